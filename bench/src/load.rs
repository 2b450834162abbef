//! Users who ask a fleet at the same time, and what can be said of their answers.
//!
//! One task of this process plays all users: it publishes their requests, reads their events
//! (MessagePack) and notes when tokens arrive. Nothing else is done while they run.

pub mod visit;

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::future::try_join_all;
use stagebus_schemas::codec::{self, ContentType};
use stagebus_schemas::messages::public::{Event, PromptRequest, Usage};

use crate::harness::stats::{Summary, median};
use crate::node_fleet::NodeFleet;

/// Longest wait for an event: nobody else uses the fleet, so silence means trouble.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);

/// What one user asks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ask<'a> {
    /// Token ids.
    pub prompt: &'a [u32],
    /// Most tokens of the answer.
    pub max_tokens: u32,
    /// Tokens to draft per step: 0 for no speculation, absent for the coordinator's choice.
    pub draft_tokens: Option<u32>,
    /// Most windows in flight; absent for the coordinator's choice.
    pub draft_windows: Option<u32>,
    /// Most second guesses beside drafts; absent for the coordinator's choice.
    pub draft_alternatives: Option<u32>,
    /// How tokens are drawn; greedy when absent.
    pub draw: Option<Draw>,
}

/// How tokens are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// Temperature.
    pub temperature: f32,
    /// Seed of the noise.
    pub seed: u64,
}

/// New tokens that came at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    /// When, in milliseconds since the users began.
    pub at_ms: f64,
    /// How many.
    pub n_tokens: usize,
}

/// One answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Served {
    /// Its tokens, an end token included.
    pub tokens: Vec<u32>,
    /// When it was asked for, in milliseconds since the users began.
    pub sent_ms: f64,
    /// When its tokens came.
    pub arrivals: Vec<Arrival>,
    /// What the coordinator reports.
    pub usage: Usage,
}

impl Served {
    /// From asking to the first token, in milliseconds.
    #[must_use]
    pub fn ttft_ms(&self) -> Option<f64> {
        Some(self.arrivals.first()?.at_ms - self.sent_ms)
    }

    /// Times between arrivals, in milliseconds. Tokens that come together are one arrival.
    pub fn gaps_ms(&self) -> impl Iterator<Item = f64> {
        self.arrivals.windows(2).map(|pair| pair[1].at_ms - pair[0].at_ms)
    }

    /// Times between arrivals that overlap the time from `from_ms` to `to_ms`.
    pub fn gaps_within_ms(&self, from_ms: f64, to_ms: f64) -> impl Iterator<Item = f64> {
        let pairs = self.arrivals.windows(2);
        let inside = pairs.filter(move |pair| pair[1].at_ms > from_ms && pair[0].at_ms < to_ms);
        inside.map(|pair| pair[1].at_ms - pair[0].at_ms)
    }

    /// Tokens per second of this user, from asking to the last token.
    #[must_use]
    pub fn tok_s(&self) -> Option<f64> {
        rate(self.tokens.len(), self.arrivals.last()?.at_ms - self.sent_ms)
    }

    /// Tokens per second of this user after the first arrival.
    #[must_use]
    pub fn decode_tok_s(&self) -> Option<f64> {
        self.decode_tok_s_of_first(self.tokens.len())
    }

    /// The same over the first `n_tokens` tokens, to the end of the arrival that brings the last
    /// of them; `None` if there are fewer.
    #[must_use]
    pub fn decode_tok_s_of_first(&self, n_tokens: usize) -> Option<f64> {
        let first = self.arrivals.first()?;
        let mut n_arrived = 0;
        let last = self.arrivals.iter().find(|arrival| {
            n_arrived += arrival.n_tokens;
            n_arrived >= n_tokens
        })?;
        rate(n_arrived - first.n_tokens, last.at_ms - first.at_ms)
    }
}

/// Tokens per second; nothing for no tokens or no time.
fn rate(n_tokens: usize, ms: f64) -> Option<f64> {
    (n_tokens > 0 && ms > 0.0).then(|| n_tokens as f64 * 1e3 / ms)
}

/// What all users together got.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Flow {
    /// All tokens over the time from the first request to the last token, prompts included.
    pub tok_s: f64,
    /// Median over users of [`Served::tok_s`].
    pub user_tok_s: f64,
    /// Median over users of [`Served::decode_tok_s`].
    pub decode_tok_s: Option<f64>,
    /// [`Served::ttft_ms`] of every answer.
    pub ttft_ms: Vec<f64>,
    /// [`Served::gaps_ms`] of every answer.
    pub gaps_ms: Vec<f64>,
    /// Tokens of all answers.
    pub n_tokens: usize,
    /// From the first request to the last token, in milliseconds.
    pub wall_ms: f64,
    /// Sums of what the coordinator reports.
    pub usage: Usage,
}

impl Flow {
    /// Puts answers together; `None` without tokens.
    #[must_use]
    pub fn of(answers: &[Served]) -> Option<Self> {
        let first = answers.iter().map(|served| served.sent_ms).min_by(f64::total_cmp)?;
        let ends = answers.iter().filter_map(|served| Some(served.arrivals.last()?.at_ms));
        let wall_ms = ends.max_by(f64::total_cmp)? - first;
        let n_tokens = answers.iter().map(|served| served.tokens.len()).sum();
        Some(Self {
            tok_s: rate(n_tokens, wall_ms)?,
            user_tok_s: median(answers.iter().filter_map(Served::tok_s))?,
            decode_tok_s: median(answers.iter().filter_map(Served::decode_tok_s)),
            ttft_ms: answers.iter().filter_map(Served::ttft_ms).collect(),
            gaps_ms: answers.iter().flat_map(Served::gaps_ms).collect(),
            n_tokens,
            wall_ms,
            usage: sum(answers.iter().map(|served| &served.usage)),
        })
    }

    /// Times to the first token, summarised.
    #[must_use]
    pub fn ttft(&self) -> Option<Summary> {
        Summary::of(self.ttft_ms.iter().copied())
    }
}

fn sum<'a>(all: impl Iterator<Item = &'a Usage>) -> Usage {
    all.fold(Usage::default(), |mut sum, usage| {
        sum.prompt_tokens += usage.prompt_tokens;
        sum.completion_tokens += usage.completion_tokens;
        sum.cached_tokens += usage.cached_tokens;
        sum.drafted_tokens += usage.drafted_tokens;
        sum.accepted_tokens += usage.accepted_tokens;
        sum.steps += usage.steps;
        sum.bloat = sum.bloat.max(usage.bloat);
        sum
    })
}

/// Lets `n_users` users ask until all questions are answered: each takes the next question when its
/// answer has come. Answers come in the order of the questions.
///
/// # Errors
/// The first request that is refused or fails.
pub async fn users(
    fleet: &NodeFleet,
    n_users: usize,
    asks: &[Ask<'_>],
) -> anyhow::Result<Vec<Served>> {
    users_from(fleet, n_users, asks, (&Cell::new(0), Instant::now())).await
}

/// As [`users`], with the number of the next question in the caller's hand, who can end the asking
/// by moving it behind the last; times count from the instant given.
///
/// # Errors
/// The first request that is refused or fails.
pub async fn users_from(
    fleet: &NodeFleet,
    n_users: usize,
    asks: &[Ask<'_>],
    (next, epoch): (&Cell<usize>, Instant),
) -> anyhow::Result<Vec<Served>> {
    let user = async || {
        let mut answers = Vec::new();
        loop {
            let index = next.get();
            next.set(index + 1);
            let Some(ask) = asks.get(index) else { return anyhow::Ok(answers) };
            answers.push((index, one(fleet, ask, epoch).await?));
        }
    };
    let mut all: Vec<_> =
        try_join_all((0..n_users).map(|_| user())).await?.into_iter().flatten().collect();
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, served)| served).collect())
}

/// Asks once; times count from `epoch`.
///
/// # Errors
/// A request that is refused or fails.
pub async fn one(fleet: &NodeFleet, ask: &Ask<'_>, epoch: Instant) -> anyhow::Result<Served> {
    let request = PromptRequest {
        tokens: Some(ask.prompt.to_vec()),
        max_tokens: Some(ask.max_tokens),
        draft_tokens: ask.draft_tokens,
        draft_windows: ask.draft_windows,
        draft_alternatives: ask.draft_alternatives,
        temperature: ask.draw.map(|draw| draw.temperature),
        seed: ask.draw.map(|draw| draw.seed),
        ..PromptRequest::default()
    };
    answer(fleet, &request, epoch).await
}

/// Sends a request of any kind once; times count from `epoch`.
///
/// # Errors
/// A request that is refused or fails.
pub async fn answer(
    fleet: &NodeFleet,
    request: &PromptRequest,
    epoch: Instant,
) -> anyhow::Result<Served> {
    let encoding = ContentType::MessagePack;
    let payload = codec::encode_public(encoding, request).context("cannot encode a request")?;
    let since = || epoch.elapsed().as_secs_f64() * 1e3;
    let capacity = request.max_tokens.unwrap_or_default() as usize;
    let mut served = Served {
        tokens: Vec::with_capacity(capacity),
        sent_ms: since(),
        arrivals: Vec::with_capacity(capacity),
        usage: Usage::default(),
    };
    let subject = fleet.subjects().prompt();
    let bus = fleet.bus();
    let mut events = bus.event_stream(&subject, encoding, payload.into(), IDLE_TIMEOUT).await?;
    while let Some(event) = events.next().await? {
        match event {
            Event::Accepted { .. } | Event::Status { .. } => {}
            Event::Token { tokens, .. } => {
                served.arrivals.push(Arrival { at_ms: since(), n_tokens: tokens.len() });
                served.tokens.extend(tokens);
            }
            Event::Done { usage, .. } => served.usage = usage,
            Event::Error { class, message, .. } => {
                anyhow::bail!("a request failed: {message} ({class:?})")
            }
        }
    }
    Ok(served)
}

/// Users of the unit tests of the scenarios.
#[cfg(test)]
pub(crate) fn served(sent_ms: f64, arrivals: &[(f64, usize)]) -> Served {
    let n_tokens = arrivals.iter().map(|(_, n_tokens)| n_tokens).sum();
    Served {
        tokens: vec![7; n_tokens],
        sent_ms,
        arrivals: arrivals.iter().map(|&(at_ms, n_tokens)| Arrival { at_ms, n_tokens }).collect(),
        usage: Usage::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_its_times_and_rates() {
        let one = served(100.0, &[(150.0, 1), (160.0, 2), (200.0, 2)]);
        assert_eq!(one.ttft_ms(), Some(50.0));
        assert_eq!(one.gaps_ms().collect::<Vec<_>>(), [10.0, 40.0]);
        assert_eq!(one.tok_s(), Some(50.0));
        assert_eq!(one.decode_tok_s(), Some(80.0));
        assert_eq!(one.decode_tok_s_of_first(2), Some(200.0));
        assert_eq!(one.decode_tok_s_of_first(6), None);
        assert_eq!(served(0.0, &[]).tok_s(), None);
        assert_eq!(served(0.0, &[(5.0, 1)]).decode_tok_s(), None);
    }

    #[test]
    fn only_gaps_that_overlap_the_time_count() {
        let one = served(0.0, &[(10.0, 1), (20.0, 1), (35.0, 1), (60.0, 1)]);
        assert_eq!(one.gaps_within_ms(20.0, 30.0).collect::<Vec<_>>(), [15.0]);
        assert_eq!(one.gaps_within_ms(25.0, 36.0).collect::<Vec<_>>(), [15.0, 25.0]);
        assert_eq!(one.gaps_within_ms(0.0, 5.0).count(), 0);
    }

    #[test]
    fn a_flow_counts_all_tokens_over_all_the_time() {
        let users =
            [served(0.0, &[(100.0, 1), (500.0, 9)]), served(50.0, &[(100.0, 1), (1000.0, 9)])];
        let flow = Flow::of(&users).expect("there are tokens");
        assert_eq!((flow.n_tokens, flow.wall_ms, flow.tok_s), (20, 1000.0, 20.0));
        assert_eq!(flow.ttft_ms, [100.0, 50.0]);
        assert_eq!(flow.gaps_ms, [400.0, 900.0]);
        assert_eq!(Flow::of(&[]), None);
        assert_eq!(Flow::of(&[served(0.0, &[])]), None);
    }
}
