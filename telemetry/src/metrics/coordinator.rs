//! The metrics of a coordinator.

use std::time::Duration;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::StageIndex;
use stagebus_schemas::messages::forward::Phase;
use stagebus_schemas::messages::public::FinishReason;

use super::{Counter, Gauge, Label, counters, long_times, register, short_times};
use crate::names::{self, CLASS, OUTCOME, PHASE, STAGE};

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// With `done`.
    Done(FinishReason),
    /// With `error`.
    Failed(ErrorClass),
    /// Its client did not listen any more.
    ClientGone,
    /// It is a job that another coordinator goes on with.
    HandedOver,
    /// It had no reply subject.
    Unanswerable,
}

impl Outcome {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        let done = [FinishReason::Stop, FinishReason::Length, FinishReason::Cancelled];
        let failed = ErrorClass::ALL.into_iter().map(Self::Failed);
        let silent = [Self::ClientGone, Self::HandedOver, Self::Unanswerable];
        done.into_iter().map(Self::Done).chain(failed).chain(silent)
    }

    /// The label's value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Done(FinishReason::Stop) => "stop",
            Self::Done(FinishReason::Length) => "length",
            Self::Done(FinishReason::Cancelled) => "cancelled",
            Self::Failed(class) => class.as_str(),
            Self::ClientGone => "client_gone",
            Self::HandedOver => "handed_over",
            Self::Unanswerable => "unanswerable",
        }
    }
}

/// What a session recovered from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// A stage refused a step: it does not have the session, or misses a step.
    StepRefused,
    /// A stage gave the session's KV blocks to another one.
    Preempted,
    /// A worker is dead or left.
    WorkerGone,
    /// The inference of a worker does not come to an end.
    WorkerStuck,
    /// A step was lost between two stages.
    StepLost,
    /// The answer to a step was lost.
    AnswerLost,
    /// A worker does not have the session any more.
    SessionLost,
    /// A step got no answer in time.
    NoAnswer,
}

impl Recovery {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::StepRefused,
        Self::Preempted,
        Self::WorkerGone,
        Self::WorkerStuck,
        Self::StepLost,
        Self::AnswerLost,
        Self::SessionLost,
        Self::NoAnswer,
    ];

    /// The label's value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StepRefused => "step_refused",
            Self::Preempted => "preempted",
            Self::WorkerGone => "worker_gone",
            Self::WorkerStuck => "worker_stuck",
            Self::StepLost => "step_lost",
            Self::AnswerLost => "answer_lost",
            Self::SessionLost => "session_lost",
            Self::NoAnswer => "no_answer",
        }
    }
}

/// What a coordinator counts and measures; clones share it. What each field is stands in
/// [`names::coordinator`].
#[derive(Debug, Clone)]
pub struct CoordinatorMetrics {
    /// [`names::coordinator::SESSIONS`].
    pub sessions: Gauge,
    /// [`names::coordinator::QUEUED`].
    pub queued: Gauge,
    /// [`names::coordinator::PROMPT_TOKENS`].
    pub prompt_tokens: Counter,
    /// [`names::coordinator::CACHED_TOKENS`].
    pub cached_tokens: Counter,
    /// [`names::coordinator::GENERATED_TOKENS`].
    pub generated_tokens: Counter,
    /// [`names::coordinator::DRAFTED_TOKENS`].
    pub drafted_tokens: Counter,
    /// [`names::coordinator::ACCEPTED_TOKENS`].
    pub accepted_tokens: Counter,
    /// [`names::coordinator::LATE_ANSWERS`].
    pub late_answers: Counter,
    /// [`names::coordinator::REFUSED_ANNOUNCEMENTS`].
    pub refused_announcements: Counter,
    /// [`names::coordinator::SLOW_CONSUMER`].
    pub slow_consumer: Counter,
    /// [`names::coordinator::RECONNECTS`].
    pub reconnects: Counter,
    requests: Family<Label, Counter>,
    recoveries: Family<Label, Counter>,
    workers: Family<[(&'static str, String); 1], Gauge>,
    queue: Histogram,
    first_token: Histogram,
    inter_token: Histogram,
    request: Histogram,
    step: Family<Label, Histogram>,
    prefill_step: Histogram,
    decode_step: Histogram,
    hop: Histogram,
}

impl Default for CoordinatorMetrics {
    /// A set that nobody sees.
    fn default() -> Self {
        let step = Family::<Label, Histogram>::new_with_constructor(short_times);
        let of_phase = |phase| step.get_or_create_owned(&[(PHASE, phase)]);
        let (prefill_step, decode_step) = (of_phase("prefill"), of_phase("decode"));
        Self {
            sessions: Gauge::default(),
            queued: Gauge::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            drafted_tokens: Counter::default(),
            accepted_tokens: Counter::default(),
            late_answers: Counter::default(),
            refused_announcements: Counter::default(),
            slow_consumer: Counter::default(),
            reconnects: Counter::default(),
            requests: counters(OUTCOME, Outcome::all().map(Outcome::as_str)),
            recoveries: counters(CLASS, Recovery::ALL.map(Recovery::as_str)),
            workers: Family::default(),
            queue: long_times(),
            first_token: long_times(),
            inter_token: short_times(),
            request: long_times(),
            step,
            prefill_step,
            decode_step,
            hop: short_times(),
        }
    }
}

impl CoordinatorMetrics {
    /// A set that `registry` shows.
    #[must_use]
    pub fn registered(registry: &mut Registry) -> Self {
        let set = Self::default();
        register(registry, &names::coordinator::SESSIONS, set.sessions.clone());
        register(registry, &names::coordinator::QUEUED, set.queued.clone());
        register(registry, &names::coordinator::WORKERS, set.workers.clone());
        register(registry, &names::coordinator::REQUESTS, set.requests.clone());
        register(registry, &names::coordinator::QUEUE, set.queue.clone());
        register(registry, &names::coordinator::FIRST_TOKEN, set.first_token.clone());
        register(registry, &names::coordinator::INTER_TOKEN, set.inter_token.clone());
        register(registry, &names::coordinator::REQUEST, set.request.clone());
        register(registry, &names::coordinator::STEP, set.step.clone());
        register(registry, &names::coordinator::HOP, set.hop.clone());
        register(registry, &names::coordinator::PROMPT_TOKENS, set.prompt_tokens.clone());
        register(registry, &names::coordinator::CACHED_TOKENS, set.cached_tokens.clone());
        register(registry, &names::coordinator::GENERATED_TOKENS, set.generated_tokens.clone());
        register(registry, &names::coordinator::DRAFTED_TOKENS, set.drafted_tokens.clone());
        register(registry, &names::coordinator::ACCEPTED_TOKENS, set.accepted_tokens.clone());
        register(registry, &names::coordinator::RECOVERIES, set.recoveries.clone());
        register(registry, &names::coordinator::LATE_ANSWERS, set.late_answers.clone());
        register(
            registry,
            &names::coordinator::REFUSED_ANNOUNCEMENTS,
            set.refused_announcements.clone(),
        );
        register(registry, &names::coordinator::SLOW_CONSUMER, set.slow_consumer.clone());
        register(registry, &names::coordinator::RECONNECTS, set.reconnects.clone());
        set
    }

    /// A request has ended.
    pub fn request_ended(&self, outcome: Outcome) {
        self.requests.get_or_create(&[(OUTCOME, outcome.as_str())]).inc();
    }

    /// A request took this time to its `done`.
    pub fn request_took(&self, time: Duration) {
        self.request.observe(time.as_secs_f64());
    }

    /// A session is replayed.
    pub fn recovered(&self, from: Recovery) {
        self.recoveries.get_or_create(&[(CLASS, from.as_str())]).inc();
    }

    /// A stage has this many workers that take sessions.
    pub fn workers(&self, stage: StageIndex, n_workers: usize) {
        self.workers.get_or_create(&[(STAGE, stage.to_string())]).set(n_workers as u64);
    }

    /// Workers have opened a new session, which waited.
    pub fn session_opened(&self, waited: Duration) {
        self.queue.observe(waited.as_secs_f64());
    }

    /// The first token of a session came after this time.
    pub fn first_token(&self, time: Duration) {
        self.first_token.observe(time.as_secs_f64());
    }

    /// Further tokens came this time after the last one.
    pub fn more_tokens(&self, n_tokens: u32, since_last: Duration) {
        let share = since_last.as_secs_f64() / f64::from(n_tokens.max(1));
        (0..n_tokens).for_each(|_| self.inter_token.observe(share));
    }

    /// A step was answered.
    pub fn step(&self, phase: Phase, round_trip: Duration) {
        let steps = match phase {
            Phase::Prefill => &self.prefill_step,
            Phase::Decode => &self.decode_step,
        };
        steps.observe(round_trip.as_secs_f64());
    }

    /// Each hop of a step took this time on average.
    pub fn hop(&self, time: Duration) {
        self.hop.observe(time.as_secs_f64());
    }
}
