//! Running cargo and other programs, with their output passed on.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::place;

/// Cargo, in the repository's root, with standard output sent to standard error.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(program());
    command.current_dir(place::root()).stdin(Stdio::null()).stdout(std::io::stderr());
    command
}

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let status = command.status().with_context(|| format!("cannot run `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Whether a command can be run and succeeds; nothing is printed.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

/// What is built to get the program `stagebus`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Build {
    /// The optimised program alone.
    Release,
    /// Everything that the tests need, the program among it. Built alone it would take other
    /// features of the dependencies, and they would be compiled twice.
    Tests,
}

/// Builds the binary `stagebus` and returns its path, as cargo names it.
pub(crate) fn build_stagebus(build: Build) -> Result<PathBuf> {
    let mut command = cargo();
    match build {
        Build::Release => command.args(["build", "--release", "--package", "stagebus", "--bins"]),
        Build::Tests => command.args(["build", "--workspace", "--all-targets"]),
    };
    command.args(["--message-format", "json-render-diagnostics"]);
    let shown = show(&command);
    let output = command
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` failed ({})", output.status);
    }
    executable(&String::from_utf8_lossy(&output.stdout), "stagebus")
        .with_context(|| format!("`{shown}` named no program"))
}

/// The program of the target `name` in cargo's messages, one JSON object a line.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == name && message["profile"]["test"] != true)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

/// What to type to run `command`.
fn show(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy()));
    words.join(" ")
}

fn program() -> OsString {
    // Set by cargo for the programs it runs, so that the same toolchain is used.
    place::variable("CARGO").map_or_else(|| OsString::from("cargo"), PathBuf::into_os_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_read_from_the_messages() {
        let messages = concat!(
            "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"other\"},",
            "\"executable\":\"/t/other\"}\n",
            "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"stagebus\"},",
            "\"executable\":null}\n",
            "not json\n",
            "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"stagebus\"},",
            "\"profile\":{\"test\":true},\"executable\":\"/t/deps/stagebus-1\"}\n",
            "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"stagebus\"},",
            "\"profile\":{\"test\":false},\"executable\":\"/t/stagebus\"}\n",
        );
        assert_eq!(executable(messages, "stagebus"), Some(PathBuf::from("/t/stagebus")));
        assert_eq!(executable(messages, "absent"), None);
    }
}
