//! What earlier deliveries of a job have stored of its answer.

use stagebus_bus::{JobError, Results, StoredEvent};
use stagebus_schemas::messages::public::Event;

/// The stored part of an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StoredAnswer {
    /// Whether the job was accepted.
    pub(crate) accepted: bool,
    /// Seed of its noise, if it draws tokens.
    pub(crate) seed: Option<u64>,
    /// Tokens that its events carry.
    pub(crate) tokens: Vec<u32>,
    /// Length of the text that its events carry, in bytes.
    pub(crate) text_len: usize,
    /// Number of token events.
    pub(crate) n_token_events: u64,
    /// Number of events of all kinds.
    pub(super) n_events: u64,
    /// Whether the last event is there.
    pub(crate) ended: bool,
    /// Sequence of the newest event; 0 without one.
    pub(super) last_sequence: u64,
    /// Delivery of the job that stored the newest event; 0 without one.
    pub(super) last_delivery: u64,
}

impl StoredAnswer {
    /// Reads all that is stored.
    pub(super) async fn read(mut results: Results) -> Result<Self, JobError> {
        let mut answer = Self::default();
        while let Some(stored) = results.next_stored().await? {
            answer.take(stored);
        }
        Ok(answer)
    }

    fn take(&mut self, stored: StoredEvent) {
        self.last_sequence = stored.sequence;
        self.last_delivery = stored.delivery;
        self.add(stored.event);
    }

    /// Adds an event.
    pub(crate) fn add(&mut self, event: Event) {
        self.n_events += 1;
        match event {
            Event::Accepted { seed, .. } => {
                self.accepted = true;
                self.seed = seed;
            }
            Event::Token { text, tokens, .. } => {
                self.tokens.extend(tokens);
                self.text_len += text.len();
                self.n_token_events += 1;
            }
            Event::Status { .. } => {}
            Event::Done { .. } | Event::Error { .. } => self.ended = true,
        }
    }
}
