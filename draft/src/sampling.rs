//! Choosing one token from one row of logits.
//!
//! The order is: bias, penalties, constraint, temperature, top-k, top-p, min-p, then the largest of
//! `logit / temperature + noise` over what is left (the Gumbel-max form of drawing from the
//! softmax). Temperature 0 is the largest logit, without noise. The choice depends on the row, the
//! parameters, the tokens before it and `(seed, position)`, on nothing else.

use std::cmp::Ordering;

use stagebus_schemas::messages::sampling::FORBIDDEN;
pub use stagebus_schemas::messages::sampling::{Sampling as SamplingParams, TokenLogprob};

mod history;
mod race;
mod row;

pub use history::History;

use crate::constraint::GuideError;
use race::Race;
use row::{by_rank, exp_of, exp_sum, gather, largest, most_likely};

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
    /// The constraint does not say which tokens may come.
    #[error("no token can be chosen at position {position}")]
    Constraint {
        /// Position of the token.
        position: u32,
        /// Why.
        #[source]
        source: GuideError,
    },
}

/// How far below the largest logit candidates are looked for, in multiples of the temperature, step
/// by step until enough are found: a step costs less than sorting the tokens of a deeper one.
const DEPTHS: [f32; 7] = [4.0, 8.0, 12.0, 16.0, 24.0, 40.0, f32::INFINITY];

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
    /// [`SamplingError::NothingLeft`] if bias, constraint and row rule out every token,
    /// [`SamplingError::Constraint`] if the constraint cannot be followed.
    pub fn choose(
        &mut self,
        row: &[f32],
        position: u32,
        params: &SamplingParams,
        history: &mut History,
    ) -> Result<Choice, SamplingError> {
        let Self { logits, candidates } = self;
        let draw = (position, params);
        let token = if params.logit_bias.is_empty() && !params.needs_history() {
            winner(row, draw, candidates)
        } else {
            logits.clear();
            logits.extend_from_slice(row);
            adjust(logits, params, history);
            fitting_winner(logits, draw, history, candidates)
                .map_err(|source| SamplingError::Constraint { position, source })?
        };
        let token = token.ok_or(SamplingError::NothingLeft { position, n_logits: row.len() })?;
        Ok(report(row, token, params, candidates))
    }
}

/// The chosen one of the tokens that are left; nothing if none is.
fn winner(
    logits: &[f32],
    (position, params): (u32, &SamplingParams),
    candidates: &mut Vec<u32>,
) -> Option<u32> {
    let best = largest(logits)?;
    if params.is_greedy() {
        return Some(best);
    }
    let scaled = Scaled { logits, max: logits[best as usize], scale: params.temperature.recip() };
    let mut race = Race::new(params.seed, position, best);
    if scaled.select(params, candidates) {
        race.run(&scaled, candidates);
    } else {
        race.run_all(&scaled);
    }
    Some(race.winner())
}

/// The chosen one of those that are left and that the constraint lets come.
///
/// Which tokens fit is costly to tell, and mostly not needed: the one that wins against all others
/// also wins against those that fit, if it is one of them. With top-k, top-p or min-p that does not
/// hold, since what they keep depends on what is ruled out.
fn fitting_winner(
    logits: &mut [f32],
    (position, params): (u32, &SamplingParams),
    history: &mut History,
    candidates: &mut Vec<u32>,
) -> Result<Option<u32>, GuideError> {
    if !history.is_guided() {
        return Ok(winner(logits, (position, params), candidates));
    }
    let keeps_all = params.top_k == 0 && params.top_p >= 1.0 && params.min_p <= 0.0;
    if (params.is_greedy() || keeps_all)
        && let Some(token) = winner(logits, (position, params), candidates)
        && history.fits(token)?
    {
        return Ok(Some(token));
    }
    if let Some(fitting) = history.next_tokens()? {
        fitting.rule_out_others(logits);
    }
    Ok(winner(logits, (position, params), candidates))
}

/// A row with what turns its logits into exponents: `(logit - max) * scale`, at most 0.
#[derive(Debug, Clone, Copy)]
struct Scaled<'a> {
    logits: &'a [f32],
    max: f32,
    scale: f32,
}

impl Scaled<'_> {
    fn exponent(&self, token: u32) -> f32 {
        (self.logits[token as usize] - self.max) * self.scale
    }

    /// Share of a token, relative to the most likely one.
    fn weight(&self, token: u32) -> f64 {
        exp_of(self.exponent(token)).into()
    }

    /// Collects the tokens that top-k, top-p and min-p keep; returns false if that is all of them.
    fn select(&self, params: &SamplingParams, kept: &mut Vec<u32>) -> bool {
        let top_k = params.top_k as usize;
        let cuts_k = top_k > 0 && top_k < self.logits.len();
        let cuts_p = params.top_p < 1.0;
        let cuts_min = params.min_p > 0.0;
        kept.clear();
        if cuts_k {
            most_likely(self.logits, top_k, kept);
        }
        if cuts_p {
            let sum = |kept: &[u32]| kept.iter().map(|token| self.weight(*token)).sum::<f64>();
            let share = f64::from(params.top_p);
            let target = if cuts_k {
                sum(kept) * share
            } else {
                exp_sum(self.logits, self.max, self.scale) * share
            };
            for depth in DEPTHS {
                if cuts_k || sum(kept) >= target {
                    break;
                }
                self.gather(kept, depth);
            }
            keep_nucleus(kept, target, |token| self.weight(token), by_rank(self.logits));
        }
        if cuts_min {
            let lowest = f64::from(params.min_p).ln();
            if !cuts_k && !cuts_p {
                // The rounding of either side does not reach a hundredth.
                self.gather(kept, 0.01 - lowest as f32);
            }
            kept.retain(|token| f64::from(self.exponent(*token)) >= lowest);
        }
        cuts_k || cuts_p || cuts_min
    }

    /// Collects the tokens that lie at most `depth` below the most likely one.
    fn gather(&self, kept: &mut Vec<u32>, depth: f32) {
        // The lowest number leaves out minus infinity and what is no number.
        let lowest = (self.max - depth / self.scale).max(f32::MIN);
        gather(self.logits, lowest, kept);
    }
}

/// Keeps the most likely candidates until their weight reaches `target`, at least one.
///
/// Sorts a prefix that doubles until it is enough: most rows need a few dozen tokens.
fn keep_nucleus(
    candidates: &mut Vec<u32>,
    target: f64,
    weight: impl Fn(u32) -> f64,
    by_rank: impl Fn(&u32, &u32) -> Ordering,
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

/// Applies bias and penalties.
fn adjust(logits: &mut [f32], params: &SamplingParams, history: &History) {
    for (token, bias) in &params.logit_bias {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = if *bias <= FORBIDDEN { f32::NEG_INFINITY } else { *logit + bias };
        }
    }
    if params.has_penalties() {
        history.penalise(logits, params);
    }
}

/// Adds the log-probabilities that were asked for; `row` is the model's own.
fn report(row: &[f32], token: u32, params: &SamplingParams, found: &mut Vec<u32>) -> Choice {
    let plain = Choice { token, logprob: None, top: Vec::new() };
    let (Some(n_top), Some(best)) = (params.top_logprobs, largest(row)) else { return plain };
    let scaled = Scaled { logits: row, max: row[best as usize], scale: 1.0 };
    let log_sum = exp_sum(row, scaled.max, scaled.scale).ln();
    // A row with an infinite logit gives no number here; the wire wants one.
    let logprob = |token| ((f64::from(scaled.exponent(token)) - log_sum) as f32).max(f32::MIN);
    most_likely(row, n_top as usize, found);
    found.sort_unstable_by(by_rank(row));
    let top = found.iter().map(|token| TokenLogprob { token: *token, logprob: logprob(*token) });
    Choice { logprob: Some(logprob(token)), top: top.collect(), ..plain }
}

#[cfg(test)]
mod tests;
