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

use super::error::{JobError, Source};
use crate::connection::Bus;
use crate::error::PublishError;
use crate::events::is_answer_inbox;
use crate::violation::{Operation, Violation};

/// How long JetStream may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What the subjects of JetStream's requests begin with.
const API: &str = "$JS.API.";

/// The JetStream of a connection.
#[derive(Debug, Clone)]
pub(super) struct Api {
    pub(super) context: Context,
    bus: Bus,
}

impl Api {
    pub(super) fn new(bus: &Bus) -> Self {
        let context =
            ContextBuilder::new().timeout(TIMEOUT).ack_timeout(TIMEOUT).build(bus.client.clone());
        Self { context, bus: bus.clone() }
    }

    /// Waits for an answer, or for the broker's word that this role may not ask.
    async fn unless_forbidden<T>(
        &self,
        subject: &str,
        answer: impl Future<Output = T>,
    ) -> Result<T, JobError> {
        let mut refusals = self.bus.refusals();
        if let Some(violation) = self.bus.signals.answers_refused() {
            return Err(violation.into());
        }
        let concerns = |violation: &Violation| {
            let refused = violation.subject.as_str();
            violation.operation == Operation::Publish
                && refused.strip_prefix(API).unwrap_or(refused) == subject
                || is_answer_inbox(violation)
        };
        tokio::select! {
            answer = answer => Ok(answer),
            violation = refusals.of(concerns) => Err(violation.into()),
        }
    }

    /// Sends a request; `Err(Refused)` holds what JetStream says.
    pub(super) async fn request<T: DeserializeOwned>(
        &self,
        subject: &str,
        payload: &impl Serialize,
    ) -> Result<T, JobError> {
        let answer = self.context.request::<_, _, Response<T>>(subject.to_owned(), payload);
        match self.unless_forbidden(subject, answer).await? {
            Ok(Response::Ok(value)) => Ok(value),
            Ok(Response::Err { error }) => Err(refused(subject, error)),
            Err(error) => Err(match error.kind() {
                RequestErrorKind::NoResponders => JobError::NoJetStream,
                RequestErrorKind::TimedOut => no_answer(subject),
                _ => JobError::Request { subject: subject.to_owned(), source: Box::new(error) },
            }),
        }
    }

    /// Stores a message and waits for the word that it is stored.
    pub(super) async fn publish(
        &self,
        subject: &str,
        message: PublishMessage,
    ) -> Result<PublishAck, JobError> {
        let stored = async {
            match self.context.send_publish(subject.to_owned(), message).await {
                Ok(sent) => sent.await,
                Err(error) => Err(error),
            }
        };
        let error = match self.unless_forbidden(subject, stored).await? {
            Ok(ack) => return Ok(ack),
            Err(error) => error,
        };
        Err(match error.kind() {
            PublishErrorKind::StreamNotFound => JobError::NoStream { subject: subject.to_owned() },
            PublishErrorKind::WrongLastSequence => JobError::Fenced { subject: subject.to_owned() },
            PublishErrorKind::TimedOut => no_answer(subject),
            PublishErrorKind::MaxPayloadExceeded => {
                let limit = self.context.client().max_payload();
                PublishError::PayloadTooLarge { bytes: limit, limit }.into()
            }
            PublishErrorKind::BrokenPipe => PublishError::Closed.into(),
            PublishErrorKind::WrongLastMessageId
            | PublishErrorKind::MaxAckPending
            | PublishErrorKind::Other => {
                use std::error::Error as _;
                let said = error.source().and_then(|source| source.downcast_ref());
                match said {
                    Some(said) => refused(subject, Clone::clone(said)),
                    None => {
                        JobError::Request { subject: subject.to_owned(), source: Box::new(error) }
                    }
                }
            }
        })
    }

    /// The last message on a subject of a stream; nothing if there is none.
    pub(super) async fn last(
        &self,
        stream: &str,
        subject: &str,
    ) -> Result<Option<StreamMessage>, JobError> {
        let failed = |source: Source| JobError::Request { subject: subject.to_owned(), source };
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

fn refused(subject: &str, error: async_nats::jetstream::Error) -> JobError {
    match error.error_code() {
        ErrorCode::JETSTREAM_NOT_ENABLED | ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT => {
            JobError::NoJetStream
        }
        ErrorCode::STREAM_NOT_FOUND => JobError::NoStream { subject: subject.to_owned() },
        code => JobError::Refused { subject: subject.to_owned(), code: code.0, source: error },
    }
}

fn no_answer(subject: &str) -> JobError {
    JobError::NoAnswer { subject: subject.to_owned(), timeout: TIMEOUT }
}
