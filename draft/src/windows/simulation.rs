//! The policy in a simulated pipeline, on simulated time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::*;
use crate::noise::philox;

/// Nanoseconds.
type Time = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives { stage: usize, window: usize },
    Ran { stage: usize },
    Answered { window: usize },
    Drafted { session: usize, ticket: usize },
}

#[derive(Debug, Clone, Copy)]
struct Window {
    session: usize,
    chain: usize,
    first: usize,
    rows: usize,
}

/// One session: a chain after the other.
#[derive(Debug, Clone, Default)]
struct Session {
    plan: Option<Plan>,
    chain: usize,
    /// Rows of the chain that agree with what the target chooses.
    agree: usize,
    sent: usize,
    known: usize,
    n_live: usize,
    ticket: usize,
    drafting: bool,
    n_tokens: usize,
}

struct Simulation {
    costs: WindowCosts,
    p: f64,
    now: Time,
    events: BinaryHeap<Reverse<(Time, usize, Event)>>,
    n_events: usize,
    windows: Vec<Window>,
    sessions: Vec<Session>,
    queues: Vec<VecDeque<usize>>,
    running: Vec<Vec<usize>>,
    n_chains: u32,
}

fn nanos(seconds: f64) -> Time {
    (seconds * 1e9) as Time
}

impl Simulation {
    fn new(p: f64, costs: &WindowCosts, plan: Plan) -> Self {
        let session = Session { plan: Some(plan), ..Session::default() };
        Self {
            p,
            now: 0,
            events: BinaryHeap::new(),
            n_events: 0,
            windows: Vec::new(),
            sessions: vec![session; costs.n_active],
            queues: vec![VecDeque::new(); costs.stages.len()],
            running: vec![Vec::new(); costs.stages.len()],
            n_chains: 0,
            costs: costs.clone(),
        }
    }

    /// Tokens per second and session.
    fn run(mut self, seconds: f64) -> f64 {
        for session in 0..self.sessions.len() {
            self.start_chain(session);
        }
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            if at > nanos(seconds) {
                break;
            }
            self.now = at;
            match event {
                Event::Arrives { stage, window } => {
                    self.queues[stage].push_back(window);
                    self.start_batch(stage);
                }
                Event::Ran { stage } => self.on_ran(stage),
                Event::Answered { window } => self.on_answer(self.windows[window]),
                Event::Drafted { session, ticket } => {
                    let state = &mut self.sessions[session];
                    if state.ticket == ticket {
                        state.known += state.plan.unwrap().k;
                        state.drafting = false;
                        self.pump(session);
                    }
                }
            }
        }
        let n_tokens: usize = self.sessions.iter().map(|session| session.n_tokens).sum();
        n_tokens as f64 / seconds / self.sessions.len() as f64
    }

    fn after(&mut self, time: f64, event: Event) {
        self.n_events += 1;
        self.events.push(Reverse((self.now + nanos(time), self.n_events, event)));
    }

    fn leg(&self) -> f64 {
        self.costs.links.as_secs_f64() / (self.costs.stages.len() + 1) as f64
    }

    fn start_chain(&mut self, session: usize) {
        self.n_chains += 1;
        let draw = f64::from(philox(7, [self.n_chains, session as u32, 0, 0])[0]) / 4_294_967_296.0;
        let state = &mut self.sessions[session];
        state.agree = (draw.max(1e-9).ln() / self.p.ln()) as usize;
        state.chain += 1;
        (state.sent, state.known, state.n_live) = (0, 1, 0);
        state.ticket += 1;
        state.drafting = false;
        self.pump(session);
    }

    /// Sends what may leave and drafts on.
    fn pump(&mut self, session: usize) {
        loop {
            let state = &mut self.sessions[session];
            let Plan { k, depth, lead } = state.plan.unwrap();
            let unsent = state.known - state.sent;
            let full = k + usize::from(state.sent == 0);
            let leads = lead && state.sent == 0;
            let waits = unsent < full && !leads && k > 0;
            if state.n_live >= depth || unsent == 0 || waits {
                break;
            }
            let rows = unsent.min(full);
            let window = Window { session, chain: state.chain, first: state.sent, rows };
            state.sent += rows;
            state.n_live += 1;
            self.windows.push(window);
            let (window, leg) = (self.windows.len() - 1, self.leg());
            self.after(leg, Event::Arrives { stage: 0, window });
        }
        let state = &mut self.sessions[session];
        let Plan { k, depth, .. } = state.plan.unwrap();
        let full = k + usize::from(state.sent == 0);
        // One window at a time drafts for the next one only.
        let wants = if depth == 1 { state.known == 1 && state.sent == 0 } else { true };
        if k > 0 && wants && !state.drafting && state.known - state.sent < full {
            state.drafting = true;
            state.ticket += 1;
            let ticket = state.ticket;
            let time = self.costs.draft.as_secs_f64() * k as f64;
            self.after(time, Event::Drafted { session, ticket });
        }
    }

    fn start_batch(&mut self, stage: usize) {
        if !self.running[stage].is_empty() {
            return;
        }
        let cap = self.sessions.len().div_ceil(self.queues.len()).max(1);
        let mut batch: Vec<usize> = Vec::new();
        let mut rest = VecDeque::new();
        for window in std::mem::take(&mut self.queues[stage]) {
            let Window { session, chain, .. } = self.windows[window];
            let is_stale = self.sessions[session].chain != chain
                && rest.iter().chain(&self.queues[stage]).chain(&batch).any(|other: &usize| {
                    self.windows[*other].session == session && self.windows[*other].chain > chain
                });
            let alone = batch.iter().all(|other| self.windows[*other].session != session);
            if is_stale {
                continue;
            }
            if alone && batch.len() < cap {
                batch.push(window);
            } else {
                rest.push_back(window);
            }
        }
        self.queues[stage] = rest;
        if batch.is_empty() {
            return;
        }
        let rows: usize = batch.iter().map(|window| self.windows[*window].rows).sum();
        let StageCost { base, row } = self.costs.stages[stage];
        self.running[stage] = batch;
        self.after(base + row * rows as f64, Event::Ran { stage });
    }

    fn on_ran(&mut self, stage: usize) {
        let leg = self.leg();
        for window in std::mem::take(&mut self.running[stage]) {
            let event = if stage + 1 < self.queues.len() {
                Event::Arrives { stage: stage + 1, window }
            } else {
                Event::Answered { window }
            };
            self.after(leg, event);
        }
        self.start_batch(stage);
    }

    fn on_answer(&mut self, window: Window) {
        let Window { session, chain, first, rows } = window;
        let state = &mut self.sessions[session];
        if state.chain != chain {
            return;
        }
        state.n_live -= 1;
        let agreed = (state.agree - first).min(rows);
        let is_end = agreed < rows || first + rows == state.known && !state.drafting;
        state.n_tokens += if agreed < rows { agreed + 1 } else { rows };
        if is_end {
            self.start_chain(session);
        } else {
            self.pump(session);
        }
    }
}

fn costs(hop_ms: u64, n_active: usize) -> WindowCosts {
    let stage = StageCost { base: 0.005, row: 0.000_5 };
    WindowCosts {
        stages: vec![stage; 2],
        links: Duration::from_micros(3_000 * hop_ms + 600),
        draft: Duration::from_micros(1_700),
        n_active,
    }
}

fn simulated(plan: Plan, p: f64, costs: &WindowCosts) -> f64 {
    let cycle = costs.links.as_secs_f64() + 0.02;
    Simulation::new(p, costs, plan).run(1_500.0 * cycle)
}

/// The best plan with one window at a time.
fn single(p: f64, costs: &WindowCosts) -> Plan {
    let rate = |k: &usize| Plan::single(*k).rate(p, costs);
    Plan::single((0..=10).max_by(|a, b| rate(a).total_cmp(&rate(b))).unwrap())
}

fn chosen(depth: (usize, usize), p: f64, costs: &WindowCosts) -> Plan {
    let choices = Choices { k: (1, 10), depth, may_lead: true };
    WindowControl::new(choices).next(single(p, costs), p, costs, 1.0)
}

const ACCEPTANCES: [f64; 5] = [0.4, 0.6, 0.75, 0.9, 0.95];

#[test]
fn what_is_expected_of_a_plan_is_what_it_does() {
    for p in ACCEPTANCES {
        for hop_ms in [0, 10, 100] {
            let costs = costs(hop_ms, 1);
            for plan in [
                Plan::single(4),
                Plan { k: 3, depth: 2, lead: true },
                Plan { k: 6, depth: 4, lead: true },
                Plan { k: 6, depth: 3, lead: false },
            ] {
                let (expected, found) = (plan.rate(p, &costs), simulated(plan, p, &costs));
                let off = (expected / found - 1.0).abs();
                assert!(off < 0.15, "p {p}, {hop_ms} ms, {plan:?}: {expected} and {found}");
            }
        }
    }
}

#[test]
fn a_slow_link_gives_most_of_what_it_can() {
    for p in ACCEPTANCES {
        let costs = costs(100, 1);
        let pass: f64 = costs.stages.iter().map(|stage| stage.base + stage.row).sum();
        let ceiling = 1.0 / (1.0 - p) / (costs.links.as_secs_f64() + pass);
        let plan = chosen((1, 8), p, &costs);
        let share = simulated(plan, p, &costs) / ceiling;
        assert!(share > 0.85, "p {p}: {share} of the ceiling by {plan:?}");
    }
}

#[test]
fn the_chosen_depth_is_about_the_best_one() {
    for p in ACCEPTANCES {
        for hop_ms in [0, 10, 50, 100] {
            for n_active in [1, 2, 4] {
                let costs = costs(hop_ms, n_active);
                let plan = chosen((1, 8), p, &costs);
                let found = simulated(plan, p, &costs);
                let alone = simulated(single(p, &costs), p, &costs);
                assert!(found > alone * 0.97, "p {p}, {hop_ms} ms, {n_active}: {plan:?}");
                if hop_ms == 0 {
                    assert!(plan.is_single());
                    continue;
                }
                let trust = 0.93;
                for depth in [2, 3, 4, 8] {
                    let fixed = chosen((depth, depth), p, &costs);
                    let best = simulated(fixed, p, &costs);
                    assert!(
                        found > best * trust,
                        "p {p}, {hop_ms} ms, {n_active}: {plan:?} {found}, {fixed:?} {best}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_is_slower_than_expected_is_left_and_tried_again() {
    let costs = costs(0, 1);
    let (p, several) = (0.8, Plan { k: 3, depth: 2, lead: true });
    let mut fit = Fit::default();
    let before = fit.of_several();
    let (_, seconds) = several.chain(p, &costs);
    for _ in 0..50 {
        fit.observe(false, seconds, Duration::from_secs_f64(seconds * 1.6));
    }
    assert!(fit.of_several() < 0.75, "{fit:?}");
    for _ in 0..3_000 {
        fit.observe(true, seconds, Duration::from_secs_f64(seconds));
    }
    assert!((fit.of_several() - before).abs() < 0.05, "{fit:?}");
}

#[test]
fn fixed_numbers_are_kept() {
    let costs = costs(0, 1);
    let mut control = WindowControl::new(Choices { k: (4, 4), depth: (3, 3), may_lead: true });
    let plan = control.next(Plan::single(4), 0.1, &costs, 0.1);
    assert_eq!((plan.k, plan.depth), (4, 3));
    let mut control = WindowControl::new(Choices { k: (0, 0), depth: (3, 3), may_lead: true });
    assert_eq!(control.next(Plan::single(0), 0.9, &costs, 1.0), Plan::single(0));
    let mut control = WindowControl::new(Choices { k: (2, 8), depth: (1, 1), may_lead: true });
    assert_eq!(control.next(Plan::single(5), 0.9, &costs, 1.0), Plan::single(5));
}
