//! The output of a session on its way to the client: tokens become text, text passes the stop
//! strings, and what became final makes token events.

use stagebus_schemas::messages::public::{Event, StepTimes, TokenLogprobs};
use stagebus_shards::text::Detokenizer;

use crate::stop::{Matched, StopMatcher};

/// Turns the tokens of one session into events.
#[derive(Debug)]
pub(crate) struct Transcript {
    /// Absent once the text has ended.
    detokenizer: Option<Detokenizer>,
    stop: StopMatcher,
    /// What came since the last token event.
    fresh: Output,
    next_event: u64,
    /// Bytes of text that an earlier delivery of the job has sent.
    n_sent: usize,
}

/// A part of a session's output.
#[derive(Debug, Default)]
pub(crate) struct Output {
    pub(crate) text: String,
    pub(crate) tokens: Vec<u32>,
    /// One entry per token, if the request asked for them.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// One entry per step, if the request asked for them.
    pub(crate) steps: Vec<StepTimes>,
}

impl Transcript {
    /// Makes an empty transcript.
    pub(crate) fn new(detokenizer: Detokenizer, stop: Vec<String>) -> Self {
        Self {
            detokenizer: Some(detokenizer),
            stop: StopMatcher::new(stop),
            fresh: Output::default(),
            next_event: 0,
            n_sent: 0,
        }
    }

    /// Takes in the tokens that earlier events carry, with `text_len` bytes of text in `n_events`
    /// events: neither is sent again. Returns true if the tokens complete a stop string or end the
    /// text.
    pub(crate) fn resume(
        &mut self,
        tokens: &[u32],
        is_end: impl Fn(u32) -> bool,
        text_len: usize,
        n_events: u64,
    ) -> bool {
        self.n_sent = text_len;
        self.next_event = n_events;
        let stopped = tokens.iter().any(|&token| {
            if is_end(token) {
                self.push_end(token, None);
                return true;
            }
            self.push(token, None)
        });
        self.fresh.tokens.clear();
        stopped
    }

    /// Takes a token. Returns true if its text completes a stop string; the text ends before it.
    pub(crate) fn push(&mut self, token: u32, logprobs: Option<TokenLogprobs>) -> bool {
        self.push_end(token, logprobs);
        let piece = self.detokenizer.as_mut().and_then(|detokenizer| detokenizer.push(token));
        piece.is_some_and(|piece| self.match_stop(&piece))
    }

    /// Takes an end token, which has no text.
    pub(crate) fn push_end(&mut self, token: u32, logprobs: Option<TokenLogprobs>) {
        self.fresh.tokens.push(token);
        self.fresh.logprobs.extend(logprobs);
    }

    /// Notes what the step took whose tokens came last.
    pub(crate) fn push_times(&mut self, times: StepTimes) {
        self.fresh.steps.push(times);
    }

    /// Lets go of the text that was held back, because no token follows. Returns true if that
    /// completes a stop string.
    pub(crate) fn finish(&mut self) -> bool {
        let rest = self.detokenizer.take().and_then(Detokenizer::finish).unwrap_or_default();
        let stopped = self.match_stop(&rest);
        if !stopped {
            let held = self.stop.finish();
            self.add_text(&held);
        }
        stopped
    }

    /// Returns a token event if there is new text.
    pub(crate) fn text_event(&mut self) -> Option<Event> {
        if self.fresh.text.is_empty() { None } else { self.rest_event() }
    }

    /// Returns a token event for everything that no event has carried.
    pub(crate) fn rest_event(&mut self) -> Option<Event> {
        if self.fresh.text.is_empty() && self.fresh.tokens.is_empty() {
            return None;
        }
        let i = self.next_event;
        self.next_event += 1;
        let Output { text, tokens, logprobs, steps } = self.take();
        Some(Event::Token { i, text, tokens, logprobs, steps })
    }

    /// Returns what no event has carried.
    pub(crate) fn take(&mut self) -> Output {
        std::mem::take(&mut self.fresh)
    }

    fn match_stop(&mut self, piece: &str) -> bool {
        let Matched { text, stopped } = self.stop.push(piece);
        self.add_text(&text);
        if stopped {
            self.detokenizer = None;
        }
        stopped
    }

    /// Adds text that was not sent.
    fn add_text(&mut self, text: &str) {
        let n_known = self.n_sent.min(text.len());
        self.n_sent -= n_known;
        self.fresh.text.push_str(text.get(n_known..).unwrap_or_default());
    }
}
