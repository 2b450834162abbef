//! How many tokens to draft: K from what acceptance, the round trip and the draft really cost.
//!
//! A step with K drafted tokens yields [`expected_tokens`] tokens and takes as long as steps of its
//! size took, and K times what drafting a token takes. K is the maximum of the quotient, 0 if
//! nothing beats a plain step by the margin that the costs ask for. While K is 0 nothing would be
//! learnt, so a short probe runs now and then; its spacing grows while probes keep failing, which
//! bounds what they cost.

use std::time::Duration;

use crate::acceptance::expected_tokens;

/// Longest draft that anybody may ask for: beyond it nothing is accepted and steps get long.
pub const MAX_DRAFT_TOKENS: u64 = 64;

/// Weight of the history against one tested token: about the last 60 tested tokens count.
const DECAY: f64 = 0.984;

/// Tested tokens that the prior is worth; few, so that a session finds its own rate soon.
const PRIOR_WEIGHT: f64 = 4.0;

/// Gain below which a change of K is not worth the restart of the estimates.
const HYSTERESIS: f64 = 1.02;

/// Drafted tokens of a probe.
const PROBE_K: usize = 2;

/// Plain steps before the first probe and at most between two.
const PROBE_SPACING: (u32, u32) = (32, 256);

/// What the parts of a step cost, measured.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCosts {
    /// A step from sending to its answer, by its drafted tokens: a plain one first, then one for
    /// each number up to [`MAX_DRAFT_TOKENS`].
    pub steps: Vec<Duration>,
    /// Drafting one token, from the wish to the draft.
    pub draft: Duration,
    /// Part by which a draft has to beat a plain step: what it costs others is not in the times.
    pub margin: f64,
}

/// Chooses K for one session.
#[derive(Debug, Clone)]
pub struct DraftLength {
    max: usize,
    k: usize,
    accepted: f64,
    tested: f64,
    plain_steps: u32,
    probe_spacing: u32,
}

impl DraftLength {
    /// Starts with an acceptance expected from earlier sessions.
    ///
    /// **Units**: `prior` is a probability per drafted token.
    #[must_use]
    pub fn new(max: usize, prior: f64) -> Self {
        Self {
            max,
            k: PROBE_K.min(max),
            accepted: prior.clamp(0.0, 1.0) * PRIOR_WEIGHT,
            tested: PRIOR_WEIGHT,
            plain_steps: 0,
            probe_spacing: PROBE_SPACING.0,
        }
    }

    /// Most tokens that it asks for.
    #[must_use]
    pub const fn max(&self) -> usize {
        self.max
    }

    /// Probability that a drafted token stands, given that all before it do.
    #[must_use]
    pub fn acceptance(&self) -> f64 {
        if self.tested > 0.0 { self.accepted / self.tested } else { 0.0 }
    }

    /// Learns from one verify of `n_drafted` tokens.
    ///
    /// Tokens behind the first rejected one were not tested and do not count.
    pub fn observe(&mut self, n_drafted: usize, n_accepted: usize) {
        let n_accepted = n_accepted.min(n_drafted);
        let tested = n_drafted.min(n_accepted + 1);
        for idx in 0..tested {
            self.tested = self.tested * DECAY + 1.0;
            self.accepted = self.accepted * DECAY + f64::from(u8::from(idx < n_accepted));
        }
    }

    /// Returns the number of tokens to draft for the next step.
    pub fn next(&mut self, costs: &StepCosts) -> usize {
        let best = self.best(costs);
        let better = self.rate(best, costs) > self.rate(self.k, costs) * HYSTERESIS;
        if better || best == 0 {
            self.k = best;
        }
        if self.k > 0 {
            self.plain_steps = 0;
            self.probe_spacing = PROBE_SPACING.0;
            return self.k;
        }
        self.plain_steps += 1;
        if self.max == 0 || self.plain_steps < self.probe_spacing {
            return 0;
        }
        self.plain_steps = 0;
        self.probe_spacing = (self.probe_spacing * 2).min(PROBE_SPACING.1);
        PROBE_K.min(self.max)
    }

    fn best(&self, costs: &StepCosts) -> usize {
        let rate = |k: &usize| self.rate(*k, costs);
        let best = (1..=self.max).max_by(|a, b| rate(a).total_cmp(&rate(b)).then(b.cmp(a)));
        best.filter(|best| rate(best) > rate(&0) * (1.0 + costs.margin)).unwrap_or(0)
    }

    /// Tokens per second with `k` drafted tokens.
    fn rate(&self, k: usize, costs: &StepCosts) -> f64 {
        let Some(step) = costs.steps.get(k) else { return 0.0 };
        let time = step.as_secs_f64() + costs.draft.as_secs_f64() * k as f64;
        if time > 0.0 { expected_tokens(self.acceptance(), k) / time } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(round_trip_us: u64, row_us: u64, draft_us: u64) -> StepCosts {
        let step = |k: u64| Duration::from_micros(round_trip_us + row_us * k);
        StepCosts {
            steps: (0..=MAX_DRAFT_TOKENS).map(step).collect(),
            draft: Duration::from_micros(draft_us),
            margin: 0.0,
        }
    }

    /// Runs a session whose drafted tokens stand with a fixed pattern of probability `percent`.
    fn run(
        control: &mut DraftLength,
        costs: &StepCosts,
        percent: usize,
        steps: usize,
    ) -> Vec<usize> {
        let mut position = 0_usize;
        (0..steps)
            .map(|_| {
                let k = control.next(costs);
                let stands = |i: &usize| (i * 37) % 100 < percent;
                let n_accepted = (position..position + k).take_while(stands).count();
                position += n_accepted + 1;
                control.observe(k, n_accepted);
                k
            })
            .collect()
    }

    #[test]
    fn a_long_round_trip_and_good_drafts_ask_for_long_windows() {
        let mut control = DraftLength::new(10, 0.5);
        let ks = run(&mut control, &costs(200_000, 1_000, 500), 90, 200);
        assert!(ks[150..].iter().all(|k| *k >= 8), "{ks:?}");
    }

    #[test]
    fn poor_drafts_are_switched_off_and_probed_rarely() {
        let mut control = DraftLength::new(10, 0.5);
        let ks = run(&mut control, &costs(12_000, 1_500, 2_000), 2, 1_000);
        let drafted = ks[100..].iter().filter(|k| **k > 0).count();
        assert!(drafted > 0, "a session that went bad is probed");
        assert!(drafted <= 10, "{drafted} probes in 900 steps");
    }

    #[test]
    fn a_session_that_gets_better_is_found_by_its_probes() {
        let mut control = DraftLength::new(8, 0.0);
        run(&mut control, &costs(12_000, 600, 500), 0, 300);
        let ks = run(&mut control, &costs(12_000, 600, 500), 95, 2_000);
        assert!(ks[1_900..].iter().all(|k| *k > 2), "{:?}", &ks[1_900..]);
    }

    #[test]
    fn a_row_that_costs_a_run_of_its_own_is_left_out() {
        let mut control = DraftLength::new(10, 0.8);
        let mut costs = costs(20_000, 100, 500);
        for step in &mut costs.steps[4..] {
            *step += Duration::from_millis(20);
        }
        let ks = run(&mut control, &costs, 80, 200);
        assert!(ks[50..].iter().all(|k| *k == 3), "{ks:?}");
    }

    #[test]
    fn a_gain_below_the_margin_is_left() {
        let run_with = |margin| {
            let mut control = DraftLength::new(4, 0.6);
            run(&mut control, &StepCosts { margin, ..costs(20_000, 4_000, 2_000) }, 60, 200)
        };
        assert!(run_with(0.0)[100..].iter().all(|k| *k > 0));
        let drafted = run_with(0.5)[100..].iter().filter(|k| **k > 0).count();
        assert!(drafted <= 3, "{drafted} drafts, probes apart");
    }

    #[test]
    fn a_limit_of_zero_never_drafts() {
        let mut control = DraftLength::new(0, 1.0);
        assert!(run(&mut control, &costs(50_000, 1, 1), 100, 300).iter().all(|k| *k == 0));
    }
}
