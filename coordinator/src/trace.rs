//! The spans of one request.
//!
//! ```text
//! request                     from its arrival to its last event, in the client's trace
//! ├─ queue                    until workers have opened its session
//! └─ session                  one per epoch, from the open to its end or to the next epoch
//!    ├─ stage (worker)        made by the worker of every stage, which the open tells
//!    └─ …
//! ```
//! Attributes are counts, names and ids; never what was asked or answered.

use std::time::Instant;

use stagebus_schemas::ids::ModelName;
use stagebus_schemas::messages::control::Open;
use stagebus_schemas::messages::public::Usage;
use stagebus_schemas::trace::TraceContext;
use stagebus_telemetry::{Outcome, Span, Tracer};

/// The spans of a request that is traced.
#[derive(Debug)]
pub(crate) struct RequestTrace {
    request: Span,
    /// The session at its epoch, once it looks for workers.
    session: Option<Span>,
}

impl RequestTrace {
    /// Begins at the arrival of a request, in the trace of its client if that has one. Nothing where
    /// nobody collects, or the request is not in the sample.
    pub(crate) fn begin(
        tracer: &Tracer,
        parent: Option<TraceContext>,
        model: &ModelName,
        arrival: Instant,
    ) -> Option<Box<Self>> {
        let mut request = tracer.begin("request", parent, arrival)?;
        request.set("gen_ai.request.model", model.to_string());
        Some(Box::new(Self { request, session: None }))
    }

    /// The workers of an epoch are asked to open the session: what they do is within the span that
    /// is returned.
    pub(crate) fn opens(&mut self, open: &Open, now: Instant) -> Option<TraceContext> {
        self.leave(now);
        let mut session = self.request.within("session", now)?;
        session.set("stagebus.session", open.session.to_string());
        session.set("stagebus.epoch", i64::from(open.epoch.number()));
        let context = session.context();
        self.session = Some(session);
        Some(context)
    }

    /// The workers have opened the session for the first time.
    pub(crate) fn opened(&mut self, arrival: Instant, now: Instant) {
        if let Some(queue) = self.request.within("queue", arrival) {
            queue.end(now);
        }
    }

    /// Something happened to the request.
    pub(crate) fn event(&mut self, name: &'static str, now: Instant) {
        self.request.event(name, now);
    }

    /// The session recovers from a fault.
    pub(crate) fn recovers(&mut self, class: &'static str, now: Instant) {
        if let Some(session) = &mut self.session {
            session.fail(class);
        }
        self.leave(now);
    }

    /// The request is over, with what it used if it was done.
    pub(crate) fn end(mut self: Box<Self>, outcome: Outcome, usage: Option<&Usage>, now: Instant) {
        let failed = !matches!(outcome, Outcome::Done(_));
        if let Some(session) = self.session.as_mut().filter(|_| failed) {
            session.fail(outcome.as_str());
        }
        self.leave(now);
        let mut request = self.request;
        request.set("stagebus.outcome", outcome.as_str());
        if failed {
            request.fail(outcome.as_str());
        }
        if let Some(usage) = usage {
            request.set("gen_ai.usage.input_tokens", i64::from(usage.prompt_tokens));
            request.set("gen_ai.usage.output_tokens", i64::from(usage.completion_tokens));
            request.set("stagebus.cached_tokens", i64::from(usage.cached_tokens));
            request.set("stagebus.drafted_tokens", i64::from(usage.drafted_tokens));
            request.set("stagebus.accepted_tokens", i64::from(usage.accepted_tokens));
            request.set("stagebus.steps", i64::from(usage.steps));
        }
        request.end(now);
    }

    fn leave(&mut self, now: Instant) {
        if let Some(session) = self.session.take() {
            session.end(now);
        }
    }
}
