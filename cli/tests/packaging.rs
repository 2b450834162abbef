//! The commands of the units and containers can be understood.

use clap::Parser as _;
use serde_json::Value;
use stagebus_cli::command::Cli;

const UNITS: [&str; 3] = [
    include_str!("../../packaging/systemd/stagebus-worker@.service"),
    include_str!("../../packaging/systemd/stagebus-coordinator.service"),
    include_str!("../../packaging/systemd/stagebus-gateway.service"),
];

const COMPOSE: &str = include_str!("../../packaging/compose.yaml");

fn parses(words: &[String]) {
    let parsed = Cli::try_parse_from([&["stagebus".to_owned()][..], words].concat());
    assert!(parsed.is_ok(), "{words:?}: {parsed:?}");
}

#[test]
fn the_units_start_commands_that_exist() {
    for unit in UNITS {
        let line =
            unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("a command");
        let words = line.strip_prefix("/usr/local/bin/stagebus ").expect("the program");
        parses(&words.replace("%i", "1").split(' ').map(str::to_owned).collect::<Vec<_>>());
    }
}

#[test]
fn the_containers_start_commands_that_exist() {
    let commands = COMPOSE.lines().filter_map(|line| line.trim().strip_prefix("command: "));
    let commands: Vec<Vec<String>> = commands
        .map(|list| serde_json::from_str::<Value>(list).expect("a list of words"))
        .map(|list| serde_json::from_value(list).expect("words"))
        .collect();
    let (broker, ours) = commands.split_first().expect("commands");
    assert_eq!(broker[0], "-c", "the broker's command is its own");
    assert_eq!(ours.len(), 4);
    ours.iter().for_each(|words| parses(words));
}
