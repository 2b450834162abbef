//! The command line: what `stagebus` can be asked to do.

use clap::{Parser, Subcommand};
use stagebus_bench::BenchArgs;
use stagebus_coordinator::CoordinatorArgs;
use stagebus_gateway::GatewayArgs;
use stagebus_worker::WorkerArgs;
use tokio_util::sync::CancellationToken;

use crate::ask::{self, AskArgs};
use crate::chat::{self, ChatArgs};
use crate::check::{self, CheckArgs};
use crate::completions::{self, CompletionsArgs};
use crate::coordinator;
use crate::doctor::{self, DoctorArgs};
use crate::drain::{self, DrainArgs};
use crate::exit::Outcome;
use crate::gateway;
use crate::jobs::cancel::{self, CancelArgs};
use crate::jobs::results::{self, ResultsArgs};
use crate::jobs::submit::{self, SubmitArgs};
use crate::keys::{self, KeysArgs};
use crate::man::{self, ManArgs};
use crate::models::{self, ModelsArgs};
use crate::node::{self, NodeArgs};
use crate::plan::{self, PlanArgs};
use crate::pull::{self, PullArgs};
use crate::push::{self, PushArgs};
use crate::shard::{self, ShardArgs};
use crate::status::{self, StatusArgs};
use crate::top::{self, TopArgs};
use crate::up::{self, UpArgs};

const WORKER_EXAMPLES: &str = "Examples:
  stagebus worker --shards shard-sets/smollm2 --stage 0
  stagebus worker --config stagebus.toml --shards shard-sets/smollm2 --stage 1 --device GPU
  stagebus worker --shards shard-sets/smollm2 --stage 1 --set broker.url=nats://127.0.0.1:4222
  stagebus worker --model smollm2 --stage 1
  stagebus worker

Without --shards the shard is pulled from the broker, where `stagebus push` has stored it, and kept in
a cache folder. Without --stage too the worker takes the stage that needs it most. Prints one line of
JSON when it is ready. The first Ctrl-C lets running sessions finish. The program stage-worker is the
same.";

const COORDINATOR_EXAMPLES: &str = "Examples:
  stagebus coordinator --shards shard-sets/smollm2
  stagebus coordinator --config stagebus.toml --shards shard-sets/smollm2 --wait-for-workers
  stagebus coordinator --shards shard-sets/smollm2 --host-stage0 --set worker.threads=4
  stagebus coordinator --model smollm2

Reads manifest, tokenizer and chat template of the shard set, no weights unless it hosts the first
stage: then that hop costs nothing, which counts where the broker is far away. Without --shards it
pulls them from the broker, where `stagebus push` has stored them. Prints one line of JSON when it is
ready. The first Ctrl-C lets running requests finish. The program coordinator is the
same, but hosts no stage.";

const GATEWAY_EXAMPLES: &str = "Examples:
  stagebus gateway
  stagebus gateway --config client/stagebus.toml --listen 127.0.0.1:9000
  stagebus gateway --listen 0.0.0.0:8443 --config gateway.toml

Speaks OpenAI's HTTP API and passes requests on to the fleet. Prints one line of JSON when it
listens. The first Ctrl-C lets answers that are under way finish. As many as wanted may run.";

/// The version, and the commit that the program was built from if that is known.
const VERSION: &str = env!("VERSION_AND_COMMIT");

/// Runs one large language model on several ordinary computers.
#[derive(Debug, Parser)]
#[command(
    name = "stagebus",
    version = VERSION,
    propagate_version = true,
    arg_required_else_help = true,
    after_help = "Examples:
  stagebus shard model.gguf --stages 2 --out shard-sets/model
  stagebus up --shards shard-sets/model
  stagebus ask \"What is the capital of Japan?\"

Exit codes: 0 success, 1 failure, 2 a command line that cannot be understood, 3 an orderly end that
took too long, 4 the broker refuses the credentials or the connection would not be safe.
Configuration: defaults < --config FILE < STAGEBUS_<TABLE>__<KEY> < flags."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,

    /// Show no progress bars and no remarks
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Cut a model into stages
    Shard(ShardArgs),
    /// Store a shard set on the broker, for workers and coordinators to pull
    Push(PushArgs),
    /// Fetch a shard set from the broker into a folder
    Pull(PullArgs),
    /// Show what the broker has stored, or remove it
    Models(ModelsArgs),
    /// Run one stage of a model, until interrupted
    #[command(after_help = WORKER_EXAMPLES)]
    Worker(WorkerArgs),
    /// Take prompts and drive them over the stages, until interrupted
    #[command(after_help = COORDINATOR_EXAMPLES)]
    Coordinator(CoordinatorArgs),
    /// Serve an OpenAI-compatible HTTP API in front of a fleet, until interrupted
    #[command(after_help = GATEWAY_EXAMPLES)]
    Gateway(Box<GatewayArgs>),
    /// Run a whole fleet on this machine: broker, workers, coordinator
    Up(Box<UpArgs>),
    /// Ask a running fleet, or one started for the question
    Ask(Box<AskArgs>),
    /// Talk to a running fleet, or one started for the conversation, turn by turn
    Chat(Box<ChatArgs>),
    /// Put a prompt into the durable queue of a fleet
    Submit(Box<SubmitArgs>),
    /// Read the answer of a job
    Results(ResultsArgs),
    /// End a job or a request
    Cancel(CancelArgs),
    /// Let workers finish and leave
    Drain(DrainArgs),
    /// Make keys, certificates and the broker's permissions for a fleet
    Keys(KeysArgs),
    /// Measure machines and choose how a model is spread over them
    Plan(Box<PlanArgs>),
    /// Let this machine be measured for a plan, until interrupted
    Node(Box<NodeArgs>),
    /// Show who is there, with what load, and whether requests can be served
    Status(StatusArgs),
    /// Watch the fleet: workers, sessions, rates, memory, until q
    Top(TopArgs),
    /// Find out what is wrong with this machine, the broker and the fleet, and what to do
    Doctor(Box<DoctorArgs>),
    /// Compare a fleet with a reference, token by token
    Check(Box<CheckArgs>),
    /// Measure, and compare with the claims
    Bench(Box<BenchArgs>),
    /// Print what makes a shell complete the commands and options of this program
    Completions(CompletionsArgs),
    /// Print the manual page, or write one for every command
    Man(ManArgs),
}

/// Runs a command; `stop` is cancelled when the user wants the program to end.
///
/// # Errors
/// What the command reports.
pub async fn run(cli: Cli, stop: CancellationToken) -> anyhow::Result<Outcome> {
    match cli.command {
        Command::Shard(args) => shard::run(args, cli.quiet, stop).await,
        Command::Push(args) => push::run(args, cli.quiet, stop).await,
        Command::Pull(args) => pull::run(args, cli.quiet, stop).await,
        Command::Models(args) => models::run(args).await,
        Command::Worker(args) => {
            Box::pin(stagebus_worker::serve_until_signalled(args)).await?;
            Ok(Outcome::Good)
        }
        Command::Coordinator(args) => Box::pin(coordinator::run(args, stop)).await,
        Command::Gateway(args) => Box::pin(gateway::run(*args, stop)).await,
        Command::Up(args) => up::run(*args, cli.quiet, stop).await,
        Command::Ask(args) => ask::run(*args, cli.quiet, stop).await,
        Command::Chat(args) => chat::run(*args, cli.quiet).await,
        Command::Submit(args) => submit::run(*args, cli.quiet, stop).await,
        Command::Results(args) => results::run(args, cli.quiet, stop).await,
        Command::Cancel(args) => cancel::run(args).await,
        Command::Drain(args) => drain::run(args, cli.quiet, stop).await,
        Command::Keys(args) => keys::run(args, cli.quiet),
        Command::Plan(args) => plan::run(*args, cli.quiet, stop).await,
        Command::Node(args) => node::run(*args, stop).await,
        Command::Status(args) => status::run(args, stop).await,
        Command::Top(args) => top::run(args, stop).await,
        Command::Doctor(args) => doctor::run(*args, stop).await,
        Command::Check(args) => check::run(*args, cli.quiet, stop).await,
        Command::Bench(args) => {
            stagebus_bench::run(*args, cli.quiet, stop).await?;
            Ok(Outcome::Good)
        }
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args),
    }
}
