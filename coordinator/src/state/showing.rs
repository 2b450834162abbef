//! Metrics that follow the state. What is measured once is counted where it happens.

use std::time::Instant;

use stagebus_telemetry::mirror;

use super::{Counters, State};

impl State {
    /// Lets counts and numbers of sessions follow the state.
    pub(super) fn show(&self) {
        let Counters {
            tokens_drafted, tokens_accepted, late_answers, announcements_refused, ..
        } = self.counters;
        let metrics = &self.metrics;
        mirror(&metrics.drafted_tokens, tokens_drafted);
        mirror(&metrics.accepted_tokens, tokens_accepted);
        mirror(&metrics.late_answers, late_answers);
        mirror(&metrics.refused_announcements, announcements_refused);
        let n_active = self.sessions.values().filter(|session| session.is_active()).count();
        metrics.sessions.set(n_active as u64);
        metrics.queued.set(self.queue.len() as u64);
    }

    /// Counts the workers of every stage.
    pub(super) fn show_workers(&self, now: Instant) {
        for stage in self.fleet.stages() {
            self.metrics.workers(stage, self.fleet.n_that_take_sessions(stage, now));
        }
    }
}
