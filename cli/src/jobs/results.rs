//! `stagebus results`: reads the answer of a job, again and again if wanted.

use std::time::Duration;

use stagebus_schemas::ids::RequestId;
use stagebus_schemas::subjects::Subjects;
use tokio_util::sync::CancellationToken;

use super::{Place, Shown, model, show};
use crate::client::ClientArgs;
use crate::exit::Outcome;

/// Arguments of `stagebus results`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus results r-4f0c9b
  stagebus results r-4f0c9b --follow
  stagebus results nightly-2026-11-29 --json

Prints what is stored of the answer. With --json one object: {request_id, state, text, tokens,
prompt_tokens, finish_reason, usage, timings, error}, where state is unknown, running, done,
cancelled or failed. Exit code 0 if the job is done, else 1. With --follow Ctrl-C ends the reading,
not the job.")]
pub struct ResultsArgs {
    /// Name of the job, as `stagebus submit` printed it
    #[arg(value_name = "NAME")]
    id: RequestId,

    #[command(flatten)]
    client: ClientArgs,

    /// Name of the model; found through the fleet's announcements when absent
    #[arg(long, value_name = "NAME")]
    model: Option<String>,

    /// Wait for what is not there yet, until the job ends
    #[arg(long)]
    follow: bool,

    /// With --follow: longest wait for each event, in seconds; no limit when absent
    #[arg(long, value_name = "SECONDS", requires = "follow")]
    timeout: Option<u64>,

    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// Configuration that is wrong, a broker that cannot be reached or keeps no results for the
/// model, events that are missing.
pub async fn run(
    args: ResultsArgs,
    quiet: bool,
    stop: CancellationToken,
) -> anyhow::Result<Outcome> {
    let bus = args.client.connect("stagebus-results").await?;
    let subjects = Subjects::new(&model(&bus, args.model.as_deref()).await?);
    let idle = args.timeout.map_or(Duration::MAX, Duration::from_secs);
    let shown = Shown { json: args.json, quiet, follow: args.follow.then_some(idle) };
    show(&Place { bus, subjects, request: args.id }, shown, &stop).await
}
