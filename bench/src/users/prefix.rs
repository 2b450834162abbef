//! What a known prefix spares: the time to the first token, with and without.
//!
//! One user sends 1,500 tokens that nobody has sent before and a question (cold), the same 1,500
//! tokens and another question (known), and the first prompt again, whose tokens must be the same
//! as when it was cold.

use std::time::Instant;

use serde::Serialize;
use stagebus_shards::text::TextModel;

use super::Context;
use super::contestant::{Contestant, Kind};
use crate::harness::stats::median;
use crate::load::{self, Ask};
use crate::prompts;

/// Tokens of the prefix.
const PREFIX_TOKENS: usize = 1500;

/// Tokens of an answer: enough to compare.
const ANSWER_TOKENS: u32 = 16;

/// Repetitions, each with a prefix of its own.
const N_PREFIXES: u64 = 3;

/// Seeds of the prefixes begin here, apart from those of the long prompts.
const FIRST_SEED: u64 = 1_000;

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prefix {
    /// The fleet.
    pub kind: Kind,
    /// Tokens of the prefix.
    pub prefix_tokens: usize,
    /// Times to the first token of prefixes that nobody knew, in milliseconds.
    pub cold_ms: Vec<f64>,
    /// Times with known ones.
    pub known_ms: Vec<f64>,
    /// Prompt tokens that were cached, with known ones.
    pub cached_tokens: Vec<u32>,
    /// Answers with a known prefix that differ from the cold one.
    pub n_differing: usize,
}

impl Prefix {
    /// Median cold time over median known time.
    #[must_use]
    pub fn ratio(&self) -> Option<f64> {
        let cold = median(self.cold_ms.iter().copied())?;
        let known = median(self.known_ms.iter().copied())?;
        (known > 0.0).then(|| cold / known)
    }
}

/// Measures on one fleet.
///
/// # Errors
/// A request that fails.
pub(super) async fn run(
    context: &Context,
    contestant: &Contestant,
    text: &TextModel,
) -> anyhow::Result<Prefix> {
    let mut result = Prefix {
        kind: contestant.kind(),
        prefix_tokens: PREFIX_TOKENS,
        cold_ms: Vec::new(),
        known_ms: Vec::new(),
        cached_tokens: Vec::new(),
        n_differing: 0,
    };
    let Some(fleet) = contestant.fleet() else { return Ok(result) };
    context.note(&format!("prefixes of {PREFIX_TOKENS} tokens"));
    fleet.join_cores().await?;
    let first = text.encode("What is the first note about?", false)?;
    let second = text.encode("Which of the notes is the longest?", false)?;
    for seed in FIRST_SEED..FIRST_SEED + N_PREFIXES {
        let prefix = prompts::long(text, PREFIX_TOKENS, seed)?;
        let ask = async |question: &[u32]| {
            let prompt = [&prefix[..], question].concat();
            let ask = Ask {
                prompt: &prompt,
                max_tokens: ANSWER_TOKENS,
                draft_tokens: Some(0),
                ..Ask::default()
            };
            load::one(fleet, &ask, Instant::now()).await
        };
        let cold = ask(&first).await?;
        let known = ask(&second).await?;
        let again = ask(&first).await?;
        result.cold_ms.extend(cold.ttft_ms());
        result.known_ms.extend(known.ttft_ms());
        result.cached_tokens.push(known.usage.cached_tokens);
        result.n_differing += usize::from(again.tokens != cold.tokens);
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use stagebus_shards::WeightMode;

    use super::*;

    #[test]
    fn the_ratio_is_that_of_the_medians() {
        let prefix = Prefix {
            kind: Kind::nodes(2, WeightMode::Compact),
            prefix_tokens: 1500,
            cold_ms: vec![900.0, 1000.0, 2000.0],
            known_ms: vec![100.0, 50.0, 300.0],
            cached_tokens: vec![1472; 3],
            n_differing: 0,
        };
        assert_eq!(prefix.ratio(), Some(10.0));
        assert_eq!(Prefix { known_ms: vec![], ..prefix }.ratio(), None);
    }
}
