//! Users by stages by speculation: throughput, latency, and where the processors' time goes.

use serde::Serialize;
use stagebus_shards::WeightMode;

use super::contestant::{Contestant, Kind};
use super::{Context, Part};
use crate::busy::observed_users;
use crate::genai::{GenaiBackend, GenaiUsers};
use crate::harness::stats::{Summary, median};
use crate::load::{Ask, Flow};
use crate::node_fleet::CpuTime;

/// Users of the batching claims.
pub(super) const MANY: usize = 16;

/// Users of the claim on speculation.
pub(super) const PAIR: usize = 2;

/// Users at the same time when all prompts are asked once, before anything is timed.
const WARM_UP_USERS: usize = 16;

/// Prompts that are asked for warming up where users are served one after the other.
const WARM_UP_ONE_BY_ONE: usize = 2;

/// One cell of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Who serves.
    pub kind: Kind,
    /// Users at the same time.
    pub users: usize,
    /// Whether the coordinator may draft.
    pub speculation: bool,
}

/// A cell with what was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Cell {
    /// Which.
    #[serde(flatten)]
    pub place: Place,
    /// Tokens per second of all users, the median over rounds.
    pub tok_s: Option<f64>,
    /// One entry per round.
    pub rounds: Vec<Round>,
    /// Times from request to first token over all rounds, in milliseconds.
    pub ttft_ms: Option<Summary>,
    /// Times between arrivals of tokens over all rounds, in milliseconds.
    pub gap_ms: Option<Summary>,
    /// What the stages did, in a turn of its own; only where claims are made.
    pub stages: Option<StageUse>,
}

/// What the stages did in one turn, from what they report with every step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageUse {
    /// Share of the time from the first token to the last that each stage spent in micro-batches
    /// with decode rows.
    pub inference_share: Vec<f64>,
    /// Mean rows of such a micro-batch of each stage, prefill rows in it included.
    pub batch_rows: Vec<f64>,
}

/// A cell in one round.
#[derive(Debug, Clone, Serialize)]
pub struct Round {
    /// Number of the round.
    pub round: usize,
    /// Tokens per second of all users: from the first request to the last token.
    pub tok_s: f64,
    /// Median of the users' own, from request to last token.
    pub user_tok_s: f64,
    /// Median of the users' own after their first token.
    pub decode_tok_s: Option<f64>,
    /// From the first request to the last token, in milliseconds.
    pub wall_ms: f64,
    /// Tokens of all answers.
    pub n_tokens: usize,
    /// Prompt tokens that were cached.
    pub cached_tokens: u32,
    /// Drafted tokens.
    pub drafted_tokens: u32,
    /// Drafted tokens that were right.
    pub accepted_tokens: u32,
    /// Steps that generated tokens.
    pub steps: u32,
    /// Answers whose tokens differ from those that the prompt gave first.
    pub n_differing: usize,
    /// Processor time of the fleet's processes in this turn.
    pub cpu: Option<CpuTime>,
}

impl Cell {
    /// Median over rounds of a figure.
    #[must_use]
    pub fn median(&self, figure: impl Fn(&Round) -> Option<f64>) -> Option<f64> {
        median(self.rounds.iter().filter_map(figure))
    }
}

/// The cells of a run, and which of them claims need.
fn places(context: &Context, kinds: &[Kind]) -> Vec<(Place, bool)> {
    let args = &context.args;
    let mut all = Vec::new();
    let mut add = |kind, users, speculation, claimed| {
        all.push((Place { kind, users, speculation }, claimed));
    };
    for &users in &args.users {
        for &kind in kinds {
            let claimed = matches!(users, 1 | MANY);
            match kind {
                Kind::Genai(GenaiUsers::One(_)) if users == 1 => add(kind, 1, false, true),
                Kind::Genai(GenaiUsers::Batch) if claimed => add(kind, users, false, true),
                Kind::Genai(_) => {}
                Kind::STATEFUL if users == 1 => add(kind, 1, false, true),
                Kind::STATEFUL => {}
                Kind::Fleet { n_stages, weights, .. } => {
                    let compact = weights == WeightMode::Compact;
                    let two = n_stages == 2 && users == PAIR;
                    if compact || claimed {
                        add(kind, users, false, claimed && n_stages <= 2);
                    }
                    if (compact || two) && args.has(Part::Speculation) {
                        add(kind, users, true, two);
                    }
                }
            }
        }
    }
    all
}

/// Warms up, then measures all cells in turn, round by round.
///
/// # Errors
/// Anything that does not run.
pub(super) async fn run(
    context: &Context,
    contestants: &mut [Contestant],
) -> anyhow::Result<Vec<Cell>> {
    let timed = warm_up(context, contestants).await?;
    let kinds: Vec<Kind> = contestants.iter().map(Contestant::kind).collect();
    let places = places(context, &kinds);
    let mut flows: Vec<Vec<(Round, Flow)>> = vec![Vec::new(); places.len()];
    for round in 0..usize::from(context.args.rounds) {
        context.note(&format!("round {}", round + 1));
        for ((place, claimed), flows) in places.iter().zip(&mut flows) {
            if round >= usize::from(context.args.whole_rounds) && !claimed {
                continue;
            }
            let found = contestants.iter_mut().find(|found| found.kind() == place.kind);
            let Some(contestant) = found else { continue };
            flows.push(turn(context, contestant, place, &timed, round).await?);
        }
    }
    let mut cells = Vec::new();
    for ((place, claimed), flows) in places.into_iter().zip(flows) {
        let contestant = contestants.iter().find(|found| found.kind() == place.kind);
        let stages = match contestant {
            Some(contestant) if claimed => stage_use(context, contestant, &place, &timed).await?,
            _ => None,
        };
        cells.push(cell(place, flows, stages));
    }
    Ok(cells)
}

fn cell(place: Place, flows: Vec<(Round, Flow)>, stages: Option<StageUse>) -> Cell {
    let all = |of: fn(&Flow) -> &Vec<f64>| {
        Summary::of(flows.iter().flat_map(|(_, flow)| of(flow).iter().copied()))
    };
    Cell {
        place,
        tok_s: median(flows.iter().map(|(round, _)| round.tok_s)),
        ttft_ms: all(|flow| &flow.ttft_ms),
        gap_ms: all(|flow| &flow.gaps_ms),
        stages,
        rounds: flows.into_iter().map(|(round, _)| round).collect(),
    }
}

/// Asks everybody the prompts once, so that no turn pays for what is done once, and returns the
/// prompts whose answers are long enough to keep all users busy to the end.
async fn warm_up(context: &Context, contestants: &mut [Contestant]) -> anyhow::Result<Vec<usize>> {
    let mut timed = Vec::new();
    for contestant in contestants {
        let kind = contestant.kind();
        context.note(&format!("warming up {}", kind.name()));
        let one_by_one = matches!(kind, Kind::STATEFUL | Kind::Genai(GenaiUsers::One(_)));
        let n_prompts = if one_by_one { WARM_UP_ONE_BY_ONE } else { context.prompts.len() };
        let prompts: Vec<usize> = (0..n_prompts).collect();
        let users = if one_by_one { 1 } else { WARM_UP_USERS };
        let answers = contestant.answer(context, &prompts, users, Some(0)).await?;
        contestant.differing(&prompts, &answers);
        if timed.is_empty() {
            let long = prompts.iter().zip(&answers);
            let long = long.filter(|(_, served)| served.tokens.len() >= context.n_tokens());
            timed = long.map(|(&prompt, _)| prompt).collect();
        }
    }
    anyhow::ensure!(
        !timed.is_empty(),
        "no prompt has an answer of {} tokens: give fewer --tokens",
        context.n_tokens()
    );
    Ok(timed)
}

/// The prompts of a turn: other ones in every round, the same ones for everybody.
fn prompts_of(timed: &[usize], n_users: usize, round: usize) -> Vec<usize> {
    (0..n_users).map(|user| timed[(round * n_users + user) % timed.len()]).collect()
}

/// What a request says about drafting.
fn draft_tokens(speculation: bool) -> Option<u32> {
    if speculation { None } else { Some(0) }
}

async fn turn(
    context: &Context,
    contestant: &mut Contestant,
    place: &Place,
    timed: &[usize],
    round: usize,
) -> anyhow::Result<(Round, Flow)> {
    let prompts = prompts_of(timed, place.users, round);
    let before = contestant.fleet().and_then(|fleet| fleet.cpu_time());
    let draft = draft_tokens(place.speculation);
    let answers = contestant.answer(context, &prompts, place.users, draft).await?;
    let after = contestant.fleet().and_then(|fleet| fleet.cpu_time());
    let n_differing = contestant.differing(&prompts, &answers);
    let flow = Flow::of(&answers)
        .ok_or_else(|| anyhow::anyhow!("{} gave no tokens", place.kind.name()))?;
    let usage = &flow.usage;
    let round = Round {
        round,
        tok_s: flow.tok_s,
        user_tok_s: flow.user_tok_s,
        decode_tok_s: flow.decode_tok_s,
        wall_ms: flow.wall_ms,
        n_tokens: flow.n_tokens,
        cached_tokens: usage.cached_tokens,
        drafted_tokens: usage.drafted_tokens,
        accepted_tokens: usage.accepted_tokens,
        steps: usage.steps,
        n_differing,
        cpu: before.zip(after).map(|(before, after)| after.since(&before)),
    };
    Ok((round, flow))
}

/// One more turn, watched.
async fn stage_use(
    context: &Context,
    contestant: &Contestant,
    place: &Place,
    timed: &[usize],
) -> anyhow::Result<Option<StageUse>> {
    let Some(fleet) = contestant.fleet() else { return Ok(None) };
    fleet.join_cores().await?;
    let max_tokens = u32::try_from(context.n_tokens())?;
    let draft_tokens = draft_tokens(place.speculation);
    let asks: Vec<Ask<'_>> = prompts_of(timed, place.users, 0)
        .into_iter()
        .map(|prompt| Ask {
            prompt: &context.prompts[prompt].tokens,
            max_tokens,
            draft_tokens,
            ..Ask::default()
        })
        .collect();
    let (answers, busy) = observed_users(fleet, place.users, &asks).await?;
    let times = || answers.iter().flat_map(|served| &served.arrivals).map(|arrival| arrival.at_ms);
    let ends = times().min_by(f64::total_cmp).zip(times().max_by(f64::total_cmp));
    let Some(span_ms) = ends.map(|(first, last)| last - first).filter(|span| *span > 0.0) else {
        return Ok(None);
    };
    let inference_share = busy.ms().into_iter().map(|ms| ms / span_ms).collect();
    Ok(Some(StageUse { inference_share, batch_rows: busy.rows() }))
}

/// The rivals that serve one user, for the claims.
pub(super) fn single_rivals() -> [Kind; 2] {
    GenaiBackend::ALL.map(|backend| Kind::Genai(GenaiUsers::One(backend)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_gets_the_same_prompts_and_each_round_others() {
        let timed = [3, 5, 8];
        assert_eq!(prompts_of(&timed, 2, 0), [3, 5]);
        assert_eq!(prompts_of(&timed, 2, 1), [8, 3]);
        assert_eq!(prompts_of(&timed, 4, 0), [3, 5, 8, 3]);
    }

    #[test]
    fn no_speculation_is_said_and_the_rest_is_the_coordinators_choice() {
        assert_eq!((draft_tokens(false), draft_tokens(true)), (Some(0), None));
    }
}
