//! The coordinator as a process: flags, configuration, logging, the ready line.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Serialize;
use stagebus_schemas::ids::ModelName;
use stagebus_settings::{ListenAddress, Overrides, ProcessArgs, logging, process};
use stagebus_telemetry::Telemetry;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::config::{CoordinatorConfig, CoordinatorSettings};
use crate::coordinator::{Ready, run};
use crate::error::CoordinatorError;
use crate::pulling::{self, Files};

/// Name of the process in traces.
const SERVICE: &str = "stagebus-coordinator";

/// Flags of `coordinator` and `stagebus coordinator`.
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
#[derive(Debug, Clone, clap::Args)]
pub struct CoordinatorArgs {
    /// Folder of the shard set; its manifest, tokenizer and chat template are read. Without it they
    /// are pulled from the broker
    #[arg(long, value_name = "DIR", conflicts_with = "model")]
    pub shards: Option<PathBuf>,

    /// Model whose shard set is pulled from the broker; the only one that it has, when absent
    #[arg(long, value_name = "NAME")]
    pub model: Option<ModelName>,

    /// Run a worker of the first stage in this process, with the settings of the table `worker`;
    /// the program coordinator cannot
    #[arg(long)]
    pub host_stage0: bool,

    /// Report ready only when every stage has a worker
    #[arg(long)]
    pub wait_for_workers: bool,

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

/// A coordinator that can be started.
#[derive(Debug)]
pub struct Prepared {
    /// Everything that it needs.
    pub config: CoordinatorConfig,
    /// What its process shows of itself.
    pub telemetry: Telemetry,
    /// Keeps what was pulled in the cache.
    pulled: Option<Files>,
}

/// Loads the configuration, starts logging, listens for scrapers and pulls what is not on this
/// machine. If the flags say so, `shutdown` is cancelled when standard input ends. Nothing comes back
/// if it is cancelled before all is here.
///
/// # Errors
/// [`CoordinatorError`].
pub async fn prepare(
    args: CoordinatorArgs,
    shutdown: &CancellationToken,
) -> Result<Option<Prepared>, CoordinatorError> {
    let mut flags = Overrides::default();
    flags
        .set_some("coordinator.model", args.model, "--model")
        .set_some("coordinator.host_stage0", args.host_stage0.then_some(true), "--host-stage0")
        .set_some("metrics.listen", args.metrics_listen, "--metrics-listen");
    let loaded = args.process.load::<CoordinatorSettings>("coordinator", &flags)?;
    logging::init(&loaded.log)?;
    info!(broker = ?loaded.broker, settings = ?loaded.process, "configuration");
    if args.exit_with_parent {
        process::watch_parent(shutdown.clone()).map_err(CoordinatorError::Thread)?;
    }
    let mut telemetry = Telemetry::start(&loaded.metrics, &loaded.telemetry, SERVICE).await?;
    let mut settings = loaded.process;
    settings.validate()?;
    let (shards, pulled) = match args.shards {
        Some(shards) => (shards, None),
        None => {
            let files = tokio::select! {
                files = pulling::pull(&loaded.broker, &loaded.store, &settings) => files?,
                () = shutdown.cancelled() => return Ok(None),
            };
            if let Some(draft) = &files.draft {
                settings.draft_shards = Some(draft.shards.dir.clone());
            }
            (files.target.shards.dir.clone(), Some(files))
        }
    };
    let config = CoordinatorConfig {
        shards,
        broker: loaded.broker,
        settings,
        wait_for_workers: args.wait_for_workers,
        hosted: None,
        telemetry: telemetry.coordinator(),
    };
    Ok(Some(Prepared { config, telemetry, pulled }))
}

/// Runs a coordinator until `shutdown` is cancelled, and prints one line of JSON on standard output
/// when it is ready.
///
/// # Errors
/// [`CoordinatorError`].
pub async fn serve(
    Prepared { config, mut telemetry, pulled }: Prepared,
    shutdown: CancellationToken,
) -> Result<(), CoordinatorError> {
    let metrics = telemetry.metrics_address();
    telemetry.serve();
    let outcome = Box::pin(run(config, shutdown, |ready| print_ready(ready, metrics))).await;
    telemetry.end().await;
    drop(pulled);
    outcome
}

/// [`prepare`] and [`serve`], until Ctrl-C or the termination signal.
///
/// # Errors
/// [`CoordinatorError`].
pub async fn serve_until_signalled(args: CoordinatorArgs) -> Result<(), CoordinatorError> {
    let shutdown = CancellationToken::new();
    // Later signals change nothing: every wait after the first has a bound.
    let work = async {
        match prepare(args, &shutdown).await? {
            Some(prepared) => serve(prepared, shutdown.clone()).await,
            None => Ok(()),
        }
    };
    process::with_signals(Box::pin(work), |_| shutdown.cancel())
        .await
        .map_err(CoordinatorError::Signals)?
}

fn print_ready(ready: &Ready, metrics: Option<SocketAddr>) {
    if let Err(error) = process::print_ready(&Said { ready, metrics }) {
        error!(%error, "ready line cannot be written");
    }
    info!(id = %ready.id, model = %ready.model, "ready");
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
