//! The worker as a process: flags, configuration, logging, the ready line, signals.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Serialize;
use stagebus_schemas::ids::ModelName;
use stagebus_settings::{ListenAddress, Overrides, ProcessArgs, Settings, logging, process};
use stagebus_telemetry::Telemetry;

use crate::config::{EngineChoice, ProfileChoice, SettingError, WorkerConfig, WorkerSettings};
use crate::error::WorkerError;
use crate::joining::join;
use crate::run::{Ready, run_joined};
use crate::shutdown::Shutdown;

/// Exit code when the end took too long and a running step was cut off.
pub const SHUTDOWN_DEADLINE_EXIT: u8 = 3;

/// Exit code when the broker refuses us, or the connection would not be safe.
pub const ACCESS_REFUSED_EXIT: u8 = 4;

/// Name of the process in traces.
const SERVICE: &str = "stagebus-worker";

/// Flags of `stage-worker` and `stagebus worker`. Most are short for a key of `[worker]`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct WorkerArgs {
    /// Folder of the shard set; without it the shard is pulled from the broker
    #[arg(long, value_name = "DIR", conflicts_with = "model")]
    pub shards: Option<PathBuf>,

    /// Stage to serve, from 0; of a pulled shard set the one that needs it most, when absent
    #[arg(long, value_name = "K")]
    pub stage: Option<u16>,

    /// Model whose shard is pulled from the broker; any that it has, when absent
    #[arg(long, value_name = "NAME")]
    pub model: Option<ModelName>,

    /// Beginning of the worker's id, for readable logs
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Device in OpenVINO's words: CPU, GPU, NPU, AUTO, HETERO:GPU,CPU
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,

    /// Numerics: the device's own precision, or single precision everywhere
    #[arg(long, value_name = "PROFILE")]
    pub profile: Option<ProfileChoice>,

    /// What runs the shard
    #[arg(long, value_name = "ENGINE")]
    pub engine: Option<EngineChoice>,

    /// Inference threads; 0 leaves the choice to the device
    #[arg(long, value_name = "N")]
    pub threads: Option<u16>,

    /// Show metrics for Prometheus there, as PORT (this machine only) or ADDRESS:PORT; port 0 is any
    /// free one
    #[arg(long, value_name = "ADDR")]
    pub metrics_listen: Option<ListenAddress>,

    /// Shut down when standard input ends, as it does when the parent process ends
    #[arg(long)]
    pub exit_with_parent: bool,

    /// Configuration
    #[command(flatten)]
    pub process: ProcessArgs,
}

impl WorkerArgs {
    fn overrides(&self) -> Overrides {
        let mut flags = Overrides::default();
        let shards = self.shards.as_ref().map(|path| path.display());
        flags
            .set_some("worker.shards", shards, "--shards")
            .set_some("worker.stage", self.stage, "--stage")
            .set_some("worker.model", self.model.as_ref(), "--model")
            .set_some("worker.name", self.name.as_ref(), "--name")
            .set_some("worker.device", self.device.as_ref(), "--device")
            .set_some("worker.profile", self.profile.map(|p| p.profile()), "--profile")
            .set_some("worker.engine", self.engine.map(|e| e.kind()), "--engine")
            .set_some("worker.threads", self.threads, "--threads")
            .set_some("metrics.listen", self.metrics_listen, "--metrics-listen");
        flags
    }
}

/// Loads the configuration, starts logging, runs the worker until `shutdown` asks for its end, and
/// prints one line of JSON on standard output when it is ready.
///
/// # Errors
/// [`WorkerError`].
pub async fn serve(args: WorkerArgs, shutdown: impl Into<Shutdown>) -> Result<(), WorkerError> {
    let shutdown = shutdown.into();
    let loaded = args.process.load::<WorkerSettings>("worker", &args.overrides())?;
    logging::init(&loaded.log)?;
    tracing::info!(broker = ?loaded.broker, settings = ?loaded.process, "configuration");
    let mut telemetry = Telemetry::start(&loaded.metrics, &loaded.telemetry, SERVICE).await?;
    // Everything that a worker does is in this future: it is large, and it is made once.
    let work = Box::pin(work(loaded, &mut telemetry, &shutdown));
    let outcome = if args.exit_with_parent {
        let watched = shutdown.with_parent(work).await;
        watched.map_err(|source| WorkerError::Thread { name: "parent-watch", source })
    } else {
        Ok(work.await)
    };
    telemetry.end().await;
    outcome?
}

/// Brings the files here if they are on the broker, then serves. Metrics carry the stage, so there
/// are none before it is known.
async fn work(
    Settings { broker, store, process: mut settings, .. }: Settings<WorkerSettings>,
    telemetry: &mut Telemetry,
    shutdown: &Shutdown,
) -> Result<(), WorkerError> {
    settings.validate()?;
    let mut joined = None;
    if settings.is_pulled() {
        let joining = shutdown.unless_asked(Box::pin(join(&broker, &store, &settings)));
        let Some(done) = joining.await.transpose()? else { return Ok(()) };
        settings = done.settings.clone();
        joined = Some(done);
    }
    let stage = settings.stage.ok_or(SettingError::NoStage)?;
    let shown = telemetry.worker(stage);
    let address = telemetry.metrics_address();
    telemetry.serve();
    let config = WorkerConfig { broker, settings, switch: None, telemetry: shown };
    Box::pin(run_joined(config, joined, shutdown, |ready| print_ready(ready, address))).await
}

/// Like [`serve`]; the first Ctrl-C or termination signal lets running sessions finish, the second
/// one does not.
///
/// # Errors
/// [`WorkerError`].
pub async fn serve_until_signalled(args: WorkerArgs) -> Result<(), WorkerError> {
    let shutdown = Shutdown::new();
    shutdown
        .with_signals(Box::pin(serve(args, shutdown.clone())))
        .await
        .map_err(WorkerError::Signals)?
}

fn print_ready(ready: &Ready, metrics: Option<SocketAddr>) {
    if let Err(error) = process::print_ready(&Said { ready, metrics }) {
        // Whoever started this worker has closed the pipe; the fleet knows it by announcements.
        tracing::warn!(error = %error, "ready line not written");
    }
}

/// The ready line of the process.
#[derive(Serialize)]
struct Said<'a> {
    #[serde(flatten)]
    ready: &'a Ready,
    /// Where its metrics are to be had.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<SocketAddr>,
}
