//! Pages of results.

use serde_json::Value;

use crate::harness::table::{markdown, number};

/// One scenario's page.
#[derive(Debug)]
pub(super) struct Page {
    /// The scenario.
    pub name: &'static str,
    /// Its tables, as it prints them.
    pub text: String,
    /// Its result.
    pub result: Value,
    /// Files of its plots, with their titles.
    pub plots: Vec<(String, String)>,
}

impl Page {
    /// The page.
    pub(super) fn markdown(&self) -> String {
        let Self { name, text, result, plots } = self;
        let mut page = format!("# {name}\n\n{}\n{}", origin(result), claims(result));
        for (file, title) in plots {
            page.push_str(&format!("\n![{title}]({file})\n"));
        }
        page.push_str(&format!("\n```text\n{}\n```\n", text.trim_end()));
        page
    }
}

/// The page over all scenarios.
pub(super) fn summary(pages: &[Page], failed: &[&str]) -> String {
    let mut text = "# Results\n".to_owned();
    for page in pages {
        let name = page.name;
        let links = format!("[page]({name}.md), [JSON]({name}.json)");
        text.push_str(&format!(
            "\n## {name}\n\n{}{links}\n\n{}",
            origin(&page.result),
            claims(&page.result)
        ));
    }
    for name in failed {
        text.push_str(&format!("\n## {name}\n\nIt failed.\n"));
    }
    text
}

/// By what, where and when.
fn origin(result: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("unknown").to_owned();
    let (origin, machine) = (&result["origin"], &result["machine"]);
    let load = |name: &str| number(machine[name].as_f64(), 1);
    let build = match origin["debug_build"].as_bool() {
        Some(true) => ", development build",
        _ => "",
    };
    format!(
        "`{}`, {}\\\n{} ({} cores, {} {}), load {} to {}\\\nStagebus {}{build}, OpenVINO {}, {}\n\n",
        text(&origin["command"]),
        text(&origin["date"]),
        text(&machine["processor"]),
        machine["n_cpus"],
        text(&machine["os"]),
        text(&machine["arch"]),
        load("load_at_start"),
        load("load_at_end"),
        text(&origin["stagebus"]),
        text(&origin["openvino"]),
        text(&origin["nats_server"]),
    )
}

fn claims(result: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let row = |claim: &Value| {
        let holds = match claim["holds"].as_bool() {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "not measured",
        };
        vec![
            text(&claim["name"]),
            number(claim["value"].as_f64(), 3),
            claim["target"].to_string(),
            holds.to_owned(),
            text(&claim["how"]),
        ]
    };
    let rows: Vec<_> = result["claims"].as_array().into_iter().flatten().map(row).collect();
    markdown(&["claim", "value", "target", "holds", "how"], &rows)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn page() -> Page {
        let claim = json!({"name": "a_b", "value": 0.5, "target": 0.6, "holds": true, "how": "so"});
        let origin = json!({"command": "stagebus bench x", "date": "2026-01-01T00:00:00Z",
            "stagebus": "0.1.0", "openvino": null, "nats_server": "v2", "debug_build": true});
        let machine = json!({"processor": "P", "n_cpus": 2, "os": "linux", "arch": "x86_64",
            "load_at_start": 0.1, "load_at_end": 0.26});
        let result = json!({"origin": origin, "machine": machine, "claims": [claim]});
        let plots = vec![("x.svg".to_owned(), "A title".to_owned())];
        Page { name: "x", text: "a table\n".to_owned(), result, plots }
    }

    #[test]
    fn a_page_says_how_it_came_about_and_what_holds() {
        let text = page().markdown();
        for part in [
            "`stagebus bench x`, 2026-01-01T00:00:00Z",
            "P (2 cores, linux x86_64), load 0.1 to 0.3",
            "0.1.0, development build, OpenVINO unknown, v2",
            "| a_b   | 0.500 | 0.6    | yes   | so  |",
            "![A title](x.svg)",
            "```text\na table\n```",
        ] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }

    #[test]
    fn the_summary_names_what_failed() {
        let text = summary(&[page()], &["y"]);
        assert!(text.contains("[page](x.md), [JSON](x.json)"), "{text}");
        assert!(text.contains("## y\n\nIt failed."), "{text}");
    }
}
