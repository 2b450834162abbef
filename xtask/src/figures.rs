//! Figures in the documents, from the result files of the benchmarks.
//!
//! A figure is followed by where it comes from, in a comment that readers of the page do not see:
//!
//! ```text
//! 6.1<!-- = wan.claims.wan100_two_sessions_vs_plain.value .1 -->
//! ```
//!
//! [`update`] writes the figures and [`check`] compares them, both by [`page::render`]. In
//! `docs/performance.md` and the README's section on speed a figure without a source is an
//! objection; [`page`] says what counts as a figure, [`expression`] how sources are written.

mod block;
mod expression;
mod page;
mod results;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::place;
use page::Page;
use results::Results;

/// Where the result files are.
const RESULTS: &str = "bench/results";

/// The pages with figures, and the section that has them; `None` is the whole page.
const PAGES: [(&str, Option<&str>); 2] =
    [("README.md", Some("How fast")), ("docs/performance.md", None)];

/// Writes the figures of all pages anew from the result files.
///
/// # Errors
/// A source that cannot be found, a page that cannot be written.
pub(crate) fn update() -> Result<()> {
    let results = Results::read(&place::root().join(RESULTS))?;
    let mut objections = Vec::new();
    for (path, text, page) in pages(place::root(), &results)? {
        objections.extend(page.objections);
        if page.text != text {
            fs::write(place::root().join(path), &page.text)
                .with_context(|| format!("cannot write {path}"))?;
            eprintln!("figures: {path} is renewed");
        }
    }
    if !objections.is_empty() {
        bail!("the figures have {} objections:\n  {}", objections.len(), objections.join("\n  "));
    }
    Ok(())
}

/// The objections to the figures of all pages below `root`, and to the result files.
///
/// # Errors
/// A page or a result file that cannot be read.
pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let results = Results::read(&root.join(RESULTS))?;
    let mut objections = results.objections();
    for (path, text, page) in pages(root, &results)? {
        objections.extend(page.objections);
        for (number, (found, expected)) in (1..).zip(text.lines().zip(page.text.lines())) {
            if found != expected {
                objections.push(format!(
                    "{path}:{number}: is not what {RESULTS} says; `cargo xtask figures` writes: {expected}"
                ));
            }
        }
        if text.lines().count() != page.text.lines().count() {
            objections.push(format!(
                "{path}: has not the lines that {RESULTS} gives; `cargo xtask figures` writes them"
            ));
        }
    }
    Ok(objections)
}

/// Every page: its path, its text, and how it should be.
fn pages(root: &Path, results: &Results) -> Result<Vec<(&'static str, String, Page)>> {
    let one = |(path, section): (&'static str, Option<&str>)| {
        let text = fs::read_to_string(root.join(path))
            .with_context(|| format!("cannot read {path}"))?
            .replace("\r\n", "\n");
        let page = page::render(path, &text, section, results);
        Ok((path, text, page))
    };
    PAGES.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A repository with one result and these pages.
    fn objections(readme: &str, performance: &str) -> Vec<String> {
        let root = tempfile::tempdir().expect("folder");
        for folder in ["docs", RESULTS] {
            fs::create_dir_all(root.path().join(folder)).expect("folder");
        }
        let result = json!({
            "origin": {"command": "stagebus bench wan", "date": "2026-01-01T00:00:00Z",
                "commit": "abc", "stagebus": "0.1.0", "openvino": "1", "nats_server": "v2"},
            "machine": {"processor": "P", "n_cpus": 2, "os": "linux", "arch": "x86_64"},
            "claims": [{"name": "speed", "value": 5.04, "target": 5.0, "holds": true, "how": ""}],
        });
        let put = |path: &str, text: &str| fs::write(root.path().join(path), text).expect(path);
        put("bench/results/wan.json", &result.to_string());
        put("README.md", readme);
        put("docs/performance.md", performance);
        check(root.path()).expect("readable")
    }

    #[test]
    fn a_figure_that_the_result_gives_passes() {
        let figure = "It is 5.0<!-- = wan.claims.speed.value .1 --> times as fast.\n";
        let readme = format!("# A\n\nNot 1.5 here.\n\n## How fast\n\n{figure}\n## B\n\n7.5\n");
        assert_eq!(objections(&readme, figure), [""; 0]);
    }

    #[test]
    fn a_wrong_figure_is_found() {
        let figure = "It is 5.1<!-- = wan.claims.speed.value .1 --> times as fast.\n";
        let found = objections("# A\n", figure);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("docs/performance.md:1: "), "{found:?}");
        assert!(found[0].contains("5.0<!--"), "{found:?}");
    }

    #[test]
    fn a_figure_without_a_source_is_found_in_the_section_alone() {
        let found = objections("1.5\n\n## How fast\n\nIt is 5.0 times as fast.\n", "");
        assert_eq!(found, ["README.md:5: the figure 5.0 has no source"]);
    }

    #[test]
    fn a_missing_result_is_found() {
        let found = objections("", "5.0<!-- = users.claims.speed.value .1 -->\n");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("no result users"), "{found:?}");
    }

    #[test]
    fn lines_that_a_table_lacks_are_found() {
        let found = objections("", "<!-- claims: wan -->\n<!-- end -->\n");
        assert!(found.iter().any(|one| one.contains("has not the lines")), "{found:?}");
    }
}
