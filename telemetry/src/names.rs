//! Every metric of worker, coordinator and gateway: name, kind, labels, meaning.
//!
//! Names have a prefix and base units; counters end in `_total`. No label holds an id of a session,
//! request, worker or client: each label has a few values that are known beforehand.

/// What all names begin with.
pub const PREFIX: &str = "stagebus_";

/// Name of the label that holds the index of a stage.
pub const STAGE: &str = "stage";

/// Name of the label that holds how a request or a step ended.
pub const OUTCOME: &str = "outcome";

/// Name of the label that holds why a session was replayed.
pub const CLASS: &str = "class";

/// Name of the label that holds whether rows are of the prompt or generated.
pub const PHASE: &str = "phase";

/// Name of the label that holds which way messages went.
pub const WAY: &str = "way";

/// Name of the label that holds which path of the HTTP API was asked.
pub const ROUTE: &str = "route";

/// Name of the label that holds the status of an HTTP response.
pub const STATUS: &str = "status";

/// What a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A number that rises only, from 0 at the start of the process.
    Counter,
    /// A number that rises and falls.
    Gauge,
    /// How often values up to certain limits came.
    Histogram,
}

impl Kind {
    /// The word of the exposition format.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// One metric as Prometheus sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Its whole name.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// What it says, without a final period: the format adds one.
    pub meaning: &'static str,
}

impl Metric {
    /// The unit in its name; counts have none.
    #[must_use]
    pub fn unit(&self) -> Option<&'static str> {
        let base = self.name.strip_suffix("_total").unwrap_or(self.name);
        ["seconds", "bytes"].into_iter().find(|unit| base.ends_with(unit))
    }
}

const fn counter(
    name: &'static str,
    labels: &'static [&'static str],
    meaning: &'static str,
) -> Metric {
    Metric { name, kind: Kind::Counter, labels, meaning }
}

const fn gauge(
    name: &'static str,
    labels: &'static [&'static str],
    meaning: &'static str,
) -> Metric {
    Metric { name, kind: Kind::Gauge, labels, meaning }
}

const fn histogram(
    name: &'static str,
    labels: &'static [&'static str],
    meaning: &'static str,
) -> Metric {
    Metric { name, kind: Kind::Histogram, labels, meaning }
}

/// The metrics of a worker; all of them have the label [`STAGE`].
pub mod worker {
    use super::{Metric, OUTCOME, STAGE, WAY, counter, gauge, histogram};

    /// Whether it takes sessions.
    pub const READY: Metric = gauge(
        "stagebus_worker_ready",
        &[STAGE],
        "1 while the worker takes sessions, 0 while it drains or leaves",
    );
    /// Sessions held.
    pub const SESSIONS: Metric = gauge("stagebus_worker_sessions", &[STAGE], "Sessions held");
    /// The queue.
    pub const QUEUE_STEPS: Metric =
        gauge("stagebus_worker_queue_steps", &[STAGE], "Steps that wait or run");
    /// Time in the queue.
    pub const STEP_WAIT: Metric = histogram(
        "stagebus_worker_step_wait_seconds",
        &[STAGE],
        "Time from the arrival of a step to the start of the micro-batch with its first rows",
    );
    /// Inference of prompt rows.
    pub const PREFILL: Metric = histogram(
        "stagebus_worker_prefill_seconds",
        &[STAGE],
        "Inference time of a prefill chunk, or of the part of it that one micro-batch ran",
    );
    /// Inference of generated rows.
    pub const DECODE: Metric = histogram(
        "stagebus_worker_decode_seconds",
        &[STAGE],
        "Inference time of a decode step, drafted rows included",
    );
    /// Rows that run together.
    pub const MICRO_BATCH_ROWS: Metric = histogram(
        "stagebus_worker_micro_batch_rows",
        &[STAGE],
        "Rows of a micro-batch, over all its sessions",
    );
    /// Sessions that run together.
    pub const MICRO_BATCH_SESSIONS: Metric =
        histogram("stagebus_worker_micro_batch_sessions", &[STAGE], "Sessions of a micro-batch");
    /// Rows run.
    pub const ROWS: Metric = counter("stagebus_worker_rows_total", &[STAGE], "Rows run");
    /// Steps by what became of them.
    pub const STEPS: Metric = counter(
        "stagebus_worker_steps_total",
        &[STAGE, OUTCOME],
        "Steps: done, failed in inference, refused at their arrival, or dropped as a duplicate",
    );
    /// Positions in the KV cache.
    pub const KV_TOKENS: Metric = gauge(
        "stagebus_worker_kv_tokens",
        &[STAGE],
        "KV positions of the sessions held, in tokens",
    );
    /// Positions that the KV cache can hold.
    pub const KV_CAPACITY_TOKENS: Metric = gauge(
        "stagebus_worker_kv_capacity_tokens",
        &[STAGE],
        "KV positions that fit, in tokens, from the memory of those held; 0 while none were, or \
         where the engine sets no limit beforehand",
    );
    /// Memory of the KV cache.
    pub const KV: Metric =
        gauge("stagebus_worker_kv_bytes", &[STAGE], "Memory of the KV caches of the sessions held");
    /// Memory that the KV cache can take.
    pub const KV_CAPACITY: Metric = gauge(
        "stagebus_worker_kv_capacity_bytes",
        &[STAGE],
        "Memory that KV caches can take; 0 where the engine sets no limit beforehand",
    );
    /// Prompt tokens of new sessions.
    pub const PROMPT_TOKENS: Metric = counter(
        "stagebus_worker_prompt_tokens_total",
        &[STAGE],
        "Prompt tokens of the sessions opened here for the first time",
    );
    /// Prompt tokens found in the cache.
    pub const PREFIX_HIT_TOKENS: Metric = counter(
        "stagebus_worker_prefix_hit_tokens_total",
        &[STAGE],
        "Of these, tokens whose KV rows the prefix cache held",
    );
    /// Sessions that gave way.
    pub const PREEMPTIONS: Metric = counter(
        "stagebus_worker_preemptions_total",
        &[STAGE],
        "Times that a session gave its KV blocks to another",
    );
    /// Sessions that ended for want of activity.
    pub const EXPIRED: Metric = counter(
        "stagebus_worker_expired_sessions_total",
        &[STAGE],
        "Sessions closed because their coordinator was gone or silent",
    );
    /// Bytes sent.
    pub const SENT: Metric = counter(
        "stagebus_worker_sent_bytes_total",
        &[STAGE, WAY],
        "Results sent to the next stage or the coordinator: direct, or in parts as bulk",
    );
    /// Bytes received.
    pub const RECEIVED: Metric =
        counter("stagebus_worker_received_bytes_total", &[STAGE], "Step messages received");
    /// Results that nobody heard.
    pub const UNHEARD: Metric = counter(
        "stagebus_worker_unheard_results_total",
        &[STAGE],
        "Results that nobody heard: the next worker is gone",
    );
    /// Messages that could not be decoded.
    pub const MALFORMED: Metric = counter(
        "stagebus_worker_malformed_messages_total",
        &[STAGE],
        "Messages that could not be decoded",
    );
    /// Subscriptions that overflowed.
    pub const SLOW_CONSUMER: Metric = counter(
        "stagebus_worker_slow_consumer_events_total",
        &[STAGE],
        "Times that a full subscription dropped messages; one may stand for many messages",
    );
    /// Connections made again.
    pub const RECONNECTS: Metric = counter(
        "stagebus_worker_reconnects_total",
        &[STAGE],
        "Times that one of its two connections to the broker was made again",
    );

    /// All of them.
    pub const ALL: [Metric; 24] = [
        READY,
        SESSIONS,
        QUEUE_STEPS,
        STEP_WAIT,
        PREFILL,
        DECODE,
        MICRO_BATCH_ROWS,
        MICRO_BATCH_SESSIONS,
        ROWS,
        STEPS,
        KV_TOKENS,
        KV_CAPACITY_TOKENS,
        KV,
        KV_CAPACITY,
        PROMPT_TOKENS,
        PREFIX_HIT_TOKENS,
        PREEMPTIONS,
        EXPIRED,
        SENT,
        RECEIVED,
        UNHEARD,
        MALFORMED,
        SLOW_CONSUMER,
        RECONNECTS,
    ];
}

/// The metrics of a coordinator.
pub mod coordinator {
    use super::{CLASS, Metric, OUTCOME, PHASE, STAGE, counter, gauge, histogram};

    /// Sessions that run.
    pub const SESSIONS: Metric = gauge(
        "stagebus_coordinator_sessions",
        &[],
        "Sessions that hold a place: they look for workers or run",
    );
    /// Requests that wait.
    pub const QUEUED: Metric =
        gauge("stagebus_coordinator_queued_requests", &[], "Requests that wait for a place");
    /// Workers of a stage.
    pub const WORKERS: Metric = gauge(
        "stagebus_coordinator_workers",
        &[STAGE],
        "Workers of the stage that take sessions, as far as this coordinator knows",
    );
    /// Requests by their end.
    pub const REQUESTS: Metric = counter(
        "stagebus_coordinator_requests_total",
        &[OUTCOME],
        "Requests by their end: a finish reason, an error class, `client_gone`, `handed_over` (a \
         job that another coordinator goes on with) or `unanswerable` (no reply subject)",
    );
    /// Time to the first step.
    pub const QUEUE: Metric = histogram(
        "stagebus_coordinator_queue_seconds",
        &[],
        "Time from the arrival of a request until workers have opened its session",
    );
    /// Time to the first token.
    pub const FIRST_TOKEN: Metric = histogram(
        "stagebus_coordinator_time_to_first_token_seconds",
        &[],
        "Time from the arrival of a request to its first token",
    );
    /// Time between tokens.
    pub const INTER_TOKEN: Metric = histogram(
        "stagebus_coordinator_inter_token_seconds",
        &[],
        "Time between tokens of a session; tokens that come together share it evenly",
    );
    /// Time of a request.
    pub const REQUEST: Metric = histogram(
        "stagebus_coordinator_request_seconds",
        &[],
        "Time from the arrival of a request to its `done`",
    );
    /// Round trip of a step.
    pub const STEP: Metric = histogram(
        "stagebus_coordinator_step_seconds",
        &[PHASE],
        "Round trip of a step through all stages",
    );
    /// Time of a hop.
    pub const HOP: Metric = histogram(
        "stagebus_coordinator_hop_seconds",
        &[],
        "Time of a decode step outside of all stages, divided by its hops: from the coordinator \
         over every stage and back",
    );
    /// Prompt tokens.
    pub const PROMPT_TOKENS: Metric = counter(
        "stagebus_coordinator_prompt_tokens_total",
        &[],
        "Prompt tokens of the sessions that have begun",
    );
    /// Prompt tokens that were not computed.
    pub const CACHED_TOKENS: Metric = counter(
        "stagebus_coordinator_cached_prompt_tokens_total",
        &[],
        "Of these, tokens that every stage had cached",
    );
    /// Tokens generated.
    pub const GENERATED_TOKENS: Metric =
        counter("stagebus_coordinator_generated_tokens_total", &[], "Tokens generated");
    /// Tokens drafted.
    pub const DRAFTED_TOKENS: Metric = counter(
        "stagebus_coordinator_drafted_tokens_total",
        &[],
        "Drafted tokens sent to the stages",
    );
    /// Drafted tokens that stand.
    pub const ACCEPTED_TOKENS: Metric = counter(
        "stagebus_coordinator_accepted_tokens_total",
        &[],
        "Of these, tokens that the last stage chose too",
    );
    /// Recoveries.
    pub const RECOVERIES: Metric = counter(
        "stagebus_coordinator_recoveries_total",
        &[CLASS],
        "Times that a session was replayed, by the fault that it recovered from",
    );
    /// Answers for nobody.
    pub const LATE_ANSWERS: Metric = counter(
        "stagebus_coordinator_late_answers_total",
        &[],
        "Answers for steps and sessions that no longer exist",
    );
    /// Announcements not followed.
    pub const REFUSED_ANNOUNCEMENTS: Metric = counter(
        "stagebus_coordinator_refused_announcements_total",
        &[],
        "Announcements of workers that are not used: of another shard set, or too many",
    );
    /// Subscriptions that overflowed.
    pub const SLOW_CONSUMER: Metric = counter(
        "stagebus_coordinator_slow_consumer_events_total",
        &[],
        "Times that a full subscription dropped messages; one may stand for many messages",
    );
    /// Connections made again.
    pub const RECONNECTS: Metric = counter(
        "stagebus_coordinator_reconnects_total",
        &[],
        "Times that the connection to the broker was made again",
    );

    /// All of them.
    pub const ALL: [Metric; 20] = [
        SESSIONS,
        QUEUED,
        WORKERS,
        REQUESTS,
        QUEUE,
        FIRST_TOKEN,
        INTER_TOKEN,
        REQUEST,
        STEP,
        HOP,
        PROMPT_TOKENS,
        CACHED_TOKENS,
        GENERATED_TOKENS,
        DRAFTED_TOKENS,
        ACCEPTED_TOKENS,
        RECOVERIES,
        LATE_ANSWERS,
        REFUSED_ANNOUNCEMENTS,
        SLOW_CONSUMER,
        RECONNECTS,
    ];
}

/// The metrics of a gateway.
pub mod gateway {
    use super::{Metric, ROUTE, STATUS, counter, gauge, histogram};

    /// Responses.
    pub const RESPONSES: Metric = counter(
        "stagebus_gateway_responses_total",
        &[ROUTE, STATUS],
        "HTTP responses by the pattern of the path (`none`: no such path) and the status",
    );
    /// Connections of clients.
    pub const CONNECTIONS: Metric =
        gauge("stagebus_gateway_connections", &[], "Connections of clients that stand");
    /// Answers under way.
    pub const ANSWERS: Metric = gauge(
        "stagebus_gateway_answers",
        &[],
        "Answers under way; a request for several counts as often",
    );
    /// Time to the first token.
    pub const FIRST_TOKEN: Metric = histogram(
        "stagebus_gateway_first_token_seconds",
        &[],
        "Time from a request to the first token of an answer",
    );
    /// Time of a request.
    pub const ANSWER: Metric = histogram(
        "stagebus_gateway_answer_seconds",
        &[],
        "Time from a request to the end of its last answer",
    );
    /// Prompt tokens.
    pub const PROMPT_TOKENS: Metric =
        counter("stagebus_gateway_prompt_tokens_total", &[], "Prompt tokens of answers that ended");
    /// Tokens generated.
    pub const COMPLETION_TOKENS: Metric = counter(
        "stagebus_gateway_completion_tokens_total",
        &[],
        "Tokens generated for answers that ended",
    );
    /// Answers given up.
    pub const CANCELLED: Metric = counter(
        "stagebus_gateway_cancelled_total",
        &[],
        "Answers cancelled because their client left, or their time was over",
    );
    /// Cancellations not sent.
    pub const CANCELS_LOST: Metric = counter(
        "stagebus_gateway_cancels_lost_total",
        &[],
        "Of these, cancellations that were not sent: the coordinator notices the absent client",
    );
    /// Whether the broker is there.
    pub const BROKER_CONNECTED: Metric = gauge(
        "stagebus_gateway_broker_connected",
        &[],
        "1 while the connection to the broker stands, 0 while it does not",
    );
    /// Models served.
    pub const MODELS: Metric = gauge("stagebus_gateway_models", &[], "Models that are served");
    /// Subscriptions that overflowed.
    pub const SLOW_CONSUMER: Metric = counter(
        "stagebus_gateway_slow_consumer_events_total",
        &[],
        "Times that a full subscription dropped messages; one may stand for many messages",
    );
    /// Connections made again.
    pub const RECONNECTS: Metric = counter(
        "stagebus_gateway_reconnects_total",
        &[],
        "Times that the connection to the broker was made again",
    );

    /// All of them.
    pub const ALL: [Metric; 13] = [
        RESPONSES,
        CONNECTIONS,
        ANSWERS,
        FIRST_TOKEN,
        ANSWER,
        PROMPT_TOKENS,
        COMPLETION_TOKENS,
        CANCELLED,
        CANCELS_LOST,
        BROKER_CONNECTED,
        MODELS,
        SLOW_CONSUMER,
        RECONNECTS,
    ];
}
