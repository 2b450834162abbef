//! All tests, and all checks that a change must pass.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::{cargo, demo, fuzz, place, setup, tidy};

/// Part of the names of tests that need a browser.
const IN_A_BROWSER: &str = "in_a_browser";

/// Sets up, builds the program that the end-to-end tests start, and runs all tests.
///
/// # Errors
/// A part that cannot be set up, a build that fails, or a failed test.
pub(crate) fn test() -> Result<()> {
    setup::run()?;
    let stagebus = cargo::build_stagebus(cargo::Build::Tests)?;
    let runtime = demo::absolute(&place::runtime_dir())?;
    let with_runtime = |command: &mut Command| {
        command.env("STAGEBUS_BIN", &stagebus).env(place::RUNTIME_DIR, &runtime);
    };
    let has_node = has_node();
    if !has_node {
        eprintln!("test: there is no Node.js with npm: the test of the page is LEFT OUT");
    }
    if cargo::succeeds(cargo::cargo().args(["nextest", "--version"])) {
        // nextest runs no documentation tests; its summary comes last.
        let mut doc = cargo::cargo();
        doc.args(["test", "--workspace", "--doc", "--quiet"]);
        with_runtime(&mut doc);
        cargo::run(&mut doc)?;
        let mut nextest = cargo::cargo();
        nextest.args(["nextest", "run", "--workspace", "--no-fail-fast"]);
        if !has_node {
            nextest.args(["--filterset", &format!("not test({IN_A_BROWSER})")]);
        }
        with_runtime(&mut nextest);
        return cargo::run(&mut nextest);
    }
    let mut test = cargo::cargo();
    test.args(["test", "--workspace", "--no-fail-fast"]);
    if !has_node {
        test.args(["--", "--skip", IN_A_BROWSER]);
    }
    with_runtime(&mut test);
    counted(&mut test)
}

/// Whether there is what installs and drives a browser.
fn has_node() -> bool {
    let npm = if cfg!(windows) { "npm.cmd" } else { "npm" };
    ["node", npm].iter().all(|name| cargo::succeeds(Command::new(name).arg("--version")))
}

/// Format, lints, documentation, tidy, a short run of the fuzz targets where there is libFuzzer, and
/// the tests last.
///
/// # Errors
/// The first check that fails.
pub(crate) fn ci() -> Result<()> {
    let mut doc = cargo::cargo();
    doc.args(["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    let mut clippy = cargo::cargo();
    clippy.args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
    eprintln!("ci: format");
    cargo::run(cargo::cargo().args(["fmt", "--all", "--check"]))?;
    // The engine's build script compiles against the OpenVINO headers that set-up brings.
    setup::run()?;
    eprintln!("ci: lints");
    cargo::run(&mut clippy)?;
    eprintln!("ci: documentation");
    cargo::run(&mut doc)?;
    eprintln!("ci: tidy");
    tidy::run()?;
    if cfg!(unix) {
        eprintln!("ci: fuzz");
        fuzz::run(&fuzz::Options::short())?;
    }
    eprintln!("ci: tests");
    test()
}

/// Runs `cargo test`, passing its output on, and ends with one line that adds up the results of
/// all test programs.
fn counted(command: &mut Command) -> Result<()> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot run `cargo test`")?;
    let stdout = child.stdout.take().context("cargo has no standard output")?;
    let mut counts = Counts::default();
    for line in BufReader::new(stdout).lines() {
        let line = line.context("cannot read the output of `cargo test`")?;
        counts.add(&line);
        println!("{line}");
    }
    let status = child.wait().context("cannot wait for `cargo test`")?;
    println!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, counts.ignored);
    if !status.success() {
        bail!("`cargo test` failed ({status})");
    }
    Ok(())
}

/// Sums over the closing lines of several test programs.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Counts {
    /// Adds a line such as `test result: ok. 17 passed; 0 failed; 1 ignored; ...`.
    fn add(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix("test result: ") else { return };
        let words: Vec<&str> = rest.split([' ', ';']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(count) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_several_programs_are_added_up() {
        let mut counts = Counts::default();
        counts.add("test result: ok. 17 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out");
        counts.add("test load::tests::x ... ok");
        counts.add("test result: FAILED. 14 passed; 3 failed; 0 ignored; 0 measured");
        assert_eq!(counts, Counts { passed: 31, failed: 3, ignored: 1 });
    }
}
