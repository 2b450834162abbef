//! What a long prompt does to users whose answers are under way.
//!
//! Eight users keep asking. After a second another one sends a prompt of 4,000 tokens that nobody
//! has sent before, until its first token comes. Beside that stands a turn without the long prompt,
//! as long or eight seconds. Compared are the times between tokens that overlap these spans.

use std::time::Duration;

use serde::Serialize;
use stagebus_shards::text::TextModel;

use super::Context;
use super::contestant::{Contestant, Kind};
use crate::harness::stats::{Summary, median};
use crate::load::Ask;
use crate::load::visit::{Visit, Visitor, visit};
use crate::node_fleet::NodeFleet;
use crate::prompts;

/// Users whose answers are under way.
const N_USERS: usize = 8;

/// Tokens of the long prompt.
pub(super) const LONG_TOKENS: usize = 4000;

/// Longest turn without the long prompt: some thousand times between tokens, whose 99th percentile
/// more would not change.
const LONGEST_SILENCE: Duration = Duration::from_secs(8);

/// Turns with a long prompt at most.
const MOST_ROUNDS: u16 = 2;

/// Questions of a turn: more than the users can ask in it.
const N_ASKS: usize = 400;

/// What was measured.
#[derive(Debug, Clone, Serialize)]
pub struct LongPrompt {
    /// The fleet.
    pub kind: Kind,
    /// Users whose answers were under way.
    pub n_users: usize,
    /// Tokens of the long prompt.
    pub long_tokens: usize,
    /// Times between tokens while the long prompt was prefilled, in milliseconds.
    pub with_ms: Option<Summary>,
    /// The same without it.
    pub without_ms: Option<Summary>,
    /// Time to the first token of the long prompt, in milliseconds, by round.
    pub long_ttft_ms: Vec<f64>,
    /// Ratio of the 99th percentiles, by round.
    pub p99_ratio: Vec<f64>,
}

/// Measures on one fleet.
///
/// # Errors
/// A request that fails.
pub(super) async fn run(
    context: &Context,
    contestant: &Contestant,
    text: &TextModel,
) -> anyhow::Result<LongPrompt> {
    let mut result = LongPrompt {
        kind: contestant.kind(),
        n_users: N_USERS,
        long_tokens: LONG_TOKENS,
        with_ms: None,
        without_ms: None,
        long_ttft_ms: Vec::new(),
        p99_ratio: Vec::new(),
    };
    let Some(fleet) = contestant.fleet() else { return Ok(result) };
    fleet.join_cores().await?;
    let (mut with_all, mut without_all) = (Vec::new(), Vec::new());
    for round in 0..context.args.rounds.min(MOST_ROUNDS) {
        context.note(&format!("a prompt of {LONG_TOKENS} tokens, round {}", round + 1));
        let prompt = prompts::long(text, LONG_TOKENS, u64::from(round))?;
        let with = turn(context, fleet, Visitor::Prompt(&prompt)).await?;
        let without = turn(context, fleet, Visitor::Nobody(with.span.min(LONGEST_SILENCE))).await?;
        let p99 = |gaps: &[f64]| Summary::of(gaps.iter().copied()).map(|summary| summary.p99);
        result.p99_ratio.extend(p99(&with.gaps_ms).zip(p99(&without.gaps_ms)).map(|(a, b)| a / b));
        result.long_ttft_ms.push(with.span.as_secs_f64() * 1e3);
        with_all.extend(with.gaps_ms);
        without_all.extend(without.gaps_ms);
    }
    result.with_ms = Summary::of(with_all);
    result.without_ms = Summary::of(without_all);
    Ok(result)
}

async fn turn(context: &Context, fleet: &NodeFleet, visitor: Visitor<'_>) -> anyhow::Result<Visit> {
    let max_tokens = u32::try_from(context.n_tokens())?;
    let ask = |prompt| Ask { prompt, max_tokens, draft_tokens: Some(0), ..Ask::default() };
    let prompts = context.prompts.iter().cycle().take(N_ASKS);
    let asks: Vec<Ask<'_>> = prompts.map(|prompt| ask(&prompt.tokens)).collect();
    visit(fleet, (N_USERS, &asks), visitor).await
}

impl LongPrompt {
    /// Median over rounds of the ratio of the 99th percentiles.
    #[must_use]
    pub fn ratio(&self) -> Option<f64> {
        median(self.p99_ratio.iter().copied())
    }
}
