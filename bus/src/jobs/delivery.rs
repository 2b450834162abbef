//! One job in the hands of a coordinator.

use std::time::Duration;

use async_nats::datetime::DateTime;
use async_nats::jetstream::{AckKind, Message};
use bytes::Bytes;
use stagebus_schemas::cloud_events::PublicHeaders;
use stagebus_schemas::trace::TraceContext;

use super::error::JobError;
use crate::subscription::{read_headers, read_trace};

/// When the broker stored something, by its own clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobTime(pub(super) DateTime);

/// A job that was delivered and is not acknowledged.
#[derive(Debug)]
pub struct JobDelivery {
    /// The request.
    pub payload: Bytes,
    /// Number of the job in the queue.
    pub sequence: u64,
    /// How often it was delivered, this time included.
    pub delivered: u64,
    /// When it came into the queue.
    pub published: JobTime,
    message: Message,
}

impl JobDelivery {
    pub(super) fn read(message: Message) -> Result<Self, JobError> {
        let info = message.info().map_err(|source| JobError::Form { source })?;
        Ok(Self {
            payload: message.payload.clone(),
            sequence: info.stream_sequence,
            delivered: u64::try_from(info.delivered).unwrap_or(1),
            published: JobTime(info.published),
            message,
        })
    }

    /// Reads the headers that say what the request is.
    #[must_use]
    pub fn public_headers(&self) -> PublicHeaders<'_> {
        read_headers(self.message.headers.as_ref())
    }

    /// Returns the span in which the job was sent, as [`Delivery::trace`](crate::Delivery::trace).
    #[must_use]
    pub fn trace(&self) -> Option<TraceContext> {
        read_trace(self.message.headers.as_ref())
    }

    /// Returns the id under which the sender wants to be known, if the request has none.
    #[must_use]
    pub fn message_id(&self) -> Option<&str> {
        self.header("Nats-Msg-Id")
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.message.headers.as_ref()?.get(name).map(async_nats::HeaderValue::as_str)
    }

    /// Says that the job is being worked on: the time after which it goes to another coordinator
    /// starts anew.
    ///
    /// # Errors
    /// [`JobError::Acknowledge`].
    pub async fn progress(&self) -> Result<(), JobError> {
        self.answer(AckKind::Progress).await
    }

    /// Takes the job out of the queue and waits for the word that it is out.
    ///
    /// # Errors
    /// [`JobError::Acknowledge`].
    pub async fn done(&self) -> Result<(), JobError> {
        let done = self.message.double_ack().await;
        done.map_err(|source| JobError::Acknowledge { source })
    }

    /// Gives the job back; it is delivered again after `delay`.
    ///
    /// # Errors
    /// [`JobError::Acknowledge`].
    pub async fn give_back(&self, delay: Duration) -> Result<(), JobError> {
        self.answer(AckKind::Nak(Some(delay))).await
    }

    async fn answer(&self, kind: AckKind) -> Result<(), JobError> {
        let sent = self.message.ack_with(kind).await;
        sent.map_err(|source| JobError::Acknowledge { source })
    }
}
