//! The one owner of a worker's state: sessions, admission, announcements.
//!
//! [`Worker::apply`] is synchronous and takes every [`Action`] as data, so tests feed actions by
//! hand. What it wants to send lies in [`Worker::take_outbox`] afterwards; what must run goes to
//! the inference thread. States: ready → draining → leaving, never back; see
//! [`Worker::move_on`].

mod opening;
mod outlook;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use stagebus_bus::BusEvent;
use stagebus_draft::constraint::{Constraint, ConstraintError, Guide};
use stagebus_schemas::codec::{self, CodecError, Message};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{Epoch, SessionId, WorkerId};
use stagebus_schemas::messages::control::{
    Close, Control, ControlAction, ControlOutcome, ControlReply, Drain, Keep, SessionProgress,
};
use stagebus_schemas::messages::fleet::{CoordinatorAnnouncement, WorkerState};
use stagebus_schemas::messages::forward::{Forward, Step};
use stagebus_schemas::subjects::{LostStep, Subject};
use stagebus_schemas::trace::TraceContext;
use stagebus_schemas::version::MessageVersion;
use stagebus_telemetry::WorkerMetrics;

use crate::inference::{Command, CommandError, Inference, InferenceEvent, OpenOrder};
use crate::results::{self, Job, Outgoing, u32_of};
use crate::rows::{check_message, check_step};
use crate::sessions::{Admission, Route, Sessions};
use crate::stage::Stage;

/// Shortest and longest time after which a step refused for a full queue is worth another try.
const QUEUE_RETRY_MS: (u64, u64) = (20, 5_000);

/// Longest interval between its announcements that a coordinator may claim.
const MAX_INTERVAL_MS: u32 = 60_000;

/// Something that happened.
#[derive(Debug)]
pub(crate) enum Action {
    /// A message on the step subject.
    Step(Incoming),
    /// A message on the control subject.
    Control(Incoming),
    /// Somebody asks who is there.
    Probe,
    /// A step that nobody heard: the broker's answer to this worker's own message, or what another
    /// worker has told (`told`).
    Lost { subject: String, told: bool },
    /// A message that cannot be read and concerns nobody here.
    Nothing,
    /// A coordinator announced itself.
    Coordinator(CoordinatorAnnouncement),
    /// The constraint of a session that opens is compiled, or cannot be.
    Compiled { order: Box<OpenOrder>, guide: Result<Guide, ConstraintError> },
    /// News from the inference thread.
    Inference(InferenceEvent),
    /// News from the broker connection.
    Connection(BusEvent),
    /// The time of the next announcement has come.
    Tick,
    /// Finish the running sessions and leave.
    Drain,
    /// Leave now.
    Stop,
}

/// A message as it came.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub payload: Bytes,
    pub reply: Option<String>,
    pub trace: Option<TraceContext>,
    pub arrived: Instant,
}

/// Limits and names of a worker beyond its stage.
#[derive(Debug, Clone)]
pub(crate) struct WorkerLimits {
    pub max_sessions: usize,
    pub queue_capacity: u32,
    pub session_idle: Duration,
    pub drain_deadline: Duration,
    pub announce_interval: Duration,
    /// Device, profile and host, as announced.
    pub device: String,
    pub profile: String,
    pub host: String,
}

impl WorkerLimits {
    /// Room that the command channel needs so that a close always fits: every queued step, every
    /// open that may wait, and a close for each of those and of the sessions held.
    pub(crate) fn command_capacity(&self) -> usize {
        self.queue_capacity as usize + 3 * self.max_sessions
    }
}

/// Events that are no errors of this worker but that an operator wants to count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Steps that had run already.
    pub duplicates: u64,
    /// Steps refused with a fault.
    pub refused: u64,
    /// Messages that could not be decoded.
    pub malformed: u64,
    /// Sessions that ended for want of activity.
    pub expired: u64,
    /// Results that the next worker did not hear.
    pub unheard: u64,
    /// Announcements of coordinators beyond those that are followed.
    pub unfollowed: u64,
}

/// The state of a worker.
#[derive(Debug)]
pub(crate) struct Worker {
    stage: Arc<Stage>,
    limits: WorkerLimits,
    sessions: Sessions,
    inference: Inference,
    /// Opens that the inference thread has not answered, with their reply subjects.
    opening: HashMap<(SessionId, Epoch), Vec<Option<String>>>,
    /// Opens whose constraints are to be compiled.
    uncompiled: Vec<(Box<OpenOrder>, Arc<Constraint>)>,
    state: WorkerState,
    drain_until: Option<Instant>,
    /// Times that messages may have been lost.
    losses: u64,
    outbox: Vec<Outgoing>,
    counters: Counters,
    metrics: WorkerMetrics,
}

impl Worker {
    pub(crate) fn new(
        stage: Arc<Stage>,
        limits: WorkerLimits,
        inference: Inference,
        metrics: WorkerMetrics,
    ) -> Self {
        Self {
            sessions: Sessions::new(Arc::clone(&stage), limits.max_sessions),
            stage,
            limits,
            inference,
            opening: HashMap::new(),
            uncompiled: Vec::new(),
            state: WorkerState::Ready,
            drain_until: None,
            losses: 0,
            outbox: Vec::new(),
            counters: Counters::default(),
            metrics,
        }
    }

    /// Returns true once the worker has nothing left to do here.
    pub(crate) fn has_left(&self) -> bool {
        self.state == WorkerState::Leaving
    }

    /// Returns what has happened so far.
    pub(crate) fn counters(&self) -> Counters {
        self.counters
    }

    /// Takes the messages that wait to be sent.
    pub(crate) fn take_outbox(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.outbox)
    }

    /// Takes the opens whose constraints are to be compiled, which takes too long here.
    pub(crate) fn take_uncompiled(&mut self) -> Vec<(Box<OpenOrder>, Arc<Constraint>)> {
        std::mem::take(&mut self.uncompiled)
    }

    /// Gives up the inference thread, which then ends.
    pub(crate) fn into_inference(self) -> Inference {
        self.inference
    }

    /// Takes in one event.
    ///
    /// # Errors
    /// [`CommandError`] if the inference thread has ended.
    pub(crate) fn apply(&mut self, action: Action, now: Instant) -> Result<(), CommandError> {
        match action {
            Action::Step(incoming) => self.on_step(&incoming, now)?,
            Action::Control(incoming) => self.on_control(incoming, now)?,
            Action::Probe => self.announce(),
            Action::Lost { told: true, .. } => {}
            Action::Lost { subject, told: false } => self.on_lost(subject),
            Action::Compiled { order, guide } => self.on_compiled(order, guide)?,
            Action::Inference(event) => self.on_inference(event),
            Action::Connection(event) => self.on_connection(event),
            Action::Nothing => {}
            Action::Coordinator(announcement) => self.on_coordinator(&announcement, now),
            Action::Tick => {
                self.expire_idle(now)?;
                self.announce();
            }
            Action::Drain => self.move_on(WorkerState::Draining, now),
            Action::Stop => self.leave(now),
        }
        self.leave_when_drained(now);
        self.show();
        Ok(())
    }

    /// Ends the worker's work here, whatever runs.
    pub(crate) fn leave(&mut self, now: Instant) {
        self.move_on(WorkerState::Leaving, now);
    }

    fn on_step(&mut self, incoming: &Incoming, now: Instant) -> Result<(), CommandError> {
        let asked = self.parse_reply(incoming.reply.as_deref());
        let mut forward: Forward = match codec::decode(&incoming.payload) {
            Ok(forward) => forward,
            Err(error) => {
                self.on_malformed(incoming, &error, "step message not decoded");
                if let Some((head_subject, lost)) = asked {
                    let lost = (lost.session, lost.epoch, lost.step);
                    self.fault(&head_subject, lost, malformed(&error));
                }
                return Ok(());
            }
        };
        let fits = check_message(&self.stage, &forward);
        let mut first_row = 0;
        let mut jobs = Vec::with_capacity(forward.steps.len());
        for step in std::mem::take(&mut forward.steps) {
            let rows = first_row..first_row + step.tokens.len();
            first_row = rows.end;
            match self.judge(&step, forward.from.as_ref(), &fits, u32_of(jobs.len())) {
                Ok(Some(route)) => {
                    self.sessions.advance(step.session, now);
                    let hidden =
                        forward.hidden.as_ref().map(|tensor| tensor.rows(rows.start, rows.len()));
                    jobs.push(Job::new(step, hidden, route, incoming.arrived));
                }
                Ok(None) => {
                    self.counters.duplicates += 1;
                    tracing::debug!(
                        session_id = %step.session, stage_index = %self.stage.index,
                        epoch = %step.epoch, step = %step.step, "step dropped, it ran already"
                    );
                }
                Err(error) => self.refuse(&step, asked.as_ref(), error),
            }
        }
        if !jobs.is_empty() {
            // In one piece: what came together may run together.
            self.inference.send(Command::Run(jobs))?;
        }
        Ok(())
    }

    /// Decides whether a step runs, and which way its result goes; `None` for a duplicate.
    /// `n_taken` steps of the same message run before it.
    fn judge(
        &self,
        step: &Step,
        from: Option<&WorkerId>,
        fits: &Result<(), ErrorReply>,
        n_taken: u32,
    ) -> Result<Option<Arc<Route>>, ErrorReply> {
        let route = match self.sessions.admit(step, from) {
            Admission::Duplicate => return Ok(None),
            Admission::Refused(error) => return Err(error),
            Admission::Run(route) => route,
        };
        fits.clone()?;
        check_step(&self.stage, step)?;
        let queued = self.inference.queued() + n_taken;
        if queued >= self.limits.queue_capacity {
            let wait_ms = f64::from(queued) * self.inference.load().decode_us / 1000.0;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a non-negative time, clamped below"
            )]
            let retry_after_ms = (wait_ms as u64).clamp(QUEUE_RETRY_MS.0, QUEUE_RETRY_MS.1);
            return Err(ErrorReply {
                class: ErrorClass::Overloaded,
                message: format!("{queued} steps wait at stage {}", self.stage.index),
                retry_after_ms: Some(retry_after_ms),
            });
        }
        Ok(Some(route))
    }

    fn refuse(&mut self, step: &Step, asked: Option<&(String, LostStep)>, error: ErrorReply) {
        self.counters.refused += 1;
        tracing::info!(
            session_id = %step.session, stage_index = %self.stage.index, epoch = %step.epoch,
            step = %step.step, error = %error, "step refused"
        );
        // The sender's coordinator comes first: after a takeover it is the old one that must hear
        // that it has been fenced off.
        let head_subject = asked.map(|(subject, _)| subject.clone()).or_else(|| {
            let coordinator = self.sessions.coordinator(step.session)?;
            Some(self.stage.subjects.head(coordinator))
        });
        if let Some(head_subject) = head_subject {
            self.fault(&head_subject, (step.session, step.epoch, step.step), error);
        }
    }

    fn on_control(&mut self, incoming: Incoming, now: Instant) -> Result<(), CommandError> {
        let control: Control = match codec::decode(&incoming.payload) {
            Ok(control) => control,
            Err(error) => {
                self.on_malformed(&incoming, &error, "control message not decoded");
                self.answer(incoming.reply, ControlOutcome::Failed(malformed(&error)));
                return Ok(());
            }
        };
        let outcome = match control.action {
            ControlAction::Open(open) => match self.open(open, &incoming, now)? {
                Ok(()) => return Ok(()),
                Err(error) => ControlOutcome::Failed(error),
            },
            ControlAction::Close(close) => self.close(&close)?,
            ControlAction::Drain(drain) => {
                self.drain(&drain, now);
                ControlOutcome::Draining
            }
            ControlAction::Keep(keep) => self.keep(&keep)?,
            ControlAction::Stats => ControlOutcome::Stats(self.load()),
            ControlAction::Progress(asked) => {
                let of =
                    |session| SessionProgress { session, steps: self.sessions.progress(session) };
                ControlOutcome::Progress(asked.into_iter().map(of).collect())
            }
        };
        self.answer(incoming.reply, outcome);
        Ok(())
    }

    fn close(&mut self, close: &Close) -> Result<ControlOutcome, CommandError> {
        Ok(match self.sessions.close(close) {
            Ok(held) => {
                if held {
                    self.inference.send(Command::Close { session: close.session })?;
                    tracing::info!(
                        session_id = %close.session, stage_index = %self.stage.index,
                        epoch = %close.epoch, "session closed"
                    );
                }
                ControlOutcome::Closed
            }
            Err(error) => ControlOutcome::Failed(error),
        })
    }

    /// Lets the running sessions end within the time asked for, or replays them elsewhere.
    fn drain(&mut self, drain: &Drain, now: Instant) {
        self.move_on(WorkerState::Draining, now);
        if let Some(until) = drain.within_ms.map(|within| now + Duration::from_millis(within)) {
            self.drain_until = self.drain_until.map(|set| set.min(until));
        }
    }

    /// Ends the sessions of a coordinator that it no longer has.
    fn keep(&mut self, keep: &Keep) -> Result<ControlOutcome, CommandError> {
        for session in self.sessions.take_others(keep) {
            self.counters.expired += 1;
            tracing::info!(
                session_id = %session, stage_index = %self.stage.index,
                "session closed, its coordinator does not have it any more"
            );
            self.inference.send(Command::Close { session })?;
        }
        Ok(ControlOutcome::Closed)
    }

    /// Passes on that the next worker is gone: the broker tells it only to whoever sent the step.
    /// Every session that goes through that worker is told.
    fn on_lost(&mut self, subject: String) {
        let Ok(Subject::Lost(_, lost)) = self.stage.subjects.parse(&subject) else { return };
        self.counters.unheard += 1;
        tracing::warn!(
            session_id = %lost.session, stage_index = %self.stage.index, epoch = %lost.epoch,
            step = %lost.step, "nobody hears the next worker"
        );
        let subjects = &self.stage.subjects;
        let shared = self.sessions.lost_with(&lost);
        let others = shared.iter().map(|(coordinator, lost)| subjects.lost(coordinator, lost));
        self.outbox.extend(std::iter::once(subject).chain(others).map(|subject| Outgoing {
            subject,
            reply: None,
            payload: Bytes::new(),
        }));
    }

    fn on_inference(&mut self, event: InferenceEvent) {
        match event {
            InferenceEvent::Opened { session, epoch, outcome } => {
                if outcome.is_err() {
                    self.sessions.forget(session, epoch);
                }
                let outcome = match outcome {
                    Ok(cached_len) => ControlOutcome::Opened { cached_len },
                    Err(error) => ControlOutcome::Failed(error),
                };
                let Some(replies) = self.opening.get_mut(&(session, epoch)) else { return };
                let reply = if replies.is_empty() { None } else { replies.remove(0) };
                if replies.is_empty() {
                    self.opening.remove(&(session, epoch));
                }
                self.answer(reply, outcome);
            }
            InferenceEvent::Lost { session, epoch } => self.sessions.forget(session, epoch),
        }
    }

    /// A coordinator announced itself: its sessions are no orphans.
    fn on_coordinator(&mut self, announcement: &CoordinatorAnnouncement, now: Instant) {
        let interval_ms = announcement.interval_ms.clamp(1, MAX_INTERVAL_MS);
        let interval = Duration::from_millis(interval_ms.into());
        let coordinator = &announcement.coordinator;
        if !self.sessions.coordinator_lives(coordinator, interval, now) {
            if self.counters.unfollowed == 0 {
                tracing::warn!(
                    stage_index = %self.stage.index, %coordinator,
                    "too many coordinators announce themselves, new ones are not followed"
                );
            }
            self.counters.unfollowed += 1;
        }
    }

    fn expire_idle(&mut self, now: Instant) -> Result<(), CommandError> {
        for session in self.sessions.take_orphans(now) {
            self.counters.expired += 1;
            tracing::warn!(
                session_id = %session, stage_index = %self.stage.index,
                "session closed, its coordinator is gone"
            );
            self.inference.send(Command::Close { session })?;
        }
        for session in self.sessions.take_idle(self.limits.session_idle, now) {
            self.counters.expired += 1;
            tracing::warn!(
                session_id = %session, stage_index = %self.stage.index,
                "session closed, nothing came for too long"
            );
            self.inference.send(Command::Close { session })?;
        }
        Ok(())
    }

    /// The only way to another state: forwards, announced, with a deadline for draining.
    fn move_on(&mut self, to: WorkerState, now: Instant) {
        match (self.state, to) {
            (WorkerState::Ready, WorkerState::Draining) => {
                self.drain_until = Some(now + self.limits.drain_deadline);
            }
            (WorkerState::Ready | WorkerState::Draining, WorkerState::Leaving) => {}
            _ => return,
        }
        tracing::info!(
            stage_index = %self.stage.index, n_sessions = self.sessions.len(), state = ?to,
            "worker changes state"
        );
        self.state = to;
        self.announce();
    }

    fn leave_when_drained(&mut self, now: Instant) {
        if self.state != WorkerState::Draining {
            return;
        }
        let expired = self.drain_until.is_some_and(|deadline| now >= deadline);
        if expired && self.sessions.len() > 0 {
            tracing::warn!(
                stage_index = %self.stage.index, n_sessions = self.sessions.len(),
                "drain deadline passed, the running sessions are left to recovery"
            );
        }
        if expired || self.sessions.len() == 0 {
            self.move_on(WorkerState::Leaving, now);
        }
    }

    /// Reads who is to hear of a step's loss from the reply subject that every step carries.
    fn parse_reply(&self, reply: Option<&str>) -> Option<(String, LostStep)> {
        match self.stage.subjects.parse(reply?) {
            Ok(Subject::Lost(coordinator, lost)) => {
                Some((self.stage.subjects.head(&coordinator), lost))
            }
            Ok(_) | Err(_) => None,
        }
    }

    fn on_malformed(&mut self, incoming: &Incoming, error: &CodecError, message: &'static str) {
        self.counters.malformed += 1;
        tracing::warn!(
            stage_index = %self.stage.index, payload_bytes = incoming.payload.len(),
            error = %error, "{message}"
        );
    }

    fn answer(&mut self, reply: Option<String>, outcome: ControlOutcome) {
        if let Some(subject) = reply {
            self.post(subject, &ControlReply { version: MessageVersion::CURRENT, outcome });
        }
    }

    fn fault(
        &mut self,
        head_subject: &str,
        lost: (SessionId, Epoch, stagebus_schemas::ids::StepNumber),
        error: ErrorReply,
    ) {
        match results::fault(&self.stage, head_subject, lost, error) {
            Ok(message) => self.outbox.push(message),
            Err(error) => tracing::error!(
                stage_index = %self.stage.index, error = &error as &dyn std::error::Error,
                "fault not encoded"
            ),
        }
    }

    fn post<M: Message>(&mut self, subject: String, message: &M) {
        match codec::encode(message) {
            Ok(payload) => {
                self.outbox.push(Outgoing { subject, reply: None, payload: payload.into() });
            }
            Err(error) => tracing::error!(
                stage_index = %self.stage.index, error = &error as &dyn std::error::Error,
                "message not encoded"
            ),
        }
    }
}

fn malformed(error: &CodecError) -> ErrorReply {
    let class = if matches!(error, CodecError::Version { .. }) {
        ErrorClass::VersionMismatch
    } else {
        ErrorClass::InvalidRequest
    };
    ErrorReply::new(class, error.to_string())
}

#[cfg(test)]
mod tests;
