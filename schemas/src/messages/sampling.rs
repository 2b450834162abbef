//! How a session's tokens are chosen from the logits: the parameters that travel to the last stage.
//! What each of them does, and in which order, is the sampler's to say (crate `stagebus-draft`).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::constraint::{self, Constraint};
use crate::codec::{CodecError, check_count};

/// Most entries of [`Sampling::logit_bias`].
pub const MAX_LOGIT_BIAS: usize = 4096;

/// A bias of this or less rules its token out, as clients of other services expect of -100.
pub const FORBIDDEN: f32 = -100.0;

/// Temperatures below this are greedy: `logit / temperature` would overflow.
pub const MIN_TEMPERATURE: f32 = 1e-5;

/// Most log-probabilities reported beside the chosen token.
pub const MAX_TOP_LOGPROBS: u32 = 64;

/// Parameters of one session. The defaults are greedy and change nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sampling {
    /// Divides the logits; 0 takes the largest.
    pub temperature: f32,
    /// Keeps the smallest set of most likely tokens that holds this probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps tokens at least this likely relative to the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits (multiplies negative ones) of tokens that stood before; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token generated before.
    pub presence_penalty: f32,
    /// Subtracted once per time that the token was generated before.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens, ascending by token; [`FORBIDDEN`] rules one out.
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of the noise.
    pub seed: u64,
    /// Most likely tokens to report beside the chosen one; absent reports nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<u32>,
    /// What the output must be; absent is anything.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "constraint")]
    pub constraint: Option<Arc<Constraint>>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            top_logprobs: None,
            constraint: None,
        }
    }
}

impl Sampling {
    /// Tells whether the largest logit is taken without noise.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature < MIN_TEMPERATURE || self.top_k == 1
    }

    /// Tells whether the tokens before a row count where its token is chosen.
    #[must_use]
    pub fn needs_history(&self) -> bool {
        self.has_penalties() || self.constraint.is_some()
    }

    /// Tells whether the tokens before a row change its logits.
    #[must_use]
    pub fn has_penalties(&self) -> bool {
        (self.repetition_penalty - 1.0).abs() > f32::EPSILON
            || self.presence_penalty.abs() > f32::EPSILON
            || self.frequency_penalty.abs() > f32::EPSILON
    }

    /// Checks the lengths.
    ///
    /// # Errors
    /// [`CodecError::Field`].
    pub(crate) fn validate(&self) -> Result<(), CodecError> {
        let n_bias = self.logit_bias.len();
        check_count("sampling.logit_bias", n_bias, 0..=MAX_LOGIT_BIAS, "at most 4096 tokens")?;
        let n_top = self.top_logprobs.unwrap_or(0);
        if n_top > MAX_TOP_LOGPROBS {
            return Err(CodecError::Field {
                field: "sampling.top_logprobs",
                found: n_top.into(),
                expected: "at most 64",
            });
        }
        let amount = |value: f32| value.is_finite() && value >= 0.0;
        let checks = [
            ("sampling.temperature", amount(self.temperature)),
            ("sampling.top_p", amount(self.top_p)),
            ("sampling.min_p", amount(self.min_p)),
            (
                "sampling.repetition_penalty",
                amount(self.repetition_penalty) && self.repetition_penalty > 0.0,
            ),
            ("sampling.presence_penalty", self.presence_penalty.is_finite()),
            ("sampling.frequency_penalty", self.frequency_penalty.is_finite()),
            ("sampling.logit_bias", self.logit_bias.iter().all(|(_, bias)| bias.is_finite())),
        ];
        for (field, fits) in checks {
            if !fits {
                let expected = "finite numbers, none below zero where that means nothing";
                return Err(CodecError::Number { field, expected });
            }
        }
        Ok(())
    }
}

/// A token and its log-probability under the model's own distribution, before any parameter.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}
