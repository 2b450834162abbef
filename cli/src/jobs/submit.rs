//! `stagebus submit`: puts a prompt into the queue.

use std::time::Duration;

use serde::Serialize;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::PromptRequest;
use stagebus_schemas::subjects::Subjects;
use tokio_util::sync::CancellationToken;

use super::{Place, Shown, model, show};
use crate::ask::prompt::{AnswerArgs, PromptArgs};
use crate::client::ClientArgs;
use crate::console;
use crate::exit::Outcome;

/// Arguments of `stagebus submit`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus submit \"Write a story about a lighthouse.\" --max-tokens 500
  cat report.txt | stagebus submit --id nightly-2026-11-29 -
  stagebus submit --wait --json \"What is the capital of Japan?\"

Prints the job's name once the broker has stored it; `stagebus results NAME` reads its answer. A
job outlives this program, its coordinator, its workers and a restart of the broker. Submitting the
same name again changes nothing. With --wait Ctrl-C ends the wait, not the job. Exit code 1 with
--wait: the job failed or was cancelled, or the wait ended before it.")]
pub struct SubmitArgs {
    #[command(flatten)]
    prompt: PromptArgs,

    #[command(flatten)]
    answer: AnswerArgs,

    #[command(flatten)]
    client: ClientArgs,

    /// Name of the model; found through the fleet's announcements when absent
    #[arg(long, value_name = "NAME")]
    model: Option<String>,

    /// Name of the job (a-z A-Z 0-9 - _, at most 64); made up when absent
    #[arg(long, value_name = "NAME")]
    id: Option<RequestId>,

    /// Wait for the answer and print it
    #[arg(long)]
    wait: bool,

    /// With --wait: longest wait for each event, in seconds; no limit when absent
    #[arg(long, value_name = "SECONDS", requires = "wait")]
    timeout: Option<u64>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What `stagebus submit --json` prints.
#[derive(Serialize)]
struct Receipt {
    request_id: RequestId,
    sequence: u64,
    duplicate: bool,
}

/// Runs the command.
///
/// # Errors
/// Configuration that is wrong, a broker that cannot be reached or has no queue for the model, a
/// full queue.
pub async fn run(
    args: SubmitArgs,
    quiet: bool,
    stop: CancellationToken,
) -> anyhow::Result<Outcome> {
    let request = args.prompt.request(&args.answer)?;
    let request_id = args.id.or(request.request_id.clone());
    let request = PromptRequest { request_id, ..request };
    let bus = args.client.connect("stagebus-submit").await?;
    let subjects = Subjects::new(&model(&bus, args.model.as_deref()).await?);
    let submitted = bus.submit(&subjects, request).await?;
    if submitted.duplicate && !quiet {
        console::note("a job of this name was there already; it stays as it is");
    }
    let request = submitted.request;
    if args.wait {
        if !quiet {
            console::note(&format!("job {request}"));
        }
        let idle = args.timeout.map_or(Duration::MAX, Duration::from_secs);
        let shown = Shown { json: args.json, quiet, follow: Some(idle) };
        return show(&Place { bus, subjects, request }, shown, &stop).await;
    }
    if args.json {
        let (sequence, duplicate) = (submitted.sequence, submitted.duplicate);
        console::print_json(&Receipt { request_id: request, sequence, duplicate })?;
    } else {
        console::print_line(request.as_str())?;
    }
    Ok(Outcome::Good)
}
