//! Durable requests: sessions whose events are stored, and which may go on where another
//! coordinator has stopped.

use std::time::Instant;

use stagebus_schemas::error::ErrorReply;
use stagebus_schemas::messages::control::Priority;
use stagebus_schemas::messages::public::{FinishReason, PromptRequest, ValidRequest};
use stagebus_telemetry::Outcome;

use super::State;
use crate::action::Effect;
use crate::jobs::{JobKey, JobStart};
use crate::session::Session;
use crate::trace::RequestTrace;

impl State {
    pub(super) fn on_job(&mut self, mut job: JobStart, now: Instant) {
        let client = job.client.clone();
        let trace = RequestTrace::begin(&self.tracer, job.trace, &self.model.identity.model, now);
        match self.read_job(&mut job) {
            Ok(request) => self.begin(request, client, (Some(job), trace), now),
            Err(error) => self.refuse((client, trace), error, now),
        }
    }

    /// Checks what a job asks for.
    fn read_job(&self, job: &mut JobStart) -> Result<ValidRequest, ErrorReply> {
        let prompt = match &mut job.prompt {
            Ok(prompt) => std::mem::take(prompt),
            Err(error) => return Err(error.clone()),
        };
        let request = PromptRequest {
            request_id: Some(job.request.clone()),
            // The tokens that are stored were drawn with this one.
            seed: prompt.seed.or(job.stored.seed),
            priority: prompt.priority.or(Some(Priority::Batch)),
            ..prompt
        };
        Ok(request.validate(&self.model.limits)?)
    }

    /// Drops what still runs of a job that is out of our hands; nobody hears of it.
    pub(super) fn on_job_lost(&mut self, job: JobKey, now: Instant) {
        let of_job = |session: &&Session| session.client.job == Some(job);
        if let Some(session) = self.sessions.values().find(of_job).map(|session| session.id) {
            let session = self.remove(session, now);
            self.request_ended(session, Outcome::HandedOver, now);
        }
    }

    /// Gives all jobs back to the queue: another coordinator goes on with them.
    pub(super) fn give_jobs_back(&mut self, now: Instant) {
        let jobs: Vec<_> = self
            .sessions
            .values()
            .filter_map(|session| Some((session.id, session.client.job?)))
            .collect();
        for (session, job) in jobs {
            let session = self.remove(session, now);
            self.request_ended(session, Outcome::HandedOver, now);
            self.effects.push(Effect::GiveBack(job));
        }
    }

    /// Whether one more job may be fetched: it would run at once.
    pub(crate) fn has_job_room(&self, now: Instant) -> bool {
        let n_active = self.sessions.values().filter(|session| session.is_active()).count();
        let n_jobs = self.sessions.values().filter(|session| session.client.job.is_some()).count();
        self.connected
            && !self.draining
            && self.queue.is_empty()
            && n_active < self.settings.max_sessions
            && n_jobs < self.settings.jobs.max_running
            && self.fleet.is_complete(now)
    }
}

impl Session {
    /// Takes in what is known of a job: its session goes on after the tokens that are stored.
    pub(super) fn resume(&mut self, job: JobStart, eos_ids: &[u32]) {
        let stored = job.stored;
        let is_end = |token| eos_ids.contains(&token);
        let (text_len, n_events) = (stored.text_len, stored.n_token_events);
        let stopped = self.transcript.resume(&stored.tokens, is_end, text_len, n_events);
        self.accepted = stored.accepted;
        self.n_resumed = stored.tokens.len();
        self.output = stored.tokens;
        self.known_end = match (job.cancelled, stopped) {
            (_, true) => Some(FinishReason::Stop),
            (true, false) => Some(FinishReason::Cancelled),
            (false, false) => None,
        };
    }

    /// The end that is known before a session runs: a job can be cancelled while it waits, or all
    /// of its answer be stored but for the last event.
    pub(super) fn known_end(&self) -> Option<FinishReason> {
        let is_full = !self.output.is_empty() && self.output.len() >= self.max_tokens as usize;
        self.known_end.or(is_full.then_some(FinishReason::Length))
    }
}
