//! Receiving.
#![expect(clippy::disallowed_methods, reason = "this crate is the owner of the NATS client")]

use async_nats::{HeaderMap, Message, StatusCode, Subject, Subscriber};
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use stagebus_schemas::cloud_events::PublicHeaders;
use stagebus_schemas::codec::{self, CodecError, ContentType};
use stagebus_schemas::trace::{TRACEPARENT, TraceContext};
use tokio::time::Instant;

use crate::connection::Bus;
use crate::error::SubscribeError;
use crate::publish::CONTENT_TYPE;
use crate::switch::{Address, AtEnd, Switch};

/// One message, from the broker or from another connection of this process.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// The bytes.
    pub payload: Bytes,
    /// True: nobody listens on the subject that was published to, and this is the broker's
    /// answer, or that of the [`Switch`], with an empty payload.
    pub no_responders: bool,
    /// Status of an answer of the broker's own.
    pub(crate) status: Option<u16>,
    subject: Subject,
    reply: Option<Subject>,
    headers: Option<HeaderMap>,
}

impl Delivery {
    /// A message that does not come from the broker.
    pub(crate) fn direct(subject: &str, reply: Option<&str>, payload: Bytes) -> Self {
        Self {
            payload,
            no_responders: false,
            status: None,
            subject: subject.into(),
            reply: reply.map(Subject::from),
            headers: None,
        }
    }

    /// The same with headers.
    pub(crate) fn with_headers(self, headers: Option<HeaderMap>) -> Self {
        Self { headers, ..self }
    }

    /// The same with a subject for answers.
    pub(crate) fn with_reply(self, reply: &str) -> Self {
        Self { reply: Some(reply.into()), ..self }
    }

    /// The word that nobody listens, for the subject on which somebody waits for answers.
    pub(crate) fn nobody(reply: &str) -> Self {
        Self { no_responders: true, ..Self::direct(reply, None, Bytes::new()) }
    }

    /// Returns the subject that the message was published on.
    #[must_use]
    pub fn subject(&self) -> &str {
        self.subject.as_str()
    }

    /// Returns the subject for answers.
    #[must_use]
    pub fn reply(&self) -> Option<&str> {
        self.reply.as_ref().map(Subject::as_str)
    }

    /// Returns the value of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.as_ref()?.get(name).map(async_nats::HeaderValue::as_str)
    }

    /// Returns the `Content-Type` header.
    #[must_use]
    pub fn content_type(&self) -> Option<&str> {
        self.header(CONTENT_TYPE)
    }

    /// Reads the headers that say what a public message is.
    #[must_use]
    pub fn public_headers(&self) -> PublicHeaders<'_> {
        read_headers(self.headers.as_ref())
    }

    /// Returns the span in which the message was sent; nothing if the header `traceparent`, in
    /// whatever case its name is, is absent or cannot be read.
    #[must_use]
    pub fn trace(&self) -> Option<TraceContext> {
        read_trace(self.headers.as_ref())
    }

    /// Tells the encoding of a public message.
    #[must_use]
    pub fn content(&self) -> ContentType {
        self.public_headers().content(&self.payload)
    }

    /// Decodes an internal message.
    ///
    /// # Errors
    /// As [`codec::decode`].
    pub fn decode<M: codec::Message>(&self) -> Result<M, CodecError> {
        codec::decode(&self.payload)
    }
}

impl From<Message> for Delivery {
    fn from(message: Message) -> Self {
        Self {
            no_responders: message.status == Some(StatusCode::NO_RESPONDERS),
            status: message.status.map(|status| status.as_u16()),
            payload: message.payload,
            subject: message.subject,
            reply: message.reply,
            headers: message.headers,
        }
    }
}

/// The headers of a message that say what it is.
pub(crate) fn read_headers(headers: Option<&HeaderMap>) -> PublicHeaders<'_> {
    let all = headers.into_iter().flat_map(HeaderMap::iter);
    PublicHeaders::read(all.filter_map(|(name, values)| {
        let name: &str = name.as_ref();
        Some((name, values.first()?.as_str()))
    }))
}

/// The span in which a message was sent.
pub(crate) fn read_trace(headers: Option<&HeaderMap>) -> Option<TraceContext> {
    // Libraries may write the names of headers as HTTP does.
    let is_it = |name: &str| name.eq_ignore_ascii_case(TRACEPARENT);
    let (_, values) = headers?.iter().find(|(name, _)| is_it((*name).as_ref()))?;
    values.first()?.as_str().parse().ok()
}

/// A subscription; it ends when it is dropped.
#[derive(Debug)]
pub struct Subscription {
    subscriber: Subscriber,
    /// What other connections of this process send here.
    address: Option<Address>,
}

impl Subscription {
    /// Waits for the next message; `None` after [`Subscription::unsubscribe`] or [`Bus::drain`],
    /// once what was received before is read.
    ///
    /// # Cancel safety
    /// No message is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Delivery> {
        let Some(address) = &mut self.address else {
            return self.subscriber.next().await.map(Delivery::from);
        };
        tokio::select! {
            Some(delivery) = address.next() => Some(delivery),
            message = self.subscriber.next() => match message {
                Some(message) => Some(message.into()),
                None => address.try_next(),
            },
        }
    }

    /// Returns a message that is already here.
    pub fn try_next(&mut self) -> Option<Delivery> {
        let direct = self.address.as_mut().and_then(Address::try_next);
        direct.or_else(|| self.subscriber.next().now_or_never().flatten().map(Delivery::from))
    }

    /// Tells the broker to send no more; messages that are already here, or that the broker sent
    /// before it heard this, can still be read until [`Subscription::next`] returns `None`. For a
    /// queue group: the other members get what comes later.
    ///
    /// # Errors
    /// [`SubscribeError::Closed`].
    pub async fn drain(&mut self) -> Result<(), SubscribeError> {
        self.end_address();
        self.subscriber.drain().await.map_err(|_closed| SubscribeError::Closed)
    }

    /// Ends the subscription; messages that are already here can still be read.
    ///
    /// # Errors
    /// [`SubscribeError::Closed`].
    pub async fn unsubscribe(&mut self) -> Result<(), SubscribeError> {
        self.end_address();
        self.subscriber.unsubscribe().await.map_err(|_closed| SubscribeError::Closed)
    }

    fn end_address(&mut self) {
        if let Some(address) = &mut self.address {
            address.end();
        }
    }
}

impl Bus {
    /// Subscribes to a subject, wildcards allowed. What is published later on this same
    /// connection is received; for other connections the broker must have seen the subscription.
    ///
    /// # Errors
    /// [`SubscribeError`].
    pub async fn subscribe(&self, subject: &str) -> Result<Subscription, SubscribeError> {
        self.subscribe_bounded(subject, self.client.subscribe(subject.to_owned())).await
    }

    /// Subscribes to a subject on which nobody else listens: connections with the same
    /// [`Switch`] reach it without the broker, and hear of its end at once. A last
    /// token `>` stands for all subjects below; there are no other wildcards.
    ///
    /// # Errors
    /// [`SubscribeError`].
    pub async fn subscribe_address(&self, subject: &str) -> Result<Subscription, SubscribeError> {
        let mut subscription = self.subscribe(subject).await?;
        let listen =
            |switch: &Switch| switch.listen(subject, self.capacity, &self.signals, AtEnd::Remember);
        subscription.address = self.switch.as_ref().map(listen);
        Ok(subscription)
    }

    /// Subscribes as a member of a group: each message goes to one member.
    ///
    /// # Errors
    /// [`SubscribeError`].
    pub async fn queue_subscribe(
        &self,
        subject: &str,
        group: &str,
    ) -> Result<Subscription, SubscribeError> {
        let subscribe = self.client.queue_subscribe(subject.to_owned(), group.to_owned());
        self.subscribe_bounded(subject, subscribe).await
    }

    async fn subscribe_bounded<F>(
        &self,
        subject: &str,
        subscribe: F,
    ) -> Result<Subscription, SubscribeError>
    where
        F: Future<Output = Result<Subscriber, async_nats::SubscribeError>>,
    {
        let waited = self.publish_timeout;
        match tokio::time::timeout_at(Instant::now() + waited, subscribe).await {
            Ok(Ok(subscriber)) => Ok(Subscription { subscriber, address: None }),
            Ok(Err(error)) => Err(match error.kind() {
                async_nats::client::SubscribeErrorKind::InvalidSubject
                | async_nats::client::SubscribeErrorKind::InvalidQueueName => {
                    SubscribeError::Subject { subject: subject.to_owned() }
                }
                async_nats::client::SubscribeErrorKind::Other => SubscribeError::Closed,
            }),
            Err(_) => Err(SubscribeError::Disconnected { waited }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_found_in_whatever_case_the_header_came() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        for (name, value, is_there) in [
            ("traceparent", text, true),
            ("Traceparent", text, true),
            ("tracestate", text, false),
            ("traceparent", "00-none", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert("Content-Type", "application/json");
            headers.insert(name, value);
            let delivery = Delivery::direct("prompt", None, Bytes::new());
            let found = delivery.with_headers(Some(headers)).trace();
            assert_eq!(found, is_there.then(|| text.parse().expect("valid")), "{name}: {value}");
        }
    }
}
