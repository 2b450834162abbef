//! `stagebus cancel`: ends a job or a request.

use std::time::Duration;

use bytes::Bytes;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::subjects::Subjects;

use super::model;
use crate::client::ClientArgs;
use crate::exit::Outcome;

/// How long the word may take to leave.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Arguments of `stagebus cancel`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus cancel r-4f0c9b

A job ends with what it has generated, a waiting one before it runs; `stagebus results NAME` shows
it. Nobody answers a cancellation, also of a name that nobody knows.")]
pub struct CancelArgs {
    /// Name of the job or request
    #[arg(value_name = "NAME")]
    id: RequestId,

    #[command(flatten)]
    client: ClientArgs,

    /// Name of the model; found through the fleet's announcements when absent
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// Configuration that is wrong, a broker that cannot be reached.
pub async fn run(args: CancelArgs) -> anyhow::Result<Outcome> {
    let bus = args.client.connect("stagebus-cancel").await?;
    let subjects = Subjects::new(&model(&bus, args.model.as_deref()).await?);
    bus.publish_bytes(&subjects.cancel(&args.id), None, Bytes::new()).await?;
    bus.flush(FLUSH_TIMEOUT).await?;
    Ok(Outcome::Good)
}
