//! The `coordinator` program; `stagebus coordinator` is the same.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use stagebus_coordinator::{CoordinatorArgs, CoordinatorError, serve_until_signalled};

/// Threads for encoding prompts; more would only take time from the stages.
const BLOCKING_THREADS: usize = 4;

/// Exit code when the broker refuses us, or the connection would not be safe.
const ACCESS_REFUSED_EXIT: u8 = 4;

/// Exit code when requests were cut off at shutdown.
const DRAIN_DEADLINE_EXIT: u8 = 3;

/// Turns prompt requests into sessions and drives them over the stages of a model
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(flatten)]
    args: CoordinatorArgs,
}

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    // One thread: the owner and the connection take turns without waking each other's thread.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .build()
        .context("runtime cannot be started")?;
    match runtime.block_on(serve_until_signalled(cli.args)) {
        Err(CoordinatorError::DrainDeadline { .. }) => Ok(ExitCode::from(DRAIN_DEADLINE_EXIT)),
        Err(error) if error.is_access_refusal() => {
            let error = anyhow::Error::from(error);
            writeln!(std::io::stderr().lock(), "Error: {error:?}")?;
            Ok(ExitCode::from(ACCESS_REFUSED_EXIT))
        }
        outcome => Ok(outcome.map(|()| ExitCode::SUCCESS)?),
    }
}
