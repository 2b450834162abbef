//! The program `stagebus`.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use stagebus_cli::command::{self, Cli};
use stagebus_cli::exit;
use stagebus_settings::process;
use tokio_util::sync::CancellationToken;

/// Threads for work that blocks, such as encoding prompts: more would only take time from the
/// stages.
const BLOCKING_THREADS: usize = 4;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // One thread: in a worker or coordinator the owner task and the connection take turns without
    // waking each other's thread, and the processor is left to inference.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .build()
        .context("cannot start the runtime");
    let result = runtime.and_then(|runtime| {
        let stop = CancellationToken::new();
        let work = command::run(cli, stop.clone());
        // Later signals change nothing: every wait after the first has a bound.
        let result = runtime
            .block_on(process::with_signals(work, |_| stop.cancel()))
            .context("cannot watch for signals")
            .unwrap_or_else(Err);
        // A shard that is still loading cannot be called off; the process does not wait for it.
        runtime.shutdown_background();
        result
    });
    exit::finish(&result)
}
