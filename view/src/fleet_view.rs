//! Who was heard, and whether a model can be served.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;
use stagebus_schemas::codec::{self, CodecError};
use stagebus_schemas::ids::{CoordinatorId, ModelName, StageIndex, WorkerId};
use stagebus_schemas::messages::fleet::{CoordinatorAnnouncement, WorkerAnnouncement, WorkerState};
use stagebus_schemas::subjects::{Subject, Subjects};

/// Announcements that may be missing before somebody counts as gone.
const MISSED_ANNOUNCEMENTS: u32 = 3;

/// How long somebody whose announcements cannot be read is remembered: nobody knows its interval.
const STRANGER_SILENCE: Duration = Duration::from_secs(10);

/// Workers, coordinators and strangers that are remembered, each: a fleet has far fewer, and nobody
/// can fill the memory.
const MAX_MEMBERS: usize = 4096;

/// The latest announcement of everybody that was heard.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FleetView {
    workers: BTreeMap<(ModelName, StageIndex, WorkerId), Heard<WorkerAnnouncement>>,
    coordinators: BTreeMap<(ModelName, CoordinatorId), Heard<CoordinatorAnnouncement>>,
    strangers: BTreeMap<String, Heard<Stranger>>,
}

/// Why a message tells nothing of the fleet.
#[derive(Debug, thiserror::Error)]
pub enum HearError {
    /// It is no announcement.
    #[error("{subject} is no subject of announcements")]
    Subject {
        /// Where it came.
        subject: String,
    },
    /// It cannot be read; who sent it is remembered as a stranger.
    #[error("the announcement on {subject} cannot be read")]
    Unreadable {
        /// Where it came.
        subject: String,
        /// Why.
        #[source]
        source: CodecError,
    },
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

/// One model: who serves it, and whether they can.
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
        /// Workers that fetch or load their shard.
        n_starting: usize,
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
            Self::StageEmpty { stage, n_starting, n_leaving, n_other_shards } => {
                write!(f, "stage {stage} has nobody")?;
                if *n_starting > 0 {
                    write!(f, ", {n_starting} starting")?;
                }
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
    /// Takes in what came on a subject; returns the subjects of its model.
    ///
    /// # Errors
    /// [`HearError`].
    pub fn hear(
        &mut self,
        subject: &str,
        payload: &[u8],
        at: Instant,
    ) -> Result<Subjects, HearError> {
        let stray = || HearError::Subject { subject: subject.to_owned() };
        let subjects = Subjects::of(subject).map_err(|_none_of_ours| stray())?;
        let taken = match subjects.parse(subject) {
            Ok(Subject::Worker(..)) => {
                codec::decode(payload).map(|worker| self.hear_worker(worker, at))
            }
            Ok(Subject::Coordinator(_)) => {
                codec::decode(payload).map(|coordinator| self.hear_coordinator(coordinator, at))
            }
            Ok(_) | Err(_) => return Err(stray()),
        };
        taken.map_err(|source| {
            self.hear_stranger(subject, &source, at);
            HearError::Unreadable { subject: subject.to_owned(), source }
        })?;
        Ok(subjects)
    }

    /// Takes in a worker's announcement; one that says good-bye removes the worker.
    pub fn hear_worker(&mut self, announcement: WorkerAnnouncement, at: Instant) {
        let key = (announcement.model.clone(), announcement.stage, announcement.worker.clone());
        if announcement.state == WorkerState::Leaving {
            self.workers.remove(&key);
        } else {
            remember(&mut self.workers, key, Heard { at, announcement });
        }
    }

    /// Takes in a coordinator's announcement.
    pub fn hear_coordinator(&mut self, announcement: CoordinatorAnnouncement, at: Instant) {
        let key = (announcement.model.clone(), announcement.coordinator.clone());
        remember(&mut self.coordinators, key, Heard { at, announcement });
    }

    /// Takes in an announcement that cannot be read.
    pub fn hear_stranger(&mut self, subject: &str, error: &CodecError, at: Instant) {
        let version = match error {
            CodecError::Version { found, .. } => Some(found.number()),
            _ => None,
        };
        let (subject, error) = (subject.to_owned(), error.to_string());
        let announcement = Stranger { subject: subject.clone(), version, error };
        remember(&mut self.strangers, subject, Heard { at, announcement });
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
        self.strangers.values().map(|heard| &heard.announcement)
    }

    /// Removes those who have missed three announcements, and strangers after 10 seconds.
    pub fn forget_silent(&mut self, now: Instant) {
        self.workers.retain(|_, worker| worker.expires() > now);
        self.coordinators
            .retain(|_, coordinator| expires(coordinator.at, coordinator.interval()) > now);
        self.strangers.retain(|_, stranger| stranger.at + STRANGER_SILENCE > now);
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

/// Those who are known are followed; others are remembered while there is room.
fn remember<K: Ord, T>(all: &mut BTreeMap<K, Heard<T>>, key: K, heard: Heard<T>) {
    if all.len() < MAX_MEMBERS || all.contains_key(&key) {
        all.insert(key, heard);
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
    let starts = |worker: &WorkerAnnouncement| {
        matches!(worker.state, WorkerState::Joining | WorkerState::Starting)
    };
    let n_starting = here.iter().filter(|worker| fits(worker) && starts(worker)).count();
    let n_leaving = here.iter().filter(|worker| fits(worker) && !starts(worker)).count();
    Some(Problem::StageEmpty { stage, n_starting, n_leaving, n_other_shards })
}

#[cfg(test)]
mod tests;
