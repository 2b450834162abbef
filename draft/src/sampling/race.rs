//! The largest of `exponent + noise` over many tokens, without the noise of those that cannot win.
//!
//! Two bounds spare most of the work and never change the winner. A token whose exponent lies more
//! than the largest noise below the leader needs no noise at all. And the noise of a word `w` is at
//! most `(z + 1) ln 2`, with `z` the number of leading ones of `w`: `-ln(-ln u) <= -ln(1 - u)`, and
//! `1 - u` is at least `2^-(z + 1)`. So two logarithms are taken only for the few tokens whose word
//! is large enough for their exponent.

use super::Scaled;
use crate::noise::{MAX_GUMBEL, gumbel_of, word, words};

/// Added to bounds, so that rounding cannot put one below what it bounds.
const SLACK: f32 = 1e-3;

/// Tokens that are passed over together; a multiple of the four that share a counter.
const BLOCK: usize = 16;

/// A race of tokens at one position.
#[derive(Debug)]
pub(super) struct Race {
    seed: u64,
    position: u32,
    winner: u32,
    score: f32,
}

impl Race {
    /// Starts with the most likely token, whose exponent is 0, in the lead.
    pub(super) fn new(seed: u64, position: u32, best: u32) -> Self {
        let score = gumbel_of(word(seed, position, best));
        Self { seed, position, winner: best, score }
    }

    /// The token with the largest sum; of equal ones the lowest id.
    pub(super) fn winner(&self) -> u32 {
        self.winner
    }

    /// Lets `tokens` take part.
    pub(super) fn run(&mut self, row: &Scaled<'_>, tokens: &[u32]) {
        for token in tokens {
            let exponent = row.exponent(*token);
            if self.may_win(exponent, MAX_GUMBEL) {
                self.offer(*token, exponent, word(self.seed, self.position, *token));
            }
        }
    }

    /// Lets every token take part.
    pub(super) fn run_all(&mut self, row: &Scaled<'_>) {
        for (first, logits) in (0..).step_by(BLOCK).zip(row.logits.chunks(BLOCK)) {
            // Written as a comparison of each, so that what is no number does not count.
            let largest = logits.iter().fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a });
            let largest = (largest - row.max) * row.scale;
            if !self.may_win(largest, MAX_GUMBEL) {
                continue;
            }
            let mut block = [0; BLOCK];
            for (counter, four) in (first / 4..).zip(block.as_chunks_mut().0) {
                *four = words(self.seed, self.position, counter);
            }
            let most_noise = noise_bound(block.iter().copied().max().unwrap_or(u32::MAX));
            if !self.may_win(largest, most_noise) {
                continue;
            }
            for ((token, logit), word) in (first..).zip(logits).zip(block) {
                self.offer(token, (logit - row.max) * row.scale, word);
            }
        }
    }

    fn offer(&mut self, token: u32, exponent: f32, word: u32) {
        if token == self.winner || !self.may_win(exponent, noise_bound(word)) {
            return;
        }
        let score = exponent + gumbel_of(word);
        if score > self.score || (score == self.score && token < self.winner) {
            (self.winner, self.score) = (token, score);
        }
    }

    fn may_win(&self, exponent: f32, most_noise: f32) -> bool {
        exponent + (most_noise + SLACK) >= self.score
    }
}

/// No noise of this word or a smaller one is larger.
fn noise_bound(word: u32) -> f32 {
    (word.leading_ones() + 1) as f32 * std::f32::consts::LN_2
}
