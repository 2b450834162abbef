//! The coordinator as a process: flags, configuration, logging, the ready line.

use std::path::PathBuf;

use stagebus_settings::{Overrides, ProcessArgs, logging, process};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::config::{CoordinatorConfig, CoordinatorSettings};
use crate::coordinator::{Ready, run};
use crate::error::CoordinatorError;

/// Flags of `coordinator` and `stagebus coordinator`.
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
#[derive(Debug, Clone, clap::Args)]
pub struct CoordinatorArgs {
    /// Folder of the shard set; its manifest, tokenizer and chat template are read
    #[arg(long, value_name = "DIR")]
    pub shards: PathBuf,

    /// Run a worker of the first stage in this process, with the settings of the table `worker`;
    /// the program coordinator cannot
    #[arg(long)]
    pub host_stage0: bool,

    /// Report ready only when every stage has a worker
    #[arg(long)]
    pub wait_for_workers: bool,

    /// Shut down when standard input ends, as it does when the parent process ends
    #[arg(long)]
    pub exit_with_parent: bool,

    /// Configuration
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// Loads the configuration and starts logging. If the flags say so, `shutdown` is cancelled when
/// standard input ends.
///
/// # Errors
/// [`CoordinatorError`].
pub fn prepare(
    args: CoordinatorArgs,
    shutdown: &CancellationToken,
) -> Result<CoordinatorConfig, CoordinatorError> {
    let mut flags = Overrides::default();
    flags.set_some("coordinator.host_stage0", args.host_stage0.then_some(true), "--host-stage0");
    let loaded = args.process.load::<CoordinatorSettings>("coordinator", &flags)?;
    logging::init(&loaded.log)?;
    info!(broker = ?loaded.broker, settings = ?loaded.process, "configuration");
    if args.exit_with_parent {
        process::watch_parent(shutdown.clone()).map_err(CoordinatorError::Thread)?;
    }
    Ok(CoordinatorConfig {
        shards: args.shards,
        broker: loaded.broker,
        settings: loaded.process,
        wait_for_workers: args.wait_for_workers,
        hosted: None,
    })
}

/// Runs a coordinator until `shutdown` is cancelled, and prints one line of JSON on standard output
/// when it is ready.
///
/// # Errors
/// [`CoordinatorError`].
pub async fn serve(
    config: CoordinatorConfig,
    shutdown: CancellationToken,
) -> Result<(), CoordinatorError> {
    Box::pin(run(config, shutdown, print_ready)).await
}

/// [`prepare`] and [`serve`], until Ctrl-C or the termination signal.
///
/// # Errors
/// [`CoordinatorError`].
pub async fn serve_until_signalled(args: CoordinatorArgs) -> Result<(), CoordinatorError> {
    let shutdown = CancellationToken::new();
    // Later signals change nothing: every wait after the first has a bound.
    let config = prepare(args, &shutdown)?;
    process::with_signals(Box::pin(serve(config, shutdown.clone())), |_| shutdown.cancel())
        .await
        .map_err(CoordinatorError::Signals)?
}

fn print_ready(ready: &Ready) {
    if let Err(error) = process::print_ready(ready) {
        error!(%error, "ready line cannot be written");
    }
    info!(id = %ready.id, model = %ready.model, "ready");
}
