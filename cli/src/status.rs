//! `stagebus status`: who is there, with what load, and whether requests can be served.

mod table;

use std::time::Duration;

use serde::Serialize;
use stagebus_bus::Bus;
use stagebus_schemas::ids::ModelName;
use stagebus_view::{ModelView, Stranger};
use tokio_util::sync::CancellationToken;

use crate::client::ClientArgs;
use crate::console;
use crate::discover;
use crate::exit::Outcome;

/// Pause between two looks of `--watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Moves the cursor home and clears the screen, so that a watched table stays in place.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Arguments of `stagebus status`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus status
  stagebus status --broker nats://127.0.0.1:4222 --model smollm2 --json
  stagebus status --watch

Exit code 0: every model heard of can be served. 1: one cannot, or nobody was heard.")]
pub struct StatusArgs {
    #[command(flatten)]
    client: ClientArgs,

    /// Look at one model only
    #[arg(long, value_name = "NAME")]
    model: Option<ModelName>,

    /// Look again every second until interrupted
    #[arg(long)]
    watch: bool,

    /// Print one JSON object (one per line with --watch)
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct StatusReport {
    served: bool,
    models: Vec<ModelView>,
    /// Those whose announcements cannot be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    strangers: Vec<Stranger>,
}

/// Runs the command until the view is complete, or with `--watch` until `stop`.
///
/// # Errors
/// Configuration that is wrong and a broker that cannot be reached.
pub async fn run(args: StatusArgs, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let bus = args.client.connect("stagebus-status").await?;
    loop {
        let report = look(&bus, args.model.as_ref()).await?;
        let outcome = if report.served { Outcome::Good } else { Outcome::Bad };
        if args.json {
            console::print_json(&report)?;
        } else {
            let clear = if args.watch { CLEAR } else { "" };
            console::print(&format!("{clear}{}", describe(&report, bus.url())))?;
        }
        if !args.watch {
            return Ok(outcome);
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(outcome),
            () = tokio::time::sleep(WATCH_INTERVAL) => {}
        }
    }
}

async fn look(bus: &Bus, model: Option<&ModelName>) -> anyhow::Result<StatusReport> {
    let window = if model.is_some() { discover::ANSWER } else { discover::LISTEN };
    let view = discover::listen(bus, model, window, |_| false).await?;
    let (models, strangers) = (view.models(), view.strangers().cloned().collect());
    let served = !models.is_empty() && models.iter().all(|model| model.served);
    Ok(StatusReport { served, models, strangers })
}

fn describe(report: &StatusReport, broker: &str) -> String {
    let mut parts: Vec<String> = report.models.iter().map(table::describe).collect();
    let stranger = |stranger: &Stranger| {
        format!("! the announcement on {} cannot be read: {}\n", stranger.subject, stranger.error)
    };
    parts.extend(report.strangers.iter().map(stranger));
    if parts.is_empty() {
        return format!("nobody announces itself on the broker at {broker}\n");
    }
    parts.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_fleet_is_described_and_not_served() {
        let report = StatusReport { served: false, models: Vec::new(), strangers: Vec::new() };
        assert!(describe(&report, "nats://127.0.0.1:1").contains("nats://127.0.0.1:1"));
    }
}
