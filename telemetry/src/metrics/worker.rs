//! The metrics of a worker.

use std::borrow::Cow;
use std::time::Duration;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::{Counter, Gauge, Label, counters, counts, register, short_times};
use crate::names::{self, OUTCOME, WAY};

/// What became of steps, as the label says it.
const STEP_OUTCOMES: [&str; 4] = ["done", "failed", "refused", "duplicate"];

/// The ways of results.
const WAYS: [&str; 2] = ["direct", "bulk"];

/// What a worker counts and measures; clones share it. What each field is stands in
/// [`names::worker`].
#[derive(Debug, Clone)]
pub struct WorkerMetrics {
    /// [`names::worker::READY`].
    pub ready: Gauge,
    /// [`names::worker::SESSIONS`].
    pub sessions: Gauge,
    /// [`names::worker::QUEUE_STEPS`].
    pub queue_steps: Gauge,
    /// [`names::worker::ROWS`].
    pub rows: Counter,
    /// [`names::worker::STEPS`] that were done.
    pub steps_done: Counter,
    /// [`names::worker::STEPS`] that failed.
    pub steps_failed: Counter,
    /// [`names::worker::STEPS`] that were refused.
    pub steps_refused: Counter,
    /// [`names::worker::STEPS`] that had run already.
    pub steps_duplicate: Counter,
    /// [`names::worker::PROMPT_TOKENS`].
    pub prompt_tokens: Counter,
    /// [`names::worker::PREFIX_HIT_TOKENS`].
    pub prefix_hit_tokens: Counter,
    /// [`names::worker::PREEMPTIONS`].
    pub preemptions: Counter,
    /// [`names::worker::EXPIRED`].
    pub expired: Counter,
    /// [`names::worker::SENT`], straight.
    pub sent_direct: Counter,
    /// [`names::worker::SENT`], as bulk.
    pub sent_bulk: Counter,
    /// [`names::worker::RECEIVED`].
    pub received: Counter,
    /// [`names::worker::UNHEARD`].
    pub unheard: Counter,
    /// [`names::worker::MALFORMED`].
    pub malformed: Counter,
    /// [`names::worker::SLOW_CONSUMER`].
    pub slow_consumer: Counter,
    /// [`names::worker::RECONNECTS`].
    pub reconnects: Counter,
    steps: Family<Label, Counter>,
    sent: Family<Label, Counter>,
    step_wait: Histogram,
    prefill: Histogram,
    decode: Histogram,
    micro_batch_rows: Histogram,
    micro_batch_sessions: Histogram,
    kv_tokens: Gauge,
    kv_capacity_tokens: Gauge,
    kv_bytes: Gauge,
    kv_capacity_bytes: Gauge,
}

impl Default for WorkerMetrics {
    /// A set that nobody sees.
    fn default() -> Self {
        let steps = counters(OUTCOME, STEP_OUTCOMES);
        let sent = counters(WAY, WAYS);
        let outcome = |value| steps.get_or_create_owned(&[(OUTCOME, value)]);
        let way = |value| sent.get_or_create_owned(&[(WAY, value)]);
        let [steps_done, steps_failed, steps_refused, steps_duplicate] = STEP_OUTCOMES.map(outcome);
        let [sent_direct, sent_bulk] = WAYS.map(way);
        Self {
            ready: Gauge::default(),
            sessions: Gauge::default(),
            queue_steps: Gauge::default(),
            rows: Counter::default(),
            steps_done,
            steps_failed,
            steps_refused,
            steps_duplicate,
            prompt_tokens: Counter::default(),
            prefix_hit_tokens: Counter::default(),
            preemptions: Counter::default(),
            expired: Counter::default(),
            sent_direct,
            sent_bulk,
            received: Counter::default(),
            unheard: Counter::default(),
            malformed: Counter::default(),
            slow_consumer: Counter::default(),
            reconnects: Counter::default(),
            steps,
            sent,
            step_wait: short_times(),
            prefill: short_times(),
            decode: short_times(),
            micro_batch_rows: counts(14),
            micro_batch_sessions: counts(9),
            kv_tokens: Gauge::default(),
            kv_capacity_tokens: Gauge::default(),
            kv_bytes: Gauge::default(),
            kv_capacity_bytes: Gauge::default(),
        }
    }
}

impl WorkerMetrics {
    /// A set that `registry` shows, for the worker of a stage.
    #[must_use]
    pub fn registered(registry: &mut Registry, stage: u16) -> Self {
        let set = Self::default();
        let label = (Cow::Borrowed(names::STAGE), Cow::Owned(stage.to_string()));
        let registry = registry.sub_registry_with_label(label);
        register(registry, &names::worker::READY, set.ready.clone());
        register(registry, &names::worker::SESSIONS, set.sessions.clone());
        register(registry, &names::worker::QUEUE_STEPS, set.queue_steps.clone());
        register(registry, &names::worker::STEP_WAIT, set.step_wait.clone());
        register(registry, &names::worker::PREFILL, set.prefill.clone());
        register(registry, &names::worker::DECODE, set.decode.clone());
        register(registry, &names::worker::MICRO_BATCH_ROWS, set.micro_batch_rows.clone());
        register(registry, &names::worker::MICRO_BATCH_SESSIONS, set.micro_batch_sessions.clone());
        register(registry, &names::worker::ROWS, set.rows.clone());
        register(registry, &names::worker::STEPS, set.steps.clone());
        register(registry, &names::worker::KV_TOKENS, set.kv_tokens.clone());
        register(registry, &names::worker::KV_CAPACITY_TOKENS, set.kv_capacity_tokens.clone());
        register(registry, &names::worker::KV, set.kv_bytes.clone());
        register(registry, &names::worker::KV_CAPACITY, set.kv_capacity_bytes.clone());
        register(registry, &names::worker::PROMPT_TOKENS, set.prompt_tokens.clone());
        register(registry, &names::worker::PREFIX_HIT_TOKENS, set.prefix_hit_tokens.clone());
        register(registry, &names::worker::PREEMPTIONS, set.preemptions.clone());
        register(registry, &names::worker::EXPIRED, set.expired.clone());
        register(registry, &names::worker::SENT, set.sent.clone());
        register(registry, &names::worker::RECEIVED, set.received.clone());
        register(registry, &names::worker::UNHEARD, set.unheard.clone());
        register(registry, &names::worker::MALFORMED, set.malformed.clone());
        register(registry, &names::worker::SLOW_CONSUMER, set.slow_consumer.clone());
        register(registry, &names::worker::RECONNECTS, set.reconnects.clone());
        set
    }

    /// A micro-batch has run.
    pub fn micro_batch(&self, n_rows: u32, n_sessions: u32) {
        self.micro_batch_rows.observe(f64::from(n_rows));
        self.micro_batch_sessions.observe(f64::from(n_sessions));
        self.rows.inc_by(u64::from(n_rows));
    }

    /// The first rows of a step have started to run, after it waited.
    pub fn step_started(&self, waited: Duration) {
        self.step_wait.observe(waited.as_secs_f64());
    }

    /// Rows of a prefill chunk have run.
    pub fn prefill(&self, infer: Duration) {
        self.prefill.observe(infer.as_secs_f64());
    }

    /// A decode step has run.
    pub fn decode(&self, infer: Duration) {
        self.decode.observe(infer.as_secs_f64());
    }

    /// The KV caches hold so much: positions, their memory, and the memory there is; 0 where that is
    /// not limited.
    pub fn kv(&self, tokens: u64, bytes: u64, capacity_bytes: u64) {
        self.kv_tokens.set(tokens);
        self.kv_bytes.set(bytes);
        self.kv_capacity_bytes.set(capacity_bytes);
        // What one position takes is known only while some are held; it does not change.
        if let Some(per_token) = bytes.checked_div(tokens).filter(|bytes| *bytes > 0) {
            self.kv_capacity_tokens.set(capacity_bytes / per_token);
        }
    }
}
