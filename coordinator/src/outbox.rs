//! Events on their way to clients, and what the broker says of clients that do not listen.
//!
//! Every message to a client names a reply subject on which the broker answers at once if nobody
//! hears it. That is either a client that is gone, which ends its request, or one that is not back
//! yet after a broken connection. So the last messages to each client are kept: those that nobody
//! heard are sent again as soon as somebody listens, and after a broken connection of our own also
//! those that may have been on their way. A client may thus see an event twice, never out of order,
//! and leaves out what it has.
//!
//! Nothing here waits or does I/O: [`Outboxes`] returns what is to be published.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stagebus_schemas::cloud_events::PublicMessage;
use stagebus_schemas::subjects::UnheardEvent;

/// Messages kept for each client that listens: what a broker may hold when it dies.
const KEPT: usize = 256;

/// Messages kept for a client that does not listen; with more it counts as gone.
const MOST_UNHEARD: usize = 4096;

/// Pause before a client that did not listen is tried again.
const PAUSE: Duration = Duration::from_millis(50);

/// A message without the broker's answer for so long was heard.
const HEARD_AFTER: Duration = Duration::from_millis(100);

/// A client that is absent again so soon was never back.
const PROBATION: Duration = Duration::from_secs(1);

/// Messages sent within this time before the connection broke may not have arrived.
const ON_THEIR_WAY: Duration = Duration::from_secs(1);

/// How long the last messages of an ended stream are kept.
const LINGER: Duration = Duration::from_secs(2);

/// A message to publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outgoing {
    /// Where to.
    pub(crate) subject: Arc<str>,
    /// Its numbers, for the reply subject.
    pub(crate) number: UnheardEvent,
    /// The event; none for the empty message that ends a stream.
    pub(crate) event: Option<PublicMessage>,
}

/// All clients with messages that may have to be sent again.
#[derive(Debug)]
pub(crate) struct Outboxes {
    /// How long a client may be away.
    patience: Duration,
    n_clients: u64,
    boxes: HashMap<Arc<str>, Outbox>,
    subjects: HashMap<u64, Arc<str>>,
}

#[derive(Debug)]
struct Outbox {
    client: u64,
    /// The last messages, oldest first.
    kept: VecDeque<(Outgoing, Instant)>,
    n_messages: u64,
    absence: Option<Absence>,
    /// The last absence: when it began, and until when another one continues it.
    last_absence: Option<(Instant, Instant)>,
    ended_at: Option<Instant>,
}

/// A client that does not listen.
#[derive(Debug, Clone, Copy)]
struct Absence {
    since: Instant,
    /// First message that nobody heard.
    from: u64,
    /// When to do the next thing.
    due: Instant,
    /// Whether that message was sent again and nothing is known of it yet.
    tried: bool,
}

impl Outboxes {
    /// Makes an empty set; a client may be away for `patience`.
    pub(crate) fn new(patience: Duration) -> Self {
        Self { patience, n_clients: 0, boxes: HashMap::new(), subjects: HashMap::new() }
    }

    /// The numbers of the next message to a client.
    pub(crate) fn next_number(&mut self, subject: &Arc<str>) -> UnheardEvent {
        self.outbox(subject).next_number()
    }

    fn outbox(&mut self, subject: &Arc<str>) -> &mut Outbox {
        self.boxes.entry(Arc::clone(subject)).or_insert_with(|| {
            let client = self.n_clients;
            self.n_clients += 1;
            self.subjects.insert(client, Arc::clone(subject));
            Outbox::new(client)
        })
    }

    /// Takes a message and returns it if it is to be published now. `event` is absent for the
    /// empty message at the end.
    pub(crate) fn push(
        &mut self,
        subject: &Arc<str>,
        event: Option<PublicMessage>,
        now: Instant,
    ) -> Option<Outgoing> {
        let outbox = self.outbox(subject);
        let number = outbox.next_number();
        outbox.n_messages += 1;
        outbox.ended_at = event.is_none().then_some(now);
        let message = Outgoing { subject: Arc::clone(subject), number, event };
        if outbox.absence.is_none() {
            outbox.kept.drain(..outbox.kept.len().saturating_sub(KEPT - 1));
        }
        outbox.kept.push_back((message.clone(), now));
        outbox.absence.is_none().then_some(message)
    }

    /// Notes that nobody heard a message.
    pub(crate) fn unheard(&mut self, unheard: UnheardEvent, now: Instant) {
        let subject = self.subjects.get(&unheard.client);
        let Some(outbox) = subject.and_then(|subject| self.boxes.get_mut(subject)) else { return };
        let from = unheard.event;
        let absence = match outbox.absence {
            // The answer to another message that was sent before.
            Some(absence) if absence.tried && absence.from < from => absence,
            Some(absence) => {
                Absence { from: absence.from.min(from), due: now + PAUSE, tried: false, ..absence }
            }
            None => {
                let last = outbox.last_absence.filter(|(_, until)| now < *until);
                let since = last.map_or(now, |(since, _)| since);
                Absence { since, from, due: now + PAUSE, tried: false }
            }
        };
        outbox.absence = Some(absence);
    }

    /// Notes that the connection stands again, after it broke at `broken`: what was on its way is
    /// sent again.
    pub(crate) fn reconnected(&mut self, broken: Instant, now: Instant) {
        for outbox in self.boxes.values_mut() {
            let at_risk = |(_, at): &&(Outgoing, Instant)| *at + ON_THEIR_WAY >= broken;
            let first = outbox.kept.iter().find(at_risk).map(|(message, _)| message.number.event);
            let unheard = outbox.absence.map(|absence| absence.from);
            if let Some(from) = first.into_iter().chain(unheard).min() {
                outbox.absence = Some(Absence { since: now, from, due: now, tried: false });
                outbox.ended_at = outbox.ended_at.map(|_| now);
            }
        }
    }

    /// When [`Self::tick`] has something to do.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.boxes.values().filter_map(|outbox| outbox.deadline(self.patience)).min()
    }

    /// Does what is due: returns messages to publish, and clients that are gone.
    pub(crate) fn tick(&mut self, now: Instant) -> (Vec<Outgoing>, Vec<Arc<str>>) {
        let (mut messages, mut gone, mut over) = (Vec::new(), Vec::new(), Vec::new());
        for (subject, outbox) in &mut self.boxes {
            if outbox.deadline(self.patience).is_none_or(|due| due > now) {
                continue;
            }
            match outbox.absence {
                Some(absence) if outbox.is_gone(absence, self.patience, now) => {
                    gone.push(Arc::clone(subject));
                }
                Some(absence) if absence.due <= now => messages.extend(outbox.retry(absence, now)),
                Some(_) => {}
                None => over.push(Arc::clone(subject)),
            }
        }
        for subject in gone.iter().chain(&over) {
            if let Some(outbox) = self.boxes.remove(subject) {
                self.subjects.remove(&outbox.client);
            }
        }
        (messages, gone)
    }
}

impl Outbox {
    fn new(client: u64) -> Self {
        let kept = VecDeque::new();
        Self { client, kept, n_messages: 0, absence: None, last_absence: None, ended_at: None }
    }

    const fn next_number(&self) -> UnheardEvent {
        UnheardEvent { client: self.client, event: self.n_messages }
    }

    fn deadline(&self, patience: Duration) -> Option<Instant> {
        match self.absence {
            Some(absence) => Some(absence.due.min(absence.since + patience)),
            None => self.ended_at.map(|ended| ended + LINGER),
        }
    }

    fn is_gone(&self, absence: Absence, patience: Duration, now: Instant) -> bool {
        let first = self.kept.front().map(|(message, _)| message.number.event);
        now >= absence.since + patience
            || self.kept.len() > MOST_UNHEARD
            || first.is_none_or(|first| first > absence.from)
    }

    /// Sends the first unheard message again, or the rest once that one was heard.
    fn retry(&mut self, absence: Absence, now: Instant) -> Vec<Outgoing> {
        let unheard = |from: u64| {
            let kept = self.kept.iter().map(|(message, _)| message);
            kept.filter(move |message| message.number.event >= from)
        };
        if !absence.tried {
            let first = unheard(absence.from).next().cloned();
            self.absence = Some(Absence { tried: true, due: now + HEARD_AFTER, ..absence });
            return first.into_iter().collect();
        }
        let rest = unheard(absence.from + 1).cloned().collect();
        self.absence = None;
        self.last_absence = Some((absence.since, now + PROBATION));
        rest
    }
}

#[cfg(test)]
mod tests;
