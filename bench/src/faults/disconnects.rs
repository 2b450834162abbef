//! Clients that vanish while their prompt is read, while tokens come, and while a worker is missing.

use std::time::Duration;

use futures::future::try_join_all;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::fleet::{FaultFleet, Told};
use super::{Context, Dice};

/// Clients at the same time.
const AT_ONCE: usize = 8;

/// Longest time until everything must be free again.
const PATIENCE: Duration = Duration::from_secs(60);

/// What was left of clients that vanished.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Disconnects {
    /// Clients that vanished.
    pub n: usize,
    /// Sessions, KV tokens and queued steps that were left.
    pub left: u64,
    /// Until nothing was left, in milliseconds.
    pub free_after_ms: f64,
    /// Answers to clients that stayed.
    pub n_neighbours: usize,
    /// Of these, answers with other tokens, or none.
    pub n_changed: usize,
}

/// Lets clients vanish at random moments, beside two that stay.
///
/// # Errors
/// A request cannot be sent, or a worker does not answer.
pub async fn run(context: &Context, fleet: &FaultFleet) -> anyhow::Result<Disconnects> {
    let n = context.args.disconnects;
    context.note(&format!("{n} clients vanish"));
    let done = std::cell::Cell::new(0_usize);
    let vanishing = async |lane: usize| {
        let mut dice = Dice::new(context.args.seed + 1 + lane as u64);
        for turn in (lane..n).step_by(AT_ONCE) {
            vanish(context, fleet, turn, &mut dice).await?;
            done.set(done.get() + 1);
        }
        anyhow::Ok(())
    };
    let staying = async |lane: usize| {
        let (mut n_answers, mut n_changed) = (0, 0);
        for turn in lane.. {
            if done.get() >= n {
                break;
            }
            let idx = turn % context.prompts.len();
            let mut told = Told::default();
            let prompt = &context.prompts[idx].tokens;
            told.rest(&mut fleet.send(prompt, context.args.tokens.into()).await?).await;
            n_answers += 1;
            let same = told.failure.is_none() && told.tokens == context.answers[idx];
            n_changed += usize::from(!same);
        }
        anyhow::Ok((n_answers, n_changed))
    };
    let (_, stayed) = tokio::try_join!(
        try_join_all((0..AT_ONCE).map(&vanishing)),
        try_join_all((0..2).map(&staying)),
    )?;
    let ended = Instant::now();
    let mut left = fleet.held().await?;
    while left > 0 && ended.elapsed() < PATIENCE {
        sleep(Duration::from_millis(50)).await;
        left = fleet.held().await?;
    }
    Ok(Disconnects {
        n,
        left,
        free_after_ms: ended.elapsed().as_secs_f64() * 1e3,
        n_neighbours: stayed.iter().map(|(n_answers, _)| n_answers).sum(),
        n_changed: stayed.iter().map(|(_, n_changed)| n_changed).sum(),
    })
}

/// One client that asks and vanishes: a third while a long prompt is read, the others while tokens
/// come.
async fn vanish(
    context: &Context,
    fleet: &FaultFleet,
    turn: usize,
    dice: &mut Dice,
) -> anyhow::Result<()> {
    let max_tokens = usize::from(context.args.tokens);
    if turn.is_multiple_of(3) {
        // Every prompt begins anew, so that none is known.
        let from = dice.below(context.long.len() / 2);
        let stream = fleet.send(&context.long[from..], max_tokens).await?;
        sleep(Duration::from_millis(dice.below(200) as u64)).await;
        drop(stream);
        return Ok(());
    }
    let prompt = &context.prompts[dice.below(context.prompts.len())].tokens;
    let mut stream = fleet.send(prompt, max_tokens).await?;
    let mut told = Told::default();
    told.until(&mut stream, dice.below(max_tokens / 2)).await;
    Ok(())
}
