//! Tokens under a constraint: what was drafted, wrongly or right, and taken back changes none.

use std::sync::Arc;

use proptest::prelude::*;
use stagebus_draft::constraint::Constraint;

use super::*;
use crate::guide_fixture::{END, VOCAB_SIZE, guide};
use crate::results::u32_of;

/// Tokens of the prompt.
const PROMPT: [u32; 3] = [3, 0, 3];

/// A last stage whose logits are a function of the position.
struct Bench {
    heads: Heads,
    rows: Vec<Vec<f32>>,
    next_step: StepNumber,
}

impl Bench {
    fn new(rows: Vec<Vec<f32>>, guide: Guide, sampling: &Sampling) -> Self {
        let mut heads = Heads::default();
        let pattern = Constraint::Regex { pattern: String::new() };
        let sampling = Sampling { constraint: Some(Arc::new(pattern)), ..sampling.clone() };
        heads.open(KEY, &open(&PROMPT, u32_of(PROMPT.len()), sampling), Some(guide));
        Self { heads, rows, next_step: StepNumber::FIRST }
    }

    /// The choices after all rows of a step.
    fn choose(&mut self, start_pos: usize, tokens: &[u32]) -> Result<Vec<u32>, HeadError> {
        let of = |pos: usize| self.rows[pos % self.rows.len()].clone();
        let logits: Vec<f32> = (start_pos..start_pos + tokens.len()).flat_map(of).collect();
        let step = Step {
            session: SessionId::from_u64(1),
            epoch: Epoch::FIRST,
            step: self.next_step,
            start_pos: u32_of(start_pos),
            phase: Phase::Decode,
            tokens: tokens.to_vec(),
            wanted: (0..u32_of(tokens.len())).collect(),
            held_from: None,
            trace: vec![],
        };
        self.next_step = self.next_step.next();
        match self.heads.choose(KEY, &step, &logits, VOCAB_SIZE)? {
            Chosen::Rows(rows) => Ok(rows.iter().map(|row| row.token).collect()),
            Chosen::AllLogits => unreachable!("the session's tokens are chosen here"),
        }
    }

    /// Generates token by token.
    fn plain(&mut self, n: usize) -> Vec<u32> {
        let mut text = PROMPT.to_vec();
        while text.len() < PROMPT.len() + n && !text.ends_with(&[END]) {
            let pos = text.len() - 1;
            let last = text[pos];
            text.extend(self.choose(pos, &[last]).expect("a token"));
        }
        text.split_off(PROMPT.len())
    }

    /// Generates in chains of windows: one after the other is chosen from, and what the first wrong
    /// token makes stale is dropped. `drafts` says how long windows are, and which of their tokens
    /// are others than those of `expected`.
    fn windows(&mut self, expected: &[u32], drafts: &[(usize, usize, u32)]) -> Vec<u32> {
        let mut text = PROMPT.to_vec();
        let mut drafts = drafts.iter().cycle();
        while text.len() < PROMPT.len() + expected.len() && !text.ends_with(&[END]) {
            // The chain: the last token, and what is drafted behind it.
            let start = text.len() - 1;
            let mut chain = vec![text[start]];
            let mut choices = Vec::new();
            for _ in 0..3 {
                let (len, wrong, token) = drafts.next().expect("a cycle");
                for at in 0..*len {
                    let right = expected.get(start + chain.len() - PROMPT.len()).copied();
                    chain.push(if at == *wrong { *token } else { right.unwrap_or(*token) });
                }
                let first = choices.len();
                choices.extend(self.choose(start + first, &chain[first..]).expect("tokens"));
            }
            let right = choices.iter().zip(&chain[1..]).take_while(|(a, b)| a == b).count();
            text.extend(&choices[..(right + 1).min(choices.len())]);
            text.truncate(PROMPT.len() + expected.len());
            if let Some(end) = text.iter().position(|token| *token == END) {
                text.truncate(end + 1);
            }
        }
        text.split_off(PROMPT.len())
    }
}

#[test]
fn rows_behind_a_wrong_token_get_any_and_cannot_fail() {
    // Nothing but `d` may come after a `c`, and it must not.
    let sampling = Sampling { logit_bias: vec![(3, -100.0)], ..Sampling::default() };
    let rows = vec![vec![5.0, 0.0, 0.0, 0.0, 0.0]];
    let mut bench = Bench::new(rows, guide("a(a|cd)b"), &sampling);
    let pos = PROMPT.len() - 1;
    let (a, b, c) = (0, 1, 2);
    assert_eq!(bench.choose(pos, &[3]).expect("a token"), [a]);
    // The row after `c` has no token that fits, and that after `b` none at all.
    let choices = bench.choose(pos + 1, &[a, c, b]).expect("no error for rows that nobody reads");
    assert_eq!(choices[0], a);
    // A window behind it is for nothing as a whole.
    bench.choose(pos + 4, &[c, c]).expect("no error for a window that nobody reads");
    assert_eq!(bench.choose(pos + 2, &[a]).expect("a token"), [b]);
    assert_eq!(bench.choose(pos + 3, &[b]).expect("a token"), [END]);
    // Where it counts, it is an error.
    let error = bench.choose(pos + 2, &[c]).expect_err("the text goes on with it");
    assert!(matches!(error, HeadError::Constraint(SamplingError::NothingLeft { .. })), "{error}");
    let all = Sampling { logit_bias: vec![(0, -100.0)], ..Sampling::default() };
    let mut bench = Bench::new(vec![vec![0.0; VOCAB_SIZE]], guide("ab"), &all);
    let error = bench.choose(pos, &[3]).expect_err("`a` is ruled out");
    assert!(matches!(error, HeadError::Constraint(_)), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn windows_of_drafts_change_no_token(
        rows in prop::collection::vec(prop::collection::vec(-2.0_f32..2.0, VOCAB_SIZE), 1..9),
        drafts in prop::collection::vec((1_usize..5, 0_usize..6, 0..u32_of(VOCAB_SIZE)), 3..9),
        kind in 0_usize..3,
        temperature in prop::sample::select(vec![0.0_f32, 1.0]),
        seed in any::<u64>(),
    ) {
        let guide = guide(["(ab|cd|aad)*", "a{3,9}(b|c+d)", "[abcd]{1,40}"][kind]);
        let sampling = Sampling { temperature, seed, presence_penalty: 0.5, ..Sampling::default() };
        let plain = Bench::new(rows.clone(), guide.clone(), &sampling).plain(24);
        let found = Bench::new(rows, guide, &sampling).windows(&plain, &drafts);
        prop_assert_eq!(found, plain);
    }
}
