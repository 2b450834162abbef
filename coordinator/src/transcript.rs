//! The output of a session on its way to the client: tokens become text, text passes the stop
//! strings, and what became final makes token events.

use stagebus_schemas::messages::public::Event;
use stagebus_shards::text::Detokenizer;

use crate::stop::{Matched, StopMatcher};

/// Turns the tokens of one session into events.
#[derive(Debug)]
pub(crate) struct Transcript {
    /// Absent once the text has ended.
    detokenizer: Option<Detokenizer>,
    stop: StopMatcher,
    /// Text and tokens since the last token event.
    text: String,
    tokens: Vec<u32>,
    next_event: u64,
}

impl Transcript {
    /// Makes an empty transcript.
    pub(crate) fn new(detokenizer: Detokenizer, stop: Vec<String>) -> Self {
        Self {
            detokenizer: Some(detokenizer),
            stop: StopMatcher::new(stop),
            text: String::new(),
            tokens: Vec::new(),
            next_event: 0,
        }
    }

    /// Takes a token. Returns true if its text completes a stop string; the text ends before it.
    pub(crate) fn push(&mut self, token: u32) -> bool {
        self.tokens.push(token);
        let piece = self.detokenizer.as_mut().and_then(|detokenizer| detokenizer.push(token));
        piece.is_some_and(|piece| self.match_stop(&piece))
    }

    /// Takes an end token, which has no text.
    pub(crate) fn push_end(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Lets go of the text that was held back, because no token follows. Returns true if that
    /// completes a stop string.
    pub(crate) fn finish(&mut self) -> bool {
        let rest = self.detokenizer.take().and_then(Detokenizer::finish).unwrap_or_default();
        let stopped = self.match_stop(&rest);
        if !stopped {
            self.text.push_str(&self.stop.finish());
        }
        stopped
    }

    /// Returns a token event if there is new text.
    pub(crate) fn text_event(&mut self) -> Option<Event> {
        if self.text.is_empty() { None } else { self.rest_event() }
    }

    /// Returns a token event for everything that no event has carried.
    pub(crate) fn rest_event(&mut self) -> Option<Event> {
        if self.text.is_empty() && self.tokens.is_empty() {
            return None;
        }
        let i = self.next_event;
        self.next_event += 1;
        let (text, tokens) = self.take();
        Some(Event::Token { i, text, tokens })
    }

    /// Returns the text and tokens that no event has carried.
    pub(crate) fn take(&mut self) -> (String, Vec<u32>) {
        (std::mem::take(&mut self.text), std::mem::take(&mut self.tokens))
    }

    fn match_stop(&mut self, piece: &str) -> bool {
        let Matched { text, stopped } = self.stop.push(piece);
        self.text.push_str(&text);
        if stopped {
            self.detokenizer = None;
        }
        stopped
    }
}
