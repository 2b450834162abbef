//! Sending. The fast path is one queue insertion: no flush, no copy of the payload.
#![expect(clippy::disallowed_methods, reason = "this crate is the owner of the NATS client")]

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use async_nats::client::PublishErrorKind;
use async_nats::{HeaderMap, PublishError as ClientPublishError};
use bytes::Bytes;
use stagebus_schemas::cloud_events::PublicMessage;
use stagebus_schemas::codec::{self, ContentType, Message};
use stagebus_schemas::trace::{TRACEPARENT, TraceContext};
use tokio::time::Instant;

use crate::connection::{Bus, DeadlinePassed};
use crate::error::PublishError;
use crate::subscription::Delivery;

pub(crate) const CONTENT_TYPE: &str = "Content-Type";

/// Room that the headers of a message in a trace take of the broker's limit, with some to spare.
const TRACE_HEADER_BYTES: usize = 256;

impl Bus {
    /// Publishes an internal message.
    ///
    /// Success means that the message is queued, not that anybody got it.
    ///
    /// # Errors
    /// [`PublishError`]; nothing was sent then.
    pub async fn publish<M: Message>(
        &self,
        subject: &str,
        message: &M,
    ) -> Result<(), PublishError> {
        self.publish_bytes(subject, None, codec::encode(message)?.into()).await
    }

    /// Publishes bytes, with a `Content-Type` header if one is given; an empty payload ends an
    /// event stream.
    ///
    /// # Errors
    /// [`PublishError`]; nothing was sent then.
    pub async fn publish_bytes(
        &self,
        subject: &str,
        content_type: Option<ContentType>,
        payload: Bytes,
    ) -> Result<(), PublishError> {
        let bytes = payload.len();
        match content_type.map(headers) {
            None => {
                let Err(payload) = self.switched(subject, None, payload)? else { return Ok(()) };
                let publish = self.client.publish(subject.to_owned(), payload);
                self.bounded(subject, bytes, publish).await
            }
            Some(headers) => {
                let publish =
                    self.client.publish_with_headers(subject.to_owned(), headers, payload);
                self.bounded(subject, bytes, publish).await
            }
        }
    }

    /// Publishes a message and names the subject on which the broker answers at once, with
    /// [`Delivery::no_responders`], if nobody listens.
    ///
    /// # Errors
    /// [`PublishError`]; nothing was sent then.
    pub async fn publish_with_reply(
        &self,
        subject: &str,
        reply: &str,
        payload: Bytes,
    ) -> Result<(), PublishError> {
        let bytes = payload.len();
        let Err(payload) = self.switched(subject, Some(reply), payload)? else { return Ok(()) };
        let publish = self.client.publish_with_reply(subject.to_owned(), reply.to_owned(), payload);
        self.bounded(subject, bytes, publish).await
    }

    /// Publishes a public message with its headers; `reply` is as in [`Bus::publish_with_reply`].
    ///
    /// # Errors
    /// [`PublishError`]; nothing was sent then.
    pub async fn publish_public(
        &self,
        subject: &str,
        reply: &str,
        message: PublicMessage,
    ) -> Result<(), PublishError> {
        self.publish_in_trace(subject, reply, message, None).await
    }

    /// The same as a part of a trace.
    pub(crate) async fn publish_in_trace(
        &self,
        subject: &str,
        reply: &str,
        message: PublicMessage,
        trace: Option<TraceContext>,
    ) -> Result<(), PublishError> {
        let bytes = message.payload.len();
        let trace = self.traced(trace, bytes + message.attribute_bytes());
        let mut headers = public_headers(&message);
        if let Some(trace) = trace {
            headers.insert(TRACEPARENT, trace.to_string());
        }
        let publish = self.client.publish_with_reply_and_headers(
            subject.to_owned(),
            reply.to_owned(),
            headers,
            message.payload,
        );
        self.bounded(subject, bytes, publish).await
    }

    /// The trace of a message, if there is room for it: a trace is not worth a message.
    pub(crate) fn traced(&self, trace: Option<TraceContext>, bytes: usize) -> Option<TraceContext> {
        trace.filter(|_| bytes + TRACE_HEADER_BYTES <= self.max_payload())
    }

    /// Answers a request with an internal message.
    ///
    /// # Errors
    /// [`PublishError::NoReply`] if the request has no reply subject; otherwise as
    /// [`Bus::publish`].
    pub async fn respond<M: Message>(
        &self,
        request: &Delivery,
        message: &M,
    ) -> Result<(), PublishError> {
        let Some(reply) = request.reply() else {
            return Err(PublishError::NoReply { subject: request.subject().to_owned() });
        };
        self.publish(reply, message).await
    }

    /// Sends past the broker, to an address of this process; gives the payload back if the subject
    /// is none. The broker's limit holds here too: a message that passes must pass everywhere.
    fn switched(
        &self,
        subject: &str,
        reply: Option<&str>,
        payload: Bytes,
    ) -> Result<Result<(), Bytes>, PublishError> {
        let Some(switch) = &self.switch else { return Ok(Err(payload)) };
        let (bytes, limit) = (payload.len(), self.max_payload());
        if bytes > limit {
            return Err(PublishError::PayloadTooLarge { bytes, limit });
        }
        let passed = switch.pass(Delivery::direct(subject, reply, payload));
        Ok(passed.map_err(|delivery| delivery.payload))
    }

    /// Checks the size, waits a bounded time for a connection and for room in its queue.
    async fn bounded<F>(&self, subject: &str, bytes: usize, publish: F) -> Result<(), PublishError>
    where
        F: Future<Output = Result<(), ClientPublishError>>,
    {
        let limit = self.max_payload();
        if bytes > limit {
            return Err(PublishError::PayloadTooLarge { bytes, limit });
        }
        match self.send(publish).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(match error.kind() {
                PublishErrorKind::MaxPayloadExceeded => {
                    PublishError::PayloadTooLarge { bytes, limit }
                }
                PublishErrorKind::InvalidSubject => {
                    PublishError::Subject { subject: subject.to_owned() }
                }
                PublishErrorKind::Send => PublishError::Closed,
            }),
            Err(DeadlinePassed) => Err(PublishError::Disconnected { waited: self.publish_timeout }),
        }
    }

    async fn send<T>(&self, publish: impl Future<Output = T>) -> Result<T, DeadlinePassed> {
        let mut publish = pin!(publish);
        // Nearly always there is a connection with room in its queue: no clock is read then.
        if self.is_connected()
            && let Poll::Ready(sent) = poll_fn(|cx| Poll::Ready(publish.as_mut().poll(cx))).await
        {
            return Ok(sent);
        }
        let deadline = Instant::now() + self.publish_timeout;
        // Queueing while the connection is away would deliver the message late, or lose it.
        self.connected(deadline).await?;
        tokio::time::timeout_at(deadline, publish).await.map_err(|_elapsed| DeadlinePassed)
    }
}

pub(crate) fn headers(content_type: ContentType) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, content_type.header());
    headers
}

/// Headers of a message that is a part of a trace.
pub(crate) fn trace_headers(trace: TraceContext) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(TRACEPARENT, trace.to_string());
    headers
}

/// The headers of a public message.
pub(crate) fn public_headers(message: &PublicMessage) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, message.content_type);
    for (name, value) in &message.attributes {
        headers.insert(*name, value.as_str());
    }
    headers
}
