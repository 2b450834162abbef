//! The scenario `users`: many users at the same time.
//!
//! A node is a core ([`crate::node_fleet`]). All contestants are loaded, then they take turns:
//! - fleets of 1, 2, 3 nodes with compact weights, and of 1 and 2 nodes with the default weights;
//! - one node with the stateful engine;
//! - `openvino_genai`, one user after the other and with its continuous batching.
//!
//! [`matrix`] measures users by stages by speculation; [`replicas`] what two cores could give; [`long_prompt`] what a long prompt does to
//! others; [`prefix`] what a known prefix spares; [`identity`] whether a user's tokens depend on
//! anybody else. [`verdict`] makes the claims.

pub mod contestant;
pub mod identity;
pub mod long_prompt;
pub mod matrix;
pub mod prefix;
pub mod replicas;
pub mod report;
pub mod verdict;

use std::path::PathBuf;

use anyhow::Context as _;
use stagebus_shards::WeightMode;

use crate::harness::claims::{Bound, Target};
use crate::harness::machine::{self, Machine};
use crate::harness::{claims, output};
use crate::measured_model::{self, ShardSets};
use crate::prompts::{self, EncodedPrompt};
use contestant::{Contestant, Kind};
use report::{SetUp, UsersReport};
use verdict::Evidence;

const TWO_NODES_VS_SINGLE: Target = Target {
    name: "users16_two_nodes_vs_genai_single",
    target: 8.0,
    bound: Bound::AtLeast,
    what: "tok/s of 16 users on two nodes over openvino_genai with one user on one core",
};
const PIPELINE_EFFICIENCY: Target = Target {
    name: "users16_pipeline_efficiency",
    target: 0.9,
    bound: Bound::AtLeast,
    what: "tok/s of 16 users on two nodes over twice that of 16 users on one node of ours",
};
const SPECULATION_VS_SINGLE: Target = Target {
    name: "users2_spec_two_nodes_vs_genai_single",
    target: 2.0,
    bound: Bound::AtLeast,
    what: "tok/s of 2 users with speculation on two nodes over openvino_genai with one user on one core",
};
const ONE_NODE_VS_BATCH: Target = Target {
    name: "users16_one_node_vs_genai_cb",
    target: 1.3,
    bound: Bound::AtLeast,
    what: "tok/s of 16 users on one node over openvino_genai's continuous batching with 16 on one core",
};
const PAGED_VS_STATEFUL: Target = Target {
    name: "one_user_paged_vs_stateful",
    target: 0.97,
    bound: Bound::AtLeast,
    what: "tok/s of one user with the paged engine over the stateful one, one node",
};
const LONG_PROMPT: Target = Target {
    name: "prefill4k_p99_ratio",
    target: 2.0,
    bound: Bound::AtMost,
    what: "99th percentile of the time between tokens while a 4,000-token prompt is prefilled over without",
};
const PREFIX: Target = Target {
    name: "prefix1500_ttft_ratio",
    target: 5.0,
    bound: Bound::AtLeast,
    what: "time to the first token without over with a known prefix of 1,500 tokens",
};
const IDENTICAL: Target = Target {
    name: "tokens_identical",
    target: 1.0,
    bound: Bound::AtLeast,
    what: "share of prompts whose tokens are the same alone, beside 15 others, and with speculation",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[
    TWO_NODES_VS_SINGLE,
    PIPELINE_EFFICIENCY,
    SPECULATION_VS_SINGLE,
    ONE_NODE_VS_BATCH,
    PAGED_VS_STATEFUL,
    LONG_PROMPT,
    PREFIX,
    IDENTICAL,
];

/// Arguments of `stagebus bench users`.
#[derive(Debug, Clone, clap::Args)]
pub struct UsersArgs {
    /// The model: a GGUF file [default: the one that `cargo xtask setup` fetches]
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,

    /// Users at the same time
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2,4,8,16,32")]
    users: Vec<usize>,

    /// Stages, each on a node
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2,3")]
    stages: Vec<usize>,

    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u16).range(2..))]
    tokens: u16,

    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// Rounds in which also that is measured which no claim needs
    #[arg(long, value_name = "N", default_value_t = 1)]
    whole_rounds: u16,

    /// Prompts whose tokens are compared alone, beside others and with speculation
    #[arg(long, value_name = "N", default_value_t = 40)]
    check_prompts: usize,

    /// A first look: one round, short answers, few prompts compared
    #[arg(long)]
    quick: bool,

    /// Leave something out
    #[arg(long, value_name = "WHAT,WHAT", value_delimiter = ',')]
    without: Vec<Part>,

    /// Settings for the fleets, such as coordinator.draft=ngram
    #[arg(long, value_name = "TABLE.KEY=VALUE")]
    set: Vec<String>,

    /// A Python with openvino_genai [default: STAGEBUS_GENAI_PYTHON, or what `cargo xtask
    /// bench-setup` made]
    #[arg(long, value_name = "PATH")]
    genai_python: Option<PathBuf>,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// What can be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Turns with speculation.
    Speculation,
    /// `openvino_genai`.
    Genai,
    /// Fleets with the default weights.
    DefaultWeights,
}

impl UsersArgs {
    fn has(&self, part: Part) -> bool {
        !self.without.contains(&part)
    }

    /// Makes `--quick` out of the options that it stands for.
    fn settle(mut self) -> Self {
        if self.quick {
            self.rounds = 1;
            self.tokens = self.tokens.min(48);
            self.check_prompts = self.check_prompts.min(8);
        }
        for list in [&mut self.users, &mut self.stages] {
            list.sort_unstable();
            list.dedup();
        }
        self
    }
}

/// What all parts of the scenario need.
#[derive(Debug)]
pub struct Context {
    /// The options.
    pub args: UsersArgs,
    /// The model file.
    pub model: PathBuf,
    /// Shard sets.
    pub sets: ShardSets,
    /// The setting that gives coordinators the draft model, if there is one.
    pub draft: Option<String>,
    /// Cores; none where processes cannot be tied.
    pub n_cpus: Option<usize>,
    /// All prompts.
    pub prompts: Vec<EncodedPrompt>,
    /// Hides remarks.
    pub quiet: bool,
}

impl Context {
    /// Tokens of an answer.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        self.args.tokens.into()
    }

    fn note(&self, text: &str) {
        output::note(self.quiet, text);
    }
}

/// Runs the scenario and prints its tables, and with `--json` one object last.
///
/// # Errors
/// Anything that does not run.
pub async fn run(args: UsersArgs, quiet: bool) -> anyhow::Result<()> {
    let args = args.settle();
    let positive = |list: &[usize]| list.first().is_some_and(|&least| least > 0);
    anyhow::ensure!(positive(&args.users), "--users: at least one user is needed");
    anyhow::ensure!(positive(&args.stages), "--stages: at least one stage is needed");
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let mut machine = Machine::look();
    let model = measured_model::find(args.model.as_deref())?;
    output::note(quiet, "sharding");
    let kinds = contestant::shard_kinds(&args);
    let sets = ShardSets::make(&model, folder.path(), kinds).await?;
    let text = prompts::text_model(sets.get(args.stages[0], WeightMode::Compact)?)?;
    let prompts = prompts::encoded(&text)?;
    let n_cpus = machine::can_pin().then_some(machine.n_cpus);
    let set = sets.get(args.stages[0], WeightMode::Compact)?;
    let draft = measured_model::draft_settings(set, folder.path()).await?;
    let context = Context { args, model, sets, draft, n_cpus, prompts, quiet };
    let (mut contestants, absent) = contestant::start_all(&context).await?;
    let matrix = matrix::run(&context, &mut contestants).await?;
    let replicas = replicas::run(&context, &contestants).await?;
    let nodes = widest_pair(&contestants);
    let identity = identity::run(&context, &contestants[nodes]).await?;
    let long_prompt = long_prompt::run(&context, &contestants[nodes], &text).await?;
    let prefix = prefix::run(&context, &contestants[nodes], &text).await?;
    for contestant in contestants {
        contestant.end().await?;
    }
    machine.finish();
    let evidence = Evidence {
        matrix: &matrix,
        replicas: replicas.as_ref(),
        absent: &absent,
        identity: &identity,
        long_prompt: &long_prompt,
        prefix: &prefix,
    };
    let claims = evidence.claims();
    let set_up = SetUp::new(&context);
    let report = UsersReport {
        machine,
        set_up,
        absent,
        matrix,
        replicas,
        identity,
        long_prompt,
        prefix,
        claims,
    };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(
        &report,
        &report.describe(),
        &claims,
        Some(&context.model),
        context.args.json,
    )?)
}

/// The fleet for what is measured once: two nodes with compact weights, else the first fleet.
fn widest_pair(contestants: &[Contestant]) -> usize {
    let two = Kind::nodes(2, WeightMode::Compact);
    contestants.iter().position(|contestant| contestant.kind() == two).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: UsersArgs,
    }

    #[test]
    fn quick_is_one_short_round() {
        let line = Line::try_parse_from(["x", "--quick", "--users", "16,1,16"]).expect("valid");
        let args = line.args.settle();
        assert_eq!((args.rounds, args.tokens, args.check_prompts), (1, 48, 8));
        assert_eq!(args.users, [1, 16]);
    }

    #[test]
    fn every_claim_has_a_name_of_its_own() {
        let mut names: Vec<&str> = CLAIMS.iter().map(|target| target.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 8);
    }
}
