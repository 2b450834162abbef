//! Choosing one token from one row of logits.
//!
//! The order is: bias, penalties, temperature, top-k, top-p, min-p, then the largest of
//! `logit / temperature + noise` over what is left (the Gumbel-max form of drawing from the
//! softmax). Temperature 0 is the largest logit, without noise. The choice depends on the row, the
//! parameters, the tokens before it and `(seed, position)`, on nothing else.

use std::collections::HashMap;

use stagebus_engine::argmax::greedy;
use stagebus_schemas::messages::sampling::FORBIDDEN;
pub use stagebus_schemas::messages::sampling::{Sampling as SamplingParams, TokenLogprob};

use crate::noise::{MAX_GUMBEL, gumbel};

/// What was chosen for a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The chosen token.
    pub token: u32,
    /// Its log-probability, if asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens in falling order, if asked for.
    pub top: Vec<TokenLogprob>,
}

/// Why no token can be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SamplingError {
    /// Every logit is minus infinity or not a number.
    #[error("no token is possible at position {position}: every logit of {n_logits} is ruled out")]
    NothingLeft {
        /// Position of the token.
        position: u32,
        /// Number of logits.
        n_logits: usize,
    },
}

/// Counts of the tokens before a row, kept up to date by appending and truncating.
#[derive(Debug, Clone, Default)]
pub struct History {
    tokens: Vec<u32>,
    prompt_len: usize,
    counts: HashMap<u32, Counts>,
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
}

/// Chooses tokens; keeps its buffers between rows.
#[derive(Debug, Default)]
pub struct Sampler {
    logits: Vec<f32>,
    candidates: Vec<u32>,
}

impl Sampler {
    /// Chooses the token at `position` from the row of logits before it.
    ///
    /// **Shape**: `row` is `[vocab_size]`. `history` holds the tokens before `position`.
    ///
    /// # Errors
    /// [`SamplingError::NothingLeft`] if bias and row rule out every token.
    pub fn choose(
        &mut self,
        row: &[f32],
        position: u32,
        params: &SamplingParams,
        history: &History,
    ) -> Result<Choice, SamplingError> {
        let plain = params.logit_bias.is_empty() && !params.needs_history();
        let token = if plain && params.is_greedy() {
            largest(row)
        } else {
            self.logits.clear();
            self.logits.extend_from_slice(row);
            adjust(&mut self.logits, params, history);
            if params.is_greedy() { largest(&self.logits) } else { self.draw(position, params) }
        };
        let token = token.ok_or(SamplingError::NothingLeft { position, n_logits: row.len() })?;
        Ok(report(row, token, params))
    }

    /// Draws from what the parameters leave; `self.logits` holds the adjusted row.
    fn draw(&mut self, position: u32, params: &SamplingParams) -> Option<u32> {
        let best = largest(&self.logits)?;
        let max = self.logits[best as usize];
        let scale = params.temperature.recip();
        self.select(max, scale, params);
        // Noise never exceeds MAX_GUMBEL, so most tokens lose without drawing theirs.
        let mut winner = best;
        let mut score = gumbel(params.seed, position, best);
        for &token in &self.candidates {
            let base = (self.logits[token as usize] - max) * scale;
            if token == best || base + MAX_GUMBEL < score {
                continue;
            }
            let noisy = base + gumbel(params.seed, position, token);
            if noisy > score || (noisy == score && token < winner) {
                (winner, score) = (token, noisy);
            }
        }
        Some(winner)
    }

    /// Fills `self.candidates` with the tokens that top-k, top-p and min-p keep.
    fn select(&mut self, max: f32, scale: f32, params: &SamplingParams) {
        let logits = &self.logits;
        let by_rank = |a: &u32, b: &u32| {
            logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b))
        };
        let possible = |token: &u32| logits[*token as usize] > f32::NEG_INFINITY;
        self.candidates.clear();
        self.candidates.extend((0..logits.len() as u32).filter(possible));
        let top_k = params.top_k as usize;
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, by_rank);
            self.candidates.truncate(top_k);
        }
        let weight = |token: u32| f64::from((logits[token as usize] - max) * scale).exp();
        if params.top_p < 1.0 {
            let total: f64 = self.candidates.iter().map(|token| weight(*token)).sum();
            keep_nucleus(&mut self.candidates, total * f64::from(params.top_p), weight, by_rank);
        }
        if params.min_p > 0.0 {
            let floor = f64::from(params.min_p);
            self.candidates.retain(|token| weight(*token) >= floor);
        }
    }
}

/// Keeps the most likely candidates until their weight reaches `target`, at least one.
///
/// Sorts a prefix that doubles until it is enough: most rows need a few dozen tokens of 50,000.
fn keep_nucleus(
    candidates: &mut Vec<u32>,
    target: f64,
    weight: impl Fn(u32) -> f64,
    by_rank: impl Fn(&u32, &u32) -> std::cmp::Ordering,
) {
    let mut sorted = 0;
    let mut sum = 0.0;
    let mut chunk = 64;
    while sorted < candidates.len() {
        let end = (sorted + chunk).min(candidates.len());
        if end < candidates.len() {
            candidates[sorted..].select_nth_unstable_by(end - sorted - 1, &by_rank);
        }
        candidates[sorted..end].sort_unstable_by(&by_rank);
        for idx in sorted..end {
            sum += weight(candidates[idx]);
            if sum >= target {
                candidates.truncate(idx + 1);
                return;
            }
        }
        sorted = end;
        chunk *= 2;
    }
}

/// Applies bias and penalties; what is not a number becomes impossible.
fn adjust(logits: &mut [f32], params: &SamplingParams, history: &History) {
    for (token, bias) in &params.logit_bias {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = if *bias <= FORBIDDEN { f32::NEG_INFINITY } else { *logit + bias };
        }
    }
    if params.needs_history() {
        for (token, counts) in &history.counts {
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
    for logit in logits {
        if logit.is_nan() {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// First index of the largest logit; `None` if no logit is above minus infinity.
fn largest(logits: &[f32]) -> Option<u32> {
    greedy(logits).ok().filter(|token| logits[*token as usize] > f32::NEG_INFINITY)
}

fn report(row: &[f32], token: u32, params: &SamplingParams) -> Choice {
    let Some(n_top) = params.top_logprobs else {
        return Choice { token, logprob: None, top: Vec::new() };
    };
    let max = row.iter().copied().filter(|l| !l.is_nan()).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 =
        row.iter().filter(|l| !l.is_nan()).map(|logit| f64::from(logit - max).exp()).sum();
    let log_sum = f64::from(max) + sum.ln();
    let logprob = |token: u32| (f64::from(row[token as usize]) - log_sum) as f32;
    let mut order: Vec<u32> =
        (0..row.len() as u32).filter(|token| !row[*token as usize].is_nan()).collect();
    let n_top = (n_top as usize).min(order.len());
    let by_rank =
        |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then_with(|| a.cmp(b));
    if n_top > 0 && n_top < order.len() {
        order.select_nth_unstable_by(n_top - 1, by_rank);
    }
    order.truncate(n_top);
    order.sort_unstable_by(by_rank);
    let top = order.into_iter().map(|token| TokenLogprob { token, logprob: logprob(token) });
    Choice { token, logprob: Some(logprob(token)), top: top.collect() }
}

#[cfg(test)]
mod tests;
