//! Why a durable request, or its events, cannot be handled.

use std::time::Duration;

use stagebus_schemas::codec::CodecError;

use crate::error::PublishError;
use crate::jetstream::ApiError;
use crate::violation::Violation;

pub(super) type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why an operation on jobs failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The broker runs without JetStream.
    #[error(
        "the broker has no JetStream, which keeps jobs: add a jetstream block to its \
         configuration, as in nats.conf"
    )]
    NoJetStream,
    /// JetStream did not answer.
    #[error("JetStream gave no answer on {subject} within {timeout:?}: the broker is away or busy")]
    NoAnswer {
        /// Subject of the request.
        subject: String,
        /// How long was waited.
        timeout: Duration,
    },
    /// The broker's permissions forbid the request, or its answers.
    #[error("jobs are not permitted with these credentials")]
    Forbidden(#[from] Violation),
    /// Nobody has made the streams of this model.
    #[error("no stream takes {subject}: no coordinator of this model has its jobs enabled")]
    NoStream {
        /// Subject of the request.
        subject: String,
    },
    /// A stream of our name is another one than ours.
    #[error("stream {stream} has {field} {found}, expected {expected}: remove it or correct it")]
    Mismatch {
        /// The stream.
        stream: String,
        /// What differs.
        field: &'static str,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// The queue holds as many jobs as it may.
    #[error("the queue of {subject} is full")]
    QueueFull {
        /// Subject of the job.
        subject: String,
    },
    /// Another coordinator has written events of the same job.
    #[error("another coordinator has written on {subject}")]
    Fenced {
        /// Subject of the event.
        subject: String,
    },
    /// JetStream refused.
    #[error("JetStream refused {subject} with error {code}")]
    Refused {
        /// Subject of the request.
        subject: String,
        /// JetStream's own number.
        code: u64,
        /// Its words.
        #[source]
        source: async_nats::jetstream::Error,
    },
    /// A request to JetStream could not be made, or its answer not be read.
    #[error("JetStream cannot be asked on {subject}")]
    Request {
        /// Subject of the request.
        subject: String,
        /// Why.
        #[source]
        source: Source,
    },
    /// No job can be fetched.
    #[error("no job can be fetched")]
    Pull {
        /// Why.
        #[source]
        source: Source,
    },
    /// A job could not be acknowledged; it may be delivered again.
    #[error("a job could not be acknowledged")]
    Acknowledge {
        /// Why.
        #[source]
        source: Source,
    },
    /// The events cannot be read on.
    #[error("events of the job cannot be read")]
    Read {
        /// Why.
        #[source]
        source: Source,
    },
    /// No event came for too long.
    #[error("no event of the job within {timeout:?}")]
    Idle {
        /// How long was waited.
        timeout: Duration,
    },
    /// A message is not in the form of JetStream's.
    #[error("a message of JetStream cannot be understood")]
    Form {
        /// Why.
        #[source]
        source: Source,
    },
    /// An event or a request is not valid.
    #[error("message is not valid")]
    Codec(#[from] CodecError),
    /// The message was not sent.
    #[error("message was not sent")]
    Publish(#[from] PublishError),
}

impl From<ApiError> for JobError {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::NoJetStream => Self::NoJetStream,
            ApiError::NoAnswer { subject, timeout } => Self::NoAnswer { subject, timeout },
            ApiError::Forbidden(violation) => Self::Forbidden(violation),
            ApiError::NoStream { subject } => Self::NoStream { subject },
            ApiError::WrongLast { subject } => Self::Fenced { subject },
            ApiError::Refused { subject, code, source } => Self::Refused { subject, code, source },
            ApiError::Request { subject, source } => Self::Request { subject, source },
            ApiError::Publish(error) => Self::Publish(error),
        }
    }
}
