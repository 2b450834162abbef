//! Checks of one source file.

/// The most lines a file may have, without its tests.
const MAX_LINES: usize = 600;

/// What starts a subject. Split here, so that this file passes its own check.
const SUBJECT: &str = concat!("\"stage", "bus.v");
/// The macro form of the same.
const SUBJECT_FORMAT: &str = concat!("format!(\"stage", "bus.");
/// Words that promise work; an issue number must follow.
const PROMISES: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// The folder that alone builds subjects.
const SCHEMAS: &str = "schemas/";

/// The objections to the file `name` (relative, with slashes) with this `text`.
pub(crate) fn check(name: &str, text: &str) -> Vec<String> {
    let mut objections = Vec::new();
    if !text.starts_with("//!") {
        objections.push(format!("{name}:1: does not begin with a `//!` line"));
    }
    let program: Vec<&str> = if is_test(name) { Vec::new() } else { program(text) };
    if program.len() > MAX_LINES {
        let n_lines = program.len();
        objections.push(format!("{name}: has {n_lines} lines without its tests, over {MAX_LINES}"));
    }
    for (number, line) in (1..).zip(&program) {
        let is_subject = line.contains(SUBJECT) || line.contains(SUBJECT_FORMAT);
        if is_subject && !name.starts_with(SCHEMAS) && !is_comment(line) {
            objections.push(format!("{name}:{number}: builds a subject outside {SCHEMAS}"));
        }
    }
    for (number, line) in (1..).zip(text.lines()) {
        for word in PROMISES {
            if let Some((_, rest)) = line.split_once(word)
                && !rest.starts_with("(#")
            {
                objections.push(format!("{name}:{number}: {word} without an issue number"));
            }
        }
    }
    objections
}

/// Whether the whole file is tests.
fn is_test(name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    // The crate `tests` is at the top level: all of it is tests.
    parts.iter().rev().skip(1).any(|&part| part == "tests" || part == "benches")
        || parts.last().is_some_and(|&file| file == "tests.rs" || file.ends_with("_tests.rs"))
}

/// The lines before the module of tests, which stands last (a lint sees to that).
fn program(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let end = lines
        .windows(2)
        .position(|pair| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod "))
        .unwrap_or(lines.len());
    lines[..end].to_vec()
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with("//")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of `n` lines with a proper head.
    fn lines(n: usize) -> String {
        format!("//! Head.\n{}", "fn a() {}\n".repeat(n - 1))
    }

    #[test]
    fn a_file_needs_a_head() {
        assert!(check("bus/src/lib.rs", "//! Head.\n").is_empty());
        assert_eq!(check("bus/src/lib.rs", "use std::fs;\n").len(), 1);
    }

    #[test]
    fn only_lines_outside_tests_count() {
        assert!(check("bus/src/a.rs", &lines(MAX_LINES)).is_empty());
        assert_eq!(check("bus/src/a.rs", &lines(MAX_LINES + 1)).len(), 1);
        let with_tests =
            format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", lines(9), "// x\n".repeat(MAX_LINES));
        assert!(check("bus/src/a.rs", &with_tests).is_empty());
        for name in ["bus/tests/a.rs", "tests/src/a.rs", "bus/src/load/tests.rs"] {
            assert!(check(name, &lines(MAX_LINES + 1)).is_empty(), "{name}");
        }
    }

    #[test]
    fn subjects_are_built_in_schemas_only() {
        let text = format!("//! Head.\nlet s = {SUBJECT_FORMAT}{{x}}\");\n");
        assert!(check("schemas/src/subjects.rs", &text).is_empty());
        let found = check("bus/src/a.rs", &text);
        assert!(found.len() == 1 && found[0].starts_with("bus/src/a.rs:2:"), "{found:?}");
        assert_eq!(check("bus/src/a.rs", &format!("//! Head.\nf({SUBJECT}1.x\");\n")).len(), 1);
    }

    #[test]
    fn a_promise_needs_an_issue() {
        let word = PROMISES[0];
        assert_eq!(check("bus/src/a.rs", &format!("//! Head.\n// {word}: later\n")).len(), 1);
        assert!(check("bus/src/a.rs", &format!("//! Head.\n// {word}(#7): later\n")).is_empty());
    }
}
