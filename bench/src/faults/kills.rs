//! Workers that die or freeze at a random token.

use std::time::Instant;

use serde::Serialize;

use super::fleet::{FaultFleet, N_STAGES, Told};
use super::{Context, Dice};
use crate::harness::output;
use crate::harness::stats::Summary;

/// Answers that may end before their fault strikes.
const MAX_MISSED: usize = 100;

/// What happens to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Strike {
    /// It is killed.
    Kill,
    /// It stops and keeps its connection.
    Freeze,
}

/// One fault.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Struck {
    /// The stage that it struck.
    pub stage: usize,
    /// What it was.
    pub strike: Strike,
    /// Token after which it came.
    pub after: usize,
    /// Whether the answer is that of the undisturbed run.
    pub identical: bool,
    /// From the fault to the client's word of it, in milliseconds.
    pub noticed_ms: Option<f64>,
    /// From that word to the next token, in milliseconds.
    pub resumed_ms: Option<f64>,
    /// Why the answer failed, if it did.
    pub failure: Option<String>,
}

/// All faults of one kind at one stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Kills {
    /// The faults.
    pub struck: Vec<Struck>,
    /// Time to read a prompt as long as the longest replay, in milliseconds.
    pub prefill_ms: f64,
}

impl Kills {
    /// Times that `of` tells of faults of a kind, summarised.
    #[must_use]
    pub fn times(&self, strike: Strike, of: impl Fn(&Struck) -> Option<f64>) -> Option<Summary> {
        let struck = self.struck.iter().filter(|struck| struck.strike == strike);
        Summary::of(struck.filter_map(of))
    }
}

/// Strikes workers one after the other, each time the one that holds the only session.
///
/// # Errors
/// A fleet that does not come back to its strength.
pub async fn run(context: &Context, fleet: &mut FaultFleet) -> anyhow::Result<Kills> {
    let mut dice = Dice::new(context.args.seed);
    let mut struck = Vec::with_capacity(context.args.kills);
    let mut n_missed = 0;
    while struck.len() < context.args.kills {
        let round = struck.len();
        let strike = if cfg!(unix) && round % 4 >= 2 { Strike::Freeze } else { Strike::Kill };
        let Some(one) = one(context, fleet, (round % N_STAGES, strike), &mut dice).await? else {
            n_missed += 1;
            anyhow::ensure!(n_missed < MAX_MISSED, "{n_missed} answers ended before their fault");
            continue;
        };
        output::note(context.quiet, &format!("fault {}: {one:?}", round + 1));
        struck.push(one);
    }
    let longest = context.prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
    let longest = (longest + usize::from(context.args.tokens)).min(context.long.len());
    let sent = Instant::now();
    let mut told = Told::default();
    told.rest(&mut fleet.send(&context.long[..longest], 1).await?).await;
    let first = told.arrivals.first().copied().unwrap_or_else(Instant::now);
    let prefill_ms = first.saturating_duration_since(sent).as_secs_f64() * 1e3;
    Ok(Kills { struck, prefill_ms })
}

/// One fault; nothing if the answer ended before it struck.
async fn one(
    context: &Context,
    fleet: &mut FaultFleet,
    (stage, strike): (usize, Strike),
    dice: &mut Dice,
) -> anyhow::Result<Option<Struck>> {
    // An answer that is over before the fault strikes shows nothing: take a long one.
    let long_enough = |answer: &Vec<u32>| answer.len() >= usize::from(context.args.tokens);
    let fitting: Vec<usize> =
        (0..context.prompts.len()).filter(|&idx| long_enough(&context.answers[idx])).collect();
    anyhow::ensure!(!fitting.is_empty(), "no answer has {} tokens", context.args.tokens);
    let chosen = fitting[dice.below(fitting.len())];
    let after = 1 + dice.below(usize::from(context.args.tokens) - 8);
    let (prompt, expected) = (&context.prompts[chosen].tokens, &context.answers[chosen]);
    let mut stream = fleet.send(prompt, context.args.tokens.into()).await?;
    let mut told = Told::default();
    told.until(&mut stream, after).await;
    let Some(worker) = fleet.holder(stage).await else {
        told.rest(&mut stream).await;
        anyhow::ensure!(told.failure.is_none(), "nobody holds the session: {told:?}");
        return Ok(None);
    };
    // While the workers were asked, events came.
    let struck_at = Instant::now();
    match strike {
        Strike::Kill => fleet.processes.kill(&worker.name).await?,
        #[cfg(unix)]
        Strike::Freeze => fleet.processes.freeze(&worker.name).await?,
        #[cfg(not(unix))]
        Strike::Freeze => {}
    }
    told.rest(&mut stream).await;
    match strike {
        Strike::Kill => drop(fleet.processes.add_worker(stage).await?),
        #[cfg(unix)]
        Strike::Freeze => fleet.processes.thaw(&worker.name).await?,
        #[cfg(not(unix))]
        Strike::Freeze => {}
    }
    let ms = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
    let noticed = told.troubles.iter().find(|at| **at >= struck_at).copied();
    let resumed = noticed.and_then(|noticed| told.arrivals.iter().find(|at| **at > noticed));
    Ok(Some(Struck {
        stage,
        strike,
        after,
        identical: told.failure.is_none() && told.tokens == *expected,
        noticed_ms: noticed.map(|noticed| ms(struck_at, noticed)),
        resumed_ms: noticed.zip(resumed).map(|(noticed, resumed)| ms(noticed, *resumed)),
        failure: told.failure,
    }))
}
