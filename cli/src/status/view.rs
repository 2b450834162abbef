//! The fleet as its announcements describe it, and whether a model can be served.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;
use stagebus_schemas::codec::CodecError;
use stagebus_schemas::ids::{CoordinatorId, ModelName, StageIndex, WorkerId};
use stagebus_schemas::messages::fleet::{CoordinatorAnnouncement, WorkerAnnouncement, WorkerState};

use crate::console;

/// Digits of a fingerprint that are shown to people.
const SHOWN_FINGERPRINT: usize = 12;

/// Announcements that may be missing before somebody counts as gone.
const MISSED_ANNOUNCEMENTS: u32 = 3;

/// Announcements that cannot be read and are remembered: a fleet has far fewer processes.
const MAX_STRANGERS: usize = 1024;

/// The latest announcement of everybody that was heard.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FleetView {
    workers: BTreeMap<(ModelName, StageIndex, WorkerId), Heard<WorkerAnnouncement>>,
    coordinators: BTreeMap<(ModelName, CoordinatorId), Heard<CoordinatorAnnouncement>>,
    strangers: BTreeMap<String, Stranger>,
}

/// An announcement and when it came.
#[derive(Debug, Clone, PartialEq)]
pub struct Heard<T> {
    /// When.
    pub at: Instant,
    /// What.
    pub announcement: T,
}

/// Somebody whose announcements cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stranger {
    /// Where it announces itself.
    pub subject: String,
    /// Its version of the messages, if that is the reason.
    pub version: Option<u16>,
    /// Why it cannot be read.
    pub error: String,
}

/// One model, as `stagebus status --json` prints it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelView {
    /// The model.
    pub model: ModelName,
    /// Whether a request would find a coordinator and a worker for every stage.
    pub served: bool,
    /// Number of stages, as the coordinators say, else as the workers say.
    pub n_stages: u16,
    /// What stands in the way of a request, or soon will.
    pub problems: Vec<Problem>,
    /// The workers, by stage.
    pub workers: Vec<WorkerAnnouncement>,
    /// The coordinators.
    pub coordinators: Vec<CoordinatorAnnouncement>,
}

/// Something that is wrong with a fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "problem")]
pub enum Problem {
    /// Nobody takes requests.
    NoCoordinator {
        /// Coordinators that are leaving.
        n_leaving: usize,
    },
    /// A stage cannot take a session.
    StageEmpty {
        /// The stage.
        stage: u16,
        /// Workers that finish their sessions and leave.
        n_leaving: usize,
        /// Workers that hold other shards than the coordinator.
        n_other_shards: usize,
    },
    /// Coordinators of the same model hold different shards.
    MixedShards {
        /// Their fingerprints.
        fingerprints: Vec<String>,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCoordinator { n_leaving: 0 } => f.write_str("no coordinator is there"),
            Self::NoCoordinator { n_leaving } => {
                write!(f, "no coordinator takes requests, {n_leaving} leaving")
            }
            Self::StageEmpty { stage, n_leaving, n_other_shards } => {
                write!(f, "stage {stage} has nobody")?;
                if *n_leaving > 0 {
                    write!(f, ", {n_leaving} leaving")?;
                }
                if *n_other_shards > 0 {
                    write!(f, ", {n_other_shards} with other shards than the coordinator")?;
                }
                Ok(())
            }
            Self::MixedShards { fingerprints } => {
                write!(f, "coordinators hold different shards: {}", fingerprints.join(", "))
            }
        }
    }
}

impl FleetView {
    /// Takes in a worker's announcement; one that says good-bye removes the worker.
    pub fn hear_worker(&mut self, announcement: WorkerAnnouncement, at: Instant) {
        let key = (announcement.model.clone(), announcement.stage, announcement.worker.clone());
        if announcement.state == WorkerState::Leaving {
            self.workers.remove(&key);
        } else {
            self.workers.insert(key, Heard { at, announcement });
        }
    }

    /// Takes in a coordinator's announcement.
    pub fn hear_coordinator(&mut self, announcement: CoordinatorAnnouncement, at: Instant) {
        let key = (announcement.model.clone(), announcement.coordinator.clone());
        self.coordinators.insert(key, Heard { at, announcement });
    }

    /// Takes in an announcement that cannot be read.
    pub fn hear_stranger(&mut self, subject: &str, error: &CodecError) {
        let version = match error {
            CodecError::Version { found, .. } => Some(found.number()),
            _ => None,
        };
        let (subject, error) = (subject.to_owned(), error.to_string());
        if self.strangers.len() < MAX_STRANGERS || self.strangers.contains_key(&subject) {
            self.strangers.insert(subject.clone(), Stranger { subject, version, error });
        }
    }

    /// The workers with the times of their last announcements, by model and stage.
    pub fn workers(&self) -> impl Iterator<Item = &Heard<WorkerAnnouncement>> {
        self.workers.values()
    }

    /// The coordinators with the times of their last announcements, by model.
    pub fn coordinators(&self) -> impl Iterator<Item = &Heard<CoordinatorAnnouncement>> {
        self.coordinators.values()
    }

    /// Those whose announcements cannot be read.
    pub fn strangers(&self) -> impl Iterator<Item = &Stranger> {
        self.strangers.values()
    }

    /// Removes those who have missed three announcements.
    pub fn forget_silent(&mut self, now: Instant) {
        self.workers.retain(|_, worker| worker.expires() > now);
        self.coordinators
            .retain(|_, coordinator| expires(coordinator.at, coordinator.interval()) > now);
    }

    /// The models heard of, each with its state, in the order of their names.
    #[must_use]
    pub fn models(&self) -> Vec<ModelView> {
        let mut models: Vec<&ModelName> = self.workers.keys().map(|(model, _, _)| model).collect();
        models.extend(self.coordinators.keys().map(|(model, _)| model));
        models.sort();
        models.dedup();
        models.into_iter().map(|model| self.model(model)).collect()
    }

    fn model(&self, model: &ModelName) -> ModelView {
        let workers = self.workers.values().map(|heard| &heard.announcement);
        let workers: Vec<_> = workers.filter(|worker| worker.model == *model).cloned().collect();
        let coordinators = self.coordinators.values().map(|heard| &heard.announcement);
        let coordinators: Vec<_> = coordinators.filter(|c| c.model == *model).cloned().collect();
        // Workers without a coordinator still tell what is missing beside the coordinator.
        let reference = coordinators
            .iter()
            .find(|coordinator| coordinator.accepting)
            .or(coordinators.first())
            .map(|coordinator| (coordinator.fingerprint.as_str(), coordinator.n_stages))
            .or(workers.first().map(|worker| (worker.fingerprint.as_str(), worker.n_stages)));
        let (fingerprint, n_stages) = reference.unwrap_or_default();
        let mut problems = coordinator_problems(&coordinators);
        problems
            .extend((0..n_stages).filter_map(|stage| stage_problem(stage, fingerprint, &workers)));
        let served = !problems.iter().any(|p| !matches!(p, Problem::MixedShards { .. }));
        ModelView { model: model.clone(), served, n_stages, problems, workers, coordinators }
    }
}

impl Heard<WorkerAnnouncement> {
    /// How often the worker says that it announces itself.
    #[must_use]
    pub fn interval(&self) -> Duration {
        Duration::from_millis(self.announcement.interval_ms.into())
    }

    /// When it counts as gone unless it is heard again.
    #[must_use]
    pub fn expires(&self) -> Instant {
        expires(self.at, self.interval())
    }
}

impl Heard<CoordinatorAnnouncement> {
    fn interval(&self) -> Duration {
        Duration::from_millis(self.announcement.interval_ms.into())
    }
}

fn expires(at: Instant, interval: Duration) -> Instant {
    at + interval * MISSED_ANNOUNCEMENTS
}

fn coordinator_problems(coordinators: &[CoordinatorAnnouncement]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let n_accepting = coordinators.iter().filter(|coordinator| coordinator.accepting).count();
    if n_accepting == 0 {
        problems.push(Problem::NoCoordinator { n_leaving: coordinators.len() });
    }
    let mut fingerprints: Vec<String> =
        coordinators.iter().map(|coordinator| coordinator.fingerprint.clone()).collect();
    fingerprints.sort();
    fingerprints.dedup();
    if fingerprints.len() > 1 {
        problems.push(Problem::MixedShards { fingerprints });
    }
    problems
}

fn stage_problem(stage: u16, fingerprint: &str, workers: &[WorkerAnnouncement]) -> Option<Problem> {
    let here: Vec<_> =
        workers.iter().filter(|worker| worker.stage == StageIndex::new(stage)).collect();
    let fits = |worker: &WorkerAnnouncement| worker.fingerprint == fingerprint;
    let ready = |worker: &WorkerAnnouncement| worker.state == WorkerState::Ready;
    if here.iter().any(|worker| fits(worker) && ready(worker)) {
        return None;
    }
    let n_other_shards = here.iter().filter(|worker| !fits(worker)).count();
    let n_leaving = here.iter().filter(|worker| fits(worker)).count();
    Some(Problem::StageEmpty { stage, n_leaving, n_other_shards })
}

impl ModelView {
    /// Describes the model for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let state = if self.served { "served" } else { "CANNOT BE SERVED" };
        let mut text = format!("{}: {state}, {} stages\n", self.model, self.n_stages);
        for problem in &self.problems {
            text.push_str(&format!("  ! {problem}\n"));
        }
        let rows: Vec<_> = self.workers.iter().map(worker_row).collect();
        if !rows.is_empty() {
            let header = [
                "stage",
                "layers",
                "worker",
                "state",
                "sessions",
                "queue",
                "kv tokens",
                "kv MiB",
                "ms",
                "device",
                "profile",
                "host",
                "shards",
            ];
            text.push_str(&console::table(&header, &rows));
        }
        let rows: Vec<_> = self.coordinators.iter().map(coordinator_row).collect();
        if !rows.is_empty() {
            let header = [
                "coordinator",
                "state",
                "sessions",
                "done",
                "tokens",
                "drafted",
                "accepted",
                "replays",
                "host",
                "shards",
            ];
            text.push_str(&console::table(&header, &rows));
        }
        text
    }
}

fn worker_row(worker: &WorkerAnnouncement) -> Vec<String> {
    let load = &worker.load;
    #[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
    let kv_mib = load.kv_bytes as f64 / f64::from(1 << 20);
    let state = match worker.state {
        WorkerState::Ready => "ready",
        WorkerState::Draining => "draining",
        WorkerState::Leaving => "leaving",
    };
    vec![
        worker.stage.to_string(),
        format!("{}..{}", worker.first_layer, worker.end_layer),
        worker.worker.to_string(),
        state.to_owned(),
        format!("{}/{}", load.n_sessions, load.max_sessions),
        load.queue_depth.to_string(),
        load.kv_tokens.to_string(),
        format!("{kv_mib:.1}"),
        format!("{:.2}", f64::from(load.decode_us) / 1e3),
        worker.device.clone(),
        worker.profile.clone(),
        worker.host.clone(),
        shown_fingerprint(&worker.fingerprint),
    ]
}

fn coordinator_row(coordinator: &CoordinatorAnnouncement) -> Vec<String> {
    vec![
        coordinator.coordinator.to_string(),
        if coordinator.accepting { "ready" } else { "draining" }.to_owned(),
        coordinator.n_sessions.to_string(),
        coordinator.requests_done.to_string(),
        coordinator.tokens_out.to_string(),
        coordinator.tokens_drafted.to_string(),
        coordinator.tokens_accepted.to_string(),
        coordinator.recoveries.to_string(),
        coordinator.host.clone(),
        shown_fingerprint(&coordinator.fingerprint),
    ]
}

fn shown_fingerprint(fingerprint: &str) -> String {
    fingerprint.get(..SHOWN_FINGERPRINT).unwrap_or(fingerprint).to_owned()
}

#[cfg(test)]
mod tests;
