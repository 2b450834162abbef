//! JetStream's own requests, with one way to fail.

use std::time::Duration;

use async_nats::jetstream::context::{ContextBuilder, PublishErrorKind, RequestErrorKind};
use async_nats::jetstream::message::{PublishMessage, StreamMessage};
use async_nats::jetstream::publish::PublishAck;
use async_nats::jetstream::response::Response;
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use async_nats::jetstream::{Context, ErrorCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::connection::Bus;
use crate::error::PublishError;
use crate::events::is_answer_inbox;
use crate::violation::{Operation, Violation};

type Source = Box<dyn std::error::Error + Send + Sync>;

/// How long JetStream may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What the subjects of JetStream's requests begin with.
const API: &str = "$JS.API.";

/// Why JetStream did not do what it was asked for.
#[derive(Debug)]
pub(crate) enum ApiError {
    /// The broker runs without JetStream.
    NoJetStream,
    /// No answer came.
    NoAnswer { subject: String, timeout: Duration },
    /// The broker's permissions forbid the request, or its answers.
    Forbidden(Violation),
    /// There is no such stream.
    NoStream { subject: String },
    /// The message that should be the last one is another one.
    WrongLast { subject: String },
    /// JetStream refused.
    Refused { subject: String, code: u64, source: async_nats::jetstream::Error },
    /// The request could not be made, or its answer not be read.
    Request { subject: String, source: Source },
    /// The message was not sent.
    Publish(PublishError),
}

/// The JetStream of a connection.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    pub(crate) context: Context,
    bus: Bus,
    /// How long it may take to answer.
    timeout: Duration,
}

impl Api {
    pub(crate) fn new(bus: &Bus) -> Self {
        Self::with_timeout(bus, TIMEOUT)
    }

    /// The same with another time to answer, for messages that are large or wait behind others.
    pub(crate) fn with_timeout(bus: &Bus, timeout: Duration) -> Self {
        let context = ContextBuilder::new().timeout(timeout).ack_timeout(timeout);
        Self { context: context.build(bus.client.clone()), bus: bus.clone(), timeout }
    }

    /// Waits for an answer, or for the broker's word that this role may not ask.
    async fn unless_forbidden<T>(
        &self,
        subject: &str,
        answer: impl Future<Output = T>,
    ) -> Result<T, ApiError> {
        let mut refusals = self.bus.refusals();
        if let Some(violation) = self.bus.signals.answers_refused() {
            return Err(ApiError::Forbidden(violation));
        }
        let concerns = |violation: &Violation| {
            let refused = violation.subject.as_str();
            violation.operation == Operation::Publish
                && refused.strip_prefix(API).unwrap_or(refused) == subject
                || is_answer_inbox(violation)
        };
        tokio::select! {
            answer = answer => Ok(answer),
            violation = refusals.of(concerns) => Err(ApiError::Forbidden(violation)),
        }
    }

    /// Sends a request; `Err(Refused)` holds what JetStream says.
    pub(crate) async fn request<T: DeserializeOwned>(
        &self,
        subject: &str,
        payload: &impl Serialize,
    ) -> Result<T, ApiError> {
        let answer = self.context.request::<_, _, Response<T>>(subject.to_owned(), payload);
        match self.unless_forbidden(subject, answer).await? {
            Ok(Response::Ok(value)) => Ok(value),
            Ok(Response::Err { error }) => Err(refused(subject, error)),
            Err(error) => Err(match error.kind() {
                RequestErrorKind::NoResponders => ApiError::NoJetStream,
                RequestErrorKind::TimedOut => no_answer(subject, self.timeout),
                _ => ApiError::Request { subject: subject.to_owned(), source: Box::new(error) },
            }),
        }
    }

    /// Stores a message and waits for the word that it is stored.
    pub(crate) async fn publish(
        &self,
        subject: &str,
        message: PublishMessage,
    ) -> Result<PublishAck, ApiError> {
        let stored = async {
            match self.context.send_publish(subject.to_owned(), message).await {
                Ok(sent) => sent.await,
                Err(error) => Err(error),
            }
        };
        let stored = self.unless_forbidden(subject, stored).await?;
        stored.map_err(|error| self.publish_error(subject, error))
    }

    /// Classifies why a message is not stored, or not known to be.
    pub(crate) fn publish_error(
        &self,
        subject: &str,
        error: async_nats::jetstream::context::PublishError,
    ) -> ApiError {
        match error.kind() {
            PublishErrorKind::StreamNotFound => ApiError::NoStream { subject: subject.to_owned() },
            PublishErrorKind::WrongLastSequence => {
                ApiError::WrongLast { subject: subject.to_owned() }
            }
            PublishErrorKind::TimedOut => no_answer(subject, self.timeout),
            PublishErrorKind::MaxPayloadExceeded => {
                let limit = self.context.client().max_payload();
                ApiError::Publish(PublishError::PayloadTooLarge { bytes: limit, limit })
            }
            PublishErrorKind::BrokenPipe => ApiError::Publish(PublishError::Closed),
            PublishErrorKind::WrongLastMessageId
            | PublishErrorKind::MaxAckPending
            | PublishErrorKind::Other => {
                use std::error::Error as _;
                let said = error.source().and_then(|source| source.downcast_ref());
                match said {
                    Some(said) => refused(subject, Clone::clone(said)),
                    None => {
                        ApiError::Request { subject: subject.to_owned(), source: Box::new(error) }
                    }
                }
            }
        }
    }

    /// The last message on a subject of a stream; nothing if there is none.
    pub(crate) async fn last(
        &self,
        stream: &str,
        subject: &str,
    ) -> Result<Option<StreamMessage>, ApiError> {
        let failed = |source: Source| ApiError::Request { subject: subject.to_owned(), source };
        let stream = self.context.get_stream_no_info(stream).await;
        let stream = stream.map_err(|error| failed(Box::new(error)))?;
        match stream.get_last_raw_message_by_subject(subject).await {
            Ok(message) => Ok(Some(message)),
            Err(error) => match error.kind() {
                LastRawMessageErrorKind::NoMessageFound => Ok(None),
                LastRawMessageErrorKind::JetStream(said) => Err(refused(subject, said)),
                LastRawMessageErrorKind::InvalidSubject | LastRawMessageErrorKind::Other => {
                    Err(failed(Box::new(error)))
                }
            },
        }
    }
}

fn refused(subject: &str, error: async_nats::jetstream::Error) -> ApiError {
    match error.error_code() {
        ErrorCode::JETSTREAM_NOT_ENABLED | ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT => {
            ApiError::NoJetStream
        }
        ErrorCode::STREAM_NOT_FOUND => ApiError::NoStream { subject: subject.to_owned() },
        code => ApiError::Refused { subject: subject.to_owned(), code: code.0, source: error },
    }
}

fn no_answer(subject: &str, timeout: Duration) -> ApiError {
    ApiError::NoAnswer { subject: subject.to_owned(), timeout }
}
