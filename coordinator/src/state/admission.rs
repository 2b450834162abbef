//! Which requests are taken, which of them start, and what those hear that are not.
//!
//! A request that cannot wait is answered `overloaded` at once, so that a fleet past its capacity
//! spends its time on the requests that it has taken: work begun and thrown away is what makes
//! goodput fall. A session starts only where the KV caches of every stage have room for what it
//! is expected to need; otherwise it would push others out, which are replayed later.

use std::time::Instant;

use stagebus_schemas::access;
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::SessionId;

use super::State;
use crate::client::Client;
use crate::session::Session;

/// Hint for a retry before the first request has ended, in milliseconds.
const FIRST_RETRY_MS: u64 = 1_000;

/// Bounds of the hint for a retry, in milliseconds.
const RETRY_LIMITS_MS: (u64, u64) = (100, 60_000);

/// Weight of one session in what the next ones are expected to use of their `max_tokens`.
const SHARE_WEIGHT: f64 = 0.1;

/// What sessions are expected to generate, as a share of what they may.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutputShare(f64);

impl Default for OutputShare {
    /// All of it, until sessions have shown otherwise.
    fn default() -> Self {
        Self(1.0)
    }
}

impl OutputShare {
    /// Takes in a session that has ended.
    pub(super) fn observe(&mut self, session: &Session) {
        if session.accepted && session.max_tokens > 0 {
            let share = tokens(session.output.len()) / f64::from(session.max_tokens);
            self.0 += (share.min(1.0) - self.0) * SHARE_WEIGHT;
        }
    }

    /// Positions that a session is expected to need at its end: at least those that it has.
    fn positions(self, session: &Session) -> f64 {
        let output = (f64::from(session.max_tokens) * self.0).max(tokens(session.output.len()));
        tokens(session.prompt.len()) + output
    }
}

impl State {
    /// Whether one more request may wait or run.
    pub(super) fn check_room(&self, client: &Client) -> Result<(), ErrorReply> {
        let limit = self.settings.max_sessions + self.settings.max_queued;
        if self.sessions.len() >= limit {
            return Err(self.overloaded(format!("{limit} requests run or wait, no more are taken")));
        }
        let (wait_ms, limit_ms) = (self.wait_ms(), self.settings.max_wait_ms);
        if !self.queue.is_empty() && wait_ms.is_some_and(|wait_ms| wait_ms > limit_ms) {
            let message = format!("a place is free in more than {limit_ms} ms, no more are taken");
            return Err(self.overloaded(message));
        }
        let limit = self.settings.max_per_client;
        if limit > 0 && self.n_of_client(client) >= limit {
            let message = format!("{limit} requests of this client run or wait, as many as may");
            return Err(self.overloaded(message));
        }
        Ok(())
    }

    /// A hint when a place may be free.
    pub(super) fn retry_after_ms(&self) -> u64 {
        let (least, most) = RETRY_LIMITS_MS;
        self.wait_ms().unwrap_or(FIRST_RETRY_MS).clamp(least, most)
    }

    /// How long the next request would wait, from the time that a session holds its place, the
    /// sessions that hold one, and those that wait before it; nothing before the first has ended.
    fn wait_ms(&self) -> Option<u64> {
        let held = self.place_time.get()?;
        let n_active = self.sessions.values().filter(|session| session.is_active()).count();
        let ahead = u32::try_from(self.queue.len() + 1).unwrap_or(u32::MAX);
        let wait = held.saturating_mul(ahead) / u32::try_from(n_active.max(1)).unwrap_or(u32::MAX);
        Some(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX))
    }

    /// Requests of the same client that run or wait. Clients without a name of their own count as
    /// one: nobody gets round the limit by hiding.
    fn n_of_client(&self, client: &Client) -> usize {
        let name = access::client_of(&client.reply);
        let others = self.sessions.values().filter(|session| session.client.job.is_none());
        others.filter(|session| access::client_of(&session.client.reply) == name).count()
    }

    fn overloaded(&self, message: String) -> ErrorReply {
        let retry_after_ms = Some(self.retry_after_ms());
        ErrorReply { class: ErrorClass::Overloaded, message, retry_after_ms }
    }

    /// Whether every stage has room for what a session is expected to need beside the sessions
    /// that run. The first one starts in any case: its worker decides then.
    pub(super) fn has_kv_room(&self, id: SessionId, now: Instant) -> bool {
        let percent = f64::from(self.settings.kv_percent);
        let Some(session) = self.sessions.get(&id) else { return true };
        if self.settings.kv_percent == 0 {
            return true;
        }
        let active = || self.sessions.values().filter(|session| session.is_active());
        if active().next().is_none() {
            return true;
        }
        let expected: f64 = active().map(|session| self.output_share.positions(session)).sum();
        let present: f64 =
            active().map(|session| tokens(session.prompt.len() + session.output.len())).sum();
        let needed = expected + self.output_share.positions(session);
        self.fleet.stages().all(|stage| {
            let Some(kv) = self.fleet.kv(stage, now) else { return true };
            // What the workers hold beyond our own sessions belongs to other coordinators.
            let others = (kv.held - present).max(0.0);
            needed + others <= kv.room * percent / 100.0
        })
    }
}

/// A number of tokens; contexts are far below 2^53.
fn tokens(n: usize) -> f64 {
    u32::try_from(n).map_or(f64::MAX, f64::from)
}
