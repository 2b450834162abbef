//! What happens to the connection, and the counters that no reader can miss.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use async_nats::{ClientError, ConnectErrorKind, Event, ServerError};
use tokio::sync::{broadcast, watch};

use crate::violation::{Operation, Violation};

/// Events that wait for a slow reader; the oldest are dropped and told as
/// [`BusEvent::Missed`].
const EVENT_CAPACITY: usize = 64;

/// What happened to the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BusEvent {
    /// Connected, for the first time or again; subscriptions are in place.
    Connected,
    /// The connection broke; it is being made again. Messages in flight are lost.
    Disconnected,
    /// A subscription was full and dropped new messages. One event may stand for many drops.
    SlowConsumer,
    /// The broker will end soon: drain.
    LameDuck,
    /// The broker refused a publish or a subscription of ours. Nothing else tells it, the operation
    /// itself seems to succeed.
    PermissionViolation(Violation),
    /// The broker refuses our identity while reconnecting; it will not heal by itself.
    AuthRefused,
    /// An attempt to reconnect failed for another reason.
    ReconnectFailed(String),
    /// Another error that the broker reported.
    ServerError(String),
    /// The connection was drained and is gone.
    Closed,
    /// The reader was too slow and missed this many events.
    Missed(u64),
}

/// Reads the events of a connection from the moment of [`Bus::events`](crate::Bus::events).
#[derive(Debug)]
pub struct BusEvents {
    receiver: broadcast::Receiver<BusEvent>,
}

impl BusEvents {
    /// Waits for the next event; `None` when the connection and all its clones are gone.
    ///
    /// # Cancel safety
    /// No event is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<BusEvent> {
        match self.receiver.recv().await {
            Ok(event) => Some(event),
            Err(broadcast::error::RecvError::Lagged(n)) => Some(BusEvent::Missed(n)),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}

/// State shared between a connection's handles and its event callback.
#[derive(Debug)]
pub(crate) struct Signals {
    events: broadcast::Sender<BusEvent>,
    closed: watch::Sender<bool>,
    losses: AtomicU64,
    slow_consumers: AtomicU64,
    /// Times that it was made.
    connections: AtomicU64,
    /// The refusal of the subscription through which all answers to requests come, since the
    /// connection stands. The client subscribes once, so it is told once.
    answers_refused: Mutex<Option<Violation>>,
}

impl Signals {
    pub(crate) fn new() -> Self {
        Self {
            events: broadcast::Sender::new(EVENT_CAPACITY),
            closed: watch::Sender::new(false),
            losses: AtomicU64::new(0),
            slow_consumers: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            answers_refused: Mutex::new(None),
        }
    }

    pub(crate) fn subscribe(&self) -> BusEvents {
        BusEvents { receiver: self.events.subscribe() }
    }

    pub(crate) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    pub(crate) fn slow_consumers(&self) -> u64 {
        self.slow_consumers.load(Ordering::Acquire)
    }

    /// Times that the connection was made after the first.
    pub(crate) fn reconnects(&self) -> u64 {
        self.connections.load(Ordering::Acquire).saturating_sub(1)
    }

    /// Whether the broker refused the subscription that all answers to requests need.
    pub(crate) fn answers_refused(&self) -> Option<Violation> {
        self.answers_refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_answers_refused(&self, violation: Option<Violation>) {
        *self.answers_refused.lock().unwrap_or_else(PoisonError::into_inner) = violation;
    }

    /// Waits until the connection is drained.
    pub(crate) async fn closed(&self) {
        let mut closed = self.closed.subscribe();
        // The sender lives in `self`, so waiting cannot fail.
        drop(closed.wait_for(|closed| *closed).await);
    }

    /// A subscription was full and dropped a message that did not come from the broker.
    pub(crate) fn message_dropped(&self) {
        self.losses.fetch_add(1, Ordering::AcqRel);
        self.slow_consumers.fetch_add(1, Ordering::AcqRel);
        drop(self.events.send(BusEvent::SlowConsumer));
    }

    /// Takes in an event of the client; counters first, so that a reader woken by the event sees
    /// them.
    pub(crate) fn on_event(&self, event: Event) {
        let event = match event {
            Event::Connected => {
                self.connections.fetch_add(1, Ordering::AcqRel);
                self.set_answers_refused(None);
                BusEvent::Connected
            }
            Event::Disconnected => {
                self.losses.fetch_add(1, Ordering::AcqRel);
                BusEvent::Disconnected
            }
            Event::SlowConsumer(_) | Event::ServerError(ServerError::SlowConsumer(_)) => {
                self.losses.fetch_add(1, Ordering::AcqRel);
                self.slow_consumers.fetch_add(1, Ordering::AcqRel);
                BusEvent::SlowConsumer
            }
            Event::LameDuckMode => BusEvent::LameDuck,
            Event::Draining => return,
            Event::Closed => {
                self.closed.send_replace(true);
                BusEvent::Closed
            }
            Event::ServerError(ServerError::AuthorizationViolation) => BusEvent::AuthRefused,
            Event::ServerError(ServerError::Other(text)) => server_error(text),
            Event::ClientError(ClientError::Other(text)) if is_auth_refusal(&text) => {
                BusEvent::AuthRefused
            }
            Event::ClientError(error) => BusEvent::ReconnectFailed(error.to_string()),
        };
        if let BusEvent::PermissionViolation(violation) = &event
            && is_answer_inbox(violation)
        {
            self.set_answers_refused(Some(violation.clone()));
        }
        // Nobody may be listening; the counters hold what must not be missed.
        drop(self.events.send(event));
    }
}

/// Whether a violation is that of the client's subscription for answers, the only one of a
/// connection that ends in a wildcard below an inbox.
pub(crate) fn is_answer_inbox(violation: &Violation) -> bool {
    let Violation { operation, subject } = violation;
    *operation == Operation::Subscribe && subject.starts_with("_INBOX") && subject.ends_with(".*")
}

/// The broker's `-ERR` line has no code.
fn server_error(text: String) -> BusEvent {
    match Violation::parse(&text) {
        Some(violation) => BusEvent::PermissionViolation(violation),
        None => BusEvent::ServerError(text),
    }
}

/// The client passes on a failed attempt as the text of its error kind.
fn is_auth_refusal(text: &str) -> bool {
    [ConnectErrorKind::AuthorizationViolation, ConnectErrorKind::Authentication]
        .iter()
        .any(|kind| kind.to_string() == text)
}
