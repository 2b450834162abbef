//! A way past the broker for the connections of one process.
//!
//! A worker in its coordinator's process is at its side, however far the broker is from both. A
//! [`Switch`] knows the *addresses* of its process: subjects on which one subscription listens and
//! nobody else ([`Bus::subscribe_address`](crate::Bus::subscribe_address)). What a connection of
//! the same switch publishes there goes into that subscription and not to the broker, whether the
//! broker is there or not. Others reach an address through the broker, as any subject.
//!
//! What else a sender may rely on:
//! - Messages to an address keep their order.
//! - A full subscription drops the newest message, which counts as a loss on its connection.
//! - Where nobody listens any more, the sender hears it at once: an ended address is remembered,
//!   and the subject for answers gets a delivery with `no_responders`, also for messages that were
//!   not read in time.
//!
//! The lock is held for a look into the table and never across an await.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::events::Signals;
use crate::subscription::Delivery;

/// The addresses of a process; clones share them. See the module's description.
#[derive(Debug, Clone, Default)]
pub struct Switch {
    addresses: Arc<RwLock<Addresses>>,
}

impl PartialEq for Switch {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.addresses, &other.addresses)
    }
}

impl Eq for Switch {}

/// Who listens on an address; `None` when it has ended.
type Entry = Option<Listener>;

#[derive(Debug, Default)]
struct Addresses {
    /// By subject.
    exact: HashMap<String, Entry>,
    /// By beginning, for addresses that end in `>`; the dot before it is part of the beginning.
    below: Vec<(String, Entry)>,
}

#[derive(Debug, Clone)]
struct Listener {
    messages: mpsc::Sender<Delivery>,
    signals: Arc<Signals>,
}

/// What becomes of an address at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtEnd {
    /// It is remembered: nobody may take a message to it for one that is on its way.
    Remember,
    /// It is forgotten: its subject is never used again.
    Forget,
}

/// The listening side of an address, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Address {
    messages: mpsc::Receiver<Delivery>,
    switch: Switch,
    subject: String,
    at_end: AtEnd,
}

impl Switch {
    /// Makes a switch without addresses.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Listens on an address; `capacity` messages wait.
    pub(crate) fn listen(
        &self,
        subject: &str,
        capacity: usize,
        signals: &Arc<Signals>,
        at_end: AtEnd,
    ) -> Address {
        let (sender, messages) = mpsc::channel(capacity.max(1));
        let listener = Listener { messages: sender, signals: Arc::clone(signals) };
        self.change(|addresses| addresses.set(subject, Some(listener)));
        Address { messages, switch: self.clone(), subject: subject.to_owned(), at_end }
    }

    /// Tells whether a subject is an address of this process, or was one.
    pub(crate) fn has(&self, subject: &str) -> bool {
        self.find(subject).is_some()
    }

    /// Delivers a message to the address that it is for.
    ///
    /// # Errors
    /// Gives the message back if the broker has to see to it: it is for no address of this process,
    /// or for one that has ended and no address wants to hear that.
    #[expect(clippy::result_large_err, reason = "the message goes on to the broker")]
    pub(crate) fn pass(&self, delivery: Delivery) -> Result<(), Delivery> {
        let Some(entry) = self.find(delivery.subject()) else { return Err(delivery) };
        let Some(listener) = entry else { return self.tell_nobody(delivery) };
        match listener.messages.try_send(delivery) {
            Ok(()) => Ok(()),
            Err(TrySendError::Closed(delivery)) => self.tell_nobody(delivery),
            Err(TrySendError::Full(_dropped)) => {
                listener.signals.message_dropped();
                Ok(())
            }
        }
    }

    /// Tells the subject for answers that nobody listens.
    #[expect(clippy::result_large_err, reason = "the message goes on to the broker")]
    fn tell_nobody(&self, delivery: Delivery) -> Result<(), Delivery> {
        let told = delivery.reply().map(Delivery::nobody).and_then(|word| {
            let listener = self.find(word.subject())??;
            Some((listener.messages.try_send(word), listener))
        });
        match told {
            Some((Ok(()), _)) => Ok(()),
            Some((Err(TrySendError::Full(_)), listener)) => {
                listener.signals.message_dropped();
                Ok(())
            }
            Some((Err(TrySendError::Closed(_)), _)) | None => Err(delivery),
        }
    }

    fn find(&self, subject: &str) -> Option<Entry> {
        let addresses = self.addresses.read().unwrap_or_else(PoisonError::into_inner);
        let below = || {
            let mut all = addresses.below.iter();
            all.find(|(start, _)| subject.starts_with(start.as_str())).map(|(_, entry)| entry)
        };
        addresses.exact.get(subject).or_else(below).cloned()
    }

    fn change(&self, change: impl FnOnce(&mut Addresses)) {
        change(&mut self.addresses.write().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Addresses {
    fn set(&mut self, subject: &str, entry: Entry) {
        let Some(start) = subject.strip_suffix('>') else {
            self.exact.insert(subject.to_owned(), entry);
            return;
        };
        match self.below.iter_mut().find(|(known, _)| known == start) {
            Some((_, known)) => *known = entry,
            None => self.below.push((start.to_owned(), entry)),
        }
    }

    fn remove(&mut self, subject: &str) {
        match subject.strip_suffix('>') {
            None => drop(self.exact.remove(subject)),
            Some(start) => self.below.retain(|(known, _)| known != start),
        }
    }
}

impl Address {
    /// Waits for the next message; `None` at the end, once all is read.
    ///
    /// # Cancel safety
    /// No message is lost when the future is dropped.
    pub(crate) async fn next(&mut self) -> Option<Delivery> {
        self.messages.recv().await
    }

    /// Returns a message that is already here.
    pub(crate) fn try_next(&mut self) -> Option<Delivery> {
        self.messages.try_recv().ok()
    }

    /// Takes no more messages; those that are here can still be read.
    pub(crate) fn end(&mut self) {
        self.switch.change(|addresses| match self.at_end {
            AtEnd::Remember => addresses.set(&self.subject, None),
            AtEnd::Forget => addresses.remove(&self.subject),
        });
        self.messages.close();
    }
}

impl Drop for Address {
    fn drop(&mut self) {
        self.end();
        while let Some(unread) = self.try_next() {
            // Who has no address of its own here hears it from nobody, as with a broker that had
            // delivered the message.
            drop(self.switch.tell_nobody(unread));
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn listen(switch: &Switch, subject: &str, capacity: usize) -> Address {
        switch.listen(subject, capacity, &Arc::new(Signals::new()), AtEnd::Remember)
    }

    fn message(subject: &str, reply: Option<&str>, text: &'static str) -> Delivery {
        Delivery::direct(subject, reply, Bytes::from_static(text.as_bytes()))
    }

    fn texts(address: &mut Address) -> Vec<(String, Bytes, bool)> {
        let next = || address.try_next();
        std::iter::from_fn(next)
            .map(|d| (d.subject().to_owned(), d.payload, d.no_responders))
            .collect()
    }

    #[test]
    fn messages_to_an_address_keep_their_order_and_others_are_given_back() {
        let switch = Switch::new();
        let mut step = listen(&switch, "a.step", 8);
        let mut lost = listen(&switch, "lost.c.>", 8);
        for text in ["1", "2", "3"] {
            switch.pass(message("a.step", Some("lost.c.1"), text)).expect("an address");
        }
        switch.pass(message("lost.c.7.1", None, "x")).expect("an address");
        for other in ["a.steps", "a", "lost.c", "lost.d.1", "b"] {
            assert!(switch.pass(message(other, Some("lost.c.1"), "")).is_err(), "{other}");
        }
        let read: Vec<Bytes> = texts(&mut step).into_iter().map(|(_, text, _)| text).collect();
        assert_eq!(read, ["1", "2", "3"]);
        assert_eq!(texts(&mut lost), [("lost.c.7.1".to_owned(), "x".into(), false)]);
    }

    #[test]
    fn an_ended_address_is_told_at_once_also_of_what_it_did_not_read() {
        let switch = Switch::new();
        let mut lost = listen(&switch, "lost.>", 8);
        let step = listen(&switch, "a.step", 8);
        switch.pass(message("a.step", Some("lost.1"), "unread")).expect("an address");
        drop(step);
        switch.pass(message("a.step", Some("lost.2"), "late")).expect("told");
        let nobody = |subject: &str| (subject.to_owned(), Bytes::new(), true);
        assert_eq!(texts(&mut lost), [nobody("lost.1"), nobody("lost.2")]);
        // Nobody here wants to hear it: the broker's business.
        assert!(switch.pass(message("a.step", None, "")).is_err());
        assert!(switch.pass(message("a.step", Some("elsewhere"), "")).is_err());
        // It may come back.
        let mut step = listen(&switch, "a.step", 8);
        switch.pass(message("a.step", Some("lost.3"), "new")).expect("an address");
        assert_eq!(texts(&mut step).len(), 1);
    }

    #[test]
    fn a_full_address_drops_the_newest_and_counts_a_loss() {
        let (switch, signals) = (Switch::new(), Arc::new(Signals::new()));
        let mut step = switch.listen("a", 2, &signals, AtEnd::Remember);
        for text in ["1", "2", "3"] {
            switch.pass(message("a", None, text)).expect("an address");
        }
        assert_eq!((signals.losses(), signals.slow_consumers()), (1, 1));
        let read: Vec<Bytes> = texts(&mut step).into_iter().map(|(_, text, _)| text).collect();
        assert_eq!(read, ["1", "2"]);
    }

    #[test]
    fn an_address_for_one_answer_is_forgotten() {
        let (switch, signals) = (Switch::new(), Arc::new(Signals::new()));
        let inbox = switch.listen("in", 1, &signals, AtEnd::Forget);
        assert!(switch.has("in"));
        drop(inbox);
        assert!(!switch.has("in"));
    }
}
