//! Durable requests on JetStream: a work queue of jobs, and a stream with the events of each.
//!
//! ```text
//! client ── job ──▶ STAGEBUS_JOBS_<model> ──▶ one coordinator (explicit acknowledgement)
//! client ◀── STAGEBUS_RESULTS_<model> ◀── result.<request> ── that coordinator
//! ```
//! A job leaves the queue when it is acknowledged, which its coordinator does after the last event
//! is stored. Each event names the one before it; the broker refuses an event of a coordinator
//! that has been overtaken by another one.

mod delivery;
mod error;
mod results;
mod streams;
mod submit;

use std::time::Duration;

use async_nats::jetstream::consumer::{Consumer, pull};
use async_nats::jetstream::message::{PublishMessage, StreamMessage};
use futures::StreamExt as _;
use stagebus_schemas::cloud_events::PublicMessage;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::subjects::Subjects;

pub use delivery::{JobDelivery, JobTime};
pub use error::JobError;
pub use results::{Results, StoredEvent};
pub use submit::Submitted;

use crate::connection::Bus;
use crate::error::PublishError;
use crate::events::BusEvent;
use crate::jetstream::{Api, ApiError};
use crate::publish::public_headers;

/// Header that tells in which delivery of the job an event was stored.
const DELIVERY: &str = "Stagebus-Delivery";

/// Header with the name of an event that nobody else uses.
const EVENT_NAME: &str = "Stagebus-Event";

/// How jobs and their events are kept and handed out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobLimits {
    /// A job whose coordinator is silent for this long goes to another one.
    pub ack_wait: Duration,
    /// Jobs that wait or run; more are refused.
    pub max_jobs: u64,
    /// Largest job, in bytes.
    pub max_job_bytes: u32,
    /// How long events are kept, and how long an id is known as taken.
    pub keep: Duration,
    /// Memory for events on the broker's disk, in bytes; the oldest give way.
    pub keep_bytes: u64,
}

/// The queue and the events of one model, for its coordinators.
#[derive(Debug, Clone)]
pub struct JobStore {
    bus: Bus,
    api: Api,
    subjects: Subjects,
    limits: JobLimits,
    consumer: Consumer<pull::Config>,
}

/// One event to append to the events of a job.
#[derive(Debug, Clone)]
pub struct NewEvent {
    /// The encoded event.
    pub message: PublicMessage,
    /// Sequence of the event before it; 0 for the first.
    pub after: u64,
    /// Delivery of the job that it comes from.
    pub delivery: u64,
    /// Name of the event that nobody else uses, so that storing it again stores nothing.
    pub name: String,
}

impl JobStore {
    /// Makes the streams, or checks those that are there and gives them these limits.
    ///
    /// # Errors
    /// [`JobError::NoJetStream`], [`JobError::NoAnswer`], [`JobError::Mismatch`],
    /// [`JobError::Refused`].
    pub async fn open(bus: &Bus, subjects: &Subjects, limits: JobLimits) -> Result<Self, JobError> {
        let api = Api::new(bus);
        let consumer = streams::ensure(&api, subjects, &limits).await?;
        Ok(Self { bus: bus.clone(), api, subjects: subjects.clone(), limits, consumer })
    }

    /// Makes the streams again if they are gone.
    ///
    /// # Errors
    /// As [`JobStore::open`].
    pub async fn reopen(&mut self) -> Result<(), JobError> {
        self.consumer = streams::ensure(&self.api, &self.subjects, &self.limits).await?;
        Ok(())
    }

    /// Waits up to `wait` for one job. The next one is not fetched with it: what a coordinator
    /// holds and does not run would wait for that coordinator's death.
    ///
    /// # Errors
    /// [`JobError::Pull`]: the streams may be gone.
    ///
    /// # Cancel safety
    /// A job that is on its way when the future is dropped is delivered again after
    /// [`JobLimits::ack_wait`].
    pub async fn pull(&self, wait: Duration) -> Result<Option<JobDelivery>, JobError> {
        let mut events = self.bus.events();
        let batch = self.consumer.batch().max_messages(1).expires(wait).messages().await;
        let mut batch = batch.map_err(|error| JobError::Pull { source: Box::new(error) })?;
        let pulled = loop {
            tokio::select! {
                pulled = batch.next() => break pulled,
                // The broker forgets the question when the connection breaks.
                Some(event) = events.next() => if event == BusEvent::Connected {
                    return Ok(None);
                },
            }
        };
        match pulled {
            None => Ok(None),
            Some(Ok(message)) => JobDelivery::read(message).map(Some),
            Some(Err(source)) => Err(JobError::Pull { source }),
        }
    }

    /// Reads the events of a job from the first one on; `None` if there are none.
    ///
    /// # Errors
    /// As [`Bus::results`].
    pub async fn results(&self, request: &RequestId) -> Result<Option<Results>, JobError> {
        let (stream, subject) = (self.subjects.results_stream(), self.subjects.result(request));
        if self.api.last(&stream, &subject).await?.is_none() {
            return Ok(None);
        }
        Results::open(&self.bus, &self.api, &self.subjects, request).await.map(Some)
    }

    /// Appends an event to those of a job and returns its sequence.
    ///
    /// # Errors
    /// [`JobError::Fenced`]: another coordinator has written since, the job is its own now.
    /// [`JobError::NoAnswer`], [`JobError::Publish`], [`JobError::Refused`]: it may be stored or
    /// not; appending the same event again is safe.
    pub async fn append(&self, request: &RequestId, event: NewEvent) -> Result<u64, JobError> {
        let limit = self.bus.max_payload();
        let bytes = event.message.payload.len() + event.message.attribute_bytes();
        if bytes > limit {
            return Err(PublishError::PayloadTooLarge { bytes, limit }.into());
        }
        let message = PublishMessage::build()
            .headers(public_headers(&event.message))
            .payload(event.message.payload)
            .header(DELIVERY, event.delivery.to_string().as_str())
            .header(EVENT_NAME, event.name.as_str())
            .expected_last_subject_sequence(event.after);
        let subject = self.subjects.result(request);
        let fenced: JobError = match self.api.publish(&subject, message).await {
            Ok(stored) => return Ok(stored.sequence),
            Err(error @ ApiError::WrongLast { .. }) => error.into(),
            Err(error) => return Err(error.into()),
        };
        // The event in the way may be this one: it was stored and the word of that was lost.
        let last = self.api.last(&self.subjects.results_stream(), &subject).await?;
        let is_this = |message: &StreamMessage| {
            message.headers.get(EVENT_NAME).is_some_and(|name| name.as_str() == event.name)
        };
        last.filter(is_this).map(|message| message.sequence).ok_or(fenced)
    }

    /// Tells whether a request was cancelled after its job came into the queue.
    ///
    /// # Errors
    /// [`JobError::NoAnswer`], [`JobError::NoJetStream`], [`JobError::Refused`].
    pub async fn is_cancelled(
        &self,
        request: &RequestId,
        since: JobTime,
    ) -> Result<bool, JobError> {
        let stream = self.subjects.results_stream();
        let cancelled = self.api.last(&stream, &self.subjects.cancel(request)).await?;
        Ok(cancelled.is_some_and(|message| JobTime(message.time) > since))
    }
}
