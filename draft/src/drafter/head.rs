//! What the numbers in a draft model's logits row stand for.

use crate::sampling::{Choice, History, Sampler, SamplingError, SamplingParams};

/// The head of a draft model: one row for every token, or for the most frequent ones only.
///
/// A token without a row is never drafted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftHead {
    vocab_size: usize,
    /// Token of each row, ascending.
    tokens: Option<Vec<u32>>,
}

/// Why a list of tokens is no head.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DraftHeadError {
    /// No row at all.
    #[error("the head has no rows")]
    Empty,
    /// A token outside the vocabulary.
    #[error("row {row} of the head is token {token}, the vocabulary has {vocab_size}")]
    Token {
        /// The row.
        row: usize,
        /// Its token.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// The tokens do not ascend.
    #[error("row {row} of the head does not have a larger token than the row before")]
    Order {
        /// The row.
        row: usize,
    },
}

impl DraftHead {
    /// A head with a row for every token.
    #[must_use]
    pub fn whole(vocab_size: usize) -> Self {
        Self { vocab_size, tokens: None }
    }

    /// A head with a row for each of `tokens`, which must ascend.
    ///
    /// # Errors
    /// [`DraftHeadError`].
    pub fn cut(vocab_size: usize, tokens: Vec<u32>) -> Result<Self, DraftHeadError> {
        if tokens.is_empty() {
            return Err(DraftHeadError::Empty);
        }
        if let Some(row) = tokens.iter().position(|token| *token as usize >= vocab_size) {
            return Err(DraftHeadError::Token { row, token: tokens[row], vocab_size });
        }
        if let Some(before) = tokens.windows(2).position(|pair| pair[0] >= pair[1]) {
            return Err(DraftHeadError::Order { row: before + 1 });
        }
        Ok(Self { vocab_size, tokens: Some(tokens) })
    }

    /// Numbers in a logits row.
    #[must_use]
    pub fn n_rows(&self) -> usize {
        self.tokens.as_ref().map_or(self.vocab_size, Vec::len)
    }

    /// What the target's head would choose from this row.
    pub(super) fn choose(
        &self,
        sampler: &mut Sampler,
        row: HeadRow<'_>,
        whole: &mut Vec<f32>,
    ) -> Result<Choice, SamplingError> {
        let HeadRow { logits, position, params, history } = row;
        let Some(tokens) = &self.tokens else {
            return sampler.choose(logits, position, params, history);
        };
        let plain = params.logit_bias.is_empty() && !params.needs_history();
        if plain && params.is_greedy() {
            // Rows ascend by token, so the first largest row is the first largest token.
            let mut choice = sampler.choose(logits, position, params, history)?;
            choice.token = tokens[choice.token as usize];
            choice.top.iter_mut().for_each(|top| top.token = tokens[top.token as usize]);
            return Ok(choice);
        }
        // Bias, penalties and noise belong to tokens: put every logit at its token's place.
        whole.clear();
        whole.resize(self.vocab_size, f32::NEG_INFINITY);
        for (token, logit) in tokens.iter().zip(logits) {
            whole[*token as usize] = *logit;
        }
        sampler.choose(whole, position, params, history)
    }
}

/// A logits row and what a token is chosen by.
#[derive(Debug)]
pub(super) struct HeadRow<'a> {
    /// **Shape**: `[n_rows]` of the head.
    pub(super) logits: &'a [f32],
    /// Position of the token to choose.
    pub(super) position: u32,
    pub(super) params: &'a SamplingParams,
    pub(super) history: &'a mut History,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_heads_are_refused() {
        assert_eq!(DraftHead::cut(4, vec![]), Err(DraftHeadError::Empty));
        let outside = DraftHead::cut(4, vec![1, 4]);
        assert_eq!(outside, Err(DraftHeadError::Token { row: 1, token: 4, vocab_size: 4 }));
        assert_eq!(DraftHead::cut(4, vec![2, 2]), Err(DraftHeadError::Order { row: 1 }));
        assert_eq!(DraftHead::cut(4, vec![0, 3]).map(|head| head.n_rows()), Ok(2));
    }

    #[test]
    fn a_cut_head_chooses_as_a_whole_one_without_the_other_tokens() {
        let head = DraftHead::cut(6, vec![1, 2, 5]).unwrap();
        let cut = [0.5, 2.0, 2.0];
        let whole = [f32::NEG_INFINITY, 0.5, 2.0, f32::NEG_INFINITY, f32::NEG_INFINITY, 2.0];
        let mut history = History::new(1);
        [3, 2, 2].iter().for_each(|token| history.push(*token));
        let mut sampler = Sampler::default();
        for temperature in [0.0, 0.7] {
            for repetition_penalty in [1.0, 1.5] {
                for position in 0..50 {
                    let params = SamplingParams {
                        temperature,
                        repetition_penalty,
                        logit_bias: if position % 2 == 0 { vec![] } else { vec![(5, -0.5)] },
                        seed: 3,
                        top_logprobs: Some(2),
                        ..SamplingParams::default()
                    };
                    let want = sampler.choose(&whole, position, &params, &mut history).unwrap();
                    let row =
                        HeadRow { logits: &cut, position, params: &params, history: &mut history };
                    let got = head.choose(&mut sampler, row, &mut Vec::new()).unwrap();
                    assert_eq!(got, want, "{params:?} at {position}");
                }
            }
        }
    }
}
