//! Why shard sets on the broker cannot be stored or read.

use std::time::Duration;

use async_nats::jetstream::ErrorCode;
use stagebus_schemas::ids::ModelName;

use crate::error::PublishError;
use crate::jetstream::ApiError;
use crate::violation::Violation;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Errors of JetStream that say that there is no more room.
const FULL: [ErrorCode; 6] = [
    ErrorCode::ACCOUNT_RESOURCES_EXCEEDED,
    ErrorCode::INSUFFICIENT_RESOURCES,
    ErrorCode::MEMORY_RESOURCES_EXCEEDED,
    ErrorCode::STORAGE_RESOURCES_EXCEEDED,
    ErrorCode::STREAM_MAX_STREAM_BYTES_EXCEEDED,
    ErrorCode::STREAM_STORE_FAILED,
];

/// Why an operation on a model's bucket failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The broker runs without JetStream.
    #[error(
        "the broker has no JetStream, which keeps shard sets: add a jetstream block to its \
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
    #[error("the shard sets of this model are not open to these credentials")]
    Forbidden(#[from] Violation),
    /// Nothing was ever stored for the model.
    #[error("the broker has no shard set of model {model}: store one with `stagebus push`")]
    NoBucket {
        /// The model.
        model: ModelName,
    },
    /// A bucket of our name is another one than ours.
    #[error("stream {stream} has {field} {found}, expected {expected}: remove it or correct it")]
    Mismatch {
        /// The stream behind the bucket.
        stream: String,
        /// What differs.
        field: &'static str,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// The broker has no more room.
    #[error(
        "the broker has no room for {object}: raise max_file_store in its configuration, or remove \
         what is not needed with `stagebus models remove`"
    )]
    Full {
        /// What should be stored.
        object: String,
        /// JetStream's words.
        #[source]
        source: async_nats::jetstream::Error,
    },
    /// What the broker says of an object is not valid.
    #[error("what the broker says of an object on {subject} is not valid")]
    Info {
        /// Where it stands.
        subject: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// An object lacks what every object of ours has.
    #[error("object {object} has no valid {field}: it was not stored by `stagebus push`")]
    Object {
        /// Its name.
        object: String,
        /// What it lacks.
        field: &'static str,
    },
    /// A part of an object is not there.
    #[error(
        "part {expected} of {object} is not on the broker, {}: remove the shard set and push it again",
        found.map_or_else(|| "nothing follows".to_owned(), |found| format!("part {found} follows"))
    )]
    MissingPart {
        /// The object.
        object: String,
        /// The part that was due.
        expected: u64,
        /// The part that came instead.
        found: Option<u64>,
    },
    /// A part has another size than its place demands.
    #[error("part {part} of {object} has {found} bytes, expected {expected}")]
    PartSize {
        /// The object.
        object: String,
        /// The part.
        part: u64,
        /// Its size.
        found: u64,
        /// What it should be.
        expected: u64,
    },
    /// The broker has another number of parts than were stored.
    #[error("the broker has {found} parts of {object}, {expected} were stored: push it again")]
    Parts {
        /// The object.
        object: String,
        /// Parts that should be there.
        expected: u64,
        /// Parts that are there.
        found: u64,
    },
    /// Nothing moved for too long.
    #[error(
        "nothing of {object} has moved for {waited:?}: the broker is away, or the way to it too slow"
    )]
    Stalled {
        /// The object.
        object: String,
        /// How long was waited.
        waited: Duration,
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
    /// The broker answered a question for stored messages with a status that is not expected.
    #[error("the broker answered {subject} with status {status} {description:?}")]
    Status {
        /// Subject of the request.
        subject: String,
        /// The status.
        status: u16,
        /// What it says about it.
        description: String,
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
    /// A message was not sent.
    #[error("message was not sent")]
    Publish(#[from] PublishError),
}

impl StoreError {
    /// Whether it may be otherwise a moment later: the broker is away, or comes back.
    pub(super) fn is_passing(&self) -> bool {
        matches!(
            self,
            Self::NoAnswer { .. }
                | Self::NoJetStream
                | Self::Request { .. }
                | Self::Publish(PublishError::Disconnected { .. })
        )
    }
}

/// Whether an error of JetStream says that there is no more room.
pub(super) fn is_full(code: u64) -> bool {
    FULL.iter().any(|full| full.0 == code)
}

impl From<ApiError> for StoreError {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::NoJetStream => Self::NoJetStream,
            ApiError::NoAnswer { subject, timeout } => Self::NoAnswer { subject, timeout },
            ApiError::Forbidden(violation) => Self::Forbidden(violation),
            ApiError::NoStream { subject } => {
                Self::Request { subject, source: "there is no stream for it".into() }
            }
            ApiError::WrongLast { subject } => {
                Self::Request { subject, source: "another message is the last one".into() }
            }
            ApiError::Refused { subject, code, source } => Self::Refused { subject, code, source },
            ApiError::Request { subject, source } => Self::Request { subject, source },
            ApiError::Publish(error) => Self::Publish(error),
        }
    }
}
