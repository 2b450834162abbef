//! The scenario `plan`: the time of a token that `stagebus plan` predicts, and the one that a fleet
//! started as planned needs.
//!
//! Three layouts: one node, two nodes, two nodes with a slow hop. A node is a core with one inference
//! thread. For each round `stagebus node` runs on every core, over the same link as a worker would,
//! and `stagebus plan` asks them; then they end, the fleet of the plan starts, and one session decodes
//! without drafts. The program, the broker and the links are those of users.

mod nodes;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use stagebus_shards::WeightMode;

use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::{self, Machine};
use crate::harness::output;
use crate::harness::stats::{Summary, median};
use crate::harness::table::{number, table};
use crate::link::{Conditions, LinkPlan};
use crate::load::{self, Ask};
use crate::node_fleet::wiring::Wiring;
use crate::node_fleet::{NodeFleet, NodePlan, node_cpus};
use crate::shard_once::{self, ShardOnceArgs};
use crate::{measured_model, prompts};
use nodes::{Chosen, Nodes};

const ERROR: Target = Target {
    name: "plan_prediction_error",
    target: 0.15,
    bound: Bound::AtMost,
    what: "by what share the predicted time per token misses the measured one, the worst of one node, two nodes and two nodes with a slow hop",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[ERROR];

/// Tokens that a session may reach, for the plan.
const CONTEXT: usize = 2048;

/// Answers of a round before those that count.
const WARM_UP: usize = 1;

/// Answers of a round that count.
const ANSWERS: usize = 3;

/// Arguments of `stagebus bench plan`.
#[derive(Debug, Clone, clap::Args)]
pub struct PlanArgs {
    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,

    /// Rounds; in each, every layout is planned and run anew
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    tokens: u32,

    /// Time that a message takes from one process to the next on the slow link, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 10)]
    hop: u32,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// What is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct LayoutKind {
    n_nodes: usize,
    hop_ms: u32,
}

/// A layout in one round.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct PlanPoint {
    #[serde(flatten)]
    layout: LayoutKind,
    round: u16,
    split: Vec<usize>,
    /// Predicted time per token, in milliseconds.
    predicted_ms: f64,
    /// Measured time per token of each answer, in milliseconds.
    measured_ms: Vec<f64>,
    /// What the prediction is made of.
    parts: serde_json::Value,
}

/// A layout over all rounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Outcome {
    #[serde(flatten)]
    layout: LayoutKind,
    predicted_ms: Option<Summary>,
    measured_ms: Option<Summary>,
    /// Median prediction over median measurement, less 1.
    error: Option<f64>,
}

#[derive(Debug, Serialize)]
struct PlanReport {
    scenario: &'static str,
    machine: Machine,
    model: String,
    n_tokens: u32,
    rounds: u16,
    tied: bool,
    outcomes: Vec<Outcome>,
    points: Vec<PlanPoint>,
    claims: Vec<Claim>,
}

/// Runs the scenario and prints its table, and with `--json` one object last.
///
/// # Errors
/// Tokens that differ between answers; anything that does not run.
pub async fn run(args: PlanArgs, quiet: bool) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut machine = Machine::look();
    let model = measured_model::find(args.model.as_deref())?;
    let layouts =
        [(1, 0), (2, 0), (2, args.hop)].map(|(n_nodes, hop_ms)| LayoutKind { n_nodes, hop_ms });
    let mut points = Vec::new();
    for round in 0..args.rounds {
        for layout in layouts {
            output::note(quiet, &format!("round {}: {}", round + 1, layout.describe()));
            let place = Place { args: &args, model: &model, folder: folder.path(), layout };
            points.push(place.round(round, &machine).await?);
        }
    }
    machine.finish();
    let outcomes: Vec<Outcome> =
        layouts.iter().map(|&layout| Outcome::of(layout, &points)).collect();
    let claims = vec![claim(&outcomes)];
    let report = PlanReport {
        scenario: "plan",
        machine,
        model: measured_model::name(&model),
        n_tokens: args.tokens,
        rounds: args.rounds,
        tied: machine::can_pin(),
        outcomes,
        points,
        claims,
    };
    let described = claims::describe(&report.claims, CLAIMS);
    let text = report.describe();
    Ok(output::print_report(&report, &text, &described, Some(&model), args.json)?)
}

impl LayoutKind {
    fn describe(self) -> String {
        match (self.n_nodes, self.hop_ms) {
            (1, _) => "one node".to_owned(),
            (n, 0) => format!("{n} nodes"),
            (n, ms) => format!("{n} nodes, {ms} ms a hop"),
        }
    }

    fn hop(self) -> Duration {
        Duration::from_millis(self.hop_ms.into())
    }

    /// The link of every process, if it has one.
    fn link(self) -> Option<LinkPlan> {
        (self.hop_ms > 0).then(|| LinkPlan::both(Conditions::delay(self.hop() / 2)))
    }
}

/// One layout to plan and to run.
struct Place<'a> {
    args: &'a PlanArgs,
    model: &'a Path,
    folder: &'a Path,
    layout: LayoutKind,
}

impl Place<'_> {
    async fn round(&self, round: u16, machine: &Machine) -> anyhow::Result<PlanPoint> {
        let cpus = match machine::can_pin() {
            true => node_cpus(self.layout.n_nodes, machine.n_cpus),
            false => Vec::new(),
        };
        let nodes = Nodes::start(self.model, &self.cache(), self.layout, &cpus).await?;
        let chosen = nodes.plan(self.model, &self.cache(), CONTEXT).await;
        nodes.end().await?;
        let chosen = chosen?;
        let measured_ms = self.measure(&chosen).await?;
        Ok(PlanPoint {
            layout: self.layout,
            round,
            split: chosen.split,
            predicted_ms: chosen.token_ms,
            measured_ms,
            parts: chosen.parts,
        })
    }

    fn cache(&self) -> PathBuf {
        self.folder.join("probes")
    }

    /// The times per token of a fleet that is started as planned.
    async fn measure(&self, chosen: &Chosen) -> anyhow::Result<Vec<f64>> {
        let name: Vec<String> = chosen.split.iter().map(usize::to_string).collect();
        let shards = self.folder.join(format!("set-{}", name.join("-")));
        if !shards.is_dir() {
            let args = ShardOnceArgs {
                model: self.model.to_owned(),
                stages: chosen.split.len(),
                weights: WeightMode::Exact,
                split: Some(chosen.split.clone()),
                out: shards.clone(),
            };
            shard_once::in_child(&args).await?;
        }
        let prompt = prompts::encode(&prompts::text_model(&shards)?, prompts::ESSAY)?;
        let plan =
            NodePlan { shards, cpus: chosen.cpus.clone(), settings: Vec::new(), host_stage0: true };
        let wiring = match self.layout.hop_ms {
            0 => Wiring::Direct,
            _ => Wiring::hops(chosen.split.len(), self.layout.hop()),
        };
        let fleet = NodeFleet::start_wired(&plan, &wiring).await?;
        let answers = self.ask(&fleet, &prompt).await;
        fleet.end().await?;
        answers
    }

    async fn ask(&self, fleet: &NodeFleet, prompt: &[u32]) -> anyhow::Result<Vec<f64>> {
        let ask =
            Ask { prompt, max_tokens: self.args.tokens, draft_tokens: Some(0), ..Ask::default() };
        let mut times = Vec::new();
        let mut tokens: Option<Vec<u32>> = None;
        for n_answers in 0..WARM_UP + ANSWERS {
            let answer = load::one(fleet, &ask, Instant::now()).await?;
            let expected = tokens.get_or_insert_with(|| answer.tokens.clone());
            anyhow::ensure!(
                answer.tokens == *expected,
                "the same question has two answers: {:?}, {expected:?}",
                answer.tokens
            );
            if n_answers >= WARM_UP {
                let rate = answer.decode_tok_s().context("an answer of one token has no pace")?;
                times.push(1e3 / rate);
            }
        }
        Ok(times)
    }
}

impl Outcome {
    fn of(layout: LayoutKind, points: &[PlanPoint]) -> Self {
        let of_layout = || points.iter().filter(|point| point.layout == layout);
        let predicted_ms = Summary::of(of_layout().map(|point| point.predicted_ms));
        let measured = of_layout().filter_map(|point| median(point.measured_ms.iter().copied()));
        let measured_ms = Summary::of(measured);
        let error = predicted_ms
            .zip(measured_ms)
            .map(|(predicted, measured)| predicted.median / measured.median - 1.0);
        Self { layout, predicted_ms, measured_ms, error }
    }
}

/// The worst of all layouts; no value unless all were measured.
fn claim(outcomes: &[Outcome]) -> Claim {
    let errors: Option<Vec<f64>> = outcomes.iter().map(|outcome| outcome.error).collect();
    let Some(errors) = errors.filter(|errors| !errors.is_empty()) else {
        return ERROR.missing("not every layout was planned and run");
    };
    let told: Vec<String> = outcomes
        .iter()
        .zip(&errors)
        .map(|(outcome, error)| {
            format!("{:+.1} % with {}", error * 100.0, outcome.layout.describe())
        })
        .collect();
    let worst = errors.iter().map(|error| error.abs()).fold(0.0, f64::max);
    ERROR.measured(worst, format!("prediction less measurement, medians: {}", told.join(", ")))
}

impl PlanReport {
    fn describe(&self) -> String {
        let median = |summary: Option<Summary>| number(summary.map(|summary| summary.median), 2);
        let row = |outcome: &Outcome| {
            vec![
                outcome.layout.describe(),
                median(outcome.predicted_ms),
                median(outcome.measured_ms),
                number(outcome.error.map(|error| error * 100.0), 1),
            ]
        };
        let rows: Vec<Vec<String>> = self.outcomes.iter().map(row).collect();
        let header = ["layout", "predicted ms", "measured ms", "error %"];
        let tied = if self.tied { "" } else { " (processes are not tied to cores here)" };
        format!(
            "time per token of one session without drafts, {} tokens, {} rounds{tied}\n{}\n",
            self.n_tokens,
            self.rounds,
            table(&header, &rows)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(layout: LayoutKind, predicted_ms: f64, measured_ms: [f64; 3]) -> PlanPoint {
        PlanPoint {
            layout,
            round: 0,
            split: vec![30],
            predicted_ms,
            measured_ms: measured_ms.to_vec(),
            parts: serde_json::Value::Null,
        }
    }

    #[test]
    fn the_worst_layout_counts_whichever_way_it_misses() {
        let one = LayoutKind { n_nodes: 1, hop_ms: 0 };
        let slow = LayoutKind { n_nodes: 2, hop_ms: 10 };
        let points = [
            point(one, 11.0, [9.0, 10.0, 30.0]),
            point(slow, 24.0, [30.0, 30.0, 29.0]),
            point(slow, 24.0, [30.0, 31.0, 30.0]),
        ];
        let outcomes = [one, slow].map(|layout| Outcome::of(layout, &points));
        let error = |at: usize| outcomes[at].error.expect("both are measured");
        assert!((error(0) - 0.1).abs() < 1e-9 && (error(1) + 0.2).abs() < 1e-9, "{outcomes:?}");
        let found = claim(&outcomes);
        assert!(found.value.is_some_and(|value| (value - 0.2).abs() < 1e-9), "{found:?}");
        assert_eq!(found.holds, Some(false));
        let none = Outcome::of(LayoutKind { n_nodes: 2, hop_ms: 0 }, &points);
        assert_eq!(claim(&[none]).holds, None);
        assert_eq!(claim(&[]).holds, None);
    }

    #[test]
    fn half_of_a_hop_is_on_either_side_of_the_broker() {
        let slow = LayoutKind { n_nodes: 2, hop_ms: 10 };
        assert_eq!(slow.link().map(|link| link.up.delay), Some(Duration::from_millis(5)));
        assert_eq!(LayoutKind { hop_ms: 0, ..slow }.link(), None);
        assert_eq!(slow.describe(), "2 nodes, 10 ms a hop");
    }
}
