//! Speculation of one session: how many tokens to draft, in how many windows, and what became of
//! them.

use std::time::Instant;

use stagebus_draft::alternatives::{MAX_ALTERNATIVES, Place, Price};
use stagebus_draft::chain::Verdict;
use stagebus_draft::control::{DraftLength, StepCosts};
use stagebus_draft::drafter::Doubt;
use stagebus_draft::windows::{Choices, Fit, MAX_WINDOWS, Plan, WindowControl, WindowCosts};
use stagebus_schemas::messages::control::HeadMode;
use stagebus_schemas::messages::sampling::Sampling;

use crate::config::{AutoOr, CoordinatorSettings};

/// Tokens drafted before anything was measured.
const FIRST_K: usize = 2;

/// Share of chains whose first token is in doubt above which the chain's first row waits for it.
const OFTEN_IN_DOUBT: f64 = 0.25;

/// Weight of one chain in that share.
const DOUBT_SMOOTHING: f64 = 0.1;

/// What a request says of its speculation.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wish {
    /// Tokens per window.
    pub(crate) tokens: Option<u32>,
    /// Most windows under way.
    pub(crate) windows: Option<u32>,
    /// Most alternatives beside a chain.
    pub(crate) alternatives: Option<u32>,
}

/// What steps cost, as far as it was measured, and how far that was right.
#[derive(Debug)]
pub(crate) struct Measured<'a> {
    pub(crate) step: StepCosts,
    pub(crate) windows: WindowCosts,
    pub(crate) fit: &'a mut Fit,
}

/// How many tokens a session drafts, and what it has learnt.
#[derive(Debug)]
pub(crate) struct Speculation {
    /// Tokens per window, unless they are chosen.
    fixed: Option<usize>,
    length: DraftLength,
    windows: WindowControl,
    plan: Plan,
    /// Most alternatives beside a window.
    alternatives: usize,
    /// What one must add; nothing while none pays.
    price: Option<Price>,
    /// Share of chains with an alternative to their first token.
    first_in_doubt: f64,
    /// Seconds that a chain should take by the plan, and when it began.
    expected: Option<(f64, Instant)>,
    /// Tokens drafted.
    pub(crate) drafted: u32,
    /// Of these, tokens that the last stage chose too.
    pub(crate) accepted: u32,
    /// Steps that generated tokens.
    pub(crate) steps: u32,
}

impl Speculation {
    /// Speculation as the settings say, expecting `prior` of the drafted tokens to be accepted. A
    /// request may ask for other numbers.
    pub(crate) fn new(
        settings: &CoordinatorSettings,
        wish: Wish,
        sampling: &Sampling,
        prior: f64,
    ) -> Self {
        let max = settings.max_draft_tokens as usize;
        let Wish { tokens, windows, alternatives } = wish;
        // The second guess of a draw would be the runner-up of that draw, whose share is not known.
        let may_guess =
            sampling.is_greedy() && !sampling.needs_history() && settings.head == HeadMode::Token;
        let alternatives = alternatives.unwrap_or(settings.alternatives) as usize;
        let alternatives = if may_guess { alternatives.min(MAX_ALTERNATIVES) } else { 0 };
        let fixed = match tokens.map_or(settings.draft_tokens, AutoOr::Fixed) {
            AutoOr::Fixed(n) => Some((n as usize).min(max)),
            AutoOr::Auto => None,
        };
        let depth = match windows.map_or(settings.windows, AutoOr::Fixed) {
            AutoOr::Fixed(n) => {
                let n = (n as usize).clamp(1, MAX_WINDOWS);
                (n, n)
            }
            AutoOr::Auto => (1, MAX_WINDOWS),
        };
        let k = fixed.map_or((1, max), |k| (k, k));
        Self {
            fixed,
            length: DraftLength::new(max, prior),
            windows: WindowControl::new(Choices { k, depth, may_lead: alternatives == 0 }),
            plan: Plan::single(0),
            alternatives,
            price: None,
            first_in_doubt: 1.0,
            expected: None,
            drafted: 0,
            accepted: 0,
            steps: 0,
        }
    }

    /// Whether it may ever draft a token.
    pub(crate) fn may_draft(&self) -> bool {
        self.fixed.unwrap_or(self.length.max()) > 0
    }

    /// Whether second guesses are wanted, where they pay.
    pub(crate) fn may_guess(&self) -> bool {
        self.alternatives > 0
    }

    /// The places for alternatives among tokens that were drafted after `n_before` others; `first`
    /// is the first one that is open.
    pub(crate) fn places(&mut self, doubts: &[Doubt], n_before: usize, first: usize) -> Vec<Place> {
        let Some(price) = self.price else { return Vec::new() };
        let reach = self.length.acceptance().powi(i32::try_from(n_before).unwrap_or(i32::MAX));
        let from = |first| price.places(doubts, reach, first, self.alternatives);
        if n_before > 0 {
            return from(first);
        }
        let places = from(0);
        let open = if first == 0 { None } else { Some(from(first)) };
        let is_first = places.first().is_some_and(|place| place.index == 0);
        let share = f64::from(u8::from(is_first));
        self.first_in_doubt += (share - self.first_in_doubt) * DOUBT_SMOOTHING;
        self.windows.let_lead(self.first_in_doubt < OFTEN_IN_DOUBT);
        open.unwrap_or(places)
    }

    /// How the session speculates until its next answer.
    pub(crate) fn plan(&self) -> Plan {
        self.plan
    }

    /// Looks for the plan of what is sent next.
    pub(crate) fn replan(&mut self, measured: Option<Measured<'_>>, now: Instant) {
        let k = match (self.fixed, &measured) {
            (Some(k), _) => k,
            (None, Some(measured)) => self.length.next(&measured.step),
            (None, None) => FIRST_K.min(self.length.max()),
        };
        let single = Plan::single(k);
        let Some(Measured { windows: costs, fit, .. }) = measured else {
            self.plan = self.windows.first(single);
            return;
        };
        let p = self.length.acceptance();
        let plan = self.windows.next(single, p, &costs, fit.of_several());
        self.price = Price::new(&plan, p, &costs).filter(|_| self.may_guess());
        if self.windows.may_overlap() {
            let since = self.expected.filter(|_| plan.is_single() == self.plan.is_single());
            let since = since.map_or(now, |(_, since)| since);
            self.expected = Some((plan.chain(p, &costs).1, since));
        }
        self.plan = plan;
    }

    /// Compares the time of a chain that has ended with what was expected.
    pub(crate) fn chain_ended(&mut self, fit: &mut Fit, now: Instant) {
        if let Some((expected, since)) = self.expected.take() {
            let taken = now.saturating_duration_since(since);
            fit.observe(self.plan.is_single(), expected, taken);
        }
    }

    /// Forgets what the time until the next answer would say: something else takes it.
    pub(crate) fn interrupted(&mut self) {
        self.expected = None;
    }

    /// Counts drafted tokens that are sent.
    pub(crate) fn sent(&mut self, n_drafted: usize) {
        self.drafted = self.drafted.saturating_add(count(n_drafted));
    }

    /// Learns from the answer to a window.
    pub(crate) fn observe(&mut self, verdict: &Verdict) {
        self.steps += 1;
        self.accepted = self.accepted.saturating_add(count(verdict.n_sent));
        let n_tested = verdict.n_agreed + usize::from(verdict.differs);
        self.length.observe(n_tested, verdict.n_agreed);
    }

    /// Drafts nothing from here on.
    pub(crate) fn switch_off(&mut self) {
        self.fixed = Some(0);
        self.plan = Plan::single(0);
    }

    /// The acceptance that was measured, if any token was drafted.
    pub(crate) fn acceptance(&self) -> Option<f64> {
        (self.fixed.is_none() && self.drafted > 0).then(|| self.length.acceptance())
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
