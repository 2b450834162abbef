//! A request that is answered by a stream of events: the client's side of a prompt.

use std::time::Duration;

use bytes::Bytes;
use stagebus_schemas::cloud_events::{self, PublicMessage};
use stagebus_schemas::codec::{self, ContentType};
use stagebus_schemas::messages::public::{Event, PromptRequest};
use stagebus_schemas::trace::TraceContext;

use crate::connection::Bus;
use crate::error::{PublishError, StreamError};
use crate::subscription::{Delivery, Subscription};
use crate::violation::{Operation, Refusals, Violation};

/// Silence after which the coordinator of an accepted request counts as gone: it says something
/// every second, and may starve for a while on a busy machine.
const COORDINATOR_SILENCE: Duration = Duration::from_secs(10);

/// The events that answer one prompt request, until the empty message.
#[derive(Debug)]
pub struct EventStream {
    subscription: Subscription,
    refusals: Refusals,
    inbox: String,
    subject: String,
    idle_timeout: Duration,
    next_token_event: u64,
    progress: Progress,
    ended: bool,
}

/// How far an answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    /// The request is sent.
    Sent,
    /// A coordinator has it.
    Accepted,
    /// The last event has come.
    Final,
}

impl Bus {
    /// Sends a prompt request as JSON and reads its events. `idle_timeout` is the longest wait for
    /// each event, the first one included.
    ///
    /// # Errors
    /// [`StreamError`], if the request cannot be sent.
    pub async fn prompt(
        &self,
        subject: &str,
        request: &PromptRequest,
        idle_timeout: Duration,
    ) -> Result<EventStream, StreamError> {
        self.prompt_in_trace(subject, request, idle_timeout, None).await
    }

    /// The same as a part of a trace, which the coordinator and the workers of the request go on
    /// with.
    ///
    /// # Errors
    /// As [`Bus::prompt`].
    pub async fn prompt_in_trace(
        &self,
        subject: &str,
        request: &PromptRequest,
        idle_timeout: Duration,
        trace: Option<TraceContext>,
    ) -> Result<EventStream, StreamError> {
        let payload = codec::encode_public(ContentType::Json, request)
            .map_err(|error| StreamError::Publish(PublishError::Encode(error)))?;
        let message = PublicMessage::plain(ContentType::Json, payload.into());
        self.begin_stream(subject, message, idle_timeout, trace).await
    }

    /// Sends bytes on a prompt subject and reads the events that come back.
    ///
    /// # Errors
    /// [`StreamError`], if the request cannot be sent.
    pub async fn event_stream(
        &self,
        subject: &str,
        content_type: ContentType,
        payload: Bytes,
        idle_timeout: Duration,
    ) -> Result<EventStream, StreamError> {
        let message = PublicMessage::plain(content_type, payload);
        self.message_stream(subject, message, idle_timeout).await
    }

    /// Sends a message, which may be a CloudEvent, on a prompt subject and reads the events that
    /// come back, packed in whatever way.
    ///
    /// # Errors
    /// [`StreamError`], if the request cannot be sent.
    pub async fn message_stream(
        &self,
        subject: &str,
        message: PublicMessage,
        idle_timeout: Duration,
    ) -> Result<EventStream, StreamError> {
        self.begin_stream(subject, message, idle_timeout, None).await
    }

    async fn begin_stream(
        &self,
        subject: &str,
        message: PublicMessage,
        idle_timeout: Duration,
        trace: Option<TraceContext>,
    ) -> Result<EventStream, StreamError> {
        let inbox = self.new_inbox();
        let refusals = self.refusals();
        let subscription = self.subscribe(&inbox).await?;
        self.publish_in_trace(subject, &inbox, message, trace).await?;
        Ok(EventStream {
            subscription,
            refusals,
            inbox,
            subject: subject.to_owned(),
            idle_timeout,
            next_token_event: 0,
            progress: Progress::Sent,
            ended: false,
        })
    }
}

impl EventStream {
    /// Waits for the next event; `None` after the end of the stream. After a broken connection the
    /// coordinator sends the last events again: those that came before are left out.
    ///
    /// # Errors
    /// [`StreamError::NoResponders`] if no coordinator listens, [`StreamError::Forbidden`],
    /// [`StreamError::Idle`], [`StreamError::CoordinatorGone`] if an accepted request falls
    /// silent, [`StreamError::Gap`] if a token event is missing, [`StreamError::Unfinished`] if the
    /// stream
    /// ends without `done` or `error`, [`StreamError::Decode`], [`StreamError::Closed`].
    ///
    /// # Cancel safety
    /// No event is lost when the future is dropped; the idle time starts anew.
    pub async fn next(&mut self) -> Result<Option<Event>, StreamError> {
        loop {
            let Some(delivery) = self.next_raw().await? else {
                if self.progress == Progress::Final {
                    return Ok(None);
                }
                return Err(StreamError::Unfinished { subject: self.subject.clone() });
            };
            let event = cloud_events::decode_event(&delivery.public_headers(), &delivery.payload)?;
            if self.is_new(&event)? {
                return Ok(Some(event));
            }
        }
    }

    /// Notes an event and tells whether it comes for the first time.
    fn is_new(&mut self, event: &Event) -> Result<bool, StreamError> {
        let seen = match event {
            Event::Token { i, .. } => {
                let (expected, found) = (self.next_token_event, *i);
                if found > expected {
                    return Err(StreamError::Gap { expected, found });
                }
                self.next_token_event = expected.max(found + 1);
                found < expected
            }
            Event::Done { .. } | Event::Error { .. } => {
                std::mem::replace(&mut self.progress, Progress::Final) == Progress::Final
            }
            Event::Accepted { .. } => {
                let seen = self.progress != Progress::Sent;
                self.progress = self.progress.max(Progress::Accepted);
                seen
            }
            Event::Status { .. } => self.progress == Progress::Final,
        };
        Ok(!seen)
    }

    /// Waits for the next event as it came, without decoding it or looking for gaps; `None` after
    /// the empty message.
    ///
    /// # Errors
    /// [`StreamError::NoResponders`], [`StreamError::Forbidden`], [`StreamError::Idle`],
    /// [`StreamError::Closed`].
    ///
    /// # Cancel safety
    /// As [`EventStream::next`].
    pub async fn next_raw(&mut self) -> Result<Option<Delivery>, StreamError> {
        if self.ended {
            return Ok(None);
        }
        let timeout = match self.progress {
            Progress::Accepted => self.idle_timeout.min(COORDINATOR_SILENCE),
            Progress::Sent | Progress::Final => self.idle_timeout,
        };
        let concerns = |violation: &Violation| {
            let Violation { operation, subject } = violation;
            match operation {
                Operation::Publish => *subject == self.subject,
                Operation::Subscribe => *subject == self.inbox,
            }
        };
        let delivery = tokio::select! {
            delivery = tokio::time::timeout(timeout, self.subscription.next()) => delivery,
            violation = self.refusals.of(concerns) => {
                self.ended = true;
                let subject = self.subject.clone();
                return Err(StreamError::Forbidden { subject, violation });
            }
        };
        let Ok(delivery) = delivery else {
            return Err(if timeout < self.idle_timeout {
                StreamError::CoordinatorGone { timeout }
            } else {
                StreamError::Idle { subject: self.subject.clone(), timeout }
            });
        };
        let Some(delivery) = delivery else {
            return Err(StreamError::Closed);
        };
        if delivery.no_responders {
            self.ended = true;
            return Err(StreamError::NoResponders { subject: self.subject.clone() });
        }
        if delivery.payload.is_empty() {
            self.ended = true;
            return Ok(None);
        }
        Ok(Some(delivery))
    }
}
