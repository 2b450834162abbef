//! The scenario `parity`: the pipeline against the unsplit model.
//!
//! Everything that is compared runs on one core with one inference thread, in the fast profile, and
//! generates greedily from the same prompt tokens. Tokens are checked before anything is timed.
//! - [`decode`]: one stage through the engine in each weight mode, `openvino_genai` and llama.cpp.
//! - [`hops`]: fleets of 1, 2, 3 stages; what a step costs beyond inference.
//! - [`breakdown`]: where the time of a token goes.
//! - [`startup`]: from `stagebus up` to the first token.
//! - [`memory`]: what reading the weights once takes.
//! - [`sharding`]: time and memory of the sharder, also for a generated large model.

pub mod breakdown;
pub mod decode;
pub mod hops;
pub mod memory;
pub mod report;
pub mod sharding;
pub mod startup;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use stagebus_fleet::FleetSpec;
use stagebus_shards::WeightMode;

use crate::harness::claims::{Bound, Target};
use crate::harness::machine::{self, Machine};
use crate::harness::{claims, output};
use crate::{measured_model, prompts};
use hops::Placement;
use report::{ParityReport, SetUp};

const SHARD_VS_GENAI: Target = Target {
    name: "shard_vs_genai_decode",
    target: 0.97,
    bound: Bound::AtLeast,
    what: "time per token of openvino_genai over that of one stage with compact weights, one core",
};
const HOP_OVERHEAD: Target = Target {
    name: "hop_overhead_ms",
    target: 0.5,
    bound: Bound::AtMost,
    what: "one hop of a 2-stage pipeline beyond inference, at the median, one core",
};
const BROKER_SHARE: Target = Target {
    name: "broker_share",
    target: 0.05,
    bound: Bound::AtMost,
    what: "share of the time of a token that messages are on the way between processes, 2 stages, one core",
};
const UP_TO_FIRST_TOKEN: Target = Target {
    name: "up_to_first_token_s",
    target: 5.0,
    bound: Bound::AtMost,
    what: "from starting `stagebus up` to the first token of a first prompt, 2 stages, shards present",
};
const SHARD_SECONDS: Target = Target {
    name: "shard_seconds",
    target: 5.0,
    bound: Bound::AtMost,
    what: "time to shard the model with exact weights",
};
const SHARD_PEAK: Target = Target {
    name: "shard_peak_mb",
    target: 300.0,
    bound: Bound::AtMost,
    what: "most memory of the sharder for the model, in any weight mode",
};
const SHARD_PEAK_GROWTH: Target = Target {
    name: "shard_peak_growth",
    target: 1.1,
    bound: Bound::AtMost,
    what: "most memory of the sharder for a 4.2 GB file over that for a file with an eighth of the layers",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[
    SHARD_VS_GENAI,
    HOP_OVERHEAD,
    BROKER_SHARE,
    UP_TO_FIRST_TOKEN,
    SHARD_SECONDS,
    SHARD_PEAK,
    SHARD_PEAK_GROWTH,
];

/// Arguments of `stagebus bench parity`.
#[derive(Debug, Clone, clap::Args)]
pub struct ParityArgs {
    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,

    /// How often the decoding processes are started anew; a process keeps the memory layout that it
    /// happened to get, and with it its speed
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    starts: u16,

    /// Rounds, for decoding of every start; every variant has one turn in each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Tokens of a turn
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(2..))]
    tokens: u16,

    /// Numbers of stages of the fleets whose hops are measured
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2,3")]
    stages: Vec<usize>,

    /// The core to run on [default: the last one]
    #[arg(long, value_name = "N")]
    cpu: Option<usize>,

    /// A Python with openvino_genai [default: STAGEBUS_GENAI_PYTHON, or what `cargo xtask
    /// bench-setup` made]
    #[arg(long, value_name = "PATH")]
    genai_python: Option<PathBuf>,

    /// llama.cpp's llama-bench [default: what `cargo xtask peers` builds, or the one on
    /// PATH]
    #[arg(long, value_name = "PATH")]
    llama_bench: Option<PathBuf>,

    /// Also shard generated models of 0.7 and 4.2 GB; needs 10 GB in the temporary folder
    #[arg(long)]
    big_gguf: bool,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// What all parts of the scenario need.
#[derive(Debug)]
pub struct Context {
    /// The model file.
    pub model: PathBuf,
    /// The core that everything compared is tied to; none where that is not possible.
    pub cpu: Option<usize>,
    /// Starts of the decoding processes.
    pub n_starts: usize,
    /// Rounds, for decoding of every start.
    pub n_rounds: usize,
    /// Tokens of a turn.
    pub n_tokens: usize,
    /// The prompt's token ids.
    pub prompt: Vec<u32>,
    /// Shard sets by stages and weights.
    pub sets: BTreeMap<(usize, &'static str), PathBuf>,
    /// Hides remarks.
    pub quiet: bool,
}

impl Context {
    /// The shard set with `n_stages` stages and these weights.
    ///
    /// # Errors
    /// There is none.
    pub fn set(&self, n_stages: usize, weights: WeightMode) -> anyhow::Result<&Path> {
        let set = self.sets.get(&(n_stages, weights.as_str()));
        set.map(PathBuf::as_path)
            .with_context(|| format!("no set with {n_stages} stages and {weights} weights"))
    }

    /// A fleet of `n_stages` stages: exact weights, fast profile, one inference thread a worker.
    ///
    /// # Errors
    /// There is no such shard set, or the running program cannot be found.
    pub fn fleet(&self, n_stages: usize, placement: Placement) -> anyhow::Result<FleetSpec> {
        let shards = self.set(n_stages, WeightMode::Exact)?;
        let mut spec = FleetSpec::new(machine::this_program()?, shards.to_owned());
        spec.settings = vec!["worker.profile=fast".to_owned(), "worker.threads=1".to_owned()];
        placement.apply(&mut spec, self.cpu, n_stages);
        Ok(spec)
    }
}

/// Runs the scenario and prints its tables, and with `--json` one object last.
///
/// # Errors
/// Tokens that differ between runs that must be equal; anything that does not run.
pub async fn run(args: ParityArgs, quiet: bool) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut machine = Machine::look();
    let mut stages = args.stages.clone();
    stages.push(1);
    stages.sort_unstable();
    stages.dedup();
    let mut context = Context {
        model: measured_model::find(args.model.as_deref())?,
        cpu: machine::can_pin().then(|| args.cpu.unwrap_or(machine.n_cpus.saturating_sub(1))),
        n_starts: args.starts.into(),
        n_rounds: args.rounds.into(),
        n_tokens: args.tokens.into(),
        prompt: Vec::new(),
        sets: BTreeMap::new(),
        quiet,
    };
    output::note(quiet, "sharding");
    let sharding = sharding::all(&mut context, &stages, folder.path()).await?;
    let text = prompts::text_model(context.set(1, WeightMode::Exact)?)?;
    context.prompt = prompts::encode(&text, prompts::ESSAY)?;
    output::note(quiet, "checking tokens: one stage through a fleet and through the engine");
    let reference = hops::reference_tokens(&context).await?;
    let decode = decode::run(&context, &args, &reference).await?;
    let whole = sharding.iter().filter(|sharded| sharded.n_stages == 1);
    let memory = whole.map(|one| memory::bound(one.weights, one.sharding.weight_bytes));
    let memory = memory.collect::<anyhow::Result<_>>()?;
    let hops = hops::run(&context, &stages, &reference).await?;
    output::note(quiet, "starting fleets");
    let startup = startup::run(&context, &stages).await?;
    let big = match args.big_gguf {
        true => Some(sharding::big(folder.path(), quiet).await?),
        false => None,
    };
    machine.finish();
    let claims = vec![
        decode.claim(),
        hops::claim(&hops),
        breakdown::claim(&hops),
        startup::claim(startup.as_ref()),
        sharding::seconds_claim(&sharding),
        sharding::peak_claim(&sharding),
        sharding::growth_claim(big.as_ref()),
    ];
    let set_up = SetUp::new(&context, &args);
    let report =
        ParityReport { machine, set_up, decode, memory, hops, startup, sharding, big, claims };
    print(&report, &context.model, args.json)
}

fn print(report: &ParityReport, model: &Path, json: bool) -> anyhow::Result<()> {
    let text = format!("{}\n", report.describe());
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(report, &text, &claims, Some(model), json)?)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: ParityArgs,
    }

    #[test]
    fn every_claim_has_a_name_of_its_own() {
        let mut names: Vec<&str> = CLAIMS.iter().map(|target| target.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CLAIMS.len());
        assert!(CLAIMS.contains(&SHARD_VS_GENAI) && CLAIMS.contains(&HOP_OVERHEAD));
    }

    #[test]
    fn stages_are_a_list_and_rounds_are_at_least_one() {
        let line = Line::try_parse_from(["x", "--stages", "2,4"]).expect("valid");
        assert_eq!(line.args.stages, [2, 4]);
        Line::try_parse_from(["x", "--rounds", "0"]).expect_err("no round");
        Line::try_parse_from(["x", "--tokens", "1"]).expect_err("nothing to time");
    }
}
