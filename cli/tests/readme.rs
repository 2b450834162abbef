//! The README's tables say what the code does.

use std::collections::BTreeMap;

use serde_json::Value;
use stagebus_coordinator::CoordinatorSettings;
use stagebus_gateway::GatewaySettings;
use stagebus_schemas::error::ErrorClass;
use stagebus_settings::{
    BrokerSettings, LogSettings, MetricsSettings, StoreSettings, TelemetrySettings, environment,
};
use stagebus_worker::WorkerSettings;

const README: &str = include_str!("../../README.md");

/// The rows of the first table after `heading`, without header and ruler, cells trimmed.
fn table(heading: &str) -> Vec<Vec<String>> {
    let (_, rest) = README.split_once(heading).expect("the heading is there");
    rest.lines()
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(|line| {
            line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()
        })
        .collect()
}

/// The text between backquotes, or the whole cell.
fn code(cell: &str) -> String {
    cell.split('`').nth(1).unwrap_or(cell).to_owned()
}

fn flatten(prefix: &str, value: &Value, keys: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                flatten(&format!("{prefix}.{name}"), value, keys);
            }
        }
        Value::Null => drop(keys.insert(prefix.to_owned(), "-".to_owned())),
        Value::String(text) => {
            let text = if text.is_empty() { "empty" } else { text };
            keys.insert(prefix.to_owned(), text.to_owned());
        }
        other => drop(keys.insert(prefix.to_owned(), other.to_string())),
    }
}

#[test]
fn the_configuration_table_has_every_key_with_its_default() {
    let mut expected = BTreeMap::new();
    let tables = [
        ("broker", serde_json::to_value(BrokerSettings::default())),
        ("worker", serde_json::to_value(WorkerSettings::default())),
        ("coordinator", serde_json::to_value(CoordinatorSettings::default())),
        ("gateway", serde_json::to_value(GatewaySettings::default())),
        ("log", serde_json::to_value(LogSettings::default())),
        ("metrics", serde_json::to_value(MetricsSettings::default())),
        ("telemetry", serde_json::to_value(TelemetrySettings::default())),
        ("store", serde_json::to_value(StoreSettings::default())),
    ];
    for (name, value) in tables {
        flatten(name, &value.expect("settings can be represented"), &mut expected);
    }
    let mut found = BTreeMap::new();
    for row in table("<!-- config table -->") {
        assert_eq!(row.len(), 3, "key, default, meaning: {row:?}");
        assert!(row[2].len() > 5, "{row:?} has no meaning");
        assert!(found.insert(code(&row[0]), code(&row[1])).is_none(), "{row:?} stands twice");
    }
    assert_eq!(found, expected);
}

#[test]
fn the_table_of_variables_has_every_reserved_one() {
    let found: Vec<String> =
        table("<!-- variable table -->").iter().map(|row| code(&row[0])).collect();
    assert_eq!(found, environment::RESERVED);
}

#[test]
fn the_table_of_error_classes_has_every_class() {
    let text: String = table("### Error classes").iter().map(|row| row[0].clone()).collect();
    for class in ErrorClass::ALL {
        let name = format!("`{}`", class.as_str());
        assert!(text.contains(&name), "{name} is missing");
    }
}

#[test]
fn the_example_client_in_the_text_is_the_tested_file() {
    let file = include_str!("../../examples/ask.py");
    assert!(README.contains(&format!("```python\n{file}```")));
}
