//! Steps that need not run: a later step of the session takes all their rows back.
//!
//! A session whose drafts turn out wrong goes on from an earlier position, while windows that it
//! sent before still wait here. The step contract says what becomes of their rows: the step that
//! comes behind them truncates the cache to its own position. Such a step is passed on without rows
//! and without having run, so that numbers stay without gaps; the last stage answers it with no
//! rows. Order is kept: it leaves when those before it have left.
//!
//! What follows a step that is left out never misses its rows. Between it and the step that takes it
//! back there are only steps of the same chain, which start behind it and are taken back as well,
//! and steps of later chains, each of which began at or before it.

use stagebus_bus::PublishError;
use stagebus_engine::backend::SessionKey;

use super::thread::{Thread, class_of};
use crate::results::{Job, Manner, Outgoing};
use crate::schedule::Waiting;

impl<F: FnMut(Outgoing, Manner) -> Result<(), PublishError>> Thread<F> {
    /// Lets a step wait behind those of its session, of which it takes some back; what need not
    /// wait any more is added to `passes`. A step whose rows are held waits for those before it.
    pub(super) fn wait_for_turn(
        &mut self,
        session: SessionKey,
        mut job: Job,
        passes: &mut Vec<Job>,
    ) {
        let start_pos = job.step.start_pos;
        let mut n_waiting = 0;
        for waiting in self.schedule.waiting(session) {
            n_waiting += 1;
            waiting.is_needless |= waiting.step.start_pos >= start_pos;
        }
        job.is_needless = job.step.is_held_by(self.stage.index);
        if job.is_needless && n_waiting == 0 {
            self.count_done(1);
            passes.push(job);
            return;
        }
        let waiting = Waiting { class: class_of(&job), n_rows: job.step.tokens.len(), step: job };
        self.schedule.push(session, waiting, self.origin.elapsed());
        self.take_needless(session, passes);
    }

    /// Adds the steps at the head of a session's queue that need not run to `passes`.
    pub(super) fn take_needless(&mut self, session: SessionKey, passes: &mut Vec<Job>) {
        let taken = self.schedule.take_needless(session, |job| job.is_needless);
        self.count_done(taken.len());
        for mut job in taken {
            if !job.step.is_held_by(self.stage.index) {
                job.step.held_from = Some(self.stage.index.next());
                job.step.wanted.clear();
            }
            passes.push(job);
        }
    }
}
