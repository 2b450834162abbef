//! Durable requests: fetched from the queue one at a time while there is room, their events stored
//! one after the other, acknowledged after the last.
//!
//! ```text
//! queue ──▶ pull ──▶ Action::Job ──▶ State ──▶ Effect::Event ──▶ keeper ──▶ result stream
//!            ▲                                                   │ progress, acknowledgement
//!            └─────────────── while State::job_room ◀────────────┘ Action::JobLost
//! ```
//! One task fetches, and each job has one, its keeper; all live in one `JoinSet` and end with the
//! owner. A job's events reach its keeper through a bounded channel: when it is full the broker has
//! not stored events for long, and the job is given back to the queue. What another delivery has
//! stored is read before the job runs, and generation goes on after it.

mod intake;
mod keeper;
mod stored;

use std::collections::HashMap;

use stagebus_bus::{Bus, JobError, JobStore};
use stagebus_schemas::error::ErrorReply;
use stagebus_schemas::ids::{CoordinatorId, RequestId};
use stagebus_schemas::messages::public::{Event, PromptRequest};
use stagebus_schemas::subjects::Subjects;
use stagebus_schemas::trace::TraceContext;
use tokio::sync::mpsc::{self, Sender};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

pub(crate) use stored::StoredAnswer;

use crate::action::Action;
use crate::client::Client;
use crate::config::{CoordinatorSettings, JobsMode};
use intake::{Intake, Taken};

/// Events of one job that wait to be stored. A job makes some tens of them in a second, and
/// storing takes a millisecond: it fills up only when the broker is away for long, and then the
/// job is given back.
const EVENT_CAPACITY: usize = 1024;

/// A job that this coordinator runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct JobKey(u64);

impl JobKey {
    #[cfg(test)]
    pub(crate) const fn new(number: u64) -> Self {
        Self(number)
    }
}

/// A job that is to run.
#[derive(Debug)]
pub(crate) struct JobStart {
    /// Where its events go.
    pub(crate) client: Client,
    /// Its name.
    pub(crate) request: RequestId,
    /// What it asks for, or why that cannot be read.
    pub(crate) prompt: Result<PromptRequest, ErrorReply>,
    /// The sender's span.
    pub(crate) trace: Option<TraceContext>,
    /// Whether it was cancelled while it waited.
    pub(crate) cancelled: bool,
    /// What earlier deliveries have stored.
    pub(crate) stored: StoredAnswer,
}

/// What the tasks report.
enum JobNews {
    /// One fetch is over.
    Pulled(Option<Box<Taken>>),
    /// A job is out of this coordinator's hands.
    Over(JobKey),
}

/// The owner's side of all jobs.
pub(crate) struct Jobs {
    /// Absent while jobs are off.
    intake: Option<Intake>,
    keepers: HashMap<JobKey, Sender<Event>>,
    tasks: JoinSet<JobNews>,
    is_pulling: bool,
    stopped: CancellationToken,
    n_taken: u64,
}

impl Jobs {
    /// Makes the streams if jobs are wanted and JetStream is there.
    ///
    /// # Errors
    /// [`JobError`] if jobs must be on and cannot.
    pub(crate) async fn open(
        bus: &Bus,
        subjects: &Subjects,
        id: &CoordinatorId,
        settings: &CoordinatorSettings,
    ) -> Result<Self, JobError> {
        let jobs = &settings.jobs;
        let store = match jobs.mode {
            JobsMode::Off => None,
            JobsMode::On => Some(open(bus, subjects, settings).await?),
            JobsMode::Auto => match open(bus, subjects, settings).await {
                Ok(store) => Some(store),
                Err(JobError::NoJetStream) => {
                    info!("the broker has no JetStream: no durable jobs are taken");
                    None
                }
                Err(error) => {
                    warn!(error = %with_cause(&error), "no durable jobs are taken");
                    None
                }
            },
        };
        let stopped = CancellationToken::new();
        let intake = store.map(|store| Intake {
            store,
            subjects: subjects.clone(),
            writer: id.clone(),
            stopped: stopped.clone(),
            max_deliveries: jobs.max_deliveries,
            max_request_bytes: settings.max_request_bytes,
            ack_wait: jobs.ack_wait(),
        });
        Ok(Self {
            intake,
            keepers: HashMap::new(),
            tasks: JoinSet::new(),
            is_pulling: false,
            stopped,
            n_taken: 0,
        })
    }

    /// Whether jobs are taken.
    pub(crate) fn are_on(&self) -> bool {
        self.intake.is_some()
    }

    /// Whether the next job may be fetched, if there is room for it.
    pub(crate) fn may_pull(&self) -> bool {
        self.intake.is_some() && !self.is_pulling && !self.stopped.is_cancelled()
    }

    /// Fetches one job.
    pub(crate) fn pull(&mut self) {
        let Some(intake) = self.intake.clone() else { return };
        self.is_pulling = true;
        self.tasks
            .spawn(async move { JobNews::Pulled(Box::pin(intake.pull()).await.map(Box::new)) });
    }

    /// Fetches no more.
    pub(crate) fn stop(&mut self) {
        self.stopped.cancel();
    }

    /// Whether nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Waits for a job to start or to be lost; for ever while nothing is under way.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub(crate) async fn next(&mut self) -> Option<Action> {
        let Some(done) = self.tasks.join_next().await else {
            return std::future::pending().await;
        };
        match done {
            Ok(JobNews::Pulled(taken)) => {
                self.is_pulling = false;
                taken.map(|taken| self.keep(*taken))
            }
            Ok(JobNews::Over(key)) => {
                self.keepers.remove(&key);
                Some(Action::JobLost(key))
            }
            Err(error) => {
                // A task that panicked took its job with it: the broker delivers it again.
                error!(%error, "task of a job failed");
                self.is_pulling = false;
                None
            }
        }
    }

    /// Stores an event; returns false if the job is no longer ours or its events are not stored.
    pub(crate) fn store(&mut self, key: JobKey, event: Event) -> bool {
        let Some(keeper) = self.keepers.get(&key) else { return false };
        let taken = keeper.try_send(event).is_ok();
        if !taken {
            warn!("events of a job are not stored fast enough, it is given back");
            self.give_back(key);
        }
        taken
    }

    /// Gives a job back to the queue, unless its last event is on its way.
    pub(crate) fn give_back(&mut self, key: JobKey) {
        self.keepers.remove(&key);
    }

    fn keep(&mut self, taken: Taken) -> Action {
        self.n_taken += 1;
        let key = JobKey(self.n_taken);
        let Taken { keeper, mut start } = taken;
        start.client.job = Some(key);
        let (events, waiting) = mpsc::channel(EVENT_CAPACITY);
        self.keepers.insert(key, events);
        self.tasks.spawn(async move {
            keeper.run(waiting).await;
            JobNews::Over(key)
        });
        Action::Job(Box::new(start))
    }
}

async fn open(
    bus: &Bus,
    subjects: &Subjects,
    settings: &CoordinatorSettings,
) -> Result<JobStore, JobError> {
    let limits = settings.jobs.limits(settings.max_request_bytes);
    JobStore::open(bus, subjects, limits).await
}

/// An error with its cause, for a log line.
fn with_cause(error: &JobError) -> String {
    use std::error::Error as _;
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}
