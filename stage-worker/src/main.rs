//! The `stage-worker` program; `stagebus worker` is the same.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use stagebus_worker::{
    ACCESS_REFUSED_EXIT, SHUTDOWN_DEADLINE_EXIT, WorkerArgs, WorkerError, serve_until_signalled,
};

/// Serves one stage of a model behind the broker
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(flatten)]
    args: WorkerArgs,
}

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    // One thread: owner and connection take turns without waking each other's thread, and the
    // processor is left to inference.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("the runtime cannot be started")?;
    let outcome = runtime.block_on(serve_until_signalled(cli.args));
    // A shard that is still loading cannot be called off; the process does not wait for it.
    runtime.shutdown_background();
    match outcome {
        Err(WorkerError::ShutdownDeadline { .. }) => Ok(ExitCode::from(SHUTDOWN_DEADLINE_EXIT)),
        Err(error) if error.is_access_refusal() => {
            let error = anyhow::Error::from(error);
            writeln!(std::io::stderr().lock(), "Error: {error:?}")?;
            Ok(ExitCode::from(ACCESS_REFUSED_EXIT))
        }
        outcome => Ok(outcome.map(|()| ExitCode::SUCCESS)?),
    }
}
