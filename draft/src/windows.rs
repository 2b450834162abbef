//! Windows in flight: how many verifies a session has under way at the same time, and how long
//! each is.
//!
//! What is drafted is a chain of tokens. A window is a piece of it, sent as one step; windows
//! follow each other without waiting for answers. The first token that the target chooses otherwise
//! ends the chain: a new one starts with that choice, and the windows behind are wasted. If each
//! token stands with probability `p`, a chain yields `1 / (1 - p)` tokens, and no policy can get
//! them before a round trip and one pass through the stages are over.
//!
//! [`Plan::rate`] plays one chain through the measured times: the drafter makes one token after the
//! other, a window leaves when it is drafted and fewer than `depth` are under way, each stage runs
//! one window at a time. The plan with the most tokens per second is taken ([`WindowControl`]).
//! Stages are shared: all sessions' rows, wasted ones too, must fit into the time of a chain.

use std::time::Duration;

/// Most windows in flight that anybody may ask for: the rows of more would be wasted, since no
/// drafter is right for that long.
pub const MAX_WINDOWS: usize = 8;

/// Probability of reaching a window below which the rest of the chain is not looked at.
const NEGLIGIBLE: f64 = 0.03;

/// Windows of a chain that are looked at.
const MAX_PLAYED: usize = 48;

/// Gain below which another plan is not worth the change.
const HYSTERESIS: f64 = 1.05;

/// Answers between two looks for a better plan: rates change slowly, and a look costs some ten
/// microseconds.
const LOOK_EVERY: u32 = 8;

/// Gain of several windows over one at a time below which one is kept, where a round trip is all
/// links and where it is all work of the stages: the drafter and the processes around the stages
/// may share their machine, and then overlapping does not come for free.
const GAINS: (f64, f64) = (1.02, 1.2);

/// Chains that the assumption is worth that sessions are as fast as expected.
const FIRST_WEIGHT: f64 = 16.0;

/// Longest time of a chain that counts, in times of what was expected.
const MOST_TAKEN: f64 = 4.0;

/// Weight of the past against one chain in what is known of the speed.
const FIT_DECAY: f64 = 0.98;

/// Weight of the past in what is known of several windows after a chain without them: a bad
/// experience fades, so that it is checked now and then.
const FIT_FADE: f64 = 0.998;

/// What one stage takes for a window.
///
/// **Units**: seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageCost {
    /// However many rows it has.
    pub base: f64,
    /// For each row.
    pub row: f64,
}

/// What the parts of a window's way cost, measured.
#[derive(Debug, Clone, PartialEq)]
pub struct WindowCosts {
    /// The stages.
    pub stages: Vec<StageCost>,
    /// Time of a round trip in which no stage has the window.
    pub links: Duration,
    /// Drafting one token.
    pub draft: Duration,
    /// Sessions that decode.
    pub n_active: usize,
}

impl WindowCosts {
    /// Sessions whose rows share a micro-batch.
    fn sharing(&self) -> f64 {
        let group = (self.n_active as f64 / self.stages.len().max(1) as f64).max(1.0);
        1.0 + (group - 1.0) * self.meet()
    }

    /// Micro-batches that hold the windows of all sessions.
    fn n_groups(&self) -> f64 {
        let fewest = self.n_active.min(self.stages.len()) as f64;
        fewest + (self.n_active as f64 - fewest) * (1.0 - self.meet())
    }

    /// How far sessions find each other in the queue of a stage: where links take most of the time
    /// they seldom do.
    fn meet(&self) -> f64 {
        let slowest = self.stages.iter().map(|stage| stage.base + stage.row).fold(0.0, f64::max);
        let round_trip = self.links.as_secs_f64() + self.pass();
        (self.n_active as f64 * slowest / round_trip.max(1e-9)).min(1.0)
    }

    /// How many sessions wait for each other's rows, on average.
    pub(crate) fn disturbed(&self) -> f64 {
        1.0 + (self.n_active as f64 - 1.0).max(0.0) * self.meet()
    }

    /// Time of one row in all stages.
    fn pass(&self) -> f64 {
        self.stages.iter().map(|stage| stage.base + stage.row).sum()
    }

    /// Whether links take most of a round trip. Elsewhere stages have little time to spare, and
    /// what they share with drafter and coordinator is not in the measured times.
    pub(crate) fn is_far(&self) -> bool {
        self.links.as_secs_f64() > self.pass()
    }

    /// What several windows must gain.
    fn least_gain(&self) -> f64 {
        let links = self.links.as_secs_f64();
        let passes = self.pass();
        GAINS.0 + (GAINS.1 - GAINS.0) * (passes / (links + passes).max(1e-9)).powi(2)
    }
}

/// How a session speculates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Drafted tokens of a window.
    pub k: usize,
    /// Most windows under way.
    pub depth: usize,
    /// Whether the token that starts a chain leaves alone, at once.
    pub lead: bool,
}

/// A window of a chain that is played through.
#[derive(Debug, Clone)]
struct Played {
    rows: f64,
    sent: f64,
    answered: f64,
    /// Probability that the chain ends in it.
    ends: f64,
    /// When each stage begins and ends its pass.
    passes: Vec<(f64, f64)>,
}

impl Plan {
    /// One window at a time, of `k` drafted tokens.
    #[must_use]
    pub const fn single(k: usize) -> Self {
        Self { k, depth: 1, lead: false }
    }

    /// Whether one window at a time is under way.
    #[must_use]
    pub const fn is_single(&self) -> bool {
        self.depth <= 1
    }

    /// Tokens per second of a session whose drafted tokens stand with probability `p` each.
    #[must_use]
    pub fn rate(&self, p: f64, costs: &WindowCosts) -> f64 {
        let (tokens, seconds) = self.chain(p, costs);
        if seconds > 0.0 { tokens / seconds } else { 0.0 }
    }

    /// Tokens of a chain, and the seconds that it takes, on average.
    #[must_use]
    pub fn chain(&self, p: f64, costs: &WindowCosts) -> (f64, f64) {
        let p = p.clamp(0.0, 0.999);
        let played = self.play(p, costs);
        let Some(last) = played.last() else { return (0.0, 0.0) };
        let n_rows: f64 = played.iter().map(|window| window.rows).sum();
        let tokens = (1.0 - p.powf(n_rows)) / (1.0 - p);
        let beyond = p.powf(n_rows);
        let mut time = beyond * last.answered;
        let first = &played[0];
        for (i, window) in played.iter().enumerate() {
            let delay = delay_behind(window.answered, &played[i + 1..], first, costs);
            // What is sent later waits for its draft meanwhile.
            let later = (delay - self.k as f64 * costs.draft.as_secs_f64()).max(0.0);
            let delay = first.ends * delay + (1.0 - first.ends) * later;
            time += window.ends * (window.answered + delay);
        }
        // With one session the stages' time is part of what was played.
        let cycle = match costs.n_active {
            0 | 1 => time,
            _ => soft_max(time, load(&played, beyond, costs)),
        };
        (tokens, cycle)
    }

    fn play(&self, p: f64, costs: &WindowCosts) -> Vec<Played> {
        let (links, draft) = (costs.links.as_secs_f64(), costs.draft.as_secs_f64());
        let leg = links / (costs.stages.len() + 1) as f64;
        let sharing = costs.sharing();
        let mut free = vec![0.0_f64; costs.stages.len()];
        let mut played: Vec<Played> = Vec::new();
        let (mut n_drafted, mut reach) = (0, 1.0);
        loop {
            let is_first = played.is_empty();
            let drafted = if is_first && self.lead { 0 } else { self.k };
            n_drafted += drafted;
            let rows = (drafted + usize::from(is_first)) as f64;
            let slot = played.len().checked_sub(self.depth).map_or(0.0, |i| played[i].answered);
            let sent = (n_drafted as f64 * draft).max(slot);
            let mut at = sent + leg;
            let mut passes = Vec::with_capacity(free.len());
            for (stage, free) in costs.stages.iter().zip(&mut free) {
                let start = at.max(*free);
                *free = start + stage.base + stage.row * rows * sharing;
                passes.push((start, *free));
                at = *free + leg;
            }
            let goes_on = reach * p.powf(rows);
            played.push(Played { rows, sent, answered: at, ends: reach - goes_on, passes });
            reach = goes_on;
            // One window at a time drafts anew after each.
            let is_over = self.depth == 1 && !self.lead || self.k == 0;
            if is_over || reach < NEGLIGIBLE || played.len() >= MAX_PLAYED {
                return played;
            }
        }
    }
}

/// How much later a chain that begins at `at` is answered because stages are at work on windows of
/// the chain before: what waits in a queue is dropped, what runs is not.
fn delay_behind(at: f64, wasted: &[Played], first: &Played, costs: &WindowCosts) -> f64 {
    let leg = costs.links.as_secs_f64() / (costs.stages.len() + 1) as f64;
    let (mut delay, mut time) = (0.0_f64, at + leg);
    let mut n_run = wasted.iter().take_while(|window| window.sent < at).count();
    for (stage, (start, end)) in first.passes.iter().enumerate() {
        let runs = wasted[..n_run].iter().map(|window| window.passes[stage]);
        n_run = runs.clone().take_while(|pass| pass.0 < time).count();
        let wait = runs.take(n_run).map(|pass| pass.1 - time).fold(0.0, f64::max);
        delay += wait;
        time += wait + (end - start) + leg;
    }
    delay
}

/// The larger of two times of which neither hides the other completely.
fn soft_max(a: f64, b: f64) -> f64 {
    (a.powi(4) + b.powi(4)).powf(0.25)
}

/// Time of the busiest stage for the windows of all sessions while one chain lasts.
fn load(played: &[Played], beyond: f64, costs: &WindowCosts) -> f64 {
    let n_sessions = costs.n_active as f64;
    let n_groups = costs.n_groups();
    let (mut n_windows, mut n_rows) = (0.0, 0.0);
    for (i, end) in played.iter().enumerate() {
        let is_last = i + 1 == played.len();
        let share = end.ends + if is_last { beyond } else { 0.0 };
        // What leaves before the end is known.
        for window in played.iter().filter(|window| window.sent < end.answered) {
            n_windows += share;
            n_rows += share * window.rows;
        }
    }
    let of =
        |stage: &StageCost| n_groups * stage.base * n_windows + n_sessions * stage.row * n_rows;
    costs.stages.iter().map(of).fold(0.0, f64::max)
}

/// What a session may choose from.
#[derive(Debug, Clone, Copy)]
pub struct Choices {
    /// Fewest and most drafted tokens of a window.
    pub k: (usize, usize),
    /// Fewest and most windows in flight.
    pub depth: (usize, usize),
    /// Whether the first row of a chain may leave alone.
    pub may_lead: bool,
}

/// Chooses the plan of one session.
#[derive(Debug, Clone)]
pub struct WindowControl {
    choices: Choices,
    plan: Option<Plan>,
    answers: u32,
}

impl WindowControl {
    /// Starts with nothing known.
    #[must_use]
    pub const fn new(choices: Choices) -> Self {
        Self { choices, plan: None, answers: 0 }
    }

    /// Whether it may ever have more than one window in flight.
    #[must_use]
    pub const fn may_overlap(&self) -> bool {
        self.choices.depth.1 > 1 && self.choices.k.1 > 0
    }

    /// Says whether the first row of a chain may leave alone.
    pub fn let_lead(&mut self, may_lead: bool) {
        if self.choices.may_lead != may_lead {
            self.choices.may_lead = may_lead;
            self.plan = None;
        }
    }

    /// Returns the plan for what is sent next. `single` is what a session that has one window at a
    /// time would do (if it drafts nothing, nobody does), `fit` how much of the expected speed several windows reach.
    pub fn next(&mut self, single: Plan, p: f64, costs: &WindowCosts, fit: f64) -> Plan {
        let is_free = self.choices.depth.0 <= 1;
        if !self.may_overlap() || single.k == 0 || (is_free && !costs.is_far()) {
            self.plan = None;
            return single;
        }
        self.answers = self.answers.wrapping_add(1);
        let held = self.plan.filter(|plan| plan.depth > 1);
        if self.answers % LOOK_EVERY != 1 && self.plan.is_some() {
            return held.unwrap_or(single);
        }
        let best = self.best(p, costs);
        let best_rate = best.rate(p, costs);
        let several = match held {
            Some(held) if held.rate(p, costs) * HYSTERESIS >= best_rate => held,
            _ => best,
        };
        let gain = several.rate(p, costs) * fit / single.rate(p, costs).max(1e-9);
        let enough = if held.is_some() { costs.least_gain() / 1.02 } else { costs.least_gain() };
        let pays = !is_free || gain > enough;
        let plan = if pays { several } else { single };
        self.plan = Some(plan);
        plan
    }

    /// The plan before anything was measured.
    #[must_use]
    pub fn first(&self, single: Plan) -> Plan {
        match self.choices.depth.0 {
            depth if depth > 1 && single.k > 0 => {
                Plan { depth, lead: self.choices.may_lead, ..single }
            }
            _ => single,
        }
    }

    /// The best plan with several windows.
    fn best(&self, p: f64, costs: &WindowCosts) -> Plan {
        let Choices { k: (least_k, most_k), depth: (least, most), may_lead } = self.choices;
        let mut best = (f64::MIN, Plan { k: least_k.max(1), depth: most, lead: may_lead });
        // Neighbours of larger numbers are about as good.
        let tried = |n: &usize| *n <= 4 || n.is_multiple_of(2);
        for depth in (least.max(2)..=most).filter(|depth| tried(depth) || least == most) {
            for k in (least_k.max(1)..=most_k).filter(|k| tried(k) || least_k == most_k) {
                for lead in [true, false].into_iter().filter(|lead| may_lead || !lead) {
                    let plan = Plan { k, depth, lead };
                    let rate = plan.rate(p, costs);
                    // Of equals the first: fewer windows.
                    if rate > best.0 * 1.001 || best.0 == f64::MIN {
                        best = (rate, plan);
                    }
                }
            }
        }
        best.1
    }
}

/// How fast sessions were with several windows, and with one at a time, against what was expected.
#[derive(Debug, Clone, Copy)]
pub struct Fit {
    several: Times,
    single: Times,
}

/// Chains and their times in parts of what was expected, the older ones with less weight. Times of
/// chains say more than tokens: those come by chance.
#[derive(Debug, Clone, Copy)]
struct Times {
    n_chains: f64,
    taken: f64,
}

impl Default for Fit {
    fn default() -> Self {
        let first = Times { n_chains: FIRST_WEIGHT, taken: FIRST_WEIGHT };
        Self { several: first, single: first }
    }
}

impl Fit {
    /// Learns from the time that a chain took which was expected to take so many seconds.
    pub fn observe(&mut self, is_single: bool, expected: f64, taken: Duration) {
        if expected <= 0.0 {
            return;
        }
        // A pause has reasons that no plan changes.
        let taken = (taken.as_secs_f64() / expected).min(MOST_TAKEN);
        let times = if is_single {
            let first = Self::default().several;
            self.several.fade(first);
            &mut self.single
        } else {
            &mut self.several
        };
        times.n_chains = times.n_chains * FIT_DECAY + 1.0;
        times.taken = times.taken * FIT_DECAY + taken;
    }

    /// What several windows reach of the speed that is expected of them, where one at a time
    /// reaches all.
    #[must_use]
    pub fn of_several(&self) -> f64 {
        let fit = |times: &Times| times.n_chains / times.taken.max(1e-9);
        fit(&self.several) / fit(&self.single).max(1e-9)
    }
}

impl Times {
    fn fade(&mut self, first: Self) {
        let toward = |old: f64, new: f64| old * FIT_FADE + new * (1.0 - FIT_FADE);
        self.n_chains = toward(self.n_chains, first.n_chains);
        self.taken = toward(self.taken, first.taken);
    }
}

#[cfg(test)]
mod simulation;
