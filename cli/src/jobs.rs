//! Durable requests: `stagebus submit`, `stagebus results`, `stagebus cancel`.

pub mod cancel;
pub mod report;
pub mod results;
pub mod submit;

use std::time::Duration;

use anyhow::Context as _;
use stagebus_bus::Bus;
use stagebus_schemas::ids::{ModelName, RequestId};
use stagebus_schemas::subjects::Subjects;
use tokio_util::sync::CancellationToken;

use crate::console;
use crate::discover;
use crate::exit::Outcome;
use report::{JobState, Report};

/// Where a job is.
struct Place {
    bus: Bus,
    subjects: Subjects,
    request: RequestId,
}

/// What is shown of a job's events.
#[derive(Debug, Clone, Copy)]
struct Shown {
    /// One JSON object at the end instead of text.
    json: bool,
    /// No remarks.
    quiet: bool,
    /// Longest wait for each event that is not stored yet; nothing: those that are stored only.
    follow: Option<Duration>,
}

async fn model(bus: &Bus, named: Option<&str>) -> anyhow::Result<ModelName> {
    match named {
        Some(name) => name.parse().context("--model is not a model's name"),
        None => discover::only_model(bus).await,
    }
}

/// Reads a job's events, shows them, and says how the job stands. When `stop` is cancelled the
/// reading ends and the job goes on.
async fn show(place: &Place, shown: Shown, stop: &CancellationToken) -> anyhow::Result<Outcome> {
    let Place { bus, subjects, request } = place;
    let mut report = Report::new(request.clone());
    let mut events = bus.results(subjects, request).await?;
    loop {
        let stored = tokio::select! {
            stored = events.next_stored() => stored?,
            () = stop.cancelled() => break,
        };
        let stored = match (stored, shown.follow) {
            (Some(stored), _) => stored,
            (None, None) => break,
            (None, Some(_)) if report.is_over() => break,
            (None, Some(idle)) => tokio::select! {
                stored = events.next(idle) => stored?,
                () = stop.cancelled() => break,
            },
        };
        let text = report.take(stored.event)?;
        if !shown.json && !text.is_empty() {
            console::print(&text)?;
        }
    }
    conclude(&report, shown)
}

fn conclude(report: &Report, shown: Shown) -> anyhow::Result<Outcome> {
    if shown.json {
        console::print_json(report)?;
    } else {
        if !report.text.is_empty() && !report.text.ends_with('\n') {
            console::print("\n")?;
        }
        if !shown.quiet || report.state != JobState::Done {
            console::note(&report.remark());
        }
    }
    Ok(if report.state == JobState::Done { Outcome::Good } else { Outcome::Bad })
}
