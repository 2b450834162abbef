//! A page with its figures written.
//!
//! What is a figure, in the section that is checked: a number with a decimal point; a number before
//! one of [`UNITS`]; and in a table every number after the first column. Numbers in code and in
//! generated tables are none, and conditions of a measurement, such as 100 ms or 20 Mbit/s in
//! running text or in the first column, are none either.

use anyhow::Context as _;

use super::block;
use super::expression::{NOT_MEASURED, figure};
use super::results::Results;

/// Begins a source, or asks for a generated table.
const COMMENT: &str = "<!-- ";
/// Ends a comment.
const COMMENT_END: &str = " -->";
/// Marks a comment as the source of the figure before it.
const SOURCE: &str = "= ";
/// Ends a generated table.
const BLOCK_END: &str = "<!-- end -->";

/// A number before one of these is a result.
const UNITS: [&str; 7] = ["%", "times", "tok/s", "tokens/s", "GB/s", "MB", "µs"];

/// A page as it should be.
#[derive(Debug, PartialEq)]
pub(super) struct Page {
    /// Its text.
    pub text: String,
    /// What cannot be written, and figures without a source.
    pub objections: Vec<String>,
}

/// Writes the figures and tables of a section (or of the whole page) and looks for figures without
/// a source there. The rest of the page stays as it is.
pub(super) fn render(path: &str, text: &str, section: Option<&str>, results: &Results) -> Page {
    let mut page = Page { text: String::with_capacity(text.len()), objections: Vec::new() };
    let mut inside = section.is_none();
    let mut in_code = false;
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        in_code ^= line.starts_with("```");
        if let (Some(section), Some(title), false) = (section, line.strip_prefix("## "), in_code) {
            inside = title == section;
        }
        let asked = line.strip_prefix(COMMENT).and_then(|line| line.strip_suffix(COMMENT_END));
        let block =
            asked.filter(|_| inside && !in_code).and_then(|asked| block::lines(asked, results));
        if let Some(block) = block {
            let mut closed = false;
            let is_inner = |line: &&str| {
                closed = *line == BLOCK_END;
                !closed
            };
            let old: Vec<&str> =
                lines.by_ref().map(|(_, line)| line).take_while(is_inner).collect();
            page.push(line);
            match block.and_then(|new| closed.then_some(new).context("the table has no end")) {
                Ok(new) => new.iter().for_each(|line| page.push(line)),
                Err(error) => {
                    page.objections.push(format!("{path}:{number}: {error:#}"));
                    old.iter().for_each(|line| page.push(line));
                }
            }
            if closed {
                page.push(BLOCK_END);
            }
        } else if inside && !in_code {
            page.line(&format!("{path}:{number}"), line, results);
        } else {
            page.push(line);
        }
    }
    page
}

impl Page {
    fn push(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// Adds a line with its figures written.
    fn line(&mut self, place: &str, line: &str, results: &Results) {
        let mut written = String::new();
        let mut unsourced = String::new();
        let mut rest = line;
        while let Some((before, source, after)) = next_source(rest) {
            let text = before.trim_end_matches(NOT_MEASURED);
            let text = if text.len() < before.len() { text } else { without_figure(before) };
            written.push_str(text);
            unsourced.push_str(text);
            match figure(source, results) {
                Ok(figure) => written.push_str(&figure),
                Err(error) => {
                    self.objections.push(format!("{place}: {error:#}"));
                    written.push_str(&before[text.len()..]);
                }
            }
            written.push_str(&format!("{COMMENT}{SOURCE}{source}{COMMENT_END}"));
            rest = after;
        }
        written.push_str(rest);
        unsourced.push_str(rest);
        let found = figures(&unsourced);
        self.objections.extend(
            found.iter().map(|figure| format!("{place}: the figure {figure} has no source")),
        );
        self.push(&written);
    }
}

/// The text before the next source, the source, and the text after it.
fn next_source(line: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = line.split_once(&format!("{COMMENT}{SOURCE}"))?;
    let (source, after) = rest.split_once(COMMENT_END)?;
    Some((before, source, after))
}

/// The text without the figure at its end.
fn without_figure(text: &str) -> &str {
    let is_digit = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',');
    match text.trim_end_matches(is_digit) {
        same if same.len() == text.len() => {
            let answer = ["yes", "no"].into_iter().find_map(|answer| text.strip_suffix(answer));
            answer.unwrap_or(text)
        }
        shorter => shorter.strip_suffix('-').unwrap_or(shorter),
    }
}

/// The figures of a line from which those with a source have been taken.
fn figures(line: &str) -> Vec<String> {
    let line = without_code_and_links(line);
    let columns: Vec<&str> = match line.trim().strip_prefix('|') {
        Some(row) => row.split('|').collect(),
        None => Vec::new(),
    };
    if columns.is_empty() {
        return numbers(&line)
            .into_iter()
            .filter(|number| number.is_result())
            .map(|n| n.text)
            .collect();
    }
    let first = numbers(columns[0]).into_iter().filter(Number::is_result);
    let others = columns[1..].iter().flat_map(|column| numbers(column));
    first.chain(others).map(|number| number.text).collect()
}

/// A number in a line.
struct Number {
    text: String,
    /// What stands after it.
    after: String,
}

impl Number {
    fn is_result(&self) -> bool {
        let after = self.after.trim_start();
        self.text.contains('.') || UNITS.iter().any(|unit| after.starts_with(unit))
    }
}

/// Numbers that are words of their own: not those of `bf16` or `Q4_1`.
fn numbers(text: &str) -> Vec<Number> {
    let mut numbers = Vec::new();
    let mut word_start = 0;
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | ',' | '-' | '/' | ':');
    while let Some(start) = text[word_start..].find(is_part).map(|at| word_start + at) {
        let end = text[start..].find(|c| !is_part(c)).map_or(text.len(), |at| start + at);
        let word = text[start..end].trim_matches(['.', ',', '-', '/', ':']);
        let plain = word.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b','));
        if plain && !word.is_empty() {
            numbers.push(Number { text: word.to_owned(), after: text[end..].to_owned() });
        }
        word_start = end;
    }
    numbers
}

/// A line without what stands in backquotes, in comments and in the targets of links.
fn without_code_and_links(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line;
    let spans = [("`", "`"), ("](", ")"), ("<!--", "-->")];
    loop {
        let next =
            spans.iter().filter_map(|span| Some((rest.find(span.0)?, span))).min_by_key(|n| n.0);
        let Some((at, (open, close))) = next else { break };
        let inner = &rest[at + open.len()..];
        let Some(length) = inner.find(close) else { break };
        text.push_str(&rest[..at]);
        // A letter stands for code, so that the text around it does not grow together.
        text.push('x');
        rest = &inner[length + close.len()..];
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn results() -> Results {
        let claim = json!({"name": "speed", "value": 5.04, "target": 5.0, "holds": true});
        let none = json!({"name": "cost", "value": null, "target": 5.0, "holds": null});
        Results::of("wan", json!({"claims": [claim, none], "n": 1500}))
    }

    fn rendered(text: &str) -> Page {
        render("a.md", text, None, &results())
    }

    #[test]
    fn figures_take_the_place_of_what_stood_there() {
        for (old, new) in
            [("", "5.0"), ("9.9", "5.0"), ("1,234", "5.0"), ("-3", "5.0"), ("not measured", "5.0")]
        {
            let line =
                |figure: &str| format!("so {figure}<!-- = wan.claims.speed.value .1 --> it is\n");
            let page = rendered(&line(old));
            assert_eq!(page, Page { text: line(new), objections: Vec::new() }, "{old}");
        }
        let page = rendered("| no<!-- = wan.claims.speed.holds -->, 1<!-- = wan.n --> |\n");
        let expected = "| yes<!-- = wan.claims.speed.holds -->, 1,500<!-- = wan.n --> |\n";
        assert_eq!(page.text, expected);
        let page = rendered("5.0<!-- = wan.claims.cost.value .1 -->\n");
        assert_eq!(page.text, "not measured<!-- = wan.claims.cost.value .1 -->\n");
        assert_eq!(page.objections, [""; 0]);
    }

    #[test]
    fn a_source_that_is_not_there_leaves_the_figure_and_is_told() {
        let text = "5.0<!-- = wan.claims.spede.value .1 -->\n";
        let page = rendered(text);
        assert_eq!(page.text, text);
        assert!(page.objections[0].starts_with("a.md:1: "), "{:?}", page.objections);
        assert_eq!(page.objections.len(), 1);
    }

    #[test]
    fn what_counts_as_a_figure() {
        for (line, expected) in [
            ("5.0 and 7 and bf16, Q4_1 and `6.5`", vec!["5.0"]),
            ("links of 100 ms, 20 Mbit/s, 2 stages, 4 sessions.", vec![]),
            ("97 % of 30 tok/s, 4 times, 12 MB", vec!["97", "30", "4", "12"]),
            ("see [page](a-1.5.md) <!-- 2.5 -->", vec![]),
            ("SmolLM2-135M and 2026-11-29", vec![]),
            ("| 100 ms | 7 | - |", vec!["7"]),
            ("| 0.5 of it | text | 1,024 |", vec!["0.5", "1,024"]),
            ("|---|---|", vec![]),
            ("it ends with 2.5.", vec!["2.5"]),
        ] {
            assert_eq!(figures(line), expected, "{line}");
        }
    }

    #[test]
    fn tables_are_generated_and_code_is_left_alone() {
        let page = rendered("<!-- claims: wan.speed -->\nold\nolder\n<!-- end -->\nafter\n");
        let rows = "| claim | value | target | holds |\n|---|---|---|---|\n\
            | `speed` | 5.040 | 5.0 | yes |\n";
        assert_eq!(page.text, format!("<!-- claims: wan.speed -->\n{rows}<!-- end -->\nafter\n"));
        assert_eq!(page.objections, [""; 0]);
        assert_eq!(rendered(&page.text), page, "a second time changes nothing");
        let open = rendered("<!-- claims: wan.speed -->\nold\n");
        assert_eq!(open.text, "<!-- claims: wan.speed -->\nold\n");
        assert_eq!(open.objections, ["a.md:1: the table has no end"]);
        let code = "```\n5.0 times\n```\n";
        assert_eq!(rendered(code), Page { text: code.to_owned(), objections: Vec::new() });
    }
}
