//! Measures what constraints cost for the tokens of a model, and how those fare that would cost too
//! much.
//!
//! For each constraint: the time to compile it, to get it again, and to use it for the first time
//! (the guide's own copy of the grammar is made then); then, over the tokens of a text that fits it,
//! the time to tell all tokens that may come next, and whether the one that comes may.
#![expect(clippy::print_stdout, reason = "the table is the program's output")]

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use serde_json::{Value, json};
use stagebus_draft::constraint::{Constraint, Grammars};
use stagebus_shards::ShardSet;
use stagebus_shards::text::TextModel;

/// Measures the cost of constraints.
#[derive(Debug, Parser)]
struct Args {
    /// Shard set whose tokens are used
    shards: PathBuf,
}

/// A constraint and a text that fits it.
type Case = (&'static str, Value, String);

const TOOLS: &str = r#"start: TEXT | until_call body
TEXT: /(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/
until_call[lazy]: /(.|\n)*/ "<tool_call>"
body: "\n{\"name\": \"weather\", \"arguments\": " %json {"type": "object", "properties": {"city":
{"type": "string", "maxLength": 40}, "days": {"type": "integer"}}, "required": ["city", "days"],
"additionalProperties": false, "x-guidance": {"whitespace_flexible": false}} "}\n</tool_call>"
"#;

fn cases() -> Vec<Case> {
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    });
    let properties: serde_json::Map<String, Value> =
        (0..60).map(|i| (format!("property_{i}"), person.clone())).collect();
    let names: Vec<&String> = properties.keys().collect();
    let large = json!({"type": "object", "required": names, "properties": properties});
    let one = r#"{"name": "Ann Smith of Lisbon", "age": 31, "tags": ["red", "green"]}"#;
    let all: Vec<String> = (0..60).map(|i| format!("\"property_{i}\": {one}")).collect();
    let essay = "The sea was calm that morning, and nobody spoke of the day before. ".repeat(8);
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\":\"Oslo\",\"days\":3}}\n\
                </tool_call>";
    vec![
        ("any JSON object", json!({"type": "json_object"}), one.to_owned()),
        (
            "schema of 3 properties",
            json!({"type": "json_schema", "schema": person}),
            one.to_owned(),
        ),
        (
            "schema of 240 properties",
            json!({"type": "json_schema", "schema": large}),
            format!("{{{}}}", all.join(", ")),
        ),
        (
            "text of at most 20,000",
            json!({"type": "json_schema", "schema": {"type": "string", "maxLength": 20_000}}),
            format!("\"{}\"", essay.repeat(8)),
        ),
        (
            "choice",
            json!({"type": "choice", "options": ["yes", "no", "perhaps"]}),
            "perhaps".into(),
        ),
        (
            "date by regex",
            json!({"type": "regex", "pattern": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}),
            "2024-02-29".to_owned(),
        ),
        ("text, or a call", json!({"type": "lark", "grammar": TOOLS}), format!("{essay}{call}")),
    ]
}

/// What would cost much, whether it is refused or not.
fn heavy() -> Vec<(&'static str, Value)> {
    let regex = |pattern: &str| json!({"type": "regex", "pattern": pattern});
    let lark = |grammar: String| json!({"type": "lark", "grammar": grammar});
    let schema = |schema: Value| json!({"type": "json_schema", "schema": schema});
    let chain: String = (0..9000).map(|i| format!("a{i}: a{}\n", i + 1)).collect();
    let some = json!({"anyOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]});
    let words: Vec<String> = (0..4000).map(|i| format!("w{i}")).collect();
    let properties: serde_json::Map<String, Value> =
        (0..2000).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect();
    let patterns: serde_json::Map<String, Value> =
        (0..40).map(|i| (format!("(a|b{i})+c"), json!({"type": "string"}))).collect();
    vec![
        ("pattern of repeats", schema(json!({"type": "string", "pattern": "(a{1,900}){1,900}b"}))),
        ("regex of repeats", regex("((a{0,100}){0,100}){0,100}")),
        ("regex with many states", regex("(a|b)*a(a|b){20}")),
        ("regex with many more", regex("(.*a.{9}){9}")),
        ("regex of classes", regex("(\\w{1,300} ){1,300}")),
        ("regex of many words", regex(&words.join("|"))),
        ("chain of rules", lark(format!("start: a0\n{chain}a9000: \"x\"\n"))),
        (
            "repeats of rules",
            lark("start: a{1,3000}\na: b{1,3000}\nb: \"x\" | c\nc: \"y\"\n".into()),
        ),
        ("ambiguous rules", lark("start: start start | start start start | \"a\"?\n".into())),
        (
            "many lexemes",
            lark(
                format!("start: ({})*\n", words.join(" | "))
                    + &words
                        .iter()
                        .map(|word| format!("{word}: /{word}[a-z]*/\n"))
                        .collect::<String>(),
            ),
        ),
        (
            "substrings",
            lark(format!(
                "start: S\nS: %regex {}\n",
                json!({"substring_chars": "abcdefgh".repeat(9000)})
            )),
        ),
        (
            "many items",
            schema(json!({"type": "array", "minItems": 100_000, "items": {"enum": [1, 2]}})),
        ),
        (
            "long text",
            schema(json!({"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000})),
        ),
        ("product of choices", schema(json!({"type": "object", "allOf": vec![some; 14]}))),
        ("many properties", schema(json!({"type": "object", "properties": properties}))),
        ("overlapping names", schema(json!({"type": "object", "patternProperties": patterns}))),
        (
            "narrow numbers",
            schema(json!({"type": "number", "minimum": 1e-300, "maximum": 1e300,
            "multipleOf": 0.000_001})),
        ),
        (
            "endless reference",
            schema(json!({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"},
            {"properties": {"x": {"$ref": "#/$defs/a"}}}]}}, "$ref": "#/$defs/a"})),
        ),
    ]
}

fn constraint(json: Value) -> Result<Constraint> {
    serde_json::from_value(json).context("no constraint")
}

/// The time that something takes, in microseconds.
fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let began = Instant::now();
    let done = work();
    (done, began.elapsed().as_secs_f64() * 1e6)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn measure(grammars: &Grammars, text: &TextModel, (name, json, fitting): Case) -> Result<()> {
    let constraint = constraint(json)?;
    let tokens = text.encode(&fitting, false)?;
    let (guide, compile) = timed(|| grammars.compile(&constraint));
    let mut guide = guide?;
    let (second, again) = timed(|| grammars.compile(&constraint));
    let mut second = second?;
    let (fits, first_use) = timed(|| second.fits(&[], tokens[0]));
    ensure!(fits?, "{name}: the first token does not fit");
    let (mut masks, mut checks) = (Vec::new(), Vec::new());
    for n in 0..tokens.len() {
        let (next, mask) = timed(|| guide.next_tokens(&tokens[..n]));
        let next = next?.context("what came before does not fit")?;
        ensure!(next.contains(tokens[n]), "{name}: token {n} does not fit");
        let (fits, check) = timed(|| second.fits(&tokens[..n], tokens[n]));
        ensure!(fits?, "{name}: token {n} does not fit");
        masks.push(mask);
        checks.push(check);
    }
    let slowest = masks.iter().copied().fold(0.0, f64::max);
    println!(
        "{name:26} {:>7} {:10.1} {again:8.0} {first_use:9.0} {:9.0} {slowest:9.0} {:9.1}",
        tokens.len(),
        compile / 1e3,
        median(&mut masks),
        median(&mut checks),
    );
    Ok(())
}

fn main() -> Result<()> {
    let args = Args::parse();
    let set = ShardSet::open(&args.shards)?;
    let text = TextModel::load(&args.shards)?;
    let vocab_size = set.manifest.dims.vocab_size;
    let grammars = Grammars::of_shards(args.shards, vocab_size, &set.manifest.eos_ids);
    let (first, took) = timed(|| grammars.compile(&Constraint::JsonObject {}));
    first?;
    println!("{vocab_size} tokens; the first constraint of a process: {:.0} ms\n", took / 1e3);
    println!(
        "{:26} {:>7} {:>10} {:>8} {:>9} {:>9} {:>9} {:>9}",
        "", "tokens", "compile ms", "again us", "first us", "all us", "most us", "one us"
    );
    for case in cases() {
        measure(&grammars, &text, case)?;
    }
    println!("\n{:26} {:>10}", "", "compile ms");
    for (name, json) in heavy() {
        let constraint = constraint(json)?;
        let (compiled, took) = timed(|| grammars.compile(&constraint));
        let outcome = match compiled {
            Ok(_) => "taken".to_owned(),
            Err(error) => error.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        println!("{name:26} {:10.1} {outcome}", took / 1e3);
    }
    Ok(())
}
