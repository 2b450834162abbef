//! What each kind of constraint lets through, and that only the output counts.

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Tokens beyond the single bytes: pieces of JSON, across the borders of its parts too.
const PIECES: [&str; 14] = [
    "{\"",
    "\":",
    "\": ",
    "\",\"",
    "\"}",
    "name",
    "age",
    "true",
    "null",
    ", ",
    "}}",
    "123",
    "[]",
    "\u{e9}\u{e9}",
];

const END: u32 = 256 + PIECES.len() as u32;
const TURN: u32 = END + 1;
const VOCAB_SIZE: usize = TURN as usize + 1;

/// A model whose first tokens are the bytes; then come [`PIECES`] and two end tokens.
fn text() -> Arc<TextModel> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0xff;
    let alphabet: Vec<char> = (0..=u8::MAX)
        .map(|byte| {
            next += u32::from(!printable(byte));
            char::from_u32(if printable(byte) { byte.into() } else { next }).unwrap()
        })
        .collect();
    let spelt = |bytes: &[u8]| -> String {
        bytes.iter().map(|byte| alphabet[usize::from(*byte)]).collect()
    };
    let bytes = (0..=u8::MAX).map(|byte| spelt(&[byte]));
    let words = bytes.chain(PIECES.iter().map(|piece| spelt(piece.as_bytes())));
    let vocab: serde_json::Map<String, Value> =
        words.zip(0_u32..).map(|(word, id)| (word, id.into())).collect();
    let added = |id: u32, content: &str| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true })
    };
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                             "use_regex": false });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "post_processor": null, "pre_tokenizer": byte_level, "decoder": byte_level,
        "added_tokens": [added(END, "</s>"), added(TURN, "<turn>")],
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    Arc::new(TextModel::load(dir.path()).unwrap())
}

fn grammars() -> Grammars {
    Grammars::new(text(), VOCAB_SIZE, &[END, TURN])
}

fn constraint(json: Value) -> Constraint {
    serde_json::from_value(json).unwrap()
}

fn guide(json: Value) -> Guide {
    grammars().compile(&constraint(json)).unwrap()
}

/// Whether a text may be written byte by byte, and the output end after it.
fn fits(guide: &mut Guide, text: &str) -> bool {
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let may = |guide: &mut Guide, n: usize, token: u32| {
        guide.next_tokens(&tokens[..n]).unwrap().is_some_and(|next| next.contains(token))
    };
    let all = (0..tokens.len()).all(|n| may(guide, n, tokens[n]));
    assert_eq!(guide.n_fitting(&[], &tokens).unwrap() == tokens.len(), all, "{text}");
    let ends = all && may(guide, tokens.len(), END);
    assert_eq!(ends, all && may(guide, tokens.len(), TURN), "either end token does");
    ends
}

#[test]
fn each_kind_of_constraint_lets_through_what_fits_it() {
    let schema = json!({
        "type": "object",
        "properties": { "b": { "type": "integer" }, "a": { "enum": ["x", "y"] } },
        "required": ["b", "a"],
        "additionalProperties": false,
    });
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(200), "]".repeat(200));
    let cases: [(Value, &[&str], &[&str]); 7] = [
        (
            json!({ "type": "json_object" }),
            &["{}", "{\"a\": [1, {\"b\": null}]}", "{\n  \"a\": \"\u{e9}\\n\"\n}", &deep],
            &["", "[]", "{", "{\"a\": \"\n\"}", "{} ", "{\"a\":01}"],
        ),
        (
            json!({ "type": "json_schema", "schema": schema }),
            &["{\"b\":-7,\"a\":\"x\"}", "{ \"b\" : 12, \"a\": \"y\" }"],
            // The order of the properties is the schema's.
            &[
                "{\"a\":\"x\",\"b\":1}",
                "{\"b\":1}",
                "{\"b\":1,\"a\":\"z\"}",
                "{\"b\":1.5,\"a\":\"x\"}",
            ],
        ),
        (json!({ "type": "json_schema", "schema": true }), &["1", "\"a\"", "[{}]"], &["", "a"]),
        (
            json!({ "type": "regex", "pattern": "a/(b|\\d{2})+" }),
            &["a/b", "a/12b"],
            &["a/", "a/1", "xa/b"],
        ),
        (
            json!({ "type": "choice", "options": ["yes", "no", "no \"way\"\n", "\u{e9}"] }),
            &["yes", "no", "no \"way\"\n", "\u{e9}"],
            &["", "ye", "y", "noo", "maybe"],
        ),
        (
            json!({ "type": "lark", "grammar": "start: \"(\" start \")\" | \"x\"" }),
            &["x", "(x)", "((x))"],
            &["(", "(x", "x)"],
        ),
        (json!({ "type": "regex", "pattern": "(?i)ab?" }), &["a", "aB"], &["b"]),
    ];
    let grammars = grammars();
    for (json, good, bad) in cases {
        let mut guide = grammars.compile(&constraint(json.clone())).unwrap();
        for text in good {
            assert!(fits(&mut guide, text), "{text:?} fits {json}");
        }
        for text in bad {
            assert!(!fits(&mut guide, text), "{text:?} does not fit {json}");
        }
    }
}

#[test]
fn what_is_finished_can_only_end_and_nothing_follows_what_does_not_fit() {
    let mut guide = guide(json!({ "type": "choice", "options": ["a", "ab"] }));
    let set = |guide: &mut Guide, output: &[u32]| -> Option<Vec<u32>> {
        let next = guide.next_tokens(output).unwrap()?;
        Some((0..VOCAB_SIZE as u32 + 9).filter(|token| next.contains(*token)).collect())
    };
    let (a, b) = (u32::from(b'a'), u32::from(b'b'));
    assert_eq!(set(&mut guide, &[]), Some(vec![a]));
    assert_eq!(set(&mut guide, &[a]), Some(vec![b, END, TURN]));
    assert_eq!(set(&mut guide, &[a, b]), Some(vec![END, TURN]));
    for wrong in [&[b][..], &[a, a], &[a, END], &[a, END, b], &[a, b, b], &[END], &[9999]] {
        assert_eq!(set(&mut guide, wrong), None, "{wrong:?}");
        assert_eq!(set(&mut guide, &[a]), Some(vec![b, END, TURN]), "after {wrong:?}");
    }
    let mut logits = vec![1.0; VOCAB_SIZE];
    guide.next_tokens(&[]).unwrap().unwrap().rule_out_others(&mut logits);
    let left: Vec<usize> = (0..VOCAB_SIZE).filter(|token| logits[*token] > 0.0).collect();
    assert_eq!(left, [a as usize]);
}

#[test]
fn tokens_across_the_borders_of_json_are_taken() {
    let mut guide = guide(json!({ "type": "json_object" }));
    let piece = |text: &str| 256 + PIECES.iter().position(|piece| *piece == text).unwrap() as u32;
    let text = ["{\"", "name", "\": ", "[]", ", "].map(piece);
    assert_eq!(guide.n_fitting(&[], &text).unwrap(), 5);
    assert_eq!(guide.n_fitting(&text[..1], &[piece("name"), piece("}}")]).unwrap(), 2, "in a text");
    assert_eq!(guide.n_fitting(&text[..3], &[piece("}}")]).unwrap(), 0);
    let closed = [&text[..4], &[u32::from(b'}')]].concat();
    assert_eq!(guide.n_fitting(&closed, &[END]).unwrap(), 1);
    assert_eq!(guide.n_fitting(&closed[..4], &[END]).unwrap(), 0);
}

#[test]
fn what_cannot_be_honoured_is_refused_with_the_reason() {
    let chain: String = (0..9000).map(|i| format!("a{i}: a{}\n", i + 1)).collect();
    let chain = json!({ "type": "lark", "grammar": format!("start: a0\n{chain}a9000: \"x\"\n") });
    assert!(fits(&mut guide(chain), "x"), "the longest chain of rules is no trouble");
    let part = json!({ "substring_chars": "abcdefgh".repeat(9000) });
    let substrings = format!("start: S\nS: %regex {part}\n");
    let nested = (0..64).fold(json!({}), |inner, _| json!({ "not": inner }));
    let cases = [
        (json!({ "type": "json_schema", "schema": { "type": "wrong" } }), "wrong"),
        (json!({ "type": "json_schema", "schema": { "$ref": "#/$defs/none" } }), "none"),
        (json!({ "type": "json_schema", "schema": false }), "false"),
        (json!({ "type": "json_schema", "schema": 7 }), "object or boolean"),
        (json!({ "type": "json_schema", "schema": nested }), "not"),
        (json!({ "type": "regex", "pattern": "(" }), "regex"),
        (json!({ "type": "regex", "pattern": "a(?=b)" }), "look"),
        (json!({ "type": "lark", "grammar": "begin: \"a\"" }), "start"),
        (json!({ "type": "lark", "grammar": "start: \"a" }), "start"),
        (json!({ "type": "lark", "grammar": format!("start: {}", "(".repeat(100_000)) }), "nested"),
        (json!({ "type": "lark", "grammar": "start: <|no_token|>" }), "no_token"),
        (json!({ "type": "lark", "grammar": substrings }), "too big"),
        // Its texts cannot be taken back, and drafted ones are.
        (json!({ "type": "lark", "grammar": "start: a\na[stop=\"x\"]: /[a-z]*/" }), "rollback"),
        (json!({ "type": "lark", "grammar": "start: a\na[max_tokens=3]: /[a-z]*/" }), "rollback"),
    ];
    let grammars = grammars();
    for (json, quoted) in cases {
        let error = grammars.compile(&constraint(json.clone())).expect_err("it is refused");
        let text = error.to_string();
        assert!(error.is_of_constraint(), "{text}");
        assert!(text.contains(quoted), "{json} gives {text}");
        assert!(text.len() < 2 * MAX_REASON_BYTES && !text.contains("backtrace"), "{text}");
    }
    let endless = Grammars::new(text(), VOCAB_SIZE, &[]);
    let error = endless.compile(&Constraint::JsonObject {}).expect_err("no end");
    assert!(matches!(error, ConstraintError::NoEnd), "{error}");
    let outside = Grammars::new(text(), VOCAB_SIZE, &[9999]);
    let error = outside.compile(&Constraint::JsonObject {}).expect_err("no such end token");
    assert!(matches!(error, ConstraintError::Vocabulary { .. }), "{error}");
}

#[test]
fn what_becomes_too_complex_is_an_error_at_every_attempt_and_for_this_output_only() {
    let ambiguous = "start: start start | start start start | \"a\"? | \"b\"\n";
    let mut guide = guide(json!({ "type": "lark", "grammar": ambiguous }));
    let long = vec![u32::from(b'a'); 4000];
    for _ in 0..2 {
        let error = guide.next_tokens(&long).expect_err("too complex");
        assert!(matches!(error, GuideError::TooComplex { .. }), "{error}");
        assert!(fits(&mut guide, "ab"));
    }
}

#[test]
fn constraints_are_kept_for_those_who_ask_again() {
    let grammars = grammars();
    let choice = |i: usize| constraint(json!({ "type": "choice", "options": [format!("n{i}")] }));
    let kept = || -> Vec<String> {
        grammars.kept.lock().unwrap().iter().map(|(text, _)| text.clone()).collect()
    };
    for i in 0..MAX_KEPT {
        grammars.compile(&choice(i)).unwrap();
    }
    // A kept guide begins anew.
    let mut used = grammars.compile(&choice(0)).unwrap();
    assert!(fits(&mut used, "n0"));
    assert_eq!(kept().last(), Some(&choice(0).to_json()), "the last used one is the last");
    grammars.compile(&choice(MAX_KEPT)).unwrap();
    let names = kept();
    assert_eq!(names.len(), MAX_KEPT);
    assert!(names.contains(&choice(0).to_json()) && !names.contains(&choice(1).to_json()));
    assert!(fits(&mut grammars.compile(&choice(0)).unwrap(), "n0"));
}

#[test]
fn a_long_output_is_followed_at_once_as_token_by_token() {
    let schema =
        json!({ "type": "json_schema", "schema": { "type": "string", "maxLength": 6000 } });
    let guide = guide(schema);
    let words = "it was a dark and stormy night; ".repeat(150);
    let output: Vec<u32> = format!("\"{words}").bytes().map(u32::from).collect();
    let next = |guide: &mut Guide| {
        let next = guide.next_tokens(&output).unwrap().expect("it fits");
        (0..VOCAB_SIZE as u32).filter(|token| next.contains(*token)).collect::<Vec<_>>()
    };
    let mut by_token = guide.clone();
    for n in 0..output.len() {
        assert!(by_token.fits(&output[..n], output[n]).unwrap(), "token {n}");
    }
    let expected = next(&mut by_token);
    assert!(expected.contains(&u32::from(b'"')) && !expected.contains(&END));
    assert_eq!(next(&mut guide.clone()), expected);
    let mut drafted = guide.clone();
    assert_eq!(drafted.n_fitting(&[], &output).unwrap(), output.len());
    assert_eq!(next(&mut drafted), expected);
}

/// Outputs that a session may ask about: each goes back to a place of the one before, and on.
fn outputs() -> impl Strategy<Value = Vec<(usize, Vec<u16>)>> {
    prop::collection::vec((0_usize..12, prop::collection::vec(any::<u16>(), 0..6)), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn only_the_output_counts(outputs in outputs(), kind in 0_usize..4) {
        let constraints = [
            json!({ "type": "json_object" }),
            json!({ "type": "json_schema", "schema": { "type": "array", "items": {
                "anyOf": [{ "type": "string", "maxLength": 3 }, { "type": "number" }] } } }),
            json!({ "type": "regex", "pattern": "(true|null|[a-d]{2,4}){1,9}" }),
            json!({ "type": "lark", "grammar": "start: \"[\" start* \"]\" | /[0-9]+/" }),
        ];
        let mut guide = guide(constraints[kind].clone());
        let plain = guide.clone();
        let mut output: Vec<u32> = Vec::new();
        for (n_kept, picks) in outputs {
            output.truncate(n_kept);
            for pick in picks {
                // Most tokens fit, one in eight is any.
                let next = plain.clone().next_tokens(&output).unwrap();
                let fitting: Vec<u32> = (0..VOCAB_SIZE as u32)
                    .filter(|token| next.as_ref().is_none_or(|next| next.contains(*token)))
                    .collect();
                let any = pick % 8 == 0;
                let tokens = if any { (0..VOCAB_SIZE as u32).collect() } else { fitting };
                output.push(tokens[usize::from(pick) % tokens.len()]);
            }
            let set = |guide: &mut Guide| {
                let next = guide.next_tokens(&output).unwrap();
                next.map(|next| (0..VOCAB_SIZE as u32).filter(|t| next.contains(*t)).collect::<Vec<_>>())
            };
            prop_assert_eq!(set(&mut guide), set(&mut plain.clone()), "{:?}", output);
        }
    }
}
