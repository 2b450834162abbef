//! The scenario `wan`: a pipeline whose hops are slow, with and without windows in flight.
//!
//! One fleet for every delay: each worker and the coordinator has a link of its own, so that every
//! hop costs the delay once. How a request speculates goes by request, so all ways take turns on
//! one fleet, prompt by prompt. Every answer must have the tokens of plain decoding.
//! [`verdict`] makes the claims.

mod hosted;
pub mod verdict;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use stagebus_shards::WeightMode;

use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::Machine;
use crate::harness::output;
use crate::llama_cpp::LlamaDecode;
use crate::llama_cpp::rpc::{Nodes, Programs};
use crate::load::{self, Ask, Served};
use crate::measured_model::{self, ShardSets};
use crate::node_fleet::wiring::Wiring;
use crate::node_fleet::{NodeFleet, NodePlan};
use crate::prompts::{self, EncodedPrompt};
use verdict::{Kind, Rate};

const CEILING: Target = Target {
    name: "wan100_ceiling_share",
    target: 0.85,
    bound: Bound::AtLeast,
    what: "tok/s of one session at 100 ms a hop, drafts in one chain, over the ceiling 1/(1-p) tokens per plain step, geometric mean over categories",
};
const TREE: Target = Target {
    name: "wan100_tree_ceiling_share",
    target: 1.0,
    bound: Bound::AtLeast,
    what: "the same with second guesses beside the chain",
};
const TWO: Target = Target {
    name: "wan100_two_sessions_vs_plain",
    target: 5.0,
    bound: Bound::AtLeast,
    what: "tok/s of two sessions at 100 ms a hop over one session that decodes plainly",
};
const FOUR: Target = Target {
    name: "wan100_four_sessions_vs_plain",
    target: 10.0,
    bound: Bound::AtLeast,
    what: "tok/s of four sessions at 100 ms a hop over one session that decodes plainly",
};
const FOUR_VS_ONE: Target = Target {
    name: "wan100_four_vs_one_session",
    target: 3.8,
    bound: Bound::AtLeast,
    what: "tok/s of four sessions at 100 ms a hop over one, both with windows in flight",
};
const NOTHING_LOST: Target = Target {
    name: "wan0_windows_vs_off",
    target: 0.98,
    bound: Bound::AtLeast,
    what: "tok/s without delay, number of windows chosen by measurement over one window, geometric mean over categories",
};
const AUTO_VS_BEST: Target = Target {
    name: "wan_auto_depth_vs_best_fixed",
    target: 0.95,
    bound: Bound::AtLeast,
    what: "tok/s with the number of windows chosen by measurement over the best fixed one, drafts in one chain, worst delay",
};

/// Most tokens of the rival over slow hops.
const RIVAL_SLOW_TOKENS: usize = 16;

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[CEILING, TREE, TWO, FOUR, FOUR_VS_ONE, NOTHING_LOST, AUTO_VS_BEST];

/// Arguments of `stagebus bench wan`.
#[derive(Debug, Clone, clap::Args)]
pub struct WanArgs {
    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,

    /// Stages, each on a node
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    stages: u16,

    /// Time of a hop, one way, in milliseconds
    #[arg(long, value_name = "MS,MS", value_delimiter = ',', default_value = "0,10,50,100")]
    hops: Vec<u32>,

    /// Sessions at the same time; one is always measured
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2,4")]
    sessions: Vec<usize>,

    /// Fixed numbers of windows; 1 is always measured
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2,4,8")]
    windows: Vec<u32>,

    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(8..))]
    tokens: u16,

    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// How weights are mapped
    #[arg(long, value_name = "MODE", default_value_t = WeightMode::Exact)]
    weights: WeightMode,

    /// More settings for the fleets
    #[arg(long, value_name = "TABLE.KEY=VALUE")]
    set: Vec<String>,

    /// llama.cpp's llama-bench with ggml-rpc-server beside it [default: what `cargo xtask peers`
    /// builds, or the one on PATH]
    #[arg(long, value_name = "PATH")]
    llama_bench: Option<PathBuf>,

    /// A first look: no and the longest delay, one fixed number of windows, short answers
    #[arg(long)]
    quick: bool,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

impl WanArgs {
    /// Makes `--quick` out of the options that it stands for, and adds what is always measured.
    fn settle(mut self) -> Self {
        self.hops.sort_unstable();
        self.hops.dedup();
        if self.quick {
            let ends = [self.hops.first(), self.hops.last()].into_iter().flatten().copied();
            self.hops = ends.collect();
            self.hops.dedup();
            self.windows.retain(|n| *n == 4);
            self.tokens = self.tokens.min(32);
        }
        self.windows.push(1);
        self.windows.sort_unstable();
        self.windows.dedup();
        self.sessions.push(1);
        self.sessions.sort_unstable();
        self.sessions.dedup();
        self
    }
}

/// How sessions decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Token by token.
    Plain,
    /// With drafts, and at most this many windows in flight.
    Windows(u32),
    /// With drafts in one chain; the coordinator chooses the number of windows.
    Chain,
    /// With drafts; the coordinator chooses the number of windows and where second guesses pay.
    Auto,
}

impl Way {
    /// Its name in tables.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Plain => "plain".to_owned(),
            Self::Windows(1) => "1 window".to_owned(),
            Self::Windows(n) => format!("{n} windows"),
            Self::Chain => "one chain".to_owned(),
            Self::Auto => "auto".to_owned(),
        }
    }

    fn ask<'a>(self, prompt: &'a EncodedPrompt, n_tokens: u16) -> Ask<'a> {
        let (draft_tokens, draft_windows) = match self {
            Self::Plain => (Some(0), None),
            Self::Windows(n) => (None, Some(n)),
            Self::Chain | Self::Auto => (None, None),
        };
        Ask {
            prompt: &prompt.tokens,
            max_tokens: n_tokens.into(),
            draft_tokens,
            draft_windows,
            draft_alternatives: (self != Self::Auto).then_some(0),
            draw: None,
        }
    }
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    /// Time of a hop, in milliseconds.
    pub hop_ms: u32,
    /// Sessions at the same time.
    pub n_sessions: usize,
    /// How they decoded.
    pub way: Way,
    /// Kind of the prompt.
    pub category: &'static str,
    /// Round.
    pub round: usize,
    /// Tokens per second of this session after its first token.
    pub tok_s: f64,
    /// Tokens of the answer.
    pub n_tokens: usize,
    /// Tokens that were drafted and sent.
    pub drafted_tokens: u32,
    /// Of these, tokens that stood.
    pub accepted_tokens: u32,
}

/// llama.cpp over as many nodes: plain decoding from an empty context.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RivalPoint {
    /// Time of a hop, in milliseconds.
    pub hop_ms: u32,
    /// Round.
    pub round: usize,
    /// Tokens that were generated.
    pub n_tokens: usize,
    /// What it reports.
    #[serde(flatten)]
    pub decode: LlamaDecode,
}

impl Point {
    /// The figures of an answer; nothing if it is too short to be timed.
    fn of(
        answer: &Served,
        (hop_ms, n_sessions, way): (u32, usize, Way),
        category: &'static str,
        round: usize,
    ) -> Option<Self> {
        answer.decode_tok_s().map(|tok_s| Self {
            hop_ms,
            n_sessions,
            way,
            category,
            round,
            tok_s,
            n_tokens: answer.tokens.len(),
            drafted_tokens: answer.usage.drafted_tokens,
            accepted_tokens: answer.usage.accepted_tokens,
        })
    }
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct WanReport {
    scenario: &'static str,
    machine: Machine,
    model: String,
    n_stages: usize,
    n_tokens: u16,
    weights: &'static str,
    tied: bool,
    has_draft_model: bool,
    /// Why a rival is missing.
    absent: Vec<String>,
    rivals: Vec<RivalPoint>,
    rates: Vec<Rate>,
    kinds: Vec<Kind>,
    points: Vec<Point>,
    /// One session over the slowest links, with the first stage in the coordinator's process.
    hosted: Vec<Point>,
    claims: Vec<Claim>,
}

/// What all fleets are asked.
struct Questions<'a> {
    args: &'a WanArgs,
    prompts: Vec<EncodedPrompt>,
    /// The tokens of plain decoding, by prompt; of the first fleet.
    answers: Vec<Vec<u32>>,
    quiet: bool,
}

/// Runs the scenario and prints its tables, and with `--json` one object last.
///
/// # Errors
/// Tokens that differ; anything that does not run.
pub async fn run(args: WanArgs, quiet: bool) -> anyhow::Result<()> {
    let args = args.settle();
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut machine = Machine::look();
    let model = measured_model::find(args.model.as_deref())?;
    output::note(quiet, "sharding");
    let n_stages = usize::from(args.stages);
    let sets = ShardSets::make(&model, folder.path(), [(n_stages, args.weights)]).await?;
    let set = sets.get(n_stages, args.weights)?;
    let draft = measured_model::draft_settings(set, folder.path()).await?;
    let mut prompts = prompts::encoded(&prompts::text_model(set)?)?;
    prompts.truncate(prompts::N_CATEGORIES);
    let mut questions = Questions { args: &args, prompts, answers: Vec::new(), quiet };
    let rival = Programs::find(args.llama_bench.as_deref());
    let (mut points, mut rivals, mut tied) = (Vec::new(), Vec::new(), false);
    let mut hosted = Vec::new();
    for &hop_ms in &args.hops {
        output::note(quiet, &format!("starting a fleet with {hop_ms} ms a hop"));
        let settings = draft.iter().cloned().chain(args.set.iter().cloned());
        let plan = NodePlan::on_nodes(set, n_stages, &machine, settings);
        let wiring = match hop_ms {
            0 => Wiring::Direct,
            ms => Wiring::hops(n_stages, Duration::from_millis(ms.into())),
        };
        let fleet = NodeFleet::start_wired(&plan, &wiring).await?;
        tied = fleet.is_tied();
        fleet.join_cores().await?;
        questions.check(&fleet).await?;
        for round in 0..usize::from(args.rounds) {
            output::note(quiet, &format!("{hop_ms} ms a hop, round {}", round + 1));
            points.extend(questions.round(&fleet, hop_ms, round).await?);
            if let Some(rival) = &rival {
                output::note(quiet, "llama.cpp with its RPC servers");
                let hop = Duration::from_millis(hop_ms.into());
                let nodes = Nodes { n: n_stages, cpus: &plan.cpus, hop };
                let n_tokens = rival_tokens(&args, hop_ms);
                let decode = rival.decode(&model, n_tokens, nodes).await?;
                rivals.push(RivalPoint { hop_ms, round, n_tokens, decode });
            }
        }
        fleet.end().await?;
        if hop_ms == verdict::SLOW_MS {
            hosted = hosted::measure(&questions, &plan, &wiring, hop_ms).await?;
        }
    }
    machine.finish();
    let claims = verdict::claims(&points);
    let report = WanReport {
        scenario: "wan",
        machine,
        model: measured_model::name(&model),
        n_stages,
        n_tokens: args.tokens,
        weights: args.weights.as_str(),
        tied,
        has_draft_model: draft.is_some(),
        absent: rival.is_none().then(no_rival).into_iter().collect(),
        rates: verdict::rates(&points, &rivals),
        rivals,
        kinds: verdict::kinds(&points),
        points,
        hosted,
        claims,
    };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &report.describe(), &claims, Some(&model), args.json)?)
}

/// Tokens of the rival: where hops take time it needs seconds for each.
fn rival_tokens(args: &WanArgs, hop_ms: u32) -> usize {
    let n_tokens = usize::from(args.tokens);
    if hop_ms == 0 { n_tokens } else { n_tokens.min(RIVAL_SLOW_TOKENS) }
}

fn no_rival() -> String {
    "llama.cpp: no llama-bench with ggml-rpc-server; run `cargo xtask peers` or give --llama-bench"
        .to_owned()
}

impl Questions<'_> {
    /// The ways of a single session, in the order of their turns.
    fn ways(&self) -> Vec<Way> {
        let fixed = self.args.windows.iter().map(|n| Way::Windows(*n));
        [Way::Plain, Way::Chain, Way::Auto].into_iter().chain(fixed).collect()
    }

    /// Learns the tokens of plain decoding from the first fleet, and lets every fleet meet drafts
    /// before it is timed.
    async fn check(&mut self, fleet: &NodeFleet) -> anyhow::Result<()> {
        output::note(self.quiet, "checking tokens");
        if self.answers.is_empty() {
            let n_tokens = self.args.tokens;
            let asks: Vec<_> =
                self.prompts.iter().map(|prompt| Way::Plain.ask(prompt, n_tokens)).collect();
            let answers = load::users(fleet, 1, &asks).await?;
            self.answers = answers.into_iter().map(|answer| answer.tokens).collect();
        }
        for way in [Way::Windows(1), Way::Auto] {
            self.ask_all(fleet, 4, way).await?;
        }
        Ok(())
    }

    /// Answers all prompts with `n_sessions` at the same time.
    async fn ask_all(
        &self,
        fleet: &NodeFleet,
        n_sessions: usize,
        way: Way,
    ) -> anyhow::Result<Vec<Served>> {
        let asks: Vec<_> =
            self.prompts.iter().map(|prompt| way.ask(prompt, self.args.tokens)).collect();
        let answers = load::users(fleet, n_sessions, &asks).await?;
        for (answer, expected) in answers.iter().zip(&self.answers) {
            ensure_equal(way, answer, expected)?;
        }
        Ok(answers)
    }

    async fn round(
        &self,
        fleet: &NodeFleet,
        hop_ms: u32,
        round: usize,
    ) -> anyhow::Result<Vec<Point>> {
        let mut points = Vec::new();
        let mut add = |n_sessions, way, category, answer: &Served| {
            points.extend(Point::of(answer, (hop_ms, n_sessions, way), category, round));
        };
        for (prompt, expected) in self.prompts.iter().zip(&self.answers) {
            for way in self.ways() {
                let ask = way.ask(prompt, self.args.tokens);
                let answer = load::one(fleet, &ask, Instant::now()).await?;
                ensure_equal(way, &answer, expected)?;
                add(1, way, prompt.category, &answer);
            }
        }
        for &n_sessions in self.args.sessions.iter().filter(|n| **n > 1) {
            for way in [Way::Windows(1), Way::Auto] {
                let answers = self.ask_all(fleet, n_sessions, way).await?;
                for (prompt, answer) in self.prompts.iter().zip(&answers) {
                    add(n_sessions, way, prompt.category, answer);
                }
            }
        }
        Ok(points)
    }
}

fn ensure_equal(way: Way, answer: &Served, expected: &[u32]) -> anyhow::Result<()> {
    let found = &answer.tokens;
    let way = way.name();
    anyhow::ensure!(found == expected, "{way} gives other tokens: {found:?}, not {expected:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: WanArgs,
    }

    #[test]
    fn one_session_and_one_window_are_always_measured() {
        let line = Line::try_parse_from(["x", "--windows", "4", "--sessions", "2"]).expect("valid");
        let args = line.args.settle();
        assert_eq!((args.windows, args.sessions), (vec![1, 4], vec![1, 2]));
    }

    #[test]
    fn quick_has_both_ends() {
        let args = Line::try_parse_from(["x", "--quick"]).expect("valid").args.settle();
        assert_eq!((args.hops, args.windows, args.tokens), (vec![0, 100], vec![1, 4], 32));
    }
}
