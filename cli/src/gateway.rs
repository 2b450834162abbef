//! `stagebus gateway`: an HTTP API in the form of OpenAI's, in front of a fleet.

use stagebus_gateway::GatewayArgs;
use tokio_util::sync::CancellationToken;

use crate::exit::Outcome;

/// Runs a gateway until `stop` is cancelled.
///
/// # Errors
/// What keeps it from starting, and an end other than as asked.
pub async fn run(args: GatewayArgs, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let config = stagebus_gateway::prepare(args, &stop)?;
    stagebus_gateway::serve(config, stop).await?;
    Ok(Outcome::Good)
}
