//! Spans of sessions on this stage, for sessions whose coordinator traces them.
//!
//! One span from a session's open to the end of its epoch here, and within it one that sums up its
//! prefill and one its decode steps: a span per step would cost more than it tells, since the times
//! of every step travel with its answer anyway. Without a trace this is one look at an empty table.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use stagebus_engine::backend::SessionKey;
use stagebus_schemas::ids::Epoch;
use stagebus_schemas::messages::control::Open;
use stagebus_schemas::messages::forward::Phase;
use stagebus_schemas::trace::TraceContext;
use stagebus_telemetry::{Span, Tracer};

use crate::results::{Job, RunTime, key_of};
use crate::stage::Stage;

/// The sessions that are traced.
#[derive(Debug)]
pub(super) struct Traces {
    tracer: Tracer,
    sessions: HashMap<SessionKey, Traced>,
}

#[derive(Debug)]
struct Traced {
    epoch: Epoch,
    span: Span,
    prefill: Option<Summary>,
    decode: Option<Summary>,
}

/// Steps of one kind.
#[derive(Debug)]
struct Summary {
    from: Instant,
    to: Instant,
    n_steps: u32,
    n_rows: usize,
    waited: Duration,
    infer: Duration,
}

impl Traces {
    pub(super) fn new(tracer: Tracer) -> Self {
        Self { tracer, sessions: HashMap::new() }
    }

    /// A session was opened; an earlier epoch of it is over, and the same one goes on.
    pub(super) fn open(
        &mut self,
        session: SessionKey,
        open: &Open,
        (trace, cached_len): (Option<TraceContext>, usize),
        stage: &Stage,
    ) {
        if self.sessions.get(&session).is_some_and(|traced| traced.epoch == open.epoch) {
            return;
        }
        self.end(session);
        let now = Instant::now();
        let span = trace.and_then(|trace| self.tracer.within(trace, "stage", now));
        let Some(mut span) = span else { return };
        span.set("stagebus.stage", number(stage.index.index()));
        span.set("stagebus.worker", stage.worker.to_string());
        span.set("stagebus.session", open.session.to_string());
        span.set("stagebus.epoch", i64::from(open.epoch.number()));
        span.set("stagebus.cached_tokens", number(cached_len));
        let traced = Traced { epoch: open.epoch, span, prefill: None, decode: None };
        self.sessions.insert(session, traced);
    }

    /// The next `n_rows` rows of a step have run.
    pub(super) fn ran(&mut self, job: &Job, n_rows: usize, time: RunTime) {
        let Some(traced) = self.sessions.get_mut(&key_of(job.step.session)) else { return };
        let summary = match job.step.phase {
            Phase::Prefill => &mut traced.prefill,
            Phase::Decode => &mut traced.decode,
        };
        let summary = summary.get_or_insert_with(|| Summary::new(time.started));
        if job.progress.n_rows == 0 {
            summary.n_steps += 1;
            summary.waited += time.started.saturating_duration_since(job.arrived);
        }
        summary.to = time.started + time.infer;
        summary.n_rows += n_rows;
        summary.infer += time.infer;
    }

    /// Notes what befell a session.
    pub(super) fn note(&mut self, session: SessionKey, event: &'static str) {
        if let Some(traced) = self.sessions.get_mut(&session) {
            traced.span.event(event, Instant::now());
        }
    }

    /// Notes that the epoch of a session failed.
    pub(super) fn fail(&mut self, session: SessionKey, class: &'static str) {
        if let Some(traced) = self.sessions.get_mut(&session) {
            traced.span.fail(class);
        }
    }

    /// A session is over here, or its epoch.
    pub(super) fn end(&mut self, session: SessionKey) {
        if let Some(traced) = self.sessions.remove(&session) {
            traced.end();
        }
    }

    /// Nothing runs any more.
    pub(super) fn end_all(&mut self) {
        self.sessions.drain().for_each(|(_, traced)| traced.end());
    }
}

impl Traced {
    fn end(self) {
        let Self { span, prefill, decode, .. } = self;
        for (name, summary) in [("prefill", prefill), ("decode", decode)] {
            let Some(summary) = summary else { continue };
            let Some(mut within) = span.within(name, summary.from) else { continue };
            within.set("stagebus.steps", i64::from(summary.n_steps));
            within.set("stagebus.rows", number(summary.n_rows));
            within.set("stagebus.wait_seconds", summary.waited.as_secs_f64());
            within.set("stagebus.inference_seconds", summary.infer.as_secs_f64());
            within.end(summary.to);
        }
        span.end(Instant::now());
    }
}

impl Summary {
    fn new(from: Instant) -> Self {
        let (waited, infer) = (Duration::ZERO, Duration::ZERO);
        Self { from, to: from, n_steps: 0, n_rows: 0, waited, infer }
    }
}

/// A count as attributes have it.
fn number(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
