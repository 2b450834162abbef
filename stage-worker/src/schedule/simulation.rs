//! The policy in a pipeline: a discrete-event simulation on simulated time. Every stage is a real
//! [`Schedule`]; only inference, the broker and the coordinator are numbers.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "simulated numbers are small"
)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::*;

/// Rows of a prompt chunk, as the coordinator cuts them.
const CHUNK: usize = 128;

/// Microseconds.
type Us = u64;

/// Inference time of a stage: about half of SmolLM2-135M on one core.
#[derive(Clone, Copy)]
struct Cost {
    batch: Us,
    row: Us,
}

/// A session of the simulated coordinator.
#[derive(Clone, Copy)]
struct User {
    starts: Us,
    prompt: usize,
    /// Tokens to generate.
    tokens: usize,
    priority: Priority,
    /// Rows of each decode step: more than one is a verify.
    rows: usize,
    /// How long the client thinks before each step after the first.
    pause: Us,
}

impl User {
    fn new(prompt: usize, tokens: usize) -> Self {
        Self { starts: 0, prompt, tokens, priority: Priority::Interactive, rows: 1, pause: 0 }
    }
}

/// What became of a user.
#[derive(Default, Clone)]
struct Outcome {
    sent_rows: usize,
    done_rows: usize,
    /// When each token was there.
    token_times: Vec<Us>,
}

impl Outcome {
    fn tokens_between(&self, from: Us, to: Us) -> usize {
        self.token_times.iter().filter(|at| (from..to).contains(at)).count()
    }

    /// Longest times between two tokens, sorted, within a span.
    fn gaps(&self, from: Us, to: Us) -> Vec<Us> {
        let pairs = self.token_times.windows(2).filter(|pair| pair[0] >= from && pair[1] < to);
        pairs.map(|pair| pair[1] - pair[0]).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Starts(usize),
    Arrives { stage: usize, user: usize, rows: usize, is_decode: bool },
    Ends { stage: usize },
    Wakes { stage: usize },
    Answered { user: usize, rows: usize, is_decode: bool },
}

/// Rows of a step in whole, kept while it runs in parts.
type Step = (usize, usize);

struct Stage {
    schedule: Schedule<Step>,
    cost: Cost,
    running: Vec<Part<Step>>,
    started: Us,
    busy: bool,
    spans: Vec<(Us, Us)>,
    n_rows: Vec<usize>,
}

struct Pipeline {
    stages: Vec<Stage>,
    users: Vec<User>,
    outcomes: Vec<Outcome>,
    events: BinaryHeap<Reverse<(Us, u64, Event)>>,
    n_events: u64,
    hop: Us,
    noise: u64,
    coordinator_free: Us,
}

impl Pipeline {
    fn new(costs: &[Cost], users: Vec<User>) -> Self {
        let policy = Policy {
            n_stages: costs.len(),
            max_sessions: 32,
            batch_rows: 128,
            mixes: true,
            prefill_percent: 45,
            decodes_per_prefill: 8,
        };
        let stage = |cost: &Cost| Stage {
            schedule: Schedule::new(policy),
            cost: *cost,
            running: Vec::new(),
            started: 0,
            busy: false,
            spans: Vec::new(),
            n_rows: Vec::new(),
        };
        let mut pipeline = Self {
            stages: costs.iter().map(stage).collect(),
            outcomes: vec![Outcome::default(); users.len()],
            users,
            events: BinaryHeap::new(),
            n_events: 0,
            hop: 100,
            noise: 1,
            coordinator_free: 0,
        };
        for user in 0..pipeline.users.len() {
            pipeline.at(pipeline.users[user].starts, Event::Starts(user));
        }
        pipeline
    }

    fn at(&mut self, time: Us, event: Event) {
        self.n_events += 1;
        self.events.push(Reverse((time, self.n_events, event)));
    }

    /// A number below `below`, another one each time.
    fn random(&mut self, below: u64) -> u64 {
        self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.noise >> 33) % below.max(1)
    }

    fn run(&mut self, until: Us) {
        while let Some(Reverse((now, _, event))) = self.events.pop() {
            if now >= until {
                self.at(now, event);
                return;
            }
            match event {
                Event::Starts(user) => {
                    let priority = self.users[user].priority;
                    for stage in &mut self.stages {
                        stage.schedule.open(SessionKey(user as u64), priority);
                    }
                    self.send_chunks(user, now);
                }
                Event::Arrives { stage, user, rows, is_decode } => {
                    let class = match rows {
                        _ if is_decode => Class::Decode,
                        0..=FIRST_TOKEN_ROWS => Class::FirstToken,
                        _ => Class::Prefill { least: 2 },
                    };
                    let waiting = Waiting { class, n_rows: rows, step: (user, rows) };
                    let key = SessionKey(user as u64);
                    self.stages[stage].schedule.push(key, waiting, Duration::from_micros(now));
                    // Steps of one message come together.
                    let together = self.events.peek().is_some_and(|Reverse((at, _, next))| {
                        *at == now && matches!(next, Event::Arrives { stage: other, .. } if *other == stage)
                    });
                    if !together {
                        self.try_start(stage, now);
                    }
                }
                Event::Ends { stage } => self.end(stage, now),
                Event::Wakes { stage } => self.try_start(stage, now),
                Event::Answered { user, rows, is_decode } => {
                    self.answered(user, rows, is_decode, now);
                }
            }
        }
    }

    fn send_chunks(&mut self, user: usize, now: Us) {
        let window = (self.stages.len() + 1) * CHUNK;
        while self.outcomes[user].sent_rows < self.users[user].prompt
            && self.outcomes[user].sent_rows - self.outcomes[user].done_rows < window
        {
            let rows = CHUNK.min(self.users[user].prompt - self.outcomes[user].sent_rows);
            self.outcomes[user].sent_rows += rows;
            let arrives = Event::Arrives { stage: 0, user, rows, is_decode: false };
            self.at(now + self.hop, arrives);
        }
    }

    fn answered(&mut self, user: usize, rows: usize, is_decode: bool, now: Us) {
        // The coordinator handles one answer after the other.
        let free = self.coordinator_free.max(now) + 30;
        self.coordinator_free = free;
        if !is_decode {
            self.outcomes[user].done_rows += rows;
            self.send_chunks(user, free);
            if self.outcomes[user].done_rows < self.users[user].prompt {
                return;
            }
        }
        self.outcomes[user].token_times.push(now);
        if self.outcomes[user].token_times.len() >= self.users[user].tokens {
            for stage in &mut self.stages {
                stage.schedule.close(SessionKey(user as u64));
            }
            return;
        }
        let rows = self.users[user].rows;
        let at = free + self.users[user].pause + self.hop + self.random(self.hop);
        self.at(at, Event::Arrives { stage: 0, user, rows, is_decode: true });
    }

    fn try_start(&mut self, stage: usize, now: Us) {
        let jitter = self.random(100);
        let place = &mut self.stages[stage];
        if place.busy {
            return;
        }
        match place.schedule.next(Duration::from_micros(now), &mut place.running) {
            Next::Nothing => {}
            Next::WaitUntil(until) => {
                let until = u64::try_from(until.as_micros()).unwrap();
                assert!(until >= now, "waits for the past");
                self.at(until.max(now + 1), Event::Wakes { stage });
            }
            Next::Run => {
                let rows: usize = place.running.iter().map(|part| part.n_rows).sum();
                assert!((1..=128).contains(&rows), "{rows} rows");
                place.busy = true;
                place.started = now;
                place.n_rows.push(rows);
                // Times vary by a tenth.
                let time =
                    (place.cost.batch + place.cost.row * rows as u64) * (950 + jitter) / 1000;
                place.spans.push((now, now + time));
                self.at(now + time, Event::Ends { stage });
            }
        }
    }

    fn end(&mut self, stage: usize, now: Us) {
        let place = &mut self.stages[stage];
        place.busy = false;
        let mut done = Vec::new();
        for Part { session, n_rows, waiting } in place.running.drain(..) {
            let rest = waiting.n_rows - n_rows;
            if rest > 0 {
                assert!(rest >= 2 && n_rows >= 2, "no part has one row");
                place.schedule.put_back(session, Waiting { n_rows: rest, ..waiting });
            } else {
                done.push((waiting.step, waiting.class == Class::Decode));
            }
        }
        let infer = Duration::from_micros(now - place.started);
        place.schedule.ran(Duration::from_micros(now), infer);
        for ((user, rows), is_decode) in done {
            let event = match stage + 1 == self.stages.len() {
                true => Event::Answered { user, rows, is_decode },
                false => Event::Arrives { stage: stage + 1, user, rows, is_decode },
            };
            self.at(now + self.hop, event);
        }
        self.try_start(stage, now);
    }

    /// Share of a span in which a stage worked.
    fn utilisation(&self, stage: usize, from: Us, to: Us) -> f64 {
        let within = |(start, end): &(Us, Us)| {
            (*end).clamp(from, to).saturating_sub((*start).clamp(from, to))
        };
        let busy: Us = self.stages[stage].spans.iter().map(within).sum();
        busy as f64 / (to - from) as f64
    }

    fn tokens(&self, from: Us, to: Us) -> Vec<usize> {
        self.outcomes.iter().map(|outcome| outcome.tokens_between(from, to)).collect()
    }

    /// The gap that one in a hundred exceeds, over some users.
    fn p99(&self, users: std::ops::Range<usize>, from: Us, to: Us) -> Us {
        let outcomes = self.outcomes[users].iter();
        let mut gaps: Vec<Us> = outcomes.flat_map(|outcome| outcome.gaps(from, to)).collect();
        gaps.sort_unstable();
        gaps[gaps.len() * 99 / 100]
    }
}

const WHOLE: Cost = Cost { batch: 9_400, row: 1_400 };
const HALF: Cost = Cost { batch: 4_700, row: 700 };
const THIRD: Cost = Cost { batch: 3_100, row: 470 };
const SECOND: Us = 1_000_000;

/// Checks that every stage is busy, and that every user gets the same.
fn check_steady(costs: &[Cost], n_users: usize, least_busy: f64) {
    let users = (0..n_users).map(|idx| User::new(20 + idx * 7, usize::MAX)).collect();
    let mut pipeline = Pipeline::new(costs, users);
    // By then all prompts are in.
    let (from, to) = (10 * SECOND, 20 * SECOND);
    pipeline.run(to);
    for stage in 0..costs.len() {
        let busy = pipeline.utilisation(stage, from, to);
        assert!(busy >= least_busy, "stage {stage} of {} worked {busy}", costs.len());
    }
    let tokens = pipeline.tokens(from, to);
    let (least, most) = (tokens.iter().min().unwrap(), tokens.iter().max().unwrap());
    assert!(*most as f64 <= *least as f64 * 1.25, "from {least} to {most} tokens");
    // As many as if equal groups kept every stage busy.
    let rows = n_users as f64 / costs.len() as f64;
    let per_token = costs[0].batch as f64 / rows + costs[0].row as f64;
    let share = tokens.iter().sum::<usize>() as f64 * per_token / (to - from) as f64;
    assert!(share >= 0.88, "{share} of what {n_users} users can reach");
}

#[test]
fn stages_work_at_the_same_time() {
    for (n_users, least_busy) in [(2, 0.9), (4, 0.9), (5, 0.9), (15, 0.9), (16, 0.9), (32, 0.88)] {
        check_steady(&[HALF; 2], n_users, least_busy);
    }
    for (n_users, least_busy) in [(3, 0.9), (16, 0.9), (18, 0.9)] {
        check_steady(&[THIRD; 3], n_users, least_busy);
    }
    check_steady(&[WHOLE], 16, 0.9);
}

#[test]
fn a_burst_of_short_prompts_is_decoding_soon() {
    for costs in [vec![WHOLE], vec![HALF; 2]] {
        let mut users: Vec<User> = (0..4).map(|_| User::new(60, usize::MAX)).collect();
        let burst = User { starts: 5 * SECOND, ..User::new(40, usize::MAX) };
        users.extend([burst; 16]);
        let mut pipeline = Pipeline::new(&costs, users);
        pipeline.run(10 * SECOND);
        let rows_alone = (costs.iter().map(|cost| cost.row).sum::<Us>() * 16 * 40) as f64;
        let last = pipeline.outcomes[4..].iter().map(|outcome| outcome.token_times[0]).max();
        let taken = (last.unwrap() - 5 * SECOND) as f64;
        assert!(taken < 2.0 * rows_alone, "{taken} us, the rows alone take {rows_alone}");
        let beside = pipeline.p99(0..4, 5 * SECOND, 7 * SECOND);
        assert!(beside < SECOND / 4, "{beside} us between two tokens of the others");
    }
}

#[test]
fn the_slowest_stage_is_never_idle() {
    let slow = Cost { batch: HALF.batch * 3 / 2, row: HALF.row * 3 / 2 };
    for costs in [[HALF, slow], [slow, HALF]] {
        let users = (0..16).map(|_| User::new(100, usize::MAX)).collect();
        let mut pipeline = Pipeline::new(&costs, users);
        pipeline.run(15 * SECOND);
        let busy = [0, 1].map(|stage| pipeline.utilisation(stage, 5 * SECOND, 15 * SECOND));
        assert!(busy[0].max(busy[1]) >= 0.95, "{busy:?}");
    }
}

#[test]
fn a_long_prompt_neither_stalls_others_nor_starves() {
    for n_users in [1, 2, 7, 15] {
        for costs in [vec![WHOLE], vec![HALF; 2], vec![THIRD; 3]] {
            let mut users: Vec<User> = (0..n_users).map(|_| User::new(60, usize::MAX)).collect();
            let long = User { starts: 10 * SECOND, ..User::new(4000, 10) };
            users.push(long);
            let mut pipeline = Pipeline::new(&costs, users);
            pipeline.run(60 * SECOND);
            let first_token = *pipeline.outcomes[n_users].token_times.first().expect("a token");
            let (start, end) = (10 * SECOND, first_token);
            let before = pipeline.p99(0..n_users, 5 * SECOND, start);
            let beside = pipeline.p99(0..n_users, start, end);
            let ratio = beside as f64 / before as f64;
            assert!(ratio < 2.4, "{n_users} users, {} stages: {ratio}", costs.len());
            let taken = (end - start) as f64 / SECOND as f64;
            assert!(taken < 25.0, "{n_users} users: 4000 rows took {taken} s");
        }
    }
}

#[test]
fn sessions_join_and_leave_and_all_are_answered() {
    let mut users = Vec::new();
    for idx in 0..120_u64 {
        let mut user = User::new(3 + (idx as usize * 37) % 400, 5 + (idx as usize * 13) % 90);
        user.starts = idx * 150_000;
        user.rows = 1 + idx as usize % 4;
        if idx % 3 == 0 {
            user.priority = Priority::Batch;
        }
        if idx % 5 == 0 {
            user.pause = 200_000;
        }
        users.push(user);
    }
    let mut pipeline = Pipeline::new(&[HALF; 2], users);
    pipeline.run(200 * SECOND);
    for (user, outcome) in pipeline.users.iter().zip(&pipeline.outcomes) {
        assert_eq!(outcome.token_times.len(), user.tokens);
    }
    for stage in &pipeline.stages {
        assert!(stage.schedule.decode.is_empty() && stage.schedule.prefill.is_empty());
        assert_eq!(stage.schedule.sessions.len(), 0);
    }
}

#[test]
fn batch_sessions_give_way_and_do_not_starve() {
    let user = |idx: usize| match idx % 2 {
        0 => User::new(50, usize::MAX),
        _ => User { priority: Priority::Batch, ..User::new(50, usize::MAX) },
    };
    // More than fit a micro-batch, so that somebody must wait.
    let mut pipeline = Pipeline::new(&[HALF; 2], (0..24).map(user).collect());
    for stage in &mut pipeline.stages {
        stage.schedule.policy.max_sessions = 6;
    }
    pipeline.run(20 * SECOND);
    let tokens = pipeline.tokens(5 * SECOND, 20 * SECOND);
    let of =
        |batch: usize| -> Vec<usize> { tokens.iter().skip(batch).step_by(2).copied().collect() };
    let (interactive, batch) = (of(0), of(1));
    let least = |tokens: &[usize]| *tokens.iter().min().unwrap();
    let most = |tokens: &[usize]| *tokens.iter().max().unwrap();
    assert!(2 * least(&interactive) > 3 * most(&batch), "{interactive:?} {batch:?}");
    assert!(least(&batch) > 20, "{batch:?}");
}

#[test]
fn clients_that_wait_do_not_shrink_the_groups_of_the_others() {
    let users = (0..24)
        .map(|idx| User {
            pause: if idx < 8 { 3 * SECOND } else { 0 },
            ..User::new(30, usize::MAX)
        })
        .collect();
    let mut pipeline = Pipeline::new(&[HALF; 2], users);
    pipeline.run(15 * SECOND);
    for stage in 0..2 {
        let busy = pipeline.utilisation(stage, 5 * SECOND, 15 * SECOND);
        assert!(busy > 0.9, "stage {stage}: {busy}");
    }
}
