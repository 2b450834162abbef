//! The scenario `speculation`: what drafting gains, and that it changes no token.
//!
//! One fleet per drafter, all alike else; the draft length goes by request. Prompts of eight
//! categories take turns with draft lengths and drafters ([`sweep`]), then drawn tokens and one long answer.
//! Beside that, what a rewind costs the stateful engine ([`crate::rewind_once`]).
//! [`verdict`] makes the claims.

pub mod gains;
pub mod report;
pub mod sweep;
pub mod verdict;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use stagebus_shards::WeightMode;

use crate::harness::claims::{Bound, Target};
use crate::harness::machine::{self, Machine};
use crate::harness::{claims, output};
use crate::load::{Ask, Draw};
use crate::measured_model::{self, ShardSets};
use crate::node_fleet::{NodeFleet, NodePlan, node_cpus};
use crate::prompts::{self, EncodedPrompt};
use crate::rewind_once;
use report::{SetUp, SpeculationReport};
use verdict::Evidence;

const AUTO_VS_BEST: Target = Target {
    name: "auto_k_vs_best_fixed",
    target: 0.95,
    bound: Bound::AtLeast,
    what: "tok/s with the draft length chosen by measurement over the best fixed one, geometric mean over categories",
};
const POOR_VS_OFF: Target = Target {
    name: "poor_acceptance_vs_off",
    target: 0.95,
    bound: Bound::AtLeast,
    what: "tok/s with the draft length chosen by measurement over none, where few drafted tokens are right",
};
const IDENTICAL: Target = Target {
    name: "tokens_identical",
    target: 1.0,
    bound: Bound::AtLeast,
    what: "share of answers with drafts, greedy and drawn, whose tokens are those without",
};

const MASK_VS_TRIM: Target = Target {
    name: "mask_vs_trim_ms",
    target: 0.0,
    bound: Bound::AtLeast,
    what: "what a step of the stateful engine spares by masking instead of cutting the state, 512 cached tokens",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[AUTO_VS_BEST, POOR_VS_OFF, IDENTICAL, MASK_VS_TRIM];

/// Who drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Drafter {
    /// What followed the same words before.
    Ngram,
    /// The draft model.
    Model,
    /// Look-up after a long match, else the model.
    Hybrid,
}

impl Drafter {
    /// Its name, in tables and in the setting `coordinator.draft`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ngram => "ngram",
            Self::Model => "model",
            Self::Hybrid => "hybrid",
        }
    }
}

/// Arguments of `stagebus bench speculation`.
#[derive(Debug, Clone, clap::Args)]
pub struct SpeculationArgs {
    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,

    /// Stages, each on a node
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    stages: u16,

    /// How the model's weights are mapped
    #[arg(long, value_name = "MODE", default_value = "exact")]
    weights: WeightMode,

    /// Who drafts
    #[arg(
        long,
        value_name = "WHO,WHO",
        value_delimiter = ',',
        default_value = "ngram,model,hybrid"
    )]
    drafters: Vec<Drafter>,

    /// Fixed draft lengths; 0 and auto are always measured
    #[arg(long, value_name = "K,K", value_delimiter = ',', default_value = "0,1,2,3,5,7,10")]
    k: Vec<u32>,

    /// Prompts of each category
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    prompts: u16,

    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u16).range(2..))]
    tokens: u16,

    /// Lengths at which the long answer's speed is taken; 0 leaves it out
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "512,1024")]
    long: Vec<usize>,

    /// Prompts that are also answered with drawn tokens, from three seeds each
    #[arg(long, value_name = "N", default_value_t = 8)]
    drawn_prompts: usize,

    /// A first look: three draft lengths, short answers, no long one
    #[arg(long)]
    quick: bool,

    /// More settings for the fleets
    #[arg(long, value_name = "TABLE.KEY=VALUE")]
    set: Vec<String>,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

impl SpeculationArgs {
    /// Makes `--quick` out of the options that it stands for, and puts draft lengths in order.
    fn settle(mut self) -> Self {
        if self.quick {
            self.k.retain(|&k| matches!(k, 0 | 2 | 5));
            self.tokens = self.tokens.min(48);
            self.long.clear();
            self.drawn_prompts = self.drawn_prompts.min(2);
        }
        self.k.push(0);
        self.k.sort_unstable();
        self.k.dedup();
        self.long.retain(|&n_tokens| n_tokens > 1);
        self.long.sort_unstable();
        self
    }
}

/// What all parts of the scenario need.
#[derive(Debug)]
pub struct Context {
    /// The options.
    pub args: SpeculationArgs,
    /// The model file.
    pub model: PathBuf,
    /// The prompts of the sweep.
    pub prompts: Vec<EncodedPrompt>,
    /// All prompts.
    pub all_prompts: Vec<EncodedPrompt>,
    /// A prompt with a long answer.
    pub long_prompt: Vec<u32>,
    /// Hides remarks.
    pub quiet: bool,
}

impl Context {
    fn note(&self, text: &str) {
        output::note(self.quiet, text);
    }

    /// A question; `k` as in [`Ask::draft_tokens`].
    fn ask<'a>(&self, prompt: &'a [u32], k: Option<u32>, draw: Option<Draw>) -> Ask<'a> {
        Ask { prompt, max_tokens: self.args.tokens.into(), draft_tokens: k, draw, ..Ask::default() }
    }
}

/// A fleet with its drafter.
#[derive(Debug)]
pub struct Drafting {
    /// Who drafts.
    pub drafter: Drafter,
    /// The fleet.
    pub fleet: NodeFleet,
}

/// Runs the scenario and prints its tables, and with `--json` one object last.
///
/// # Errors
/// Anything that does not run.
pub async fn run(args: SpeculationArgs, quiet: bool) -> anyhow::Result<()> {
    let args = args.settle();
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut machine = Machine::look();
    let model = measured_model::find(args.model.as_deref())?;
    output::note(quiet, "sharding");
    let (n_stages, weights) = (usize::from(args.stages), args.weights);
    let kinds = [(n_stages, weights), (1, weights)];
    let sets = ShardSets::make(&model, folder.path(), kinds).await?;
    let set = sets.get(n_stages, weights)?;
    let text = prompts::text_model(set)?;
    let all_prompts = prompts::encoded(&text)?;
    let n_prompts = usize::from(args.prompts) * prompts::N_CATEGORIES;
    let long_prompt = prompts::encode(&text, prompts::ESSAY)?;
    let prompts = all_prompts.iter().take(n_prompts).cloned().collect();
    let context = Context { args, model, prompts, all_prompts, long_prompt, quiet };
    let (fleets, absent) = start_all(&context, set, folder.path()).await?;
    let tied = fleets.first().is_some_and(|drafting| drafting.fleet.is_tied());
    let sweep = sweep::run(&context, &fleets).await?;
    let drawn = sweep::drawn(&context, &fleets).await?;
    let long = sweep::long(&context, &fleets).await?;
    for drafting in fleets {
        drafting.fleet.end().await?;
    }
    output::note(quiet, "rewinds of the stateful engine");
    let cpu = tied.then(|| machine.n_cpus.saturating_sub(1));
    let rewinds = rewind_once::in_child(sets.get(1, weights)?, cpu).await?;
    machine.finish();
    let evidence = Evidence { points: &sweep, drawn: &drawn, long: &long, rewinds: &rewinds };
    let claims = evidence.claims(&absent);
    let set_up = SetUp::new(&context, tied);
    let report = SpeculationReport { machine, set_up, absent, sweep, drawn, long, rewinds, claims };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(
        &report,
        &report.describe(),
        &claims,
        Some(&context.model),
        context.args.json,
    )?)
}

/// Starts a fleet for every drafter; also returns why drafters are missing, if any are.
async fn start_all(
    context: &Context,
    set: &Path,
    folder: &Path,
) -> anyhow::Result<(Vec<Drafting>, Vec<String>)> {
    let draft = measured_model::draft_settings(set, folder).await?;
    let cpus = if machine::can_pin() {
        node_cpus(context.args.stages.into(), machine::n_cpus())
    } else {
        Vec::new()
    };
    let (mut fleets, mut absent) = (Vec::new(), Vec::new());
    for &drafter in &context.args.drafters {
        if drafter != Drafter::Ngram && draft.is_none() {
            absent.push(format!("{}: no draft model for this tokenizer", drafter.name()));
            continue;
        }
        context.note(&format!("starting a fleet with the drafter {}", drafter.name()));
        let mut settings = vec![format!("coordinator.draft={}", drafter.name())];
        settings.extend(draft.clone().filter(|_| drafter != Drafter::Ngram));
        settings.extend(context.args.set.iter().cloned());
        let plan =
            NodePlan { shards: set.to_owned(), cpus: cpus.clone(), settings, host_stage0: false };
        fleets.push(Drafting { drafter, fleet: NodeFleet::start(&plan).await? });
    }
    Ok((fleets, absent))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: SpeculationArgs,
    }

    #[test]
    fn no_drafting_is_always_measured() {
        let line = Line::try_parse_from(["x", "--k", "5,2"]).expect("valid");
        assert_eq!(line.args.settle().k, [0, 2, 5]);
    }

    #[test]
    fn quick_is_short() {
        let line = Line::try_parse_from(["x", "--quick"]).expect("valid");
        let args = line.args.settle();
        assert_eq!((args.k, args.tokens, args.long), (vec![0, 2, 5], 48, vec![]));
    }
}
