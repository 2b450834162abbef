//! Plots of the scenarios' results, from their JSON alone.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::harness::plot::{Plot, Series, Shape};
use crate::harness::stats::median;
use crate::wan::verdict::RIVAL;

/// The plots of a scenario; none for those that are told by tables.
pub(super) fn of(scenario: &str, result: &Value) -> Vec<Plot> {
    match scenario {
        "parity" => vec![parity(result), breakdown(result)],
        "users" => vec![users(result)],
        "speculation" => vec![speculation(result)],
        "wan" => vec![wan(result)],
        "head" => vec![head(result)],
        "prefill" => vec![prefill(result)],
        "long" => vec![long(result)],
        "hop" => vec![hop(result)],
        _ => Vec::new(),
    }
}

fn rows(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Points by series, in the order of their x values.
fn series(points: impl IntoIterator<Item = (String, f64, f64)>) -> Vec<Series> {
    let mut all: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for (name, x, y) in points {
        all.entry(name).or_default().push((x, y));
    }
    let in_order = |(name, mut points): (String, Vec<(f64, f64)>)| {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name, points }
    };
    all.into_iter().map(in_order).collect()
}

fn lines(name: &str, title: &str, (x, y): (&str, &str), series: Vec<Series>) -> Plot {
    let shape = Shape::Lines { x: x.to_owned(), series };
    Plot { name: name.to_owned(), title: title.to_owned(), y: y.to_owned(), shape }
}

fn bars(name: &str, title: &str, y: &str, bars: Vec<(String, f64)>) -> Plot {
    let shape = Shape::Bars(bars);
    Plot { name: name.to_owned(), title: title.to_owned(), y: y.to_owned(), shape }
}

fn parity(result: &Value) -> Plot {
    let contenders = rows(&result["decode"]["contenders"])
        .filter_map(|one| Some((text(&one["name"]), one["token_ms"]["median"].as_f64()?)));
    let title = "One stage and the unsplit model on one core";
    bars("parity", title, "ms a token, median", contenders.collect())
}

/// Where a token's time goes in a pipeline of two stages on one core.
fn breakdown(result: &Value) -> Plot {
    let two = |row: &&Value| {
        row["placement"].as_str() == Some("one_core") && row["n_stages"].as_u64() == Some(2)
    };
    let parts = rows(&result["hops"]).find(two).map(|row| {
        let part = |one: &Value| Some((text(&one["name"]), one["ms"].as_f64()?));
        rows(&row["parts"]).filter_map(part).collect()
    });
    let title = "Where a token's time goes: 2 stages on one core";
    bars("breakdown", title, "ms a token, median", parts.unwrap_or_default())
}

fn users(result: &Value) -> Plot {
    let points = rows(&result["matrix"]).filter_map(|cell| {
        let speculation = match cell["speculation"].as_bool() {
            Some(true) => ", speculation",
            _ => "",
        };
        let name = format!("{}{speculation}", text(&cell["kind"]));
        let tok_s = rows(&cell["rounds"]).filter_map(|round| round["tok_s"].as_f64());
        Some((name, cell["users"].as_f64()?, median(tok_s)?))
    });
    lines("users", "All users together", ("users", "tok/s, median"), series(points))
}

/// Means over prompts and rounds.
fn speculation(result: &Value) -> Plot {
    let mut sums: BTreeMap<(String, u64), (f64, f64)> = BTreeMap::new();
    for point in rows(&result["sweep"]) {
        if let (Some(k), Some(tok_s)) = (point["k"].as_u64(), point["tok_s"].as_f64()) {
            let sum = sums.entry((text(&point["drafter"]), k)).or_default();
            *sum = (sum.0 + tok_s, sum.1 + 1.0);
        }
    }
    let points = sums.into_iter().map(|((name, k), (sum, n))| (name, k as f64, sum / n));
    let axes = ("drafted tokens a step", "tok/s, mean over prompts");
    lines("speculation", "One user with drafted tokens", axes, series(points))
}

/// All cases at the longest delay; of the fixed numbers of windows only one.
fn wan(result: &Value) -> Plot {
    let longest = rows(&result["rates"]).filter_map(|rate| rate["hop_ms"].as_u64()).max();
    let bar = |rate: &Value| {
        let sessions = match rate["n_sessions"].as_u64()? {
            1 => "1 session".to_owned(),
            n => format!("{n} sessions"),
        };
        let way = match rate["way"].as_str()? {
            "auto" => "windows in flight",
            "1 window" => "one window",
            "plain" => "no drafts",
            RIVAL => RIVAL,
            _ => return None,
        };
        let at_longest = rate["hop_ms"].as_u64() == longest;
        at_longest.then_some((format!("{sessions}, {way}"), rate["tok_s"].as_f64()?))
    };
    let title = match longest {
        Some(ms) => format!("Stages whose hops take {ms} ms one way"),
        None => "Slow hops".to_owned(),
    };
    let shown = rows(&result["rates"]).filter_map(bar).collect();
    bars("wan", &title, "tok/s, all sessions", shown)
}

fn head(result: &Value) -> Plot {
    let points = rows(&result["points"]).flat_map(|point| {
        let case = &point["case"];
        let name = format!("{} sessions, K={}", case["n_sessions"], case["n_drafted"]);
        ["top1", "logits"].into_iter().filter_map(move |mode| {
            let tok_s = point[format!("{mode}_tok_s")]["median"].as_f64()?;
            Some((format!("{name}, {mode}"), tok_s))
        })
    });
    bars("head", "Tokens against whole logits over a narrow relay", "tok/s", points.collect())
}

fn prefill(result: &Value) -> Plot {
    let points = rows(&result["points"]).filter_map(|point| {
        let name = format!("{} nodes, layers {}", point["n_stages"], point["layers"]);
        Some((name, point["n_tokens"].as_f64()?, point["ttft_ms"]["median"].as_f64()?))
    });
    let axes = ("prompt tokens", "ms to the first token, median");
    lines("prefill", "Time to the first token", axes, series(points))
}

fn long(result: &Value) -> Plot {
    let points = rows(&result["runs"]).flat_map(|run| {
        let name = format!("{}, {} nodes", text(&run["profile"]), run["n_stages"]);
        rows(&run["costs"]).filter_map(move |cost| {
            Some((name.clone(), cost["position"].as_f64()?, cost["ms"].as_f64()?))
        })
    });
    lines("long", "One long answer", ("position", "ms a token, median"), series(points))
}

fn hop(result: &Value) -> Plot {
    let local = rows(&result["points"]).filter(|point| point["place"] == "loopback");
    let points = local.flat_map(|point| {
        ["NATS", "TCP"].into_iter().filter_map(move |way| {
            let ms = point[format!("{}_ms", way.to_lowercase())]["median"].as_f64()?;
            Some((way.to_owned(), point["n_bytes"].as_f64()? / 1e6, ms))
        })
    });
    lines("hop", "One message, one way, loopback", ("MB", "ms, median"), series(points))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn series_are_in_order() {
        let result = json!({"points": [
            {"n_stages": 2, "n_tokens": 500, "ttft_ms": {"median": 30.0}},
            {"n_stages": 1, "n_tokens": 500, "ttft_ms": {"median": 50.0}},
            {"n_stages": 2, "n_tokens": 64, "ttft_ms": {"median": 10.0}},
            {"n_stages": 1, "n_tokens": 64, "ttft_ms": null},
        ]});
        let plots = of("prefill", &result);
        let Shape::Lines { series, .. } = &plots[0].shape else { panic!("lines are expected") };
        assert_eq!(series.len(), 2);
        assert_eq!(series[0].points, [(500.0, 50.0)]);
        assert_eq!(series[1].points, [(64.0, 10.0), (500.0, 30.0)]);
    }

    #[test]
    fn speculation_is_averaged_by_drafter_and_length() {
        let point =
            |k: Option<u32>, tok_s: f64| json!({"drafter": "hybrid", "k": k, "tok_s": tok_s});
        let sweep =
            [point(Some(0), 10.0), point(Some(0), 20.0), point(Some(3), 30.0), point(None, 9.0)];
        let plot = speculation(&json!({"sweep": sweep}));
        let Shape::Lines { series, .. } = &plot.shape else { panic!("lines are expected") };
        assert_eq!(series[0].points, [(0.0, 15.0), (3.0, 30.0)]);
    }

    #[test]
    fn slow_hops_are_shown_at_the_longest_delay() {
        let rate = |hop_ms: u32, way: &str, tok_s: f64| json!({"hop_ms": hop_ms, "n_sessions": 1, "way": way, "tok_s": tok_s});
        let rates = [
            rate(0, "auto", 99.0),
            rate(100, "plain", 3.0),
            rate(100, "4 windows", 5.0),
            rate(100, "auto", 6.0),
        ];
        let plot = wan(&json!({"rates": rates}));
        let Shape::Bars(bars) = &plot.shape else { panic!("bars are expected") };
        let expected = [("1 session, no drafts", 3.0), ("1 session, windows in flight", 6.0)];
        assert_eq!(bars[..], expected.map(|(name, tok_s)| (name.to_owned(), tok_s)));
    }

    #[test]
    fn a_result_without_values_has_empty_plots() {
        for scenario in ["parity", "users", "speculation", "wan", "head", "prefill", "long", "hop"]
        {
            let plots = of(scenario, &json!({"claims": []}));
            assert!(!plots.is_empty() && plots.iter().all(Plot::is_empty), "{scenario}");
        }
        assert!(of("faults", &json!({})).is_empty());
    }
}
