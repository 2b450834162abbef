//! The same pipeline with the first stage in the coordinator's process, beside the ordinary layout.
//!
//! Stage 0 keeps its core: the coordinator's process is tied to it. One session, plain and with the
//! coordinator's choice of drafts; tokens are checked, no claim is made.

use std::time::Instant;

use super::verdict::rate;
use super::{Point, Questions, Way, ensure_equal};
use crate::harness::output;
use crate::harness::stats::geometric_mean;
use crate::harness::table::{number, table};
use crate::load;
use crate::node_fleet::wiring::Wiring;
use crate::node_fleet::{NodeFleet, NodePlan};

/// How the sessions decode.
const WAYS: [Way; 2] = [Way::Plain, Way::Auto];

/// Measures a fleet of `plan` whose coordinator hosts the first stage.
pub(super) async fn measure(
    questions: &Questions<'_>,
    plan: &NodePlan,
    wiring: &Wiring,
    hop_ms: u32,
) -> anyhow::Result<Vec<Point>> {
    output::note(questions.quiet, &format!("{hop_ms} ms a hop, the first stage hosted"));
    let plan = NodePlan { host_stage0: true, ..plan.clone() };
    let fleet = NodeFleet::start_wired(&plan, wiring).await?;
    fleet.join_cores().await?;
    for way in WAYS {
        questions.ask_all(&fleet, 4, way).await?;
    }
    let mut points = Vec::new();
    for round in 0..usize::from(questions.args.rounds) {
        for (prompt, expected) in questions.prompts.iter().zip(&questions.answers) {
            for way in WAYS {
                let ask = way.ask(prompt, questions.args.tokens);
                let answer = load::one(&fleet, &ask, Instant::now()).await?;
                ensure_equal(way, &answer, expected)?;
                points.extend(Point::of(&answer, (hop_ms, 1, way), prompt.category, round));
            }
        }
    }
    fleet.end().await?;
    Ok(points)
}

/// The table for people: both layouts, by category and together; nothing if it was not measured.
pub(super) fn describe(points: &[Point], hosted: &[Point]) -> String {
    let Some(hop_ms) = hosted.first().map(|point| point.hop_ms) else { return String::new() };
    let mut categories: Vec<&str> = hosted.iter().map(|point| point.category).collect();
    categories.sort_unstable();
    categories.dedup();
    let layouts = WAYS.map(|way| [(points, way), (hosted, way)]).concat();
    let rates = |category: &str| {
        let of = |(points, way): &(&[Point], Way)| rate(points, (hop_ms, 1, *way), category);
        layouts.iter().map(of).collect::<Vec<_>>()
    };
    let row = |name: &str, rates: &[Option<f64>]| {
        let over = |at: usize| rates[at + 1].zip(rates[at]).map(|(hosted, apart)| hosted / apart);
        let [plain, auto] =
            [0, 2].map(|at| [number(rates[at], 2), number(rates[at + 1], 2), number(over(at), 2)]);
        std::iter::once(name.to_owned()).chain(plain).chain(auto).collect::<Vec<_>>()
    };
    let all: Vec<Vec<Option<f64>>> = categories.iter().map(|category| rates(category)).collect();
    let mean = |at: usize| geometric_mean(all.iter().filter_map(|rates| rates[at]));
    let mut rows: Vec<_> =
        categories.iter().zip(&all).map(|(category, rates)| row(category, rates)).collect();
    rows.push(row("geometric mean", &[0, 1, 2, 3].map(mean)));
    let header = ["category", "plain", "hosted", "ratio", "auto", "hosted", "ratio"];
    format!(
        "one session at {hop_ms} ms a hop, tok/s, without and with stage 0 in the coordinator's \
         process\n{}\n",
        table(&header, &rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_stand_beside_each_other() {
        let point = |way, tok_s| Point {
            hop_ms: 100,
            n_sessions: 1,
            way,
            category: "list",
            round: 0,
            tok_s,
            n_tokens: 62,
            drafted_tokens: 0,
            accepted_tokens: 0,
        };
        let apart = [point(Way::Plain, 3.0), point(Way::Auto, 6.0)];
        let hosted = [point(Way::Plain, 4.5), point(Way::Auto, 8.0)];
        let text = describe(&apart, &hosted);
        for part in ["list", "geometric mean", "3.00", "4.50", "1.50", "6.00", "8.00", "1.33"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        assert!(describe(&apart, &[]).is_empty());
    }
}
