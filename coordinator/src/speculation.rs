//! Speculation of one session: how many tokens to draft, and what became of them.

use stagebus_draft::control::{DraftLength, StepCosts};

use crate::config::DraftTokens;

/// Tokens drafted before anything was measured.
const FIRST_K: usize = 2;

/// How many tokens a session drafts, and what it has learnt.
#[derive(Debug)]
pub(crate) struct Speculation {
    length: Length,
    /// Tokens drafted.
    pub(crate) drafted: u32,
    /// Of these, tokens that the last stage chose too.
    pub(crate) accepted: u32,
    /// Steps that generated tokens.
    pub(crate) steps: u32,
}

#[derive(Debug)]
enum Length {
    Fixed(usize),
    Auto(DraftLength),
}

impl Speculation {
    /// Speculation with at most `max` drafted tokens, expecting `prior` of them to be accepted.
    pub(crate) fn new(tokens: DraftTokens, max: usize, prior: f64) -> Self {
        let length = match tokens {
            DraftTokens::Fixed(n) => Length::Fixed((n as usize).min(max)),
            DraftTokens::Auto => Length::Auto(DraftLength::new(max, prior)),
        };
        Self { length, drafted: 0, accepted: 0, steps: 0 }
    }

    /// Whether it may ever draft a token.
    pub(crate) fn may_draft(&self) -> bool {
        match &self.length {
            Length::Fixed(k) => *k > 0,
            Length::Auto(length) => length.max() > 0,
        }
    }

    /// Tokens to draft for the next step, at most `room`.
    pub(crate) fn next(&mut self, costs: Option<&StepCosts>, room: usize) -> usize {
        let k = match (&mut self.length, costs) {
            (Length::Fixed(k), _) => *k,
            (Length::Auto(length), Some(costs)) => length.next(costs),
            (Length::Auto(length), None) => FIRST_K.min(length.max()),
        };
        k.min(room)
    }

    /// Learns from a step of `n_drafted` tokens.
    pub(crate) fn observe(&mut self, n_drafted: usize, n_accepted: usize) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        self.steps += 1;
        self.drafted = self.drafted.saturating_add(count(n_drafted));
        self.accepted = self.accepted.saturating_add(count(n_accepted));
        if let Length::Auto(length) = &mut self.length {
            length.observe(n_drafted, n_accepted);
        }
    }

    /// Drafts nothing from here on.
    pub(crate) fn switch_off(&mut self) {
        self.length = Length::Fixed(0);
    }

    /// The acceptance that was measured, if any token was drafted.
    pub(crate) fn acceptance(&self) -> Option<f64> {
        match &self.length {
            Length::Auto(length) if self.drafted > 0 => Some(length.acceptance()),
            Length::Auto(_) | Length::Fixed(_) => None,
        }
    }
}
