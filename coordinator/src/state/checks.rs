//! Questions to the workers of sessions that hear nothing: whether they live, and how far the steps
//! are.
//!
//! A worker that died with a step in its queue shows by nothing else before its announcements are
//! missed. A step that the broker dropped shows by nothing else at all while other sessions keep
//! the workers busy. A question costs a worker some ten microseconds and names the sessions that
//! have waited for long; what follows from the answers is in `Running::hear`.

use std::time::{Duration, Instant};

use stagebus_schemas::ids::{SessionId, WorkerId};
use stagebus_schemas::messages::control::MAX_ASKED;
use tracing::warn;

use super::State;
use crate::action::{CheckAnswer, Effect};
use crate::timings::{ask_after, loss_grace};

/// Silence after which the workers of a session are asked whether they live.
pub(super) const CHECK_PATIENCE: Duration = Duration::from_millis(25);

impl State {
    /// Asks the workers of sessions that hear nothing.
    pub(super) fn check_workers(&mut self, now: Instant) {
        let mut asked = Vec::new();
        for session in self.sessions.values_mut() {
            if let Some(opening) = session.opening_mut()
                && opening.last_check + CHECK_PATIENCE <= now
            {
                opening.last_check = now;
                asked.extend(self.fleet.stages().zip(opening.route.iter().cloned()));
            }
            if let Some(running) = session.running_mut()
                && running.next_check(CHECK_PATIENCE).is_some_and(|due| due <= now)
            {
                running.checked(now);
                asked.extend(self.fleet.stages().zip(running.route.iter().cloned()));
            }
        }
        for (stage, worker) in asked {
            // Sessions that share a worker ask at different moments: it need not answer each.
            if self.fleet.take_check(&worker, CHECK_PATIENCE / 2, now) {
                let sessions = self.overdue_on(&worker, now);
                self.effects.push(Effect::Check { stage, worker, sessions });
            }
        }
    }

    /// Sessions on a worker whose steps take longer than most, as many as a question names: those
    /// that have waited longest.
    fn overdue_on(&self, worker: &WorkerId, now: Instant) -> Vec<SessionId> {
        let patience = ask_after(CHECK_PATIENCE, self.round_trip);
        let waits = |since: &Instant| *since + patience <= now;
        let mut overdue: Vec<_> = self
            .sessions
            .values()
            .filter_map(|session| {
                let running = session.running().filter(|running| running.route.contains(worker))?;
                Some((running.waits_since().filter(waits)?, session.id))
            })
            .collect();
        overdue.sort_unstable_by_key(|(since, _)| *since);
        overdue.into_iter().map(|(_, session)| session).take(MAX_ASKED).collect()
    }

    pub(super) fn on_checked(
        &mut self,
        worker: &WorkerId,
        asked: Instant,
        answer: CheckAnswer,
        now: Instant,
    ) {
        let progress = match answer {
            CheckAnswer::Gone => {
                warn!(%worker, "nobody hears the worker, counts as dead");
                return self.on_worker_gone(worker, now);
            }
            CheckAnswer::Silent => return,
            CheckAnswer::Progress(progress) => progress,
        };
        let grace = loss_grace(self.round_trip);
        for entry in progress {
            let session = self.sessions.get_mut(&entry.session);
            let running = session.and_then(|session| session.running_mut());
            let fault =
                running.and_then(|running| running.hear(worker, entry.steps, (asked, now), grace));
            if let Some(fault) = fault {
                self.on_session_fault(entry.session, fault, now);
            }
        }
    }
}
