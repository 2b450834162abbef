//! Tables that are generated as a whole.

use anyhow::{Context, Result};
use serde_json::Value;

use super::expression::figure;
use super::results::Results;

/// The lines of the block that its first line asks for, such as `claims: wan head.speed`.
///
/// # Errors
/// A result or claim that is not there.
pub(super) fn lines(asked: &str, results: &Results) -> Option<Result<Vec<String>>> {
    match asked.split_once(':') {
        Some(("claims", names)) => Some(claims(names, results)),
        None if asked == "origins" => Some(Ok(origins(results))),
        _ => None,
    }
}

/// A table of claims: all of a result, or those named as `RESULT.CLAIM`.
fn claims(names: &str, results: &Results) -> Result<Vec<String>> {
    let mut lines =
        vec!["| claim | value | target | holds |".to_owned(), "|---|---|---|---|".to_owned()];
    for name in names.split_whitespace() {
        let (result, one) = match name.split_once('.') {
            Some((result, claim)) => (result, Some(claim)),
            None => (name, None),
        };
        let of = results.get(result).with_context(|| format!("there is no result {result}"))?;
        let all = of["claims"].as_array().map(Vec::as_slice).unwrap_or_default();
        let mut names: Vec<&str> = all.iter().filter_map(|claim| claim["name"].as_str()).collect();
        names.retain(|name| one.is_none_or(|one| one == *name));
        if let (Some(one), []) = (one, names.as_slice()) {
            anyhow::bail!("result {result} has no claim {one}");
        }
        for name in names {
            let value = |field: &str, decimals: &str| {
                figure(&format!("{result}.claims.{name}.{field} {decimals}"), results)
            };
            let target = of["claims"].as_array().into_iter().flatten();
            let target = target.filter(|claim| claim["name"] == name).map(|claim| &claim["target"]);
            lines.push(format!(
                "| `{name}` | {} | {} | {} |",
                value("value", ".3")?,
                target.map(Value::to_string).collect::<String>(),
                value("holds", "")?
            ));
        }
    }
    Ok(lines)
}

/// A table of all results: by what, where and when.
fn origins(results: &Results) -> Vec<String> {
    let mut lines = vec![
        "| result | ended | Stagebus | with | machine | load | command |".to_owned(),
        "|---|---|---|---|---|---|---|".to_owned(),
    ];
    let text = |value: &Value| match value {
        Value::Null => "unknown".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    for (name, result) in results.all() {
        let (origin, machine) = (&result["origin"], &result["machine"]);
        let build = if origin["debug_build"] == true { ", development build" } else { "" };
        lines.push(format!(
            "| [`{name}`](../{}/{name}.json) | {} | {} `{}`{build} | OpenVINO {}, {} | {}, {} cores | {} to {} | `{}` |",
            super::RESULTS,
            text(&origin["date"]),
            text(&origin["stagebus"]),
            text(&origin["commit"]),
            text(&origin["openvino"]),
            text(&origin["nats_server"]),
            text(&machine["processor"]),
            text(&machine["n_cpus"]),
            text(&machine["load_at_start"]),
            text(&machine["load_at_end"]),
            text(&origin["command"]),
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn results() -> Results {
        let result = json!({
            "origin": {"date": "2026-01-01T00:00:00Z", "command": "stagebus bench wan"},
            "machine": {"processor": "P", "n_cpus": 2, "load_at_start": 0.1},
            "claims": [{"name": "speed", "value": 5.04, "target": 5.0, "holds": true},
                {"name": "cost", "value": null, "target": 1.5, "holds": null}],
        });
        Results::of("wan", result)
    }

    #[test]
    fn claims_of_a_result_or_single_ones_are_listed() {
        let all = lines("claims: wan", &results()).expect("a block").expect("there");
        assert_eq!(all[2], "| `speed` | 5.040 | 5.0 | yes |");
        assert_eq!(all[3], "| `cost` | not measured | 1.5 | not measured |");
        let one = lines("claims: wan.cost", &results()).expect("a block").expect("there");
        assert_eq!(one[2..], all[3..]);
        lines("claims: wan.nothing", &results()).expect("a block").expect_err("no claim");
        lines("claims: users", &results()).expect("a block").expect_err("no result");
        assert!(lines("config table", &results()).is_none());
    }

    #[test]
    fn every_result_has_a_line_with_its_origin() {
        let found = lines("origins", &results()).expect("a block").expect("there");
        for part in
            ["(../bench/results/wan.json)", "P, 2 cores", "0.1 to unknown", "`stagebus bench wan`"]
        {
            assert!(found[2].contains(part), "{part}: {found:?}");
        }
    }
}
