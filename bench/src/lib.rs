//! The benchmark harness behind `stagebus bench`.
//!
//! - [`harness`]: interleaving, summaries, claims, tables, the machine. Knows no scenario.
//! - [`contender`]: a program that is measured, driven turn by turn over its standard streams.
//! - [`fleet_run`]: a private fleet whose steps are timed from beside the broker.
//! - [`link`]: a slow, narrow or lossy way to a broker, for the scenarios over wide areas.
//! - [`node_fleet`], [`load`]: a fleet whose nodes are cores, and users who ask it at the same time.
//! - One module per scenario: [`parity`], [`users`], [`speculation`], [`wan`], [`head`], [`prefill`],
//!   [`long`], [`faults`], [`hop`], [`plan`], [`gateway`], [`delivery`], [`link::accuracy`], [`wire`]. A scenario checks tokens
//!   first, measures its variants in turn within one run, and ends with its claims.
//! - [`all`]: every scenario in a process of its own, and a folder of results.
//!
//! The subcommands [`engine_decode`], [`shard_once`] and [`rewind_once`] are the measured child processes; they are
//! hidden from the help.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "measured numbers: counts and times are far below 2^53"
)]

pub mod all;
pub mod busy;
pub mod contender;
pub mod delivery;
pub mod engine_decode;
pub mod faults;
pub mod fleet_run;
pub mod gateway;
pub mod genai;
pub mod harness;
pub mod head;
pub mod hop;
pub mod link;
pub mod llama_cpp;
pub mod load;
pub mod long;
pub mod measured_model;
pub mod node_fleet;
pub mod parity;
pub mod plan;
pub mod prefill;
pub mod prepare;
pub mod prompts;
pub mod random_folder;
pub mod random_gguf;
pub mod random_shard_set;
pub mod rewind_once;
pub mod shard_once;
pub mod speculation;
pub mod users;
pub mod wan;
pub mod wire;

use clap::{Args, Subcommand};
use tokio_util::sync::CancellationToken;

use crate::harness::claims::Listed;
use crate::harness::output;

/// Arguments of `stagebus bench`.
#[derive(Debug, Clone, Args)]
#[command(
    arg_required_else_help = true,
    after_help = "Examples:
  stagebus bench --list
  stagebus bench parity
  stagebus bench parity --rounds 9 --tokens 128 --json
  stagebus bench users --json
  stagebus bench speculation --json
  stagebus bench faults --quick
  stagebus bench all --out results
  stagebus bench users --users 1,16 --stages 1,2 --quick

Tokens are checked before anything is timed; a difference ends the run with an error, or is a claim
of its own that does not hold. A claim that could not be measured has `holds: null` and says what is missing."
)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    scenario: Option<Scenario>,

    /// List every scenario with its claims and their targets
    #[arg(long)]
    list: bool,

    /// With --list: one JSON object instead of text
    #[arg(long, requires = "list")]
    json: bool,
}

/// Every scenario, in the order of `bench all`.
const SCENARIOS: &[Listed] = &[
    Listed {
        name: "parity",
        claims: parity::CLAIMS,
        quick: &["--starts", "1", "--rounds", "2", "--tokens", "24"],
    },
    Listed { name: "users", claims: users::CLAIMS, quick: &["--quick", "--users", "1,2,16"] },
    Listed { name: "speculation", claims: speculation::CLAIMS, quick: &["--quick"] },
    Listed { name: "wan", claims: wan::CLAIMS, quick: &["--quick"] },
    Listed { name: "head", claims: head::CLAIMS, quick: &["--rounds", "1", "--tokens", "16"] },
    Listed { name: "prefill", claims: prefill::CLAIMS, quick: &["--rounds", "1"] },
    Listed { name: "long", claims: long::CLAIMS, quick: &["--tokens", "512"] },
    Listed { name: "wire", claims: wire::CLAIMS, quick: &["--quick"] },
    Listed { name: "plan", claims: plan::CLAIMS, quick: &["--rounds", "1", "--tokens", "24"] },
    Listed { name: "faults", claims: faults::CLAIMS, quick: &["--quick"] },
    Listed { name: "hop", claims: hop::CLAIMS, quick: &["--rounds", "1", "--messages", "50"] },
    Listed { name: "gateway", claims: gateway::CLAIMS, quick: &["--quick"] },
    Listed { name: "prepare", claims: prepare::CLAIMS, quick: &["--gib", "4"] },
    Listed { name: "delivery", claims: delivery::CLAIMS, quick: &["--mib", "64"] },
    Listed { name: "link", claims: link::accuracy::CLAIMS, quick: &["--pings", "20"] },
];

#[derive(Debug, Clone, Subcommand)]
enum Scenario {
    /// Every scenario, one after the other: results, tables and plots into one folder
    All(all::AllArgs),
    /// The pipeline against the unsplit model, on one core: decode, hops, start, sharding
    Parity(Box<parity::ParityArgs>),
    /// Many users at the same time, on 1 to 3 nodes: throughput, latency, long prompts, prefixes
    Users(Box<users::UsersArgs>),
    /// Drafted tokens per step by drafters by kinds of prompts, and long answers
    Speculation(Box<speculation::SpeculationArgs>),
    /// Workers that die, freeze and are replaced, clients that vanish, a broker that goes away
    Faults(Box<faults::FaultsArgs>),
    /// A pipeline over slow links: plain, with drafts, with several windows of them in flight
    Wan(Box<wan::WanArgs>),
    /// Tokens chosen on the last stage against whole rows of logits, over a narrow relay
    Head(head::HeadArgs),
    /// Time to the first token by the prompt's length, on one and two nodes
    Prefill(prefill::PrefillArgs),
    /// One session up to 2,048 tokens: time per token by position, equal tokens, memory
    Long(long::LongArgs),
    /// The time of a token that a plan predicts, and the one that a fleet needs
    Plan(plan::PlanArgs),
    /// One message from stage to stage, by NATS and by raw TCP
    Hop(hop::HopArgs),
    /// What the HTTP gateway adds to a request and to a token, and what open streams cost it
    Gateway(gateway::GatewayArgs),
    /// Models of 70B shape cut into stages, and a model on nodes too small for it
    Prepare(prepare::PrepareArgs),
    /// A shard set through the broker's store, over a way that breaks
    Delivery(delivery::DeliveryArgs),
    /// The link emulator: delays and rates asked for against measured
    Link(link::accuracy::LinkArgs),
    /// Number formats of the hidden states on the wire: bytes, time, and what they change
    Wire(wire::WireArgs),
    /// Decodes turn by turn through the engine (started by the scenarios)
    #[command(hide = true)]
    EngineDecode(engine_decode::EngineDecodeArgs),
    /// Writes one shard set and reports time and memory (started by the scenarios)
    #[command(hide = true)]
    ShardOnce(shard_once::ShardOnceArgs),
    /// Measures rewinds of the stateful engine (started by the scenarios)
    #[command(hide = true)]
    RewindOnce(rewind_once::RewindOnceArgs),
}

/// Runs `stagebus bench`. `quiet` hides remarks on the progress; `stop` ends the run early, and
/// everything that it started.
///
/// # Errors
/// Tokens that differ, a program or fleet that does not run, or that the user stopped it. A claim
/// that does not hold is a result, no error.
pub async fn run(args: BenchArgs, quiet: bool, stop: CancellationToken) -> anyhow::Result<()> {
    if args.list {
        return Ok(output::print(&harness::claims::list(SCENARIOS, args.json)?)?);
    }
    let work = Box::pin(async {
        match args.scenario {
            Some(Scenario::Parity(args)) => Box::pin(parity::run(*args, quiet)).await,
            Some(Scenario::Users(args)) => users::run(*args, quiet).await,
            Some(Scenario::Speculation(args)) => speculation::run(*args, quiet).await,
            Some(Scenario::Faults(args)) => faults::run(*args, quiet).await,
            Some(Scenario::Wan(args)) => wan::run(*args, quiet).await,
            Some(Scenario::Head(args)) => head::run(args, quiet).await,
            Some(Scenario::Prefill(args)) => prefill::run(args, quiet).await,
            Some(Scenario::Long(args)) => long::run(args, quiet).await,
            Some(Scenario::Plan(args)) => Box::pin(plan::run(args, quiet)).await,
            Some(Scenario::Hop(args)) => hop::run(args, quiet).await,
            Some(Scenario::Gateway(args)) => gateway::run(args, quiet).await,
            Some(Scenario::Prepare(args)) => prepare::run(args, quiet).await,
            Some(Scenario::Delivery(args)) => delivery::run(args, quiet).await,
            Some(Scenario::Link(args)) => link::accuracy::run(&args, quiet),
            Some(Scenario::All(args)) => all::run(args, SCENARIOS, quiet).await,
            Some(Scenario::Wire(args)) => wire::run(args, quiet).await,
            Some(Scenario::EngineDecode(args)) => engine_decode::run(args).await,
            Some(Scenario::ShardOnce(args)) => shard_once::run(args).await,
            Some(Scenario::RewindOnce(args)) => rewind_once::run(args).await,
            None => Ok(()),
        }
    });
    tokio::select! {
        result = work => result,
        // Every child is killed with the handles that the dropped work held.
        () = stop.cancelled() => anyhow::bail!("stopped before the last measurement"),
    }
}
