//! Every command explains itself.

use clap::{Command, CommandFactory as _, Parser as _};
use stagebus_cli::command::Cli;

/// The visible subcommands with their full help.
fn subcommands() -> Vec<Command> {
    let mut cli = Cli::command();
    cli.build();
    cli.get_subcommands().filter(|command| command.get_name() != "help").cloned().collect()
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn every_command_says_what_it_does_and_shows_an_example() {
    let commands = subcommands();
    assert!(commands.len() >= 5, "the list is complete");
    for mut command in commands {
        let name = command.get_name().to_owned();
        assert!(command.get_about().is_some(), "{name} has no description");
        let help = command.render_long_help().to_string();
        let example = format!("  stagebus {name}");
        assert!(help.contains("Examples:") && help.contains(&example), "{name} shows no example");
        for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
            assert!(
                argument.get_help().is_some(),
                "{name}: {} is not explained",
                argument.get_id()
            );
        }
    }
}

#[test]
fn the_examples_in_the_help_can_be_parsed() {
    let mut n_examples = 0;
    for mut command in subcommands() {
        let name = command.get_name().to_owned();
        let help = command.render_long_help().to_string();
        let (_, examples) = help.split_once("Examples:").expect("checked above");
        let examples = examples.lines().filter_map(|line| line.trim().split_once("stagebus "));
        for (before, line) in examples {
            // Prose mentions commands in backquotes; an example is a line of its own or follows a
            // pipe.
            if !(before.is_empty() || before.ends_with("| ")) {
                continue;
            }
            // What follows belongs to the shell.
            let is_ours = |word: &String| !["|", "<", ">", ">>"].contains(&word.as_str());
            let words = shell_words(line).into_iter().take_while(is_ours);
            let words = ["stagebus".to_owned()].into_iter().chain(words);
            let parsed = Cli::try_parse_from(words);
            assert!(parsed.is_ok(), "{name}: `stagebus {line}`: {}", parsed.unwrap_err());
            n_examples += 1;
        }
    }
    assert!(n_examples >= 10, "only {n_examples} examples were found");
}

/// Splits a line into words; double quotes keep words together.
fn shell_words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            c => words.last_mut().expect("never empty").push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

#[test]
fn a_wrong_command_line_names_what_is_wrong() {
    let check = |words: &[&str], part: &str| {
        let words = ["stagebus"].iter().chain(words);
        let error = Cli::try_parse_from(words).expect_err("a wrong command line").to_string();
        assert!(error.contains(part), "{error}");
    };
    check(&["shard", "m.gguf", "--out", "o"], "--stages");
    check(
        &["shard", "m.gguf", "--stages", "2", "--out", "o", "--weights", "best"],
        "near-lossless",
    );
    check(&["ask"], "PROMPT");
    check(&["ask", "hi", "--tokens", "1"], "--tokens");
    check(&["ask", "hi", "--stages", "2"], "--local");
    check(&["check"], "--reference");
    check(&["status", "--model", "not a name"], "model name");
    check(&["frobnicate"], "frobnicate");
}
