//! Speculation of one session: how many tokens to draft, in how many windows, and what became of
//! them.

use std::time::Instant;

use stagebus_draft::chain::Verdict;
use stagebus_draft::control::{DraftLength, StepCosts};
use stagebus_draft::windows::{Choices, Fit, MAX_WINDOWS, Plan, WindowControl, WindowCosts};

use crate::config::{AutoOr, CoordinatorSettings};

/// Tokens drafted before anything was measured.
const FIRST_K: usize = 2;

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
    /// request may ask for other numbers of tokens and of windows.
    pub(crate) fn new(
        settings: &CoordinatorSettings,
        (tokens, windows): (Option<u32>, Option<u32>),
        prior: f64,
    ) -> Self {
        let max = settings.max_draft_tokens as usize;
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
            windows: WindowControl::new(Choices { k, depth }),
            plan: Plan::single(0),
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
