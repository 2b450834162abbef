//! What happens when the KV blocks run out: a session gives way, so that the others go on.
//!
//! The youngest batch session gives way, else the youngest of all; it may be the one that needs
//! room. Age counts from a session's first open, so the oldest one always comes to its end and two
//! sessions never push each other out in turn. A session that holds all blocks itself cannot be
//! helped: its step is refused as overload.
//!
//! Whoever gives way loses its blocks here and nothing else: its next step is answered with
//! [`ErrorClass::Preempted`], and its coordinator opens it again at a higher epoch and replays it
//! when there is room.

use std::cmp::Reverse;

use stagebus_bus::PublishError;
use stagebus_engine::backend::{OpenError, SessionKey, StepError};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::messages::control::{Open, Priority};

use super::thread::Held;
use super::thread::{Failure, Standing, Thread};
use crate::results::{Job, Manner, Outgoing, key_of};
use crate::schedule::Waiting;

/// Sessions that gave way and whose age is remembered until they come back.
const MAX_GAVE_WAY: usize = 256;

/// A step that found no blocks.
pub(super) type Starved = (SessionKey, Waiting<Job>, StepError);

impl<F: FnMut(Outgoing, Manner) -> Result<(), PublishError>> Thread<F> {
    /// Opens a session in the backend. An interactive one takes the room of batch sessions.
    pub(super) fn open_backend(&mut self, open: &Open) -> Result<usize, OpenError> {
        let key = key_of(open.session);
        let holds_rows = self.sessions.get(&key).is_some_and(|held| held.holds_rows);
        let prompt_len = (open.prompt_len as usize).min(open.prompt.len());
        // Generated rows may only be taken over from the session itself: what others prefilled
        // went another path.
        let rows = if holds_rows { &open.prompt[..] } else { &open.prompt[..prompt_len] };
        loop {
            let opened = self.backend.open(key, rows, open.prompt.len());
            let victim = match (&opened, open.priority) {
                (Err(OpenError::OutOfBlocks { needed, total, .. }), Priority::Interactive)
                    if needed <= total =>
                {
                    self.youngest(|session, held| {
                        held.holds_rows && held.priority == Priority::Batch && session != key
                    })
                }
                _ => None,
            };
            match victim {
                Some(victim) => self.preempt(victim),
                None => return opened,
            }
        }
    }

    /// Lets one session give way to the steps that found no blocks; those are the next to run.
    pub(super) fn make_room(&mut self, starved: Vec<Starved>) {
        let Some(first) = starved.first().map(|(session, ..)| *session) else { return };
        let others_hold =
            self.sessions.iter().any(|(session, held)| held.holds_rows && *session != first);
        let needy = |session| starved.iter().any(|(other, ..)| *other == session);
        let victim = match others_hold {
            true => self.youngest(|session, held| held.holds_rows || needy(session)),
            false => None,
        };
        for (session, waiting, error) in starved.into_iter().rev() {
            if victim.is_none() && session == first {
                self.count_done(1);
                self.fail(&waiting.step, &Failure::Step(error));
            } else {
                self.schedule.put_back(session, waiting);
            }
        }
        if let Some(victim) = victim {
            self.preempt(victim);
        }
    }

    /// Tells the coordinator that a session has to be replayed.
    pub(super) fn tell_preempted(&mut self, job: &Job) {
        if let Some(held) = self.sessions.get_mut(&key_of(job.step.session)) {
            held.standing = Standing::Failed;
        }
        let message = format!(
            "stage {} on worker {} gave the session's KV blocks to another: replay it",
            self.stage.index, self.stage.worker
        );
        self.send_fault(job, ErrorReply::new(ErrorClass::Preempted, message));
    }

    fn preempt(&mut self, victim: SessionKey) {
        self.backend.close(victim);
        let waiting = self.schedule.clear(victim);
        self.count_done(waiting.len());
        let Some(held) = self.sessions.get_mut(&victim) else { return };
        tracing::info!(
            session_id = %victim, stage_index = %self.stage.index, epoch = %held.epoch,
            "session gives way, the KV blocks have run out"
        );
        self.metrics.preemptions.inc();
        self.traces.note(victim, "preempted");
        held.holds_rows = false;
        let born = held.born;
        if held.standing == Standing::Runs {
            held.standing = Standing::Preempted;
            if let Some(first) = waiting.front() {
                self.tell_preempted(&first.step);
            }
        }
        self.gave_way.retain(|(session, _)| *session != victim);
        self.gave_way.truncate(MAX_GAVE_WAY - 1);
        self.gave_way.push_front((victim, born));
    }

    /// The session that gives way first among those that hold blocks, or are about to.
    fn youngest(&self, eligible: impl Fn(SessionKey, &Held) -> bool) -> Option<SessionKey> {
        self.sessions
            .iter()
            .filter(|(session, held)| eligible(**session, held))
            .min_by_key(|(_, held)| (held.priority == Priority::Interactive, Reverse(held.born)))
            .map(|(session, _)| *session)
    }
}
