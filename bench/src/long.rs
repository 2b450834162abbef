//! The scenario `long`: one session up to 2,048 tokens, by nodes and profile.
//!
//! End tokens are ruled out, so that the answer goes on. What a token costs is told by position, and
//! the memory of the workers after the long answer is compared with that after a short one.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_schemas::messages::public::PromptRequest;
use stagebus_shards::{ShardSet, WeightMode};

use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::Machine;
use crate::harness::output;
use crate::harness::stats::median;
use crate::harness::table::{number, table};
use crate::load::{self, Served};
use crate::measured_model::{self, ShardSets};
use crate::node_fleet::{NodeFleet, NodePlan};
use crate::prompts;

const IDENTICAL: Target = Target {
    name: "long2k_tokens_identical",
    target: 1.0,
    bound: Bound::AtLeast,
    what: "share of the tokens up to position 2,048 that are the same with 1 and 2 stages, exact profile",
};
const MEMORY: Target = Target {
    name: "long2k_memory_ratio",
    target: 1.25,
    bound: Bound::AtMost,
    what: "most memory of the workers after 2,048 tokens over that after 256, fast profile, the worst stage count",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[IDENTICAL, MEMORY];

/// Tokens of the short answer before the long one.
const SHORT: usize = 256;

/// Positions whose times are put together.
const BUCKET: usize = 128;

/// Arguments of `stagebus bench long`.
#[derive(Debug, Clone, clap::Args)]
pub struct LongArgs {
    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,

    /// Tokens of the prompt and its answer
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u16).range(512..))]
    tokens: u16,

    /// Stages, each on a node
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2")]
    stages: Vec<usize>,

    /// Settings for the fleets, such as worker.engine=stateful
    #[arg(long, value_name = "TABLE.KEY=VALUE")]
    set: Vec<String>,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// What a token costs around a position.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// The middle of the positions.
    pub position: usize,
    /// Median time from one token to the next, in milliseconds.
    pub ms: f64,
}

/// One fleet's long answer.
#[derive(Debug, Serialize)]
pub struct LongRun {
    /// Profile of its workers.
    pub profile: &'static str,
    /// Stages, each on a node.
    pub n_stages: usize,
    /// What tokens cost.
    pub costs: Vec<Cost>,
    /// Tokens per second after the first one.
    pub tok_s: Option<f64>,
    /// Tokens that are the same as those with the fewest stages in the same profile, from the start.
    pub n_equal: usize,
    /// Tokens of the answer.
    pub n_tokens: usize,
    /// Most memory of all workers together after the short answer, in bytes.
    pub short_bytes: Option<u64>,
    /// The same after the long one.
    pub long_bytes: Option<u64>,
    #[serde(skip)]
    tokens: Vec<u32>,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct LongReport {
    scenario: &'static str,
    machine: Machine,
    model: String,
    settings: Vec<String>,
    prompt_tokens: usize,
    tied: bool,
    runs: Vec<LongRun>,
    claims: Vec<Claim>,
}

/// Runs the scenario and prints its tables, and with `--json` one object last.
///
/// # Errors
/// A long answer that does not begin as the short one; anything that does not run.
pub async fn run(mut args: LongArgs, quiet: bool) -> anyhow::Result<()> {
    args.stages.retain(|&n_stages| n_stages > 0);
    args.stages.sort_unstable();
    args.stages.dedup();
    let fewest = *args.stages.first().context("--stages: at least one stage is needed")?;
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut machine = Machine::look();
    let model = measured_model::find(args.model.as_deref())?;
    output::note(quiet, "sharding");
    let kinds = args.stages.iter().map(|&n_stages| (n_stages, WeightMode::Exact));
    let sets = ShardSets::make(&model, folder.path(), kinds).await?;
    let set = sets.get(fewest, WeightMode::Exact)?;
    let prompt = prompts::encode(&prompts::text_model(set)?, prompts::ESSAY)?;
    let n_tokens = usize::from(args.tokens).saturating_sub(prompt.len());
    let manifest = ShardSet::open(set)?.manifest;
    let request = PromptRequest {
        tokens: Some(prompt.clone()),
        max_tokens: Some(u32::try_from(n_tokens)?),
        draft_tokens: Some(0),
        logit_bias: manifest.eos_ids.iter().map(|&token| (token, -100.0)).collect(),
        ..PromptRequest::default()
    };
    let (mut runs, mut tied): (Vec<LongRun>, bool) = (Vec::new(), false);
    for profile in ["exact", "fast"] {
        for &n_stages in &args.stages {
            output::note(quiet, &format!("{profile} profile, {n_stages} nodes"));
            let settings =
                [format!("worker.profile={profile}")].into_iter().chain(args.set.clone());
            let set = sets.get(n_stages, WeightMode::Exact)?;
            let plan = NodePlan::on_nodes(set, n_stages, &machine, settings);
            let fleet = NodeFleet::start(&plan).await?;
            tied |= fleet.is_tied();
            fleet.join_cores().await?;
            let mut run = one(&fleet, &request, profile).await?;
            fleet.end().await?;
            let mut same_profile = runs.iter().filter(|run| run.profile == profile);
            let first = same_profile.next().map_or(&run.tokens, |run| &run.tokens);
            run.n_equal = first.iter().zip(&run.tokens).take_while(|(a, b)| a == b).count();
            runs.push(run);
        }
    }
    machine.finish();
    let claims = vec![identical_claim(&runs), memory_claim(&runs)];
    let report = LongReport {
        scenario: "long",
        machine,
        model: measured_model::name(&model),
        settings: args.set,
        prompt_tokens: prompt.len(),
        tied,
        runs,
        claims,
    };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &report.describe(), &claims, Some(&model), args.json)?)
}

async fn one(
    fleet: &NodeFleet,
    request: &PromptRequest,
    profile: &'static str,
) -> anyhow::Result<LongRun> {
    let short = PromptRequest { max_tokens: Some(u32::try_from(SHORT)?), ..request.clone() };
    let begins = load::answer(fleet, &short, Instant::now()).await?.tokens;
    let short_bytes = workers_bytes(fleet);
    let served = load::answer(fleet, request, Instant::now()).await?;
    anyhow::ensure!(
        served.tokens.starts_with(&begins),
        "{profile} profile: the long answer does not begin as the short one"
    );
    Ok(LongRun {
        profile,
        n_stages: fleet.n_stages(),
        costs: costs(&served, request.tokens.as_ref().map_or(0, Vec::len)),
        tok_s: served.decode_tok_s(),
        n_equal: 0,
        n_tokens: served.tokens.len(),
        short_bytes,
        long_bytes: workers_bytes(fleet),
        tokens: served.tokens,
    })
}

/// Most memory of all workers together.
fn workers_bytes(fleet: &NodeFleet) -> Option<u64> {
    let peaks = fleet.peak_rss_bytes();
    let workers = peaks.iter().filter(|(name, _)| name.starts_with("worker"));
    let sum: u64 = workers.map(|(_, bytes)| bytes).sum();
    (sum > 0).then_some(sum)
}

/// Medians over equally many positions each; tokens come one by one.
fn costs(served: &Served, n_before: usize) -> Vec<Cost> {
    let gaps: Vec<f64> = served.gaps_ms().collect();
    let one = |(index, gaps): (usize, &[f64])| {
        let position = n_before + index * BUCKET + gaps.len() / 2;
        Some(Cost { position, ms: median(gaps.iter().copied())? })
    };
    gaps.chunks(BUCKET).enumerate().filter_map(one).collect()
}

fn identical_claim(runs: &[LongRun]) -> Claim {
    let share = |profile| {
        let mut others = runs.iter().filter(|run| run.profile == profile && run.n_stages == 2);
        let run = others.next()?;
        Some((run.n_equal as f64 / run.n_tokens as f64, run))
    };
    let both = runs.iter().any(|run| run.n_stages == 1);
    match share("exact").filter(|_| both) {
        None => IDENTICAL.missing("needs --stages 1,2"),
        Some((share_equal, run)) => {
            let fast = share("fast").map(|(share, _)| share);
            let how = format!(
                "{} tokens after the prompt, end tokens ruled out; fast profile: {}",
                run.n_tokens,
                number(fast, 3)
            );
            IDENTICAL.measured(share_equal, how)
        }
    }
}

fn memory_claim(runs: &[LongRun]) -> Claim {
    let ratio = |run: &LongRun| Some(run.long_bytes? as f64 / run.short_bytes? as f64);
    let fast = runs.iter().filter(|run| run.profile == "fast");
    match fast.filter_map(ratio).max_by(f64::total_cmp) {
        None => MEMORY.missing("this platform does not tell the memory of a process"),
        Some(worst) => MEMORY.measured(worst, "sums over the workers of a fleet"),
    }
}

impl LongReport {
    /// The tables for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let megabytes = |bytes: Option<u64>| number(bytes.map(|bytes| bytes as f64 / 1e6), 0);
        let row = |run: &LongRun| {
            vec![
                run.profile.to_owned(),
                run.n_stages.to_string(),
                number(run.tok_s, 1),
                format!("{} of {}", run.n_equal, run.n_tokens),
                megabytes(run.short_bytes),
                megabytes(run.long_bytes),
            ]
        };
        let header = ["profile", "nodes", "tok/s", "equal", "MB at 256", "MB at the end"];
        let rows: Vec<_> = self.runs.iter().map(row).collect();
        let name = |run: &LongRun| format!("{} x {}", run.profile, run.n_stages);
        let names: Vec<String> = self.runs.iter().map(name).collect();
        let columns: Vec<&str> =
            std::iter::once("position").chain(names.iter().map(String::as_str)).collect();
        let n_rows = self.runs.iter().map(|run| run.costs.len()).max().unwrap_or(0);
        let cost_row = |index: usize| {
            let at = |run: &LongRun| run.costs.get(index).copied();
            let position = self.runs.iter().find_map(at).map_or(0, |cost| cost.position);
            let costs = self.runs.iter().map(|run| number(at(run).map(|cost| cost.ms), 2));
            std::iter::once(position.to_string()).chain(costs).collect()
        };
        format!(
            "{}, one session, {} prompt tokens\n{}\nms a token, median around a position\n{}\n",
            self.model,
            self.prompt_tokens,
            table(&header, &rows),
            table(&columns, &(0..n_rows).map(cost_row).collect::<Vec<_>>())
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::served;

    fn run(profile: &'static str, n_stages: usize, n_equal: usize) -> LongRun {
        LongRun {
            profile,
            n_stages,
            costs: Vec::new(),
            tok_s: None,
            n_equal,
            n_tokens: 2000,
            short_bytes: Some(400),
            long_bytes: Some(400 + 20 * n_stages as u64),
            tokens: Vec::new(),
        }
    }

    #[test]
    fn costs_are_medians_by_position() {
        let arrivals: Vec<(f64, usize)> = (0..=200).map(|n| (f64::from(n) * 10.0, 1)).collect();
        let costs = costs(&served(0.0, &arrivals), 40);
        assert_eq!(costs.len(), 2);
        assert_eq!(costs[0], Cost { position: 104, ms: 10.0 });
        assert_eq!(costs[1], Cost { position: 204, ms: 10.0 });
    }

    #[test]
    fn the_exact_profile_counts_for_tokens_and_the_fast_one_for_memory() {
        let runs = [
            run("exact", 1, 2000),
            run("exact", 2, 2000),
            run("fast", 1, 2000),
            run("fast", 2, 500),
        ];
        let claim = identical_claim(&runs);
        assert_eq!((claim.value, claim.holds), (Some(1.0), Some(true)));
        assert!(claim.how.contains("fast profile: 0.250"), "{}", claim.how);
        assert_eq!(memory_claim(&runs).value, Some(1.1));
        assert_eq!(identical_claim(&runs[..1]).holds, None);
    }
}
