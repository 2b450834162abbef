//! `stagebus doctor`: what is wrong with this machine, the broker and the fleet, and what to do.

pub mod broker;
pub mod finding;
pub mod fleet;
pub mod machine;
pub mod shards;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use stagebus_coordinator::{CoordinatorSettings, JobsMode};
use stagebus_schemas::ids::ModelName;
use stagebus_settings::{BrokerSettings, SettingsError};
use stagebus_shards::ShardSet;
use stagebus_worker::{EngineChoice, WorkerSettings};
use tokio_util::sync::CancellationToken;

use crate::client::ClientArgs;
use crate::console;
use crate::exit::Outcome;
use crate::source;
use finding::{Check, Fault, Finding, Findings, Level};
use fleet::Known;

/// Arguments of `stagebus doctor`.
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus doctor
  stagebus doctor --shards shard-sets/smollm2 --stage 1
  stagebus doctor --config worker-smollm2/stagebus.toml --shards shard-sets/smollm2 --no-broker
  stagebus doctor --config client/stagebus.toml --model smollm2 --jobs --json

Looks at configuration, OpenVINO and its devices, folders and disk, shard sets, the broker (way
there and back, clock, largest message, JetStream) and the fleet (stages, contents, versions, workers
that hang). Every fault has a name that does not change; docs/doctor.md explains each. It connects
as a client. `stagebus check` goes on where this ends: it compares tokens.

Exit code 0: nothing fails, warnings aside. 1: something does.")]
pub struct DoctorArgs {
    #[command(flatten)]
    client: ClientArgs,

    /// A shard set to check [default: worker.shards]
    #[arg(long, value_name = "DIR")]
    shards: Option<PathBuf>,

    /// Check the files of this stage only, as on a machine that holds no others [default:
    /// worker.stage]
    #[arg(long, value_name = "K")]
    stage: Option<u16>,

    /// Shard set of a draft model to check [default: coordinator.draft_shards]
    #[arg(long, value_name = "DIR")]
    draft_shards: Option<PathBuf>,

    /// Device that is to run stages [default: worker.device]
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,

    /// Folder in which shard sets are kept
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,

    /// Name of the model [default: that of the shard set, else all]
    #[arg(long, value_name = "NAME")]
    model: Option<ModelName>,

    /// Durable jobs are wanted, so the broker needs JetStream
    #[arg(long)]
    jobs: bool,

    /// Look at this machine only
    #[arg(long, conflicts_with_all = ["broker", "jobs"])]
    no_broker: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What `stagebus doctor --json` prints.
#[derive(Serialize)]
struct Report<'a> {
    /// Whether nothing fails.
    sound: bool,
    findings: &'a [Finding],
}

/// Runs the command.
///
/// # Errors
/// The user stopped it, or standard output cannot be written. What is wrong is no error but
/// [`Outcome::Bad`].
pub async fn run(args: DoctorArgs, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let json = args.json;
    let findings = tokio::select! {
        findings = Box::pin(examine(args)) => findings?,
        () = stop.cancelled() => anyhow::bail!("stopped before everything was looked at"),
    };
    let sound = findings.worst() < Level::Fail;
    if json {
        console::print_json(&Report { sound, findings: findings.all() })?;
    } else {
        console::print(&findings.to_string())?;
    }
    Ok(if sound { Outcome::Good } else { Outcome::Bad })
}

async fn examine(args: DoctorArgs) -> anyhow::Result<Findings> {
    let mut findings = Findings::default();
    let settings = match Settings::load(&args) {
        Ok(settings) => settings,
        Err(error) => {
            findings.fault(Fault::ConfigurationWrong, machine::line(&error.into()));
            return Ok(findings);
        }
    };
    findings.ok(Check::Configuration, "it can be read");
    let plan = Plan::new(&args, &settings);
    let no_broker = args.no_broker;
    // Opening a library and reading shard sets take their time, and nothing can interrupt them.
    let here = tokio::task::spawn_blocking(move || {
        let set = examine_machine(&plan, &mut findings);
        (plan, set, findings)
    });
    let (plan, set, mut findings) = here.await?;
    machine::key_file(settings.broker.nkey_seed_file.as_deref(), &mut findings);
    if no_broker {
        findings.skip(Check::Broker, "--no-broker");
        return Ok(findings);
    }
    examine_broker(&settings, &plan, set.as_ref(), &mut findings).await;
    Ok(findings)
}

/// The configuration of everybody on this machine.
struct Settings {
    broker: BrokerSettings,
    worker: WorkerSettings,
    coordinator: CoordinatorSettings,
}

impl Settings {
    fn load(args: &DoctorArgs) -> Result<Self, SettingsError> {
        let broker = args.client.overrides();
        let worker = args.client.process.load::<WorkerSettings>("worker", &broker)?;
        let coordinator =
            args.client.process.load::<CoordinatorSettings>("coordinator", &broker)?;
        let (broker, worker) = (worker.broker, worker.process);
        Ok(Self { broker, worker, coordinator: coordinator.process })
    }
}

/// What is to be looked at.
struct Plan {
    device: Option<String>,
    cache: Option<PathBuf>,
    shards: Option<PathBuf>,
    stage: Option<u16>,
    draft: Option<PathBuf>,
    model: Option<ModelName>,
    jobs: bool,
}

impl Plan {
    fn new(args: &DoctorArgs, settings: &Settings) -> Self {
        let configured = Some(&settings.worker.shards).filter(|path| !path.as_os_str().is_empty());
        // The test engine runs without OpenVINO and its devices.
        let needs_device = settings.worker.engine != EngineChoice::Test;
        let device = args.device.clone().unwrap_or_else(|| settings.worker.device.clone());
        Self {
            device: needs_device.then_some(device),
            cache: args.cache.clone().or_else(|| source::default_cache().ok()),
            shards: args.shards.clone().or_else(|| configured.cloned()),
            stage: args.stage.or(settings.worker.stage),
            draft: args.draft_shards.clone().or_else(|| settings.coordinator.draft_shards.clone()),
            model: args.model.clone(),
            jobs: args.jobs || settings.coordinator.jobs.mode == JobsMode::On,
        }
    }
}

fn examine_machine(plan: &Plan, findings: &mut Findings) -> Option<ShardSet> {
    match &plan.device {
        Some(device) => machine::runtime(device, findings),
        None => findings.skip(Check::Openvino, "the test engine needs none"),
    }
    machine::nats_server(findings);
    match &plan.cache {
        Some(cache) => machine::cache(cache, findings),
        None => findings.skip(Check::Cache, "there is neither a runtime nor a user cache folder"),
    }
    let set = match &plan.shards {
        Some(dir) => shards::shard_set(dir, plan.stage, findings),
        None => {
            findings.skip(Check::Shards, "none is named: --shards DIR");
            None
        }
    };
    match (&plan.draft, &set) {
        (Some(draft), Some(set)) => shards::draft(draft, set, findings),
        (Some(_), None) => findings.skip(Check::Draft, "it is compared with a shard set: --shards"),
        (None, _) => findings.skip(Check::Draft, "none is named: --draft-shards DIR"),
    }
    set
}

async fn examine_broker(
    settings: &Settings,
    plan: &Plan,
    set: Option<&ShardSet>,
    findings: &mut Findings,
) {
    let Some(bus) = broker::connect(&settings.broker, findings).await else { return };
    broker::distance(&bus, findings).await;
    // A model in one piece sends no rows.
    let set_of_several = set.filter(|set| set.manifest.n_stages() > 1);
    let hidden_dim = set_of_several.map(|set| set.manifest.dims.hidden_dim);
    let chunk_rows = settings.coordinator.prefill_chunk;
    broker::payload(bus.max_payload(), hidden_dim, chunk_rows, findings);
    broker::jetstream(&bus, plan.jobs, findings).await;
    let of_set = set.and_then(|set| set.manifest.model.parse().ok());
    let model = plan.model.clone().or(of_set);
    let Some(view) = fleet::listen(&bus, model.as_ref(), findings).await else { return };
    let unmeasured = Duration::from_millis(settings.coordinator.step_timeout_ms);
    let known = Known { model: model.as_ref(), shards: set, unmeasured };
    fleet::judge(&view, known, Instant::now(), findings);
}
