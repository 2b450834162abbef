//! The coordinator as a process: flags, configuration, logging, the ready line.

use std::io::{self, Read, Write};
use std::path::PathBuf;

use stagebus_settings::{Overrides, ProcessArgs, logging};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::config::{CoordinatorConfig, CoordinatorSettings};
use crate::coordinator::{Ready, run};
use crate::error::CoordinatorError;
use crate::signals::run_until_signalled;

/// Flags of `coordinator` and `stagebus coordinator`.
#[derive(Debug, Clone, clap::Args)]
pub struct CoordinatorArgs {
    /// Folder of the shard set; its manifest, tokenizer and chat template are read
    #[arg(long, value_name = "DIR")]
    pub shards: PathBuf,

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

/// Loads the configuration, starts logging, runs the coordinator until `shutdown` is cancelled,
/// and prints one line of JSON on standard output when it is ready.
///
/// # Errors
/// [`CoordinatorError`].
pub async fn serve(
    args: CoordinatorArgs,
    shutdown: CancellationToken,
) -> Result<(), CoordinatorError> {
    let loaded = args.process.load::<CoordinatorSettings>("coordinator", &Overrides::default())?;
    logging::init(&loaded.log)?;
    info!(broker = ?loaded.broker, settings = ?loaded.process, "configuration");
    if args.exit_with_parent {
        cancel_with_stdin(shutdown.clone())?;
    }
    let config = CoordinatorConfig {
        shards: args.shards,
        broker: loaded.broker,
        settings: loaded.process,
        wait_for_workers: args.wait_for_workers,
    };
    run(config, shutdown, print_ready).await
}

/// Like [`serve`], until Ctrl-C or the termination signal.
///
/// # Errors
/// [`CoordinatorError`].
pub async fn serve_until_signalled(args: CoordinatorArgs) -> Result<(), CoordinatorError> {
    let shutdown = CancellationToken::new();
    run_until_signalled(&shutdown, Box::pin(serve(args, shutdown.clone())))
        .await
        .map_err(CoordinatorError::Signals)?
}

fn print_ready(ready: &Ready) {
    let line = match serde_json::to_string(ready) {
        Ok(line) => line,
        Err(error) => return error!(%error, "ready line cannot be written"),
    };
    let mut out = io::stdout().lock();
    if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) {
        error!(%error, "ready line cannot be written");
    }
    info!(id = %ready.id, model = %ready.model, "ready");
}

/// Watches standard input on a thread of its own, which ends with the process: a blocking read
/// cannot be called off.
fn cancel_with_stdin(shutdown: CancellationToken) -> Result<(), CoordinatorError> {
    std::thread::Builder::new()
        .name("parent-watch".to_owned())
        .spawn(move || {
            let mut buffer = [0; 64];
            let mut stdin = io::stdin().lock();
            while stdin.read(&mut buffer).is_ok_and(|n| n > 0) {}
            shutdown.cancel();
        })
        .map(drop)
        .map_err(CoordinatorError::Thread)
}
