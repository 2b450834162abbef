//! Large messages that stand in nobody's way.
//!
//! A message of a megabyte takes 0.4 s of a link of 20 Mbit/s, and whatever is behind it waits. So
//! large messages travel in parts, each of which is acknowledged, and hardly more parts are on their
//! way than the way holds anyway ([`lane`]). Messages to one subject arrive in the order in which they
//! were given; what is lost on the way stays lost, and is found missing as any other message is.
//!
//! ```text
//! BulkSender ─ queue ─▶ task (lanes) ─ parts ─▶ broker ─▶ task (assembly) ─ queue ─▶ BulkReceiver
//!                            ◀────────── acknowledgements ──────────┘
//! ```
//! Give both ends a connection of their own ([`Bus`]): on a shared one, steps would wait in the same
//! socket. The tasks end with their connection; the sender's also when the last clone of
//! [`BulkSender`] is gone and everything has arrived.

mod assembly;
mod lane;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use stagebus_schemas::codec;
use stagebus_schemas::messages::bulk::Part;
use stagebus_schemas::version::MessageVersion;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::sleep_until;

pub use assembly::BulkDelivery;

use crate::connection::Bus;
use crate::error::{PublishError, SubscribeError};
use crate::subscription::{Delivery, Subscription};
use assembly::Assembly;
use lane::{Lane, NextPart, Transfer};

/// Messages received and not taken yet; more are not acknowledged until there is room.
const RECEIVED: usize = 8;

/// Messages that wait for the sender's task; more are refused.
const GIVEN: usize = 4096;

/// Losses that nobody has taken yet.
const LOSSES: usize = 1024;

/// A way without anything to carry is forgotten after this time, and what was learnt of it.
const FORGOTTEN: Duration = Duration::from_secs(300);

/// A message to send.
pub struct Bulk {
    /// Where to.
    pub subject: String,
    /// Its reply subject.
    pub reply: Option<String>,
    /// The bytes.
    pub payload: Bytes,
    /// Called once all of it is acknowledged; dropped if it is lost. Must not block.
    pub on_arrival: Box<dyn FnOnce() + Send>,
}

impl std::fmt::Debug for Bulk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let n_bytes = self.payload.len();
        f.debug_struct("Bulk").field("subject", &self.subject).field("n_bytes", &n_bytes).finish()
    }
}

/// The sending end.
#[derive(Debug, Clone)]
pub struct BulkSender {
    queue: mpsc::Sender<Given>,
    room: Arc<Semaphore>,
    capacity_bytes: u32,
}

/// Where messages come out that did not arrive. The sender's task ends when this is dropped.
#[derive(Debug)]
pub struct BulkLosses {
    replies: mpsc::Receiver<String>,
    _task: JoinSet<()>,
}

/// A message that holds its room until it has arrived or is lost.
#[derive(Debug)]
struct Given {
    bulk: Bulk,
    _room: OwnedSemaphorePermit,
}

impl BulkSender {
    /// Starts the task on a connection. Messages of `capacity_bytes` may wait for it and be on
    /// their way.
    ///
    /// # Errors
    /// [`SubscribeError`]: acknowledgements cannot be heard.
    pub async fn start(
        bus: Bus,
        capacity_bytes: u32,
    ) -> Result<(Self, BulkLosses), SubscribeError> {
        let (queue, given) = mpsc::channel(GIVEN);
        let (losses, replies) = mpsc::channel(LOSSES);
        let inbox = bus.new_inbox();
        let acknowledgements = bus.subscribe(&format!("{inbox}.*.*")).await?;
        let carrier = Carrier {
            bus,
            inbox,
            lanes: HashMap::new(),
            under_way: HashMap::new(),
            next_id: RandomState::new().build_hasher().finish(),
            losses,
        };
        let mut task = JoinSet::new();
        task.spawn(carrier.run(given, acknowledgements));
        let room = Arc::new(Semaphore::new(capacity_bytes as usize));
        Ok((Self { queue, room, capacity_bytes }, BulkLosses { replies, _task: task }))
    }

    /// Gives a message to the task.
    ///
    /// # Errors
    /// [`PublishError::BulkFull`] if too many wait, [`PublishError::Closed`] if the task has ended.
    pub fn send(&self, bulk: Bulk) -> Result<(), PublishError> {
        let full = || PublishError::BulkFull { capacity_bytes: self.capacity_bytes };
        let n_bytes = u32::try_from(bulk.payload.len()).map_err(|_too_large| full())?;
        let room = Arc::clone(&self.room);
        let room = room.try_acquire_many_owned(n_bytes).map_err(|_none_left| full())?;
        self.queue.try_send(Given { bulk, _room: room }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => full(),
            mpsc::error::TrySendError::Closed(_) => PublishError::Closed,
        })
    }
}

impl BulkLosses {
    /// Waits for the reply subject of a message that did not arrive; `None` when the task has
    /// ended.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<String> {
        self.replies.recv().await
    }
}

/// The receiving end. Its task ends when this is dropped.
#[derive(Debug)]
pub struct BulkReceiver {
    messages: mpsc::Receiver<BulkDelivery>,
    _task: JoinSet<()>,
}

impl BulkReceiver {
    /// Listens on a subject.
    ///
    /// # Errors
    /// [`SubscribeError`].
    pub async fn subscribe(bus: Bus, subject: &str) -> Result<Self, SubscribeError> {
        let parts = bus.subscribe(subject).await?;
        let (sender, messages) = mpsc::channel(RECEIVED);
        let mut task = JoinSet::new();
        task.spawn(receive(bus, parts, sender));
        Ok(Self { messages, _task: task })
    }

    /// Waits for the next whole message; `None` when the connection has ended.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<BulkDelivery> {
        self.messages.recv().await
    }
}

async fn receive(bus: Bus, mut parts: Subscription, messages: mpsc::Sender<BulkDelivery>) {
    let mut assembly = Assembly::default();
    while let Some(delivery) = parts.next().await {
        let part: Part = match delivery.decode() {
            Ok(part) => part,
            Err(error) => {
                tracing::warn!(subject = delivery.subject(), %error, "part of a message not decoded");
                continue;
            }
        };
        if let Some(whole) = assembly.add(part, Instant::now())
            && messages.send(whole).await.is_err()
        {
            return;
        }
        let Some(reply) = delivery.reply() else { continue };
        if let Err(error) = bus.publish_bytes(reply, None, Bytes::new()).await {
            tracing::debug!(%error, "part was not acknowledged");
        }
    }
}

/// The sender's task.
struct Carrier {
    bus: Bus,
    /// Acknowledgements go to `<inbox>.<transfer>.<index>`.
    inbox: String,
    /// By subject, with the time of their last use.
    lanes: HashMap<String, (Lane, Instant)>,
    /// The messages in the lanes.
    under_way: HashMap<u64, Given>,
    next_id: u64,
    losses: mpsc::Sender<String>,
}

impl Carrier {
    async fn run(mut self, mut given: mpsc::Receiver<Given>, mut heard: Subscription) {
        let mut goes_on = true;
        while goes_on || !self.under_way.is_empty() {
            let lanes = || self.lanes.values().map(|(lane, _)| lane);
            let deadline = lanes().filter_map(Lane::deadline).min();
            let next_part = lanes().filter_map(Lane::next_part_at).min();
            tokio::select! {
                message = given.recv(), if goes_on => match message {
                    Some(message) => self.take(message),
                    None => goes_on = false,
                },
                delivery = heard.next() => match delivery {
                    Some(delivery) => self.acknowledged(&delivery),
                    None => return,
                },
                () = at(deadline) => self.expire(),
                () = at(next_part) => {}
            }
            self.send_parts().await;
        }
    }

    fn take(&mut self, given: Given) {
        let now = Instant::now();
        self.lanes.retain(|_, (lane, used)| {
            !lane.is_idle() || now.saturating_duration_since(*used) < FORGOTTEN
        });
        self.next_id = self.next_id.wrapping_add(1);
        let Bulk { subject, reply, payload, .. } = &given.bulk;
        let (lane, used) = self.lanes.entry(subject.clone()).or_insert_with(|| (Lane::new(), now));
        *used = now;
        let (id, reply, payload) = (self.next_id, reply.clone(), payload.clone());
        lane.push(Transfer { id, reply, payload });
        self.under_way.insert(id, given);
    }

    fn acknowledged(&mut self, delivery: &Delivery) {
        let place = delivery.subject().strip_prefix(&self.inbox).and_then(place);
        let Some((transfer, index)) = place else { return };
        let Some(given) = self.under_way.get(&transfer) else { return };
        let subject = given.bulk.subject.clone();
        if delivery.no_responders {
            return self.give_up(&subject, "nobody hears it");
        }
        let Some((lane, _)) = self.lanes.get_mut(&subject) else { return };
        for arrived in lane.acknowledged(transfer, index, Instant::now()) {
            if let Some(given) = self.under_way.remove(&arrived) {
                (given.bulk.on_arrival)();
            }
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        let is_late = |lane: &Lane| lane.deadline().is_some_and(|deadline| deadline <= now);
        let late = self.lanes.iter().filter(|(_, (lane, _))| is_late(lane));
        for subject in late.map(|(subject, _)| subject.clone()).collect::<Vec<_>>() {
            self.give_up(&subject, "no part is acknowledged");
        }
    }

    /// Drops what is on a way that leads nowhere, and tells which messages those were.
    fn give_up(&mut self, subject: &str, why: &str) {
        let Some((mut lane, _)) = self.lanes.remove(subject) else { return };
        let lost = lane.give_up();
        tracing::warn!(%subject, n_messages = lost.len(), why, "large messages were lost");
        for id in lost {
            let Some(reply) = self.under_way.remove(&id).and_then(|given| given.bulk.reply) else {
                continue;
            };
            if self.losses.try_send(reply).is_err() {
                // Whoever waits for the message finds it missing.
                tracing::warn!("a lost message was not told of");
            }
        }
    }

    /// Sends all parts that may leave.
    async fn send_parts(&mut self) {
        let mut failed = Vec::new();
        for (subject, (lane, _)) in &mut self.lanes {
            while let Some(part) = lane.next(Instant::now()) {
                let reply = format!("{}.{}.{}", self.inbox, part.transfer, part.index);
                let sent = match codec::encode(&message(part)) {
                    Ok(bytes) => self.bus.publish_with_reply(subject, &reply, bytes.into()).await,
                    Err(error) => Err(error.into()),
                };
                if let Err(error) = sent {
                    failed.push((subject.clone(), error));
                    break;
                }
            }
        }
        for (subject, error) in failed {
            self.give_up(&subject, &error.to_string());
        }
    }
}

fn message(part: NextPart) -> Part {
    let NextPart { transfer, index, n_parts, reply, data } = part;
    Part { version: MessageVersion::CURRENT, transfer, index, n_parts, reply, data }
}

/// Transfer and index of `.<transfer>.<index>`.
fn place(suffix: &str) -> Option<(u64, u32)> {
    let (transfer, index) = suffix.strip_prefix('.')?.split_once('.')?;
    Some((transfer.parse().ok()?, index.parse().ok()?))
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
