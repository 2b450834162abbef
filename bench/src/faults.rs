//! The scenario `faults`: what is noticed how soon, and whether anything is lost.
//!
//! One fleet of two stages with two workers each, of real processes with the real model.
//! - [`kills`]: a worker dies (SIGKILL) or freezes (SIGSTOP) at a random token; the answer must be
//!   that of the undisturbed run.
//! - [`disconnects`]: clients vanish at random moments beside neighbours that stay.
//! - [`rolling`]: every worker is replaced while users ask.
//! - [`soak`]: users ask for a while, with a fault every so often.
//!
//! Times are taken where the client is: from the fault to the event that tells of it, and from there
//! to the next token.

pub mod disconnects;
pub mod fleet;
pub mod kills;
pub mod report;
pub mod rolling;
pub mod soak;

use std::path::PathBuf;

use anyhow::Context as _;
use stagebus_shards::WeightMode;

use crate::harness::claims::{self, Bound, Target};
use crate::harness::machine::Machine;
use crate::harness::output;
use crate::measured_model::{self, ShardSets};
use crate::prompts::{self, EncodedPrompt};
use fleet::FaultFleet;
use report::FaultsReport;

const KILLS: Target = Target {
    name: "kills_identical",
    target: 1.0,
    bound: Bound::AtLeast,
    what: "share of answers that are token for token those of the undisturbed run although a worker died or froze",
};
const DEATH: Target = Target {
    name: "death_noticed_ms",
    target: 100.0,
    bound: Bound::AtMost,
    what: "longest time from the death of a worker to the client's word of it",
};
const WEDGE: Target = Target {
    name: "wedge_noticed_ms",
    target: 2000.0,
    bound: Bound::AtMost,
    what: "longest time from the freezing of a worker to the client's word of it",
};
const RESUME: Target = Target {
    name: "resume_ms",
    target: 1000.0,
    bound: Bound::AtMost,
    what: "longest time from that word to the next token, less the time to read as long a prompt",
};
const LEAKS: Target = Target {
    name: "disconnect_leaks",
    target: 0.0,
    bound: Bound::AtMost,
    what: "sessions, KV tokens and queued steps left after random disconnects, and neighbours whose tokens changed",
};
const ROLLING: Target = Target {
    name: "rolling_failures",
    target: 0.0,
    bound: Bound::AtMost,
    what: "requests that failed or changed while every worker was replaced under the load of the users",
};
const SOAK: Target = Target {
    name: "soak_wrong",
    target: 0.0,
    bound: Bound::AtMost,
    what: "answers with wrong tokens under load with faults",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[KILLS, DEATH, WEDGE, RESUME, LEAKS, ROLLING, SOAK];

/// Arguments of `stagebus bench faults`.
#[derive(Debug, Clone, clap::Args)]
pub struct FaultsArgs {
    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,

    /// Workers that die or freeze, in turn of every stage
    #[arg(long, value_name = "N", default_value_t = 100)]
    kills: usize,

    /// Clients that vanish
    #[arg(long, value_name = "N", default_value_t = 1000)]
    disconnects: usize,

    /// Users at the same time while workers are replaced, and in the long run
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    users: u16,

    /// Length of the run under load with faults, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    soak: u64,

    /// Time between its faults, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    fault_every: u64,

    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(16..))]
    tokens: u16,

    /// Seed of the random moments
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// A first look: few of everything
    #[arg(long)]
    quick: bool,

    /// Settings for the fleet, such as worker.profile=exact
    #[arg(long, value_name = "TABLE.KEY=VALUE")]
    set: Vec<String>,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

impl FaultsArgs {
    /// Makes `--quick` out of the options that it stands for.
    fn settle(mut self) -> Self {
        if self.quick {
            self.kills = self.kills.min(8);
            self.disconnects = self.disconnects.min(40);
            self.soak = self.soak.min(30);
            self.fault_every = self.fault_every.min(10);
        }
        self
    }
}

/// What all parts of the scenario need.
#[derive(Debug)]
pub struct Context {
    /// The options.
    pub args: FaultsArgs,
    /// Prompts that differ in length and kind.
    pub prompts: Vec<EncodedPrompt>,
    /// Their undisturbed answers.
    pub answers: Vec<Vec<u32>>,
    /// A prompt that takes a while to be read.
    pub long: Vec<u32>,
    /// Hides remarks.
    pub quiet: bool,
}

impl Context {
    fn note(&self, text: &str) {
        output::note(self.quiet, text);
    }
}

/// Numbers that look random, the same for the same seed (SplitMix64).
#[derive(Debug, Clone, Copy)]
pub struct Dice(u64);

impl Dice {
    /// Starts from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `end`, which is at least 1.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }
}

/// Runs the scenario and prints its table, and with `--json` one object last.
///
/// # Errors
/// Anything that does not run. Answers that fail or differ are figures, no errors.
pub async fn run(args: FaultsArgs, quiet: bool) -> anyhow::Result<()> {
    let args = args.settle();
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut machine = Machine::look();
    let model = measured_model::find(args.model.as_deref())?;
    output::note(quiet, "sharding");
    let kind = (fleet::N_STAGES, WeightMode::Compact);
    let sets = ShardSets::make(&model, folder.path(), [kind]).await?;
    let set = sets.get(fleet::N_STAGES, WeightMode::Compact)?;
    let text = prompts::text_model(set)?;
    let mut prompts = prompts::encoded(&text)?;
    prompts.truncate(N_PROMPTS);
    let long = prompts::long(&text, LONG_PROMPT, args.seed)?;
    let mut fleet = FaultFleet::start(set, &args.set).await?;
    let mut answers = Vec::with_capacity(prompts.len());
    for prompt in &prompts {
        answers.push(fleet.answer(&prompt.tokens, args.tokens.into()).await?);
    }
    let context = Context { args, prompts, answers, long, quiet };
    let kills = kills::run(&context, &mut fleet).await?;
    let disconnects = disconnects::run(&context, &fleet).await?;
    let rolling = rolling::run(&context, &mut fleet).await?;
    let soak = soak::run(&context, &mut fleet).await?;
    fleet.end().await?;
    machine.finish();
    let report = FaultsReport::new(machine, &context, kills, disconnects, rolling, soak);
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &report.describe(), &claims, Some(&model), context.args.json)?)
}

/// Prompts that are asked in turn.
const N_PROMPTS: usize = 12;

/// Tokens of the long prompt.
const LONG_PROMPT: usize = 600;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dice_repeat_themselves_and_stay_below_the_end() {
        let throw = |seed| {
            let mut dice = Dice::new(seed);
            (0..100).map(|_| dice.below(6)).collect::<Vec<_>>()
        };
        assert_eq!(throw(1), throw(1));
        assert_ne!(throw(1), throw(2));
        assert!((0..6).all(|side| throw(1).contains(&side)));
    }
}
