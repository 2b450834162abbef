//! Steps on their way to the first stage.

use std::time::Instant;

use stagebus_schemas::codec;
use stagebus_schemas::ids::{SessionId, StageIndex, WorkerId};
use stagebus_schemas::messages::forward::{Forward, MAX_ROWS, MAX_STEPS, Step};
use stagebus_schemas::subjects::LostStep;
use stagebus_schemas::version::MessageVersion;
use tracing::{debug, warn};

use super::Coordinator;
use crate::action::Action;

impl Coordinator {
    /// Sends the steps that were added.
    pub(super) async fn send_steps(&mut self) {
        for (worker, steps) in std::mem::take(&mut self.steps.0) {
            self.send_together(&worker, steps).await;
        }
    }

    /// Sends steps in one message. Nobody hearing it is told with the first step's name: the worker
    /// is gone then, and all its sessions with it.
    async fn send_together(&mut self, worker: &WorkerId, steps: Vec<Step>) {
        let Some(first) = steps.first() else { return };
        if !self.bus.is_connected() {
            // They count as lost, and their sessions are replayed when the broker is back.
            debug!(%worker, n_steps = steps.len(), "steps were not sent, the broker is away");
            return;
        }
        let lost = LostStep {
            session: first.session,
            epoch: first.epoch,
            step: first.step,
            stage: StageIndex::FIRST,
        };
        let subject = self.subjects.step(StageIndex::FIRST, worker);
        let reply = self.subjects.lost(self.state.id(), &lost);
        let sessions: Vec<SessionId> = steps.iter().map(|step| step.session).collect();
        let forward = Forward { version: MessageVersion::CURRENT, from: None, steps, hidden: None };
        let sent = match codec::encode(&forward) {
            Ok(payload) => self.bus.publish_with_reply(&subject, &reply, payload.into()).await,
            Err(error) => Err(error.into()),
        };
        if let Err(error) = sent {
            warn!(%worker, %error, n_steps = sessions.len(), "steps were not sent");
            for session in sessions {
                self.state.apply(Action::Unsent(session), Instant::now());
            }
        }
    }
}

/// Steps on their way to the first stage: those for one worker leave together.
#[derive(Default)]
pub(super) struct StepMessages(Vec<(WorkerId, Vec<Step>)>);

impl StepMessages {
    /// Adds a step for a worker.
    pub(super) fn add(&mut self, worker: WorkerId, step: Step) {
        let n_rows = |steps: &[Step]| steps.iter().map(|step| step.tokens.len()).sum::<usize>();
        let fits = |(to, steps): &&mut (WorkerId, Vec<Step>)| {
            *to == worker
                && steps.len() < MAX_STEPS
                && n_rows(steps) + step.tokens.len() <= MAX_ROWS
        };
        match self.0.iter_mut().rev().find(fits) {
            Some((_, steps)) => steps.push(step),
            None => self.0.push((worker, vec![step])),
        }
    }
}
