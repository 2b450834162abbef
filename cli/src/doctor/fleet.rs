//! The fleet: who is there, of one content and one version, and whether every worker gets on.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use stagebus_bus::{Bus, Violation};
use stagebus_schemas::ids::ModelName;
use stagebus_shards::ShardSet;
use stagebus_view::{FleetView, ModelView, Problem};

use super::finding::{Check, Fault, Findings};
use super::machine::line;
use crate::discover::{LISTEN, Listener};

/// Longest time to listen for somebody who was heard once.
const LONGEST: Duration = Duration::from_secs(10);

/// Listens long enough to tell who falls silent.
pub async fn listen(
    bus: &Bus,
    model: Option<&ModelName>,
    findings: &mut Findings,
) -> Option<FleetView> {
    match listen_to_the_late(bus, model).await {
        Ok(view) => {
            findings.ok(Check::Permissions, "the fleet can be heard and asked");
            Some(view)
        }
        Err(error) => {
            if error.downcast_ref::<Violation>().is_some() {
                findings.fault(Fault::PermissionMissing, line(&error));
            } else {
                findings.skip(Check::Fleet, line(&error));
            }
            None
        }
    }
}

async fn listen_to_the_late(bus: &Bus, model: Option<&ModelName>) -> anyhow::Result<FleetView> {
    let start = Instant::now();
    let mut listener = Listener::start(bus, model).await?;
    let mut until = start + LISTEN;
    loop {
        match tokio::time::timeout_at(until.into(), listener.hear()).await {
            Ok(heard) => heard?,
            Err(_) => match later(&listener.view, Instant::now()) {
                Some(later) if later <= start + LONGEST => until = later,
                _ => return Ok(listener.view),
            },
        }
    }
}

/// When the last of those who are late counts as silent; nothing if nobody is late.
fn later(view: &FleetView, now: Instant) -> Option<Instant> {
    let is_late = |at: Instant, interval: Duration| now > at + interval * 3 / 2;
    let late = view.workers().filter(|worker| is_late(worker.at, worker.interval()));
    late.map(|worker| worker.expires()).filter(|expires| *expires > now).max()
}

/// What is known from elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// The model that was listened to.
    pub model: Option<&'a ModelName>,
    /// The shard set of this machine.
    pub shards: Option<&'a ShardSet>,
    /// How long a micro-batch may take of whose kind nothing has been measured.
    pub unmeasured: Duration,
}

/// Judges what was heard until `now`.
pub fn judge(view: &FleetView, known: Known<'_>, now: Instant, findings: &mut Findings) {
    let mut is_another_version = false;
    for stranger in view.strangers() {
        let found = format!("{}: {}", stranger.subject, stranger.error);
        is_another_version |= stranger.version.is_some();
        let other = stranger.version.map(|_| Fault::VersionsDiffer);
        findings.fault(other.unwrap_or(Fault::AnnouncementInvalid), found);
    }
    let models = view.models();
    if models.is_empty() && !is_another_version {
        let of = known.model.map(|model| format!(" of {model}")).unwrap_or_default();
        findings.fault(Fault::NobodyThere, format!("nobody{of} announces itself"));
    }
    for model in &models {
        judge_model(model, known.shards, findings);
    }
    judge_workers(view, known.unmeasured, now, findings);
}

fn judge_model(model: &ModelView, shards: Option<&ShardSet>, findings: &mut Findings) {
    let name = &model.model;
    let mut is_sound = true;
    let mut fault = |fault: Fault, found: String| {
        is_sound = false;
        findings.fault(fault, format!("{name}: {found}"));
    };
    for problem in &model.problems {
        match problem {
            Problem::NoCoordinator { .. } => fault(Fault::CoordinatorMissing, problem.to_string()),
            Problem::StageEmpty { n_other_shards: 0, .. } => {
                fault(Fault::StageMissing, problem.to_string());
            }
            // Told below, with who holds what.
            Problem::StageEmpty { .. } | Problem::MixedShards { .. } => {}
        }
    }
    let holders = holders(model, shards);
    if holders.len() > 1 {
        let group = |(fingerprint, names): (&&str, &Vec<String>)| {
            format!("{} has {}", names.join(", "), fingerprint.get(..12).unwrap_or(fingerprint))
        };
        let groups: Vec<String> = holders.iter().map(group).collect();
        fault(Fault::FingerprintsDiffer, groups.join("; "));
    }
    if is_sound {
        let (n_workers, n_coordinators) = (model.workers.len(), model.coordinators.len());
        findings.ok(
            Check::Fleet,
            format!(
                "{name}: {} stages, {n_workers} workers, {n_coordinators} coordinators, one \
                 content",
                model.n_stages
            ),
        );
    }
}

/// Who holds which shards.
fn holders<'a>(
    model: &'a ModelView,
    shards: Option<&'a ShardSet>,
) -> BTreeMap<&'a str, Vec<String>> {
    let mut holders: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut add = |fingerprint, name| holders.entry(fingerprint).or_default().push(name);
    for coordinator in &model.coordinators {
        add(coordinator.fingerprint.as_str(), coordinator.coordinator.to_string());
    }
    for worker in &model.workers {
        add(worker.fingerprint.as_str(), worker.worker.to_string());
    }
    if let Some(set) = shards.filter(|set| set.manifest.model == model.model.as_str()) {
        add(set.manifest.fingerprint.as_str(), set.dir.display().to_string());
    }
    holders
}

fn judge_workers(view: &FleetView, unmeasured: Duration, now: Instant, findings: &mut Findings) {
    let (mut n_workers, mut is_sound) = (0, true);
    for worker in view.workers() {
        n_workers += 1;
        let (name, load) = (&worker.announcement.worker, &worker.announcement.load);
        if load.is_stuck(unmeasured) {
            is_sound = false;
            let found = format!(
                "{name} has been running one micro-batch for {} ms, {} steps wait",
                load.busy_ms, load.queue_depth
            );
            findings.fault(Fault::WorkerWedged, found);
        }
        if worker.expires() <= now {
            is_sound = false;
            let silent = now.saturating_duration_since(worker.at);
            let interval = worker.interval();
            let found = format!("{name} is silent for {silent:.1?}, it announced {interval:?}");
            findings.fault(Fault::WorkerSilent, found);
        }
    }
    if is_sound && n_workers > 0 {
        findings.ok(Check::Workers, format!("{n_workers} get on"));
    }
}

#[cfg(test)]
mod tests;
