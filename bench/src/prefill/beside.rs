//! What a long prompt on narrow links does to the steps of others.
//!
//! Two stages, each worker on a link of its own to the broker, 10 ms one way. Two users decode
//! without drafts; then another one sends a prompt of 2,000 tokens that nobody has sent before. A
//! step's time is that between two tokens of a user. A prompt costs the stages computation as well,
//! which the links have nothing to do with: so a fleet whose links have the same delay and no limit
//! stands beside.

use std::time::Duration;

use serde::Serialize;
use stagebus_shards::text::TextModel;

use super::{CLAIMED, Cut, PrefillArgs, plan, warm_up};
use crate::harness::claims::{Bound, Claim, Target};
use crate::harness::machine::Machine;
use crate::harness::stats::{Summary, median};
use crate::harness::table::{number, table};
use crate::link::{self, Conditions, LinkPlan};
use crate::load::Ask;
use crate::load::visit::{Visitor, visit};
use crate::node_fleet::NodeFleet;
use crate::node_fleet::wiring::Wiring;
use crate::prompts;

pub(super) const BULK_STEPS: Target = Target {
    name: "bulk_step_ratio",
    target: 1.3,
    bound: Bound::AtMost,
    what: "median step of two users while a 2,000-token prompt passes worker links of 20 Mbit/s, over that without the prompt",
};

/// Rate of the narrow links.
const NARROW_MBIT_S: f64 = 20.0;

/// From a worker to the broker, and from there to a worker.
const DELAY: Duration = Duration::from_millis(10);

/// Users who decode.
const N_USERS: usize = 2;

/// Tokens of an answer, and answers of a turn: more than can be given in it.
const ANSWERS: (u32, usize) = (200, 100);

/// What was measured on one fleet.
#[derive(Debug, Serialize)]
pub struct Beside {
    /// Rate of the workers' links, in Mbit/s; nothing if it is not limited.
    pub mbit_s: Option<f64>,
    /// Times of steps without the prompt, in milliseconds.
    pub without_ms: Option<Summary>,
    /// Times of steps while the prompt was prefilled, in milliseconds.
    pub with_ms: Option<Summary>,
    /// Ratio of the medians, by round.
    pub ratio: Vec<f64>,
    /// Time to the first token of the prompt, in milliseconds, by round.
    pub ttft_ms: Vec<f64>,
}

/// Measures both fleets, one after the other.
///
/// # Errors
/// A fleet that does not start, a request that fails.
pub(super) async fn run(
    args: &PrefillArgs,
    (cut, machine): (&Cut, &Machine),
    text: &TextModel,
) -> anyhow::Result<Vec<Beside>> {
    let mut all = Vec::new();
    for mbit_s in [Some(NARROW_MBIT_S), None] {
        let conditions = match mbit_s {
            Some(rate) => Conditions::queued(DELAY, link::mbit_s(rate)),
            None => Conditions::delay(DELAY),
        };
        let workers = vec![Some(LinkPlan::both(conditions)); cut.layers.len()];
        let wiring = Wiring::Each { workers, coordinator: None };
        let fleet = NodeFleet::start_wired(&plan(args, cut, machine, None), &wiring).await?;
        warm_up(&fleet, text).await?;
        fleet.join_cores().await?;
        all.push(measure(args, &fleet, text, mbit_s).await?);
        fleet.end().await?;
    }
    Ok(all)
}

async fn measure(
    args: &PrefillArgs,
    fleet: &NodeFleet,
    text: &TextModel,
    mbit_s: Option<f64>,
) -> anyhow::Result<Beside> {
    let encoded = prompts::encoded(text)?;
    let (max_tokens, n_asks) = ANSWERS;
    let ask = |prompt| Ask { prompt, max_tokens, draft_tokens: Some(0), ..Ask::default() };
    let prompts = encoded.iter().cycle().take(n_asks);
    let asks: Vec<Ask<'_>> = prompts.map(|prompt| ask(&prompt.tokens)).collect();
    let (mut ratio, mut ttft_ms) = (Vec::new(), Vec::new());
    let (mut with_all, mut without_all) = (Vec::new(), Vec::new());
    for round in 0..args.rounds {
        let prompt = prompts::long(text, CLAIMED, 5000 + u64::from(round))?;
        let with = visit(fleet, (N_USERS, &asks), Visitor::Prompt(&prompt)).await?;
        let without = visit(fleet, (N_USERS, &asks), Visitor::Nobody(with.span)).await?;
        let of = |gaps: &[f64]| median(gaps.iter().copied());
        ratio.extend(of(&with.gaps_ms).zip(of(&without.gaps_ms)).map(|(with, out)| with / out));
        ttft_ms.push(with.span.as_secs_f64() * 1e3);
        with_all.extend(with.gaps_ms);
        without_all.extend(without.gaps_ms);
    }
    let (without_ms, with_ms) = (Summary::of(without_all), Summary::of(with_all));
    Ok(Beside { mbit_s, without_ms, with_ms, ratio, ttft_ms })
}

/// The claim, and beside it what the prompt does where links are not limited.
pub(super) fn claim(all: &[Beside]) -> Claim {
    let find = |narrow: bool| all.iter().find(|beside| beside.mbit_s.is_some() == narrow);
    let ratio = |beside: &Beside| median(beside.ratio.iter().copied());
    let (Some(narrow), Some(wide)) = (find(true), find(false)) else {
        return BULK_STEPS.missing("needs --stages 2");
    };
    let how = format!(
        "{}; on links without a limit, where only the computation of the prompt counts, {} ({})",
        steps(narrow),
        number(ratio(wide), 2),
        steps(wide)
    );
    match ratio(narrow) {
        Some(ratio) => BULK_STEPS.measured(ratio, how),
        None => BULK_STEPS.missing("no step was timed"),
    }
}

fn steps(beside: &Beside) -> String {
    let of = |summary: Option<Summary>| {
        let ms = |of: fn(&Summary) -> f64| number(summary.as_ref().map(of), 0);
        format!("{} ms, 99 % {} ms", ms(|summary| summary.median), ms(|summary| summary.p99))
    };
    format!("median {} with the prompt, {} without", of(beside.with_ms), of(beside.without_ms))
}

/// The table for people.
pub(super) fn describe(all: &[Beside]) -> String {
    let row = |beside: &Beside| {
        let ms =
            |summary: Option<Summary>, of: fn(&Summary) -> f64| number(summary.as_ref().map(of), 1);
        vec![
            beside.mbit_s.map_or_else(|| "no limit".to_owned(), |rate| number(Some(rate), 0)),
            ms(beside.without_ms, |summary| summary.median),
            ms(beside.without_ms, |summary| summary.p99),
            ms(beside.with_ms, |summary| summary.median),
            ms(beside.with_ms, |summary| summary.p99),
            number(median(beside.ratio.iter().copied()), 2),
            number(median(beside.ttft_ms.iter().copied()), 0),
        ]
    };
    let header = [
        "link Mbit/s",
        "step ms alone",
        "p99",
        "beside a prompt",
        "p99",
        "ratio",
        "TTFT ms of the prompt",
    ];
    table(&header, &all.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_claim_is_for_narrow_links_and_names_the_others() {
        let beside = |mbit_s, ratio: f64| Beside {
            mbit_s,
            without_ms: Summary::of([50.0]),
            with_ms: Summary::of([50.0 * ratio]),
            ratio: vec![ratio],
            ttft_ms: vec![1.0],
        };
        let found = claim(&[beside(Some(20.0), 1.25), beside(None, 1.2)]);
        assert_eq!((found.value, found.holds), (Some(1.25), Some(true)));
        assert!(found.how.contains("1.20"), "{}", found.how);
        assert_eq!(claim(&[]).holds, None);
    }
}
