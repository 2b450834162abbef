//! Tells the program which commit it was built from, for `stagebus --version` and for results of
//! `stagebus bench`.
#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a build script is told everything by its environment and answers on stdout"
)]

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

fn main() {
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let commit = git(&["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]);
    let version = match commit {
        Some(commit) => format!("{version} ({commit})"),
        None => version,
    };
    println!("cargo::rustc-env=VERSION_AND_COMMIT={version}");
    // A commit, and a change of any crate: the program is then built anew anyway.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    for entry in fs::read_dir(Path::new("..")).into_iter().flatten().flatten() {
        let source = entry.path().join("src");
        if source.is_dir() {
            println!("cargo::rerun-if-changed={}", source.display());
        }
    }
}

/// What git prints, in the folder of this crate; nothing where there is no git or no repository.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned()).filter(|text| !text.is_empty())
}
