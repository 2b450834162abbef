//! Reading stored messages: batches that the broker sends on request, one after the other.
//!
//! A question names the sequence to start from. When the connection breaks, the broker has forgotten
//! the question: what was received before is still read, and the next question starts behind it. So
//! nothing that arrived is asked for again. A question that left while the connection broke may have
//! reached the broker or not; its answer is waited for a moment before it is asked anew.
#![expect(clippy::disallowed_methods, reason = "this crate is the owner of the NATS client")]

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::{Message, Subscriber};
use bytes::Bytes;
use futures::StreamExt as _;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until};

use super::error::StoreError;
use super::{MESSAGE_ID, ModelStore, SEQUENCE, StoredObject};
use crate::connection::Bus;
use crate::error::PublishError;
use crate::events::{BusEvent, BusEvents};
use crate::violation::Operation;

/// Bytes that one question asks for: what a broken connection loses at most, and what other traffic
/// of the connection waits for.
const BATCH_BYTES: u64 = 4 << 20;

/// Messages that one question asks for; they wait in the subscription, which holds more.
const BATCH_MESSAGES: u64 = 256;

/// How long the broker may be silent before it is asked anew: it may have lost the question.
const SILENCE: Duration = Duration::from_secs(30);

/// How long the answer to a question is waited for that left while the connection broke.
const DOUBTFUL: Duration = Duration::from_secs(2);

/// Pause before a broker that is not ready is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// How long nothing may come before reading fails.
const PATIENCE: Duration = Duration::from_secs(300);

/// Status of the message that ends a batch.
const END_OF_BATCH: u16 = 204;

/// Status that says that no message follows.
pub(super) const NO_MESSAGE: u16 = 404;

/// A stored message.
#[derive(Debug)]
pub(super) struct StoredMessage {
    pub(super) subject: String,
    pub(super) sequence: u64,
    /// Name under which its sender stored it.
    pub(super) id: Option<String>,
    pub(super) payload: Bytes,
}

/// The messages on some subjects of a bucket, in the order in which they were stored.
pub(super) struct Messages {
    store: ModelStore,
    filter: String,
    /// Subject of the questions.
    subject: String,
    /// Sequence of the last message that was read.
    after: u64,
    events: BusEvents,
    /// The question that stands.
    asked: Option<Asked>,
}

struct Asked {
    answers: Subscriber,
    /// The connection that its answers come on, by the client's count.
    connection: u64,
    /// Whether it may have been lost with the connection before that one.
    is_doubtful: bool,
    /// When it is asked anew if nothing comes.
    until: Instant,
}

/// What a message of the broker means for the reading.
enum Answer {
    Message(StoredMessage),
    /// The batch is over.
    End,
    /// No message follows.
    Last,
    /// The stream cannot be read now.
    NobodyThere,
}

impl std::fmt::Debug for Messages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Messages");
        shown.field("filter", &self.filter).field("after", &self.after).finish_non_exhaustive()
    }
}

impl Messages {
    pub(super) fn new(store: &ModelStore, filter: String, after: u64) -> Self {
        Self {
            subject: store.questions(),
            events: store.bus.events(),
            store: store.clone(),
            filter,
            after,
            asked: None,
        }
    }

    /// The next message; nothing when all are read. `what` is named if nothing comes for too long.
    ///
    /// # Cancel safety
    /// No message is lost when the future is dropped.
    pub(super) async fn next(&mut self, what: &str) -> Result<Option<StoredMessage>, StoreError> {
        let began = Instant::now();
        if let Some(asked) = &mut self.asked
            && !asked.is_doubtful
        {
            // The time in which nobody asked for a message does not count.
            asked.until = began + SILENCE;
        }
        loop {
            if began.elapsed() > PATIENCE {
                let object = what.to_owned();
                return Err(StoreError::Stalled { object, waited: PATIENCE });
            }
            let Some(asked) = &mut self.asked else {
                match self.ask().await {
                    Err(error) if error.is_passing() => sleep(ASK_AGAIN).await,
                    outcome => outcome?,
                }
                continue;
            };
            // What came before a break is read before the break is heard of.
            let answer = tokio::select! {
                biased;
                answer = asked.answers.next() => answer.ok_or(PublishError::Closed)?,
                event = self.events.next() => {
                    self.hear(event)?;
                    continue;
                }
                () = sleep_until(asked.until) => {
                    self.asked = None;
                    continue;
                }
            };
            match self.read(answer)? {
                Answer::Message(message) => return Ok(Some(message)),
                Answer::End => self.asked = None,
                Answer::Last => {
                    self.asked = None;
                    return Ok(None);
                }
                Answer::NobodyThere => {
                    self.asked = None;
                    // Says so if the stream is gone for good.
                    match self.store.request::<Value>("INFO", &json!({})).await {
                        Ok(_) => sleep(ASK_AGAIN).await,
                        Err(error) if error.is_passing() => sleep(ASK_AGAIN).await,
                        Err(error) => return Err(error),
                    }
                }
            }
        }
    }

    /// Asks for the messages after the last one that was read.
    async fn ask(&mut self) -> Result<(), StoreError> {
        let bus = &self.store.bus;
        let waited = bus.publish_timeout;
        let disconnected = || StoreError::from(PublishError::Disconnected { waited });
        let deadline = Instant::now() + waited;
        bus.connected(deadline).await.map_err(|_passed| disconnected())?;
        let question = json!({
            "seq": self.after + 1,
            "next_by_subj": self.filter,
            "batch": BATCH_MESSAGES,
            "max_bytes": BATCH_BYTES,
        });
        let payload = Bytes::from(question.to_string());
        let (inbox, before) = (bus.new_inbox(), n_connections(bus));
        let client = &bus.client;
        let send = async {
            let answers = client.subscribe(inbox.clone()).await;
            let answers = answers.map_err(|_closed| PublishError::Closed)?;
            let subject = self.subject.clone();
            let sent = client.publish_with_reply(subject, inbox, payload).await;
            sent.map_err(|_closed| PublishError::Closed)?;
            client.flush().await.map_err(|_closed| PublishError::Closed)?;
            Ok::<_, PublishError>(answers)
        };
        let answers = tokio::time::timeout_at(deadline, send).await;
        let answers = answers.map_err(|_elapsed| disconnected())??;
        let connection = n_connections(bus);
        let is_doubtful = before != connection;
        let until = Instant::now() + if is_doubtful { DOUBTFUL } else { SILENCE };
        self.asked = Some(Asked { answers, connection, is_doubtful, until });
        Ok(())
    }

    /// Drops the question if it went with the connection, and notices what is forbidden.
    fn hear(&mut self, event: Option<BusEvent>) -> Result<(), StoreError> {
        match event {
            None | Some(BusEvent::Closed) => Err(PublishError::Closed.into()),
            Some(BusEvent::PermissionViolation(violation)) => {
                let ours = match violation.operation {
                    Operation::Publish => violation.subject == self.subject,
                    Operation::Subscribe => violation.subject.starts_with("_INBOX"),
                };
                if ours { Err(violation.into()) } else { Ok(()) }
            }
            Some(_) => {
                let connection = n_connections(&self.store.bus);
                if self.asked.as_ref().is_some_and(|asked| asked.connection != connection) {
                    self.asked = None;
                }
                Ok(())
            }
        }
    }

    /// Reads one message of the broker.
    fn read(&mut self, answer: Message) -> Result<Answer, StoreError> {
        let number = |name: &str| header(&answer, name)?.parse::<u64>().ok();
        if let Some(status) = answer.status {
            return match status.as_u16() {
                503 => Ok(Answer::NobodyThere),
                NO_MESSAGE => Ok(Answer::Last),
                END_OF_BATCH if number("Nats-Num-Pending") == Some(0) => Ok(Answer::Last),
                END_OF_BATCH => Ok(Answer::End),
                status => Err(StoreError::Status {
                    subject: self.subject.clone(),
                    status,
                    description: answer.description.unwrap_or_default(),
                }),
            };
        }
        let sequence = number(SEQUENCE).ok_or_else(|| no_sequence(&self.subject))?;
        if number("Nats-Num-Pending").is_none() {
            // A broker that knows no batches answers with one message.
            self.asked = None;
        } else if let Some(asked) = &mut self.asked {
            asked.is_doubtful = false;
            asked.until = Instant::now() + SILENCE;
        }
        self.after = sequence;
        Ok(Answer::Message(StoredMessage {
            subject: header(&answer, "Nats-Subject").unwrap_or_default().to_owned(),
            sequence,
            id: header(&answer, MESSAGE_ID).map(str::to_owned),
            payload: answer.payload,
        }))
    }
}

/// The error of a stored message that is none.
pub(super) fn no_sequence(subject: &str) -> StoreError {
    let source = "a stored message came without its sequence".into();
    StoreError::Request { subject: subject.to_owned(), source }
}

/// The place of a part, which stands at the end of the name that its sender gave it.
pub(super) fn index_in(id: &str) -> Option<u64> {
    id.rsplit_once('-')?.1.parse().ok()
}

fn header<'a>(message: &'a Message, name: &str) -> Option<&'a str> {
    message.headers.as_ref()?.get(name).map(async_nats::HeaderValue::as_str)
}

/// How often the connection was made, by the client's own count, which rises before anything is sent
/// on the new one.
fn n_connections(bus: &Bus) -> u64 {
    bus.client.statistics().connects.load(Ordering::Relaxed)
}

/// A part of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its place, from 0.
    pub index: u64,
    /// Its sequence in the bucket: where to go on after it.
    pub sequence: u64,
    /// The bytes.
    pub bytes: Bytes,
}

/// Reads the parts of a file, over breaks of the connection and ends of the broker.
#[derive(Debug)]
pub struct ObjectReader {
    object: StoredObject,
    messages: Messages,
    /// The part that is due.
    next: u64,
    n_fetched: u64,
}

impl ObjectReader {
    pub(super) fn new(store: &ModelStore, object: StoredObject, part: u64, after: u64) -> Self {
        let filter = store.bucket.parts(&object.content);
        Self { messages: Messages::new(store, filter, after), object, next: part, n_fetched: 0 }
    }

    /// Parts that came from the broker, those included that were not needed.
    #[must_use]
    pub fn n_fetched(&self) -> u64 {
        self.n_fetched
    }

    /// The next part; nothing after the last one.
    ///
    /// # Errors
    /// [`StoreError::MissingPart`], [`StoreError::PartSize`], [`StoreError::NoBucket`] (it was
    /// removed meanwhile), [`StoreError::Stalled`], [`StoreError::Forbidden`].
    ///
    /// # Cancel safety
    /// No part is lost when the future is dropped.
    pub async fn next(&mut self) -> Result<Option<Part>, StoreError> {
        let StoredObject { name, bytes, part_bytes, .. } = &self.object;
        let left = bytes.saturating_sub(self.next.saturating_mul(*part_bytes));
        if left == 0 {
            return Ok(None);
        }
        let missing =
            |expected, found| StoreError::MissingPart { object: name.clone(), expected, found };
        loop {
            let message = self.messages.next(name).await?;
            let Some(message) = message else { return Err(missing(self.next, None)) };
            self.n_fetched += 1;
            match message.id.as_deref().and_then(index_in) {
                // What another one than ours stored twice.
                Some(place) if place < self.next => {}
                Some(place) if place == self.next => {
                    let (found, expected) = (message.payload.len() as u64, left.min(*part_bytes));
                    if found != expected {
                        let (object, part) = (name.clone(), place);
                        return Err(StoreError::PartSize { object, part, found, expected });
                    }
                    self.next += 1;
                    let StoredMessage { sequence, payload: bytes, .. } = message;
                    return Ok(Some(Part { index: place, sequence, bytes }));
                }
                found => return Err(missing(self.next, found)),
            }
        }
    }
}
