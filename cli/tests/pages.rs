//! Every command has a manual page and is completed by every shell.

use std::collections::BTreeSet;

use clap::{Command, CommandFactory as _, ValueEnum as _};
use clap_complete::Shell;
use stagebus_cli::command::Cli;
use stagebus_cli::completions::script;
use stagebus_cli::man::pages;

/// The visible commands, with their words joined by a dash.
fn commands() -> BTreeSet<String> {
    fn collect(command: &Command, name: &str, names: &mut BTreeSet<String>) {
        names.insert(name.to_owned());
        let visible = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
        for sub in command.get_subcommands().filter(visible) {
            collect(sub, &format!("{name}-{}", sub.get_name()), names);
        }
    }
    let mut names = BTreeSet::new();
    collect(&Cli::command(), "stagebus", &mut names);
    names
}

#[test]
fn every_command_has_a_page_and_every_page_a_command() {
    let found: BTreeSet<String> = pages().into_iter().map(|page| page.file).collect();
    let expected: BTreeSet<String> = commands().iter().map(|name| format!("{name}.1")).collect();
    assert!(expected.len() > 20, "{expected:?}");
    assert_eq!(found, expected);
}

#[test]
fn a_page_has_name_synopsis_options_and_examples() {
    for page in pages() {
        // Subcommands of a command share its examples.
        let n_words = page.file.split('-').count();
        for section in [".SH NAME", ".SH SYNOPSIS", ".SH OPTIONS"] {
            assert!(page.text.contains(section), "{}: no {section}", page.file);
        }
        assert!(n_words > 2 || page.text.contains("Examples:"), "{}: no examples", page.file);
    }
}

#[test]
fn every_shell_completes_every_command_and_its_options() {
    for shell in Shell::value_variants() {
        let script = script(*shell);
        for command in Cli::command().get_subcommands() {
            assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
        }
        for option in ["quiet", "max-tokens", "workers-per-stage"] {
            assert!(script.contains(option), "{shell}: --{option}");
        }
    }
}
