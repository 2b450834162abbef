//! Subjects, built and parsed here only.
//!
//! ```text
//! stagebus.v1.<model>.prompt                                public: requests
//! stagebus.v1.<model>.job                                   public: durable requests (JetStream)
//! stagebus.v1.<model>.result.<request>                      public: their events (JetStream)
//! stagebus.v1.<model>.cancel.<request>                      public: end a request
//! stagebus.v1.<model>.stage.<k>.<worker>.step               forward messages for a worker
//! stagebus.v1.<model>.stage.<k>.<worker>.bulk               parts of large forward messages
//! stagebus.v1.<model>.stage.<k>.<worker>.ctl                control requests for a worker
//! stagebus.v1.<model>.head.<coordinator>                    head rows and faults
//! stagebus.v1.<model>.lost.<coordinator>.<session>.<epoch>.<step>.<stage>   steps that nobody heard
//! stagebus.v1.<model>.unheard.<coordinator>.<client>.<event>   events that nobody heard
//! stagebus.v1.<model>.fleet.<k>.<worker>                    worker announcements
//! stagebus.v1.<model>.fleet.coordinator.<coordinator>       coordinator announcements
//! stagebus.v1.<model>.probe                                 asks everybody to announce itself now
//! ```
//!
//! Those of machines that are measured for a plan are in [`nodes`].

pub mod nodes;

use std::num::ParseIntError;
use std::str::FromStr;

use crate::ids::{
    CoordinatorId, Epoch, IdError, ModelName, RequestId, SessionId, StageIndex, StepNumber,
    WorkerId,
};

/// Queue group of the coordinators on the prompt subject.
pub const COORDINATOR_QUEUE: &str = "coordinator";

const ROOT: &str = "stagebus.v1";

/// All announcements of all models, for those who look for a model without knowing its name.
pub const ANY_FLEET: &str = "stagebus.v1.*.fleet.>";

/// The subjects of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subjects {
    prefix: String,
}

impl Subjects {
    /// Makes the subjects of a model.
    #[must_use]
    pub fn new(model: &ModelName) -> Self {
        Self { prefix: format!("{ROOT}.{model}") }
    }

    /// Makes the patterns that stand for all models; only to grant rights.
    #[must_use]
    pub fn any_model() -> Self {
        Self { prefix: format!("{ROOT}.*") }
    }

    /// Makes the subjects of the model that a subject belongs to.
    ///
    /// # Errors
    /// [`SubjectError`] if the subject is none of ours.
    pub fn of(subject: &str) -> Result<Self, SubjectError> {
        let unknown = || SubjectError::Unknown { subject: subject.to_owned() };
        let rest = subject
            .strip_prefix(ROOT)
            .and_then(|rest| rest.strip_prefix('.'))
            .ok_or_else(unknown)?;
        let (model, _) = rest.split_once('.').ok_or_else(unknown)?;
        Ok(Self::new(&ModelName::new(model)?))
    }

    /// The model's token of the subjects.
    fn model(&self) -> &str {
        self.prefix.rsplit('.').next().unwrap_or_default()
    }

    /// Public requests.
    #[must_use]
    pub fn prompt(&self) -> String {
        format!("{}.prompt", self.prefix)
    }

    /// Public durable requests.
    #[must_use]
    pub fn job(&self) -> String {
        format!("{}.job", self.prefix)
    }

    /// Events of a durable request.
    #[must_use]
    pub fn result(&self, request: &RequestId) -> String {
        format!("{}.result.{request}", self.prefix)
    }

    /// Events of all durable requests.
    #[must_use]
    pub fn result_all(&self) -> String {
        format!("{}.result.*", self.prefix)
    }

    /// Name of the JetStream stream that holds durable requests until they are done.
    #[must_use]
    pub fn jobs_stream(&self) -> String {
        format!("STAGEBUS_JOBS_{}", self.model())
    }

    /// Name of the JetStream stream that holds the events of durable requests, and cancellations.
    #[must_use]
    pub fn results_stream(&self) -> String {
        format!("STAGEBUS_RESULTS_{}", self.model())
    }

    /// Ends a request.
    #[must_use]
    pub fn cancel(&self, request: &RequestId) -> String {
        format!("{}.cancel.{request}", self.prefix)
    }

    /// All cancellations.
    #[must_use]
    pub fn cancel_all(&self) -> String {
        format!("{}.cancel.*", self.prefix)
    }

    /// Forward messages for a worker.
    #[must_use]
    pub fn step(&self, stage: StageIndex, worker: &WorkerId) -> String {
        format!("{}.stage.{stage}.{worker}.step", self.prefix)
    }

    /// Forward messages for all workers.
    #[must_use]
    pub fn step_all(&self) -> String {
        format!("{}.stage.*.*.step", self.prefix)
    }

    /// Parts of large forward messages for a worker.
    #[must_use]
    pub fn bulk(&self, stage: StageIndex, worker: &WorkerId) -> String {
        format!("{}.stage.{stage}.{worker}.bulk", self.prefix)
    }

    /// Parts of large forward messages for all workers.
    #[must_use]
    pub fn bulk_all(&self) -> String {
        format!("{}.stage.*.*.bulk", self.prefix)
    }

    /// Control requests for a worker.
    #[must_use]
    pub fn control(&self, stage: StageIndex, worker: &WorkerId) -> String {
        format!("{}.stage.{stage}.{worker}.ctl", self.prefix)
    }

    /// Control requests for all workers.
    #[must_use]
    pub fn control_all(&self) -> String {
        format!("{}.stage.*.*.ctl", self.prefix)
    }

    /// Head rows for a coordinator.
    #[must_use]
    pub fn head(&self, coordinator: &CoordinatorId) -> String {
        format!("{}.head.{coordinator}", self.prefix)
    }

    /// Head rows for all coordinators.
    #[must_use]
    pub fn head_all(&self) -> String {
        format!("{}.head.*", self.prefix)
    }

    /// Reply subject of one step. When nobody hears the step, the broker answers here, but only to
    /// the connection that published the step: a worker passes that on as an empty message.
    #[must_use]
    pub fn lost(&self, coordinator: &CoordinatorId, lost: &LostStep) -> String {
        let LostStep { session, epoch, step, stage } = lost;
        format!("{}.lost.{coordinator}.{session}.{epoch}.{step}.{stage}", self.prefix)
    }

    /// All steps of a coordinator that nobody heard.
    #[must_use]
    pub fn lost_all(&self, coordinator: &CoordinatorId) -> String {
        format!("{}.lost.{coordinator}.>", self.prefix)
    }

    /// The steps of all coordinators that nobody heard, for whoever publishes steps for several.
    #[must_use]
    pub fn lost_any(&self) -> String {
        format!("{}.lost.>", self.prefix)
    }

    /// Reply subject of one event to a client, by the coordinator's own numbers. When nobody hears
    /// the event, the broker answers here: the client is gone, or not back yet.
    #[must_use]
    pub fn unheard(&self, coordinator: &CoordinatorId, unheard: UnheardEvent) -> String {
        let UnheardEvent { client, event } = unheard;
        format!("{}.unheard.{coordinator}.{client}.{event}", self.prefix)
    }

    /// The events of all coordinators that nobody heard.
    #[must_use]
    pub fn unheard_any(&self) -> String {
        format!("{}.unheard.>", self.prefix)
    }

    /// All events of a coordinator that nobody heard.
    #[must_use]
    pub fn unheard_all(&self, coordinator: &CoordinatorId) -> String {
        format!("{}.unheard.{coordinator}.>", self.prefix)
    }

    /// Announcements of a worker.
    #[must_use]
    pub fn worker(&self, stage: StageIndex, worker: &WorkerId) -> String {
        format!("{}.fleet.{stage}.{worker}", self.prefix)
    }

    /// Announcements of all workers, and of coordinators.
    #[must_use]
    pub fn worker_all(&self) -> String {
        format!("{}.fleet.*.*", self.prefix)
    }

    /// Announcements of a coordinator.
    #[must_use]
    pub fn coordinator(&self, coordinator: &CoordinatorId) -> String {
        format!("{}.fleet.coordinator.{coordinator}", self.prefix)
    }

    /// Announcements of all coordinators.
    #[must_use]
    pub fn coordinator_all(&self) -> String {
        format!("{}.fleet.coordinator.*", self.prefix)
    }

    /// All announcements.
    #[must_use]
    pub fn fleet_all(&self) -> String {
        format!("{}.fleet.>", self.prefix)
    }

    /// Everything of the model, for those who only watch.
    #[must_use]
    pub fn all(&self) -> String {
        format!("{}.>", self.prefix)
    }

    /// A coordinator as the source of CloudEvents: a URI-reference with the tokens of its subjects.
    #[must_use]
    pub fn source(&self, coordinator: &CoordinatorId) -> String {
        format!("/{}/coordinator/{coordinator}", self.prefix.replace('.', "/"))
    }

    /// Asks everybody to announce itself now.
    #[must_use]
    pub fn probe(&self) -> String {
        format!("{}.probe", self.prefix)
    }

    /// Parses a subject of this model.
    ///
    /// # Errors
    /// [`SubjectError`] if the subject belongs to another model or is none of ours.
    pub fn parse(&self, subject: &str) -> Result<Subject, SubjectError> {
        let unknown = || SubjectError::Unknown { subject: subject.to_owned() };
        let rest = subject
            .strip_prefix(self.prefix.as_str())
            .and_then(|rest| rest.strip_prefix('.'))
            .ok_or_else(unknown)?;
        let tokens: Vec<&str> = rest.split('.').collect();
        match tokens.as_slice() {
            ["prompt"] => Ok(Subject::Prompt),
            ["job"] => Ok(Subject::Job),
            ["result", request] => Ok(Subject::Result(RequestId::new(*request)?)),
            ["probe"] => Ok(Subject::Probe),
            ["cancel", request] => Ok(Subject::Cancel(RequestId::new(*request)?)),
            ["stage", stage, worker, "step"] => {
                Ok(Subject::Step(parse_stage(stage)?, WorkerId::new(*worker)?))
            }
            ["stage", stage, worker, "bulk"] => {
                Ok(Subject::Bulk(parse_stage(stage)?, WorkerId::new(*worker)?))
            }
            ["stage", stage, worker, "ctl"] => {
                Ok(Subject::Control(parse_stage(stage)?, WorkerId::new(*worker)?))
            }
            ["head", coordinator] => Ok(Subject::Head(CoordinatorId::new(*coordinator)?)),
            ["fleet", "coordinator", coordinator] => {
                Ok(Subject::Coordinator(CoordinatorId::new(*coordinator)?))
            }
            ["fleet", stage, worker] => {
                Ok(Subject::Worker(parse_stage(stage)?, WorkerId::new(*worker)?))
            }
            ["lost", coordinator, session, epoch, step, stage] => Ok(Subject::Lost(
                CoordinatorId::new(*coordinator)?,
                LostStep {
                    session: parse_session(session)?,
                    epoch: Epoch::new(parse_number(epoch)?),
                    step: StepNumber::new(parse_number(step)?),
                    stage: parse_stage(stage)?,
                },
            )),
            ["unheard", coordinator, client, event] => Ok(Subject::Unheard(
                CoordinatorId::new(*coordinator)?,
                UnheardEvent { client: parse_number(client)?, event: parse_number(event)? },
            )),
            _ => Err(unknown()),
        }
    }
}

/// An event that nobody heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnheardEvent {
    /// The client, by the coordinator's own count.
    pub client: u64,
    /// The event, counted per client.
    pub event: u64,
}

/// A step that nobody heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostStep {
    /// The session.
    pub session: SessionId,
    /// Fencing number.
    pub epoch: Epoch,
    /// Number of the step.
    pub step: StepNumber,
    /// Stage that the step was for.
    pub stage: StageIndex,
}

/// A parsed subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// Public requests.
    Prompt,
    /// Public durable requests.
    Job,
    /// Events of a durable request.
    Result(RequestId),
    /// Asks everybody to announce itself.
    Probe,
    /// Ends a request.
    Cancel(RequestId),
    /// Forward messages for a worker.
    Step(StageIndex, WorkerId),
    /// Parts of large forward messages for a worker.
    Bulk(StageIndex, WorkerId),
    /// Control requests for a worker.
    Control(StageIndex, WorkerId),
    /// Head rows for a coordinator.
    Head(CoordinatorId),
    /// A step that nobody heard.
    Lost(CoordinatorId, LostStep),
    /// An event that nobody heard.
    Unheard(CoordinatorId, UnheardEvent),
    /// Announcements of a worker.
    Worker(StageIndex, WorkerId),
    /// Announcements of a coordinator.
    Coordinator(CoordinatorId),
}

/// Why a subject is not one of a model's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubjectError {
    /// No subject of this model has this form.
    #[error("subject {subject:?} is none of this model's")]
    Unknown {
        /// The subject.
        subject: String,
    },
    /// A token is not a valid id.
    #[error("subject token is not valid")]
    Id(#[from] IdError),
    /// A token is not a number.
    #[error("subject token is not a number")]
    Number(#[source] ParseIntError),
    /// A number is not written as it is built here.
    #[error("subject token {token:?} is not in the form of its number")]
    NumberForm {
        /// The token.
        token: String,
    },
}

fn parse_stage(token: &str) -> Result<StageIndex, SubjectError> {
    parse_number(token).map(StageIndex::new)
}

/// Reads a number in the one form in which it is written: no sign, no leading zero.
fn parse_number<T: FromStr<Err = ParseIntError> + ToString>(
    token: &str,
) -> Result<T, SubjectError> {
    let number: T = token.parse().map_err(SubjectError::Number)?;
    if number.to_string() == token {
        Ok(number)
    } else {
        Err(SubjectError::NumberForm { token: token.to_owned() })
    }
}

/// Reads a session in its one form: 16 small hexadecimal digits.
fn parse_session(token: &str) -> Result<SessionId, SubjectError> {
    let number = u64::from_str_radix(token, 16).map_err(SubjectError::Number)?;
    let session = SessionId::from_u64(number);
    if session.to_string() == token {
        Ok(session)
    } else {
        Err(SubjectError::NumberForm { token: token.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_of_a_subject_is_found() {
        let model = ModelName::new("m-1").expect("a valid name");
        let subjects = Subjects::new(&model);
        let worker = WorkerId::random(StageIndex::FIRST);
        let found = Subjects::of(&subjects.worker(StageIndex::FIRST, &worker)).expect("ours");
        assert_eq!(found, subjects);
        for other in
            ["", "stagebus.v1", "stagebus.v1.m", "other.v1.m.prompt", "stagebus.v1..prompt"]
        {
            assert!(Subjects::of(other).is_err(), "{other}");
        }
    }
}
