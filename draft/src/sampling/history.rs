//! The tokens before a row, as far as penalties and constraints look at them.

use std::collections::HashMap;

use super::SamplingParams;
use crate::constraint::{Guide, GuideError, TokenSet};

/// The tokens before a row with their counts, kept up to date by appending and truncating.
#[derive(Debug, Clone, Default)]
pub struct History {
    tokens: Vec<u32>,
    prompt_len: usize,
    counts: HashMap<u32, Counts>,
    /// What the output must be.
    guide: Option<Guide>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    prompt: u32,
    output: u32,
}

impl History {
    /// Makes an empty history whose first `prompt_len` tokens count as prompt.
    #[must_use]
    pub fn new(prompt_len: usize) -> Self {
        Self { prompt_len, ..Self::default() }
    }

    /// Lets a constraint look at the output.
    #[must_use]
    pub fn with_guide(self, guide: Option<Guide>) -> Self {
        Self { guide, ..self }
    }

    /// Gives the constraint back.
    #[must_use]
    pub fn into_guide(self) -> Option<Guide> {
        self.guide
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Tells whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Appends a token.
    pub fn push(&mut self, token: u32) {
        let counts = self.counts.entry(token).or_default();
        if self.tokens.len() < self.prompt_len {
            counts.prompt += 1;
        } else {
            counts.output += 1;
        }
        self.tokens.push(token);
    }

    /// Forgets the tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        while self.tokens.len() > len {
            let Some(token) = self.tokens.pop() else { return };
            let is_prompt = self.tokens.len() < self.prompt_len;
            if let Some(counts) = self.counts.get_mut(&token) {
                if is_prompt {
                    counts.prompt -= 1;
                } else {
                    counts.output -= 1;
                }
                if counts.prompt == 0 && counts.output == 0 {
                    self.counts.remove(&token);
                }
            }
        }
    }

    /// Whether a constraint looks at the output.
    pub(super) fn is_guided(&self) -> bool {
        self.guide.is_some()
    }

    /// Whether the constraint lets a token come next.
    pub(super) fn fits(&mut self, token: u32) -> Result<bool, GuideError> {
        let output = self.tokens.get(self.prompt_len..).unwrap_or_default();
        self.guide.as_mut().map_or(Ok(true), |guide| guide.fits(output, token))
    }

    /// The tokens that the constraint lets come next; nothing if there is none, or the output does
    /// not fit it anyway.
    pub(super) fn next_tokens(&mut self) -> Result<Option<TokenSet>, GuideError> {
        let Some(guide) = &mut self.guide else { return Ok(None) };
        guide.next_tokens(self.tokens.get(self.prompt_len..).unwrap_or_default())
    }

    /// Applies the penalties to a row.
    pub(super) fn penalise(&self, logits: &mut [f32], params: &SamplingParams) {
        for (token, counts) in &self.counts {
            let Some(logit) = logits.get_mut(*token as usize) else { continue };
            if *logit > 0.0 {
                *logit /= params.repetition_penalty;
            } else {
                *logit *= params.repetition_penalty;
            }
            if counts.output > 0 {
                *logit -= params.presence_penalty;
                *logit -= params.frequency_penalty * counts.output as f32;
            }
        }
    }
}
