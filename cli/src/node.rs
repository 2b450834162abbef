//! `stagebus node`: lets this machine take part in a plan.
//!
//! ```text
//! operator ─ questions ─▶ agent ─ order ────▶ thread "measure" ─ finds the probe, loads stages
//!     ▲                     │ ◀─ progress ──────── │                and runs them in turn
//!     └────── answers ──────┘ ◀─ what it found ────┘
//! ```
//! The agent is one task that answers one question at a time. The thread is not waited for at the end:
//! a stage that is being loaded cannot be called off.

mod agent;
mod measure;
mod passes;
mod probe;

use std::path::PathBuf;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_bus::{Bus, BusOptions, Role};
use stagebus_delivery::Cache;
use stagebus_engine::Runtime;
use stagebus_schemas::ids::{ModelName, NodeId};
use stagebus_settings::{Overrides, ProcessArgs, find_openvino, logging, process};
use stagebus_worker::{EngineChoice, WorkerSettings};
use tokio_util::sync::CancellationToken;

use crate::exit::Outcome;
use crate::source::default_cache;
use agent::{Agent, Machine};
use probe::Origin;

/// Arguments of `stagebus node`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus node
  stagebus node --broker nats://127.0.0.1:4222 --name desk-4
  stagebus node --model model.gguf --devices CPU,GPU --memory 8192
  stagebus node --config worker-smollm2/stagebus.toml --worker-of smollm2

Answers `stagebus plan`: tells memory and devices, measures how long the model's layers take and how
long messages to other nodes take. It measures with the settings of the table worker (engine, profile,
threads, properties), which a worker here should have too. Start one on every machine that may take
part, and end it when the plan is made: what a worker uses is missing in the next measurement. Without
a model file it pulls what it has to measure from the broker, which needs JetStream then. Prints one
line of JSON when it is ready. docs/plan.md says what is measured.")]
pub struct NodeArgs {
    /// The model to measure, if its file is here: a GGUF file, or a folder as `stagebus shard` takes it
    #[arg(long, value_name = "MODEL")]
    model: Option<PathBuf>,

    /// Name of this machine in plans and files [default: the host's]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Devices to measure, as OpenVINO names them [default: all that it finds]
    #[arg(long, value_name = "DEVICE,DEVICE", value_delimiter = ',')]
    devices: Vec<String>,

    /// Most memory that a stage may take here, in MiB [default: what is free]
    #[arg(long, value_name = "MIB")]
    memory: Option<u64>,

    /// Folder in which the probe, a cut of the model file, is kept
    #[arg(long, value_name = "DIR", requires = "model")]
    cache: Option<PathBuf>,

    /// Model whose worker's key the configuration has, where the broker asks for keys
    #[arg(long, value_name = "NAME")]
    worker_of: Option<ModelName>,

    /// Address of the broker [default: nats://127.0.0.1:4222]
    #[arg(long, value_name = "URL")]
    broker: Option<String>,

    /// Shut down when standard input ends, as it does when the parent process ends
    #[arg(long)]
    exit_with_parent: bool,

    #[command(flatten)]
    process: ProcessArgs,
}

/// What a node says when it can be asked.
#[derive(Debug, Serialize)]
struct Ready<'a> {
    ready: bool,
    role: &'static str,
    id: &'a NodeId,
    name: &'a str,
    devices: &'a [String],
}

/// Answers until `stop` is cancelled.
///
/// # Errors
/// Settings that cannot work, no OpenVINO, a broker that cannot be reached or forbids it.
pub async fn run(args: NodeArgs, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let mut flags = Overrides::default();
    flags.set_some("broker.url", args.broker.as_ref(), "--broker");
    let loaded = args.process.load::<WorkerSettings>("worker", &flags)?;
    logging::init(&loaded.log)?;
    let settings = loaded.process;
    // A node has neither shards nor a stage yet; everything else must fit a worker.
    let checked = WorkerSettings { shards: ".".into(), stage: Some(0), ..settings.clone() };
    checked.validate()?;
    if args.exit_with_parent {
        process::watch_parent(stop.clone()).context("cannot watch the parent process")?;
    }
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    let machine = Machine {
        name: args.name.unwrap_or_else(|| host.clone()),
        host,
        devices: devices(args.devices, settings.engine)?,
        limit_bytes: args.memory.map(|mib| mib << 20),
    };
    let id = NodeId::random();
    let role = match &args.worker_of {
        Some(model) => Role::Worker(model),
        // Without credentials the role only decides where answers go.
        None => Role::Operator,
    };
    let options = BusOptions::from_settings(&loaded.broker, role, &format!("node {id}"))?;
    let origin = match args.model {
        Some(model) => Origin::Here { model, cache: args.cache.map_or_else(default_cache, Ok)? },
        None => {
            Origin::Broker { options: Box::new(options.clone()), cache: Cache::new(&loaded.store)? }
        }
    };
    let bus = Bus::connect(options).await?;
    let mut agent = Agent::new(id, machine, origin, settings);
    agent
        .serve(&bus, &stop, |id, machine| {
            let (name, devices) = (machine.name.as_str(), machine.devices.as_slice());
            process::print_ready(&Ready { ready: true, role: "node", id, name, devices })
        })
        .await?;
    Ok(Outcome::Good)
}

/// The devices to measure.
fn devices(asked: Vec<String>, engine: EngineChoice) -> anyhow::Result<Vec<String>> {
    match engine {
        _ if !asked.is_empty() => Ok(asked),
        EngineChoice::Test => Ok(vec![WorkerSettings::default().device]),
        EngineChoice::Auto
        | EngineChoice::Paged
        | EngineChoice::Stateful
        | EngineChoice::Static => Ok(Runtime::load(find_openvino()?.path())?.devices()?),
    }
}
