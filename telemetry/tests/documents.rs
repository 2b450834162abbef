//! The documentation and the dashboard name the metrics that there are.

use std::collections::BTreeSet;

use serde_json::Value;
use stagebus_telemetry::names::{self, Kind, Metric, PREFIX};

const PAGE: &str = include_str!("../../docs/metrics.md");
const DASHBOARD: &str = include_str!("../../packaging/grafana/stagebus.json");

fn all() -> impl Iterator<Item = Metric> {
    let workers_and_coordinators = names::worker::ALL.into_iter().chain(names::coordinator::ALL);
    workers_and_coordinators.chain(names::gateway::ALL)
}

/// Names of all series: a histogram has three.
fn series() -> BTreeSet<String> {
    all()
        .flat_map(|Metric { name, kind, .. }| match kind {
            Kind::Counter | Kind::Gauge => vec![name.to_owned()],
            Kind::Histogram => {
                ["_bucket", "_sum", "_count"].map(|end| format!("{name}{end}")).to_vec()
            }
        })
        .collect()
}

/// The words of a text that look like metrics.
fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with(PREFIX)).collect()
}

/// The row of a metric in the page.
fn row(metric: &Metric) -> String {
    let Metric { name, kind, labels, meaning } = metric;
    let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
    let labels = if labels.is_empty() { "-".to_owned() } else { labels.join(", ") };
    let (kind, unit) = (kind.as_str(), metric.unit().unwrap_or("-"));
    format!("| `{name}` | {kind} | {unit} | {labels} | {meaning} |")
}

#[test]
fn the_page_has_a_row_for_every_metric_and_no_other() {
    for (heading, metrics) in [
        ("<!-- worker metrics -->", &names::worker::ALL[..]),
        ("<!-- coordinator metrics -->", &names::coordinator::ALL[..]),
        ("<!-- gateway metrics -->", &names::gateway::ALL[..]),
    ] {
        let (_, rest) = PAGE.split_once(heading).expect("the heading is there");
        let lines = rest.lines().skip_while(|line| !line.starts_with('|'));
        let found: Vec<&str> = lines.take_while(|line| line.starts_with('|')).skip(2).collect();
        let expected: Vec<String> = metrics.iter().map(row).collect();
        assert_eq!(found, expected, "{heading}");
    }
}

#[test]
fn expressions_in_the_page_use_series_that_there_are() {
    let (_, examples) = PAGE.split_once("## Questions").expect("the heading is there");
    let (found, series) = (named(examples), series());
    assert!(found.len() >= 8, "{found:?}");
    assert!(found.iter().all(|name| series.contains(*name)), "{found:?}");
}

#[test]
fn the_dashboard_shows_every_metric_and_no_other() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let expressions: Vec<&str> =
        targets.map(|target| target["expr"].as_str().expect("an expression")).collect();
    let text = expressions.join("\n");
    let (found, series) = (named(&text), series());
    let unknown: Vec<_> = found.iter().filter(|name| !series.contains(**name)).collect();
    assert!(unknown.is_empty(), "no such series: {unknown:?}");
    let is_shown = |name: &str| found.iter().any(|found| found.starts_with(name));
    let missing: Vec<_> = all().map(|metric| metric.name).filter(|name| !is_shown(name)).collect();
    assert!(missing.is_empty(), "not in the dashboard: {missing:?}");
}

#[test]
fn labels_in_the_dashboard_are_those_of_the_metrics() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let text = |key: &str| target[key].as_str().expect("a text").to_owned();
            let (expression, legend) = (text("expr"), text("legendFormat"));
            let labels: BTreeSet<&str> = all()
                .filter(|metric| named(&expression).iter().any(|n| n.starts_with(metric.name)))
                .flat_map(|metric| metric.labels)
                .copied()
                .collect();
            let shown = legend.split("{{").skip(1).filter_map(|rest| rest.split("}}").next());
            for label in shown {
                assert!(labels.contains(label), "{expression} has no label {label}");
                assert!(expression.contains(label), "{expression} sums over {label}");
            }
        }
    }
}
