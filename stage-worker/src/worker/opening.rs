//! The opening of sessions: checked here, carried out by the inference thread. In between, the last
//! stage has the session's constraint compiled elsewhere.

use std::time::Instant;

use stagebus_draft::constraint::{ConstraintError, Guide};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::messages::control::{HeadMode, Open};
use stagebus_schemas::messages::fleet::WorkerState;

use super::{Incoming, Worker};
use crate::inference::{Command, CommandError, InferenceEvent, OpenOrder};
use crate::sessions::RETRY_AFTER_MS;

impl Worker {
    /// Opens a session; the answer follows when the inference thread has done its part.
    pub(super) fn open(
        &mut self,
        open: Open,
        incoming: &Incoming,
        now: Instant,
    ) -> Result<Result<(), ErrorReply>, CommandError> {
        let n_opening: usize = self.opening.values().map(Vec::len).sum();
        if n_opening >= self.limits.max_sessions {
            return Ok(Err(ErrorReply {
                class: ErrorClass::Overloaded,
                message: format!("{n_opening} opens wait at stage {}", self.stage.index),
                retry_after_ms: Some(RETRY_AFTER_MS),
            }));
        }
        let accepting = self.state == WorkerState::Ready;
        let opening = match self.sessions.open(&open, accepting, now) {
            Ok(opening) => opening,
            Err(error) => return Ok(Err(error)),
        };
        tracing::info!(
            session_id = %open.session, stage_index = %self.stage.index, epoch = %open.epoch,
            ?opening, "session opens"
        );
        let (session, epoch) = (open.session, open.epoch);
        let chooses = self.stage.is_last() && open.head == HeadMode::Token;
        let constraint = open.sampling.constraint.clone().filter(|_| chooses);
        let order = Box::new(OpenOrder { open, trace: incoming.trace });
        match constraint {
            Some(constraint) => self.uncompiled.push((order, constraint)),
            None => self.inference.send(Command::Open(order, None))?,
        }
        self.opening.entry((session, epoch)).or_default().push(incoming.reply.clone());
        Ok(Ok(()))
    }

    /// Goes on with an open, unless the session has gone on, or ended, meanwhile.
    pub(super) fn on_compiled(
        &mut self,
        order: Box<OpenOrder>,
        guide: Result<Guide, ConstraintError>,
    ) -> Result<(), CommandError> {
        let (session, epoch) = (order.open.session, order.open.epoch);
        let now_at = self.sessions.progress(session).map(|progress| progress.epoch);
        let error = match guide {
            Ok(guide) if now_at == Some(epoch) => {
                return self.inference.send(Command::Open(order, Some(guide)));
            }
            Ok(_) => {
                let message = format!("session {session} has left epoch {epoch} while it opened");
                ErrorReply::new(ErrorClass::StaleEpoch, message)
            }
            Err(error) => {
                let class = match error.is_of_constraint() {
                    true => ErrorClass::InvalidRequest,
                    false => ErrorClass::Internal,
                };
                ErrorReply::new(class, format!("stage {}: {error}", self.stage.index))
            }
        };
        self.on_inference(InferenceEvent::Opened { session, epoch, outcome: Err(error) });
        Ok(())
    }
}
