//! The scenario `prefill`: time to the first token against the length of the prompt, by nodes.
//!
//! Prompts run in chunks, and the chunks of one prompt follow each other through the stages: while
//! the second stage runs a chunk, the first one runs the next. Every timed prompt is new, so that no
//! known prefix shortens it.
//!
//! By default stages cost alike when decoding: the last one has fewer layers, for the head. A prompt
//! needs the head for its last row only, so the first stage holds it up. A fleet whose stages have
//! equally many layers stands beside.

pub mod beside;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_shards::text::TextModel;
use stagebus_shards::{ShardSet, WeightMode};

use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::Machine;
use crate::harness::stats::{Summary, median};
use crate::harness::table::{number, table};
use crate::harness::{interleave, output};
use crate::load::{self, Ask};
use crate::measured_model;
use crate::node_fleet::{NodeFleet, NodePlan};
use crate::prompts;
use crate::shard_once::{self, ShardOnceArgs};
use beside::Beside;

const TWO_NODES: Target = Target {
    name: "prefill2k_two_nodes_vs_one",
    target: 0.6,
    bound: Bound::AtMost,
    what: "time to the first token of a 2,000-token prompt on two one-core nodes, even stages, over that on one",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[TWO_NODES, beside::BULK_STEPS];

/// Tokens of the prompt of the claim.
const CLAIMED: usize = 2000;

/// Tokens that are compared before anything is timed.
const CHECKED_TOKENS: u32 = 8;

/// Arguments of `stagebus bench prefill`.
#[derive(Debug, Clone, clap::Args)]
pub struct PrefillArgs {
    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,

    /// Tokens of the prompts; the claim needs 2000
    #[arg(
        long,
        value_name = "N,N",
        value_delimiter = ',',
        default_value = "64,128,256,512,1000,2000"
    )]
    lengths: Vec<usize>,

    /// Stages, each on a node; the claim needs 1 and 2
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2")]
    stages: Vec<usize>,

    /// How the model's weights are mapped
    #[arg(long, value_name = "MODE", default_value = "exact")]
    weights: WeightMode,

    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Settings for the fleets, such as coordinator.prefill_chunk=256
    #[arg(long, value_name = "TABLE.KEY=VALUE")]
    set: Vec<String>,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// Shards of a fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cut {
    /// Layers of each stage.
    layers: Vec<usize>,
    /// Whether that is the default.
    is_default: bool,
    shards: PathBuf,
}

/// Times of one length on one fleet.
#[derive(Debug, Serialize)]
pub struct PrefillPoint {
    /// Stages, each on a node.
    pub n_stages: usize,
    /// Layers of each stage.
    pub layers: Vec<usize>,
    /// Whether the stages are those that the sharder makes by default.
    pub default_split: bool,
    /// Tokens of the prompts.
    pub n_tokens: usize,
    /// Times to the first token, in milliseconds.
    pub ttft_ms: Option<Summary>,
    /// Median over rounds of the time over that of the fleet with the fewest stages.
    pub ratio: Option<f64>,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct PrefillReport {
    scenario: &'static str,
    machine: Machine,
    model: String,
    weights: String,
    settings: Vec<String>,
    rounds: u16,
    tied: bool,
    points: Vec<PrefillPoint>,
    beside: Vec<Beside>,
    claims: Vec<Claim>,
}

/// A fleet with its times so far.
#[derive(Debug)]
struct Contestant {
    cut: Cut,
    fleet: NodeFleet,
    /// By length, by round.
    ttft_ms: Vec<Vec<f64>>,
}

/// Runs the scenario and prints its table, and with `--json` one object last.
///
/// # Errors
/// Tokens that differ between fleets in the exact profile; anything that does not run.
pub async fn run(mut args: PrefillArgs, quiet: bool) -> anyhow::Result<()> {
    for list in [&mut args.lengths, &mut args.stages] {
        list.retain(|&n| n > 0);
        list.sort_unstable();
        list.dedup();
        anyhow::ensure!(!list.is_empty(), "--lengths and --stages: one number at least is needed");
    }
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut machine = Machine::look();
    let model = measured_model::find(args.model.as_deref())?;
    output::note(quiet, "sharding");
    let cuts = cuts(&args, &model, folder.path()).await?;
    let text = prompts::text_model(&cuts[0].shards)?;
    output::note(quiet, "checking tokens in the exact profile");
    check(&args, (&cuts, &machine), &text).await?;
    let narrow = cuts.iter().find(|cut| cut.is_default && cut.layers.len() == 2).cloned();
    let mut contestants = Vec::new();
    for cut in cuts {
        let fleet = NodeFleet::start(&plan(&args, &cut, &machine, None)).await?;
        warm_up(&fleet, &text).await?;
        let ttft_ms = vec![Vec::new(); args.lengths.len()];
        contestants.push(Contestant { cut, fleet, ttft_ms });
    }
    interleave(args.rounds.into(), &mut contestants, async |contestant, round| {
        output::note(quiet, &format!("round {}", round + 1));
        contestant.turn(&args.lengths, &text, round).await
    })
    .await?;
    let tied = contestants.iter().any(|contestant| contestant.fleet.is_tied());
    let points = points(&args, &contestants);
    for contestant in contestants {
        contestant.fleet.end().await?;
    }
    let beside = match &narrow {
        Some(cut) => {
            output::note(quiet, "a long prompt beside the steps of others, over links");
            beside::run(&args, (cut, &machine), &text).await?
        }
        None => Vec::new(),
    };
    machine.finish();
    let claims = vec![claim(&points), beside::claim(&beside)];
    let report = PrefillReport {
        scenario: "prefill",
        machine,
        model: measured_model::name(&model),
        weights: args.weights.to_string(),
        settings: args.set,
        rounds: args.rounds,
        tied,
        points,
        beside,
        claims,
    };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &report.describe(), &claims, Some(&model), args.json)?)
}

/// Shards the model for every number of stages, by default and evenly.
async fn cuts(args: &PrefillArgs, model: &Path, folder: &Path) -> anyhow::Result<Vec<Cut>> {
    let mut cuts: Vec<Cut> = Vec::new();
    for &stages in &args.stages {
        let default = cut(args, model, (stages, None), folder).await?;
        let n_layers: usize = default.layers.iter().sum();
        let even = even(n_layers, stages);
        let is_even = default.layers == even;
        cuts.push(default);
        if !is_even {
            cuts.push(cut(args, model, (stages, Some(even)), folder).await?);
        }
    }
    Ok(cuts)
}

async fn cut(
    args: &PrefillArgs,
    model: &Path,
    (stages, split): (usize, Option<Vec<usize>>),
    folder: &Path,
) -> anyhow::Result<Cut> {
    let is_default = split.is_none();
    let name = if is_default { "default" } else { "even" };
    let (model, out) = (model.to_owned(), folder.join(format!("set-{stages}-{name}")));
    let order = ShardOnceArgs { model, stages, weights: args.weights, split, out: out.clone() };
    shard_once::in_child(&order).await?;
    let manifest = ShardSet::open(&out)?.manifest;
    let layers = manifest.stages.iter().map(|stage| stage.end_layer - stage.first_layer);
    Ok(Cut { layers: layers.collect(), is_default, shards: out })
}

/// Equally many layers for each stage; the first ones take what is left over.
fn even(n_layers: usize, n_stages: usize) -> Vec<usize> {
    let more = |stage: usize| usize::from(stage < n_layers % n_stages);
    (0..n_stages).map(|stage| n_layers / n_stages + more(stage)).collect()
}

fn plan(args: &PrefillArgs, cut: &Cut, machine: &Machine, profile: Option<&str>) -> NodePlan {
    let profile = profile.map(|profile| format!("worker.profile={profile}"));
    let settings = profile.into_iter().chain(args.set.iter().cloned());
    NodePlan::on_nodes(&cut.shards, cut.layers.len(), machine, settings)
}

/// In the exact profile the number of stages changes no token.
async fn check(
    args: &PrefillArgs,
    (cuts, machine): (&[Cut], &Machine),
    text: &TextModel,
) -> anyhow::Result<()> {
    let mut first: Option<Vec<Vec<u32>>> = None;
    for cut in cuts {
        let fleet = NodeFleet::start(&plan(args, cut, machine, Some("exact"))).await?;
        let mut all = Vec::new();
        for &n_tokens in &args.lengths {
            let prompt = prompts::long(text, n_tokens, 0)?;
            let ask = Ask {
                prompt: &prompt,
                max_tokens: CHECKED_TOKENS,
                draft_tokens: Some(0),
                ..Ask::default()
            };
            all.push(load::one(&fleet, &ask, Instant::now()).await?.tokens);
        }
        fleet.end().await?;
        let expected = first.get_or_insert_with(|| all.clone());
        anyhow::ensure!(
            *expected == all,
            "stages of {:?} layers give other tokens: {all:?}, expected {expected:?}",
            cut.layers
        );
    }
    Ok(())
}

/// The first prompt of a fleet meets cold caches.
async fn warm_up(fleet: &NodeFleet, text: &TextModel) -> anyhow::Result<()> {
    ttft_ms(fleet, text, 300, 1).await.map(drop)
}

async fn ttft_ms(
    fleet: &NodeFleet,
    text: &TextModel,
    n_tokens: usize,
    seed: u64,
) -> anyhow::Result<f64> {
    let prompt = prompts::long(text, n_tokens, seed)?;
    let ask = Ask { prompt: &prompt, max_tokens: 1, draft_tokens: Some(0), ..Ask::default() };
    let served = load::one(fleet, &ask, Instant::now()).await?;
    anyhow::ensure!(served.usage.cached_tokens == 0, "a new prompt was known already");
    served.ttft_ms().context("a prompt got no token")
}

impl Contestant {
    async fn turn(
        &mut self,
        lengths: &[usize],
        text: &TextModel,
        round: usize,
    ) -> anyhow::Result<()> {
        self.fleet.join_cores().await?;
        for (index, (&n_tokens, times)) in lengths.iter().zip(&mut self.ttft_ms).enumerate() {
            // The same on every fleet, and never asked before.
            let seed = 1000 + (round * lengths.len() + index) as u64;
            times.push(ttft_ms(&self.fleet, text, n_tokens, seed).await?);
        }
        Ok(())
    }
}

fn points(args: &PrefillArgs, contestants: &[Contestant]) -> Vec<PrefillPoint> {
    let mut points = Vec::new();
    for contestant in contestants {
        for (index, &n_tokens) in args.lengths.iter().enumerate() {
            let (times, base) = (&contestant.ttft_ms[index], &contestants[0].ttft_ms[index]);
            points.push(PrefillPoint {
                n_stages: contestant.cut.layers.len(),
                layers: contestant.cut.layers.clone(),
                default_split: contestant.cut.is_default,
                n_tokens,
                ttft_ms: Summary::of(times.iter().copied()),
                ratio: median(times.iter().zip(base).map(|(time, base)| time / base)),
            });
        }
    }
    points
}

/// Of the splits that were measured, the even one counts: it is the one for long prompts.
fn claim(points: &[PrefillPoint]) -> Claim {
    let find = |n_stages, default_split| {
        let mut found = points.iter().filter(|point| point.n_tokens == CLAIMED);
        found.find(|point| (point.n_stages, point.default_split) == (n_stages, default_split))
    };
    let (even, default) = (find(2, false), find(2, true));
    let (Some(one), Some(two)) = (find(1, true), even.or(default)) else {
        return TWO_NODES.missing("needs --stages 1,2 and a length of 2000");
    };
    let ms = |point: &PrefillPoint| number(point.ttft_ms.map(|summary| summary.median), 0);
    let (two_ms, layers, one_ms) = (ms(two), &two.layers, ms(one));
    let mut how =
        format!("medians: {two_ms} ms on two nodes with {layers:?} layers, {one_ms} ms on one");
    if let (Some(_), Some(default)) = (even, default) {
        let (ratio, layers) = (number(default.ratio, 3), &default.layers);
        how.push_str(&format!("; {ratio} with {layers:?} layers, the default split"));
    }
    match two.ratio {
        Some(ratio) => TWO_NODES.measured(ratio, how),
        None => TWO_NODES.missing("no round was timed"),
    }
}

impl PrefillReport {
    /// The table for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let row = |point: &PrefillPoint| {
            let ms = |of: fn(&Summary) -> f64| number(point.ttft_ms.as_ref().map(of), 1);
            let per_second = point.ttft_ms.map(|ms| point.n_tokens as f64 * 1e3 / ms.median);
            vec![
                point.n_stages.to_string(),
                format!("{:?}", point.layers),
                point.n_tokens.to_string(),
                ms(|summary| summary.min),
                ms(|summary| summary.median),
                ms(|summary| summary.p90),
                number(per_second, 0),
                number(point.ratio, 3),
            ]
        };
        let header = [
            "nodes",
            "layers",
            "prompt tokens",
            "TTFT ms min",
            "median",
            "p90",
            "tokens/s",
            "ratio",
        ];
        let tied = if self.tied { "a node is a core" } else { "nodes are not tied to cores" };
        format!(
            "{}, {} weights, {tied}\n{}\n{}\n",
            self.model,
            self.weights,
            table(&header, &self.points.iter().map(row).collect::<Vec<_>>()),
            beside::describe(&self.beside)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(layers: &[usize], n_tokens: usize, ratio: f64) -> PrefillPoint {
        PrefillPoint {
            n_stages: layers.len(),
            layers: layers.to_vec(),
            default_split: layers != [15, 15],
            n_tokens,
            ttft_ms: Summary::of([ratio * 1e3]),
            ratio: Some(ratio),
        }
    }

    #[test]
    fn the_claim_is_for_the_long_prompt_on_two_nodes_with_even_stages() {
        let points = [
            point(&[30], 2000, 1.0),
            point(&[18, 12], 500, 0.9),
            point(&[15, 15], 2000, 0.5),
            point(&[18, 12], 2000, 0.625),
        ];
        let found = claim(&points);
        assert_eq!((found.value, found.holds), (Some(0.5), Some(true)));
        assert!(found.how.contains("0.625 with [18, 12] layers"), "{}", found.how);
        assert_eq!(claim(&points[..2]).holds, None);
    }

    #[test]
    fn even_stages_differ_by_one_layer_at_most() {
        assert_eq!(even(30, 2), [15, 15]);
        assert_eq!(even(32, 3), [11, 11, 10]);
    }
}
