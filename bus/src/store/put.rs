//! Storing a file: many parts under way, in one order.
//!
//! Each part says which message stands before it, so the broker takes them in order or not at all:
//! the parts that it has are always the first ones, each once, even if two store the same file at
//! the same time. After a break the broker is asked which part it has last, and what it lacks is sent
//! again. Every part also has a name of its own: one that was still on its way when the broker was
//! asked counts as the same.

use std::collections::VecDeque;
use std::time::Duration;

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::{PublishAckFuture, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::error::StoreError;
use super::{LastPart, ModelStore, NewObject, StoredObject, n_parts};
use crate::error::PublishError;
use crate::events::{BusEvent, BusEvents};
use crate::jetstream::{Api, ApiError};

/// Parts under way, 4 MiB in all: more than any link here holds, and a window that a link of 1 Mbit/s
/// empties within [`ACK_TIMEOUT`].
const WINDOW: usize = 16;

/// How long the word that a part is stored may take.
const ACK_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause before a broker that is not ready is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// How long the broker may be away.
const PATIENCE: Duration = Duration::from_secs(300);

/// Stores the parts of a file, over breaks of the connection and ends of the broker.
#[derive(Debug)]
pub struct ObjectWriter {
    store: ModelStore,
    api: Api,
    object: NewObject,
    /// Subject of the parts.
    subject: String,
    /// Name of this attempt, in the names of the parts.
    attempt: String,
    events: BusEvents,
    /// Parts whose storing is not known yet, in order.
    waiting: VecDeque<Waiting>,
    /// Parts that are known to be stored.
    n_stored: u64,
    /// The part that the caller gives next.
    next: u64,
    /// What must stand before the part that is sent next.
    before: Before,
    /// When a part was last stored.
    moved: Instant,
}

/// What stands before a part.
#[derive(Debug, Clone, Copy)]
enum Before {
    /// The part before it, sent by this writer as the stream's last message.
    Ours,
    /// The content's last message, by its sequence; 0 for none.
    Stored { sequence: u64 },
}

#[derive(Debug)]
struct Waiting {
    bytes: Bytes,
    /// Absent if it could not be sent.
    stored: Option<PublishAckFuture>,
}

impl ObjectWriter {
    pub(super) async fn open(store: &ModelStore, object: NewObject) -> Result<Self, StoreError> {
        let (n_stored, sequence) = match store.last_part(&object.content).await? {
            None => (0, 0),
            Some(LastPart { index: Some(index), sequence }) if index < n_parts(object.bytes) => {
                (index + 1, sequence)
            }
            Some(_) => {
                store.remove_content(&object.content).await?;
                (0, 0)
            }
        };
        Ok(Self {
            api: Api::with_timeout(&store.bus, ACK_TIMEOUT),
            subject: store.bucket.parts(&object.content),
            attempt: store.bus.new_inbox().rsplit('.').next().unwrap_or_default().to_owned(),
            events: store.bus.events(),
            store: store.clone(),
            object,
            waiting: VecDeque::with_capacity(WINDOW),
            n_stored,
            next: n_stored,
            before: Before::Stored { sequence },
            moved: Instant::now(),
        })
    }

    /// The part that [`ObjectWriter::write`] takes next.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.next
    }

    /// Parts that the broker has.
    #[must_use]
    pub fn n_stored(&self) -> u64 {
        self.n_stored
    }

    /// Sends the next part; waits while too many are under way.
    ///
    /// # Errors
    /// [`StoreError::Full`], [`StoreError::Forbidden`], [`StoreError::NoBucket`] (it was removed
    /// meanwhile), [`StoreError::Stalled`], [`StoreError::Parts`], [`StoreError::Refused`].
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), StoreError> {
        if self.waiting.is_empty() {
            // The time in which nobody gave a part does not count.
            self.moved = Instant::now();
        }
        while self.waiting.len() >= WINDOW {
            self.settle().await?;
        }
        if self.next < self.n_stored {
            // Somebody else has stored it meanwhile, maybe while this one waited.
            self.next += 1;
            return Ok(());
        }
        let stored = self.send(self.next, bytes.clone()).await?;
        self.waiting.push_back(Waiting { bytes, stored });
        self.next += 1;
        Ok(())
    }

    /// Waits until all parts are stored; then the object appears.
    ///
    /// # Errors
    /// As [`ObjectWriter::write`]; [`StoreError::Parts`] if not all parts were given.
    pub async fn finish(mut self) -> Result<StoredObject, StoreError> {
        while !self.waiting.is_empty() {
            self.settle().await?;
        }
        let expected = n_parts(self.object.bytes);
        let (found, _) = self.stored_when_back().await?;
        if found != expected {
            return Err(StoreError::Parts { object: self.object.name, expected, found });
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            // Saying it twice changes nothing.
            match self.store.announce(&self.object).await {
                Err(error) if error.is_passing() && Instant::now() < deadline => {
                    sleep(ASK_AGAIN).await;
                }
                outcome => return outcome,
            }
        }
    }

    /// Hands a part to the connection; nothing comes back if that stands still.
    async fn send(
        &mut self,
        index: u64,
        bytes: Bytes,
    ) -> Result<Option<PublishAckFuture>, StoreError> {
        let id = |index: u64| format!("{}-{index}", self.attempt);
        let mut message = PublishMessage::build().payload(bytes).message_id(id(index));
        message = match self.before {
            Before::Ours => message.expected_last_message_id(id(index - 1)),
            Before::Stored { sequence } => message.expected_last_subject_sequence(sequence),
        };
        // Sent or not: without this part the broker takes none of those that follow.
        self.before = Before::Ours;
        match self.api.context.send_publish(self.subject.clone(), message).await {
            Ok(stored) => Ok(Some(stored)),
            Err(error) if error.kind() == PublishErrorKind::TimedOut => Ok(None),
            Err(error) => {
                let error = self.api.publish_error(&self.subject, error);
                Err(self.store.concerning(&self.object.name, error))
            }
        }
    }

    /// Waits for the word about the oldest part under way.
    async fn settle(&mut self) -> Result<(), StoreError> {
        let Some(oldest) = self.waiting.front_mut() else { return Ok(()) };
        let Some(stored) = oldest.stored.take() else { return self.resume().await };
        let outcome = tokio::select! {
            stored = stored.into_future() => stored,
            broken = broken(&mut self.events, &self.subject) => {
                broken?;
                return self.resume().await;
            }
        };
        let error = match outcome {
            Ok(_stored) => {
                self.waiting.pop_front();
                self.n_stored += 1;
                self.moved = Instant::now();
                return Ok(());
            }
            Err(error) => error,
        };
        match error.kind() {
            // A part before it is not stored, or no word came of it.
            PublishErrorKind::WrongLastMessageId
            | PublishErrorKind::WrongLastSequence
            | PublishErrorKind::TimedOut
            | PublishErrorKind::BrokenPipe => self.resume().await,
            _ => match self.api.publish_error(&self.subject, error) {
                ApiError::Refused { code, .. } if code == ErrorCode::CLUSTER_NOT_AVAILABLE.0 => {
                    self.resume().await
                }
                error => Err(self.store.concerning(&self.object.name, error)),
            },
        }
    }

    /// Asks what the broker has and sends the rest again.
    async fn resume(&mut self) -> Result<(), StoreError> {
        if self.moved.elapsed() > PATIENCE {
            return Err(self.stalled());
        }
        let (mut found, mut sequence) = self.stored_when_back().await?;
        if found == self.n_stored {
            // Another one stores at the same time, or the broker is not ready.
            sleep(ASK_AGAIN).await;
            (found, sequence) = self.stored_when_back().await?;
        }
        if found < self.n_stored {
            let (object, expected) = (self.object.name.clone(), self.n_stored);
            return Err(StoreError::Parts { object, expected, found });
        }
        if found > self.n_stored {
            self.moved = Instant::now();
        }
        for _ in self.n_stored..found {
            self.waiting.pop_front();
        }
        self.n_stored = found;
        self.before = Before::Stored { sequence };
        for at in 0..self.waiting.len() {
            let (index, bytes) = (found + at as u64, self.waiting[at].bytes.clone());
            self.waiting[at].stored = self.send(index, bytes).await?;
        }
        Ok(())
    }

    /// How many parts the broker has, and the sequence of the last one, once it is there.
    async fn stored_when_back(&self) -> Result<(u64, u64), StoreError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let connected = self.store.bus.connected(deadline).await;
            connected.map_err(|_passed| self.stalled())?;
            match self.store.last_part(&self.object.content).await {
                Ok(None) => return Ok((0, 0)),
                Ok(Some(LastPart { index: Some(index), sequence })) => {
                    return Ok((index + 1, sequence));
                }
                Ok(Some(LastPart { index: None, .. })) => {
                    let object = self.object.name.clone();
                    return Err(StoreError::Object { object, field: "part" });
                }
                Err(error) if error.is_passing() && Instant::now() < deadline => {
                    sleep(ASK_AGAIN).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn stalled(&self) -> StoreError {
        StoreError::Stalled { object: self.object.name.clone(), waited: PATIENCE }
    }
}

/// Waits until the connection was made again: what was under way may be lost.
///
/// # Errors
/// The connection is closed, or may not store.
async fn broken(events: &mut BusEvents, subject: &str) -> Result<(), StoreError> {
    loop {
        match events.next().await {
            Some(BusEvent::Disconnected | BusEvent::Missed(_)) => return Ok(()),
            Some(BusEvent::PermissionViolation(violation)) if violation.subject == subject => {
                return Err(violation.into());
            }
            None | Some(BusEvent::Closed) => return Err(PublishError::Closed.into()),
            Some(_) => {}
        }
    }
}
