//! The sessions of a worker and the rules that fence them. Pure: no I/O, no clock of its own.
//!
//! The broker delivers at most once and never repairs, so every step carries (epoch, step number)
//! and each session expects exactly one number:
//!
//! | step | verdict |
//! |---|---|
//! | unknown session | refused, [`ErrorClass::UnknownSession`] |
//! | epoch below the session's | refused, [`ErrorClass::StaleEpoch`]: recovery has fenced it off |
//! | epoch above the session's | refused, [`ErrorClass::UnknownSession`]: its open was lost |
//! | number below the expected one | dropped: it ran already |
//! | number above the expected one | refused, [`ErrorClass::StepGap`]: messages were lost |
//! | the expected number | runs, and the next number is expected |
//!
//! A step that is refused does not move the expected number, so whatever follows it in the same
//! epoch is refused as well: no row is ever appended behind a hole.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{CoordinatorId, Epoch, SessionId, StepNumber, WorkerId};
use stagebus_schemas::messages::control::{Close, Keep, Open, StepProgress};
use stagebus_schemas::messages::forward::Step;
use stagebus_schemas::subjects::LostStep;

use crate::stage::Stage;

/// When a refused session is worth another try: most sessions are short, a second sees some end.
pub(crate) const RETRY_AFTER_MS: u64 = 1_000;

/// Announcements of a coordinator that may be missing before its sessions count as orphans.
const ORPHAN_INTERVALS: u32 = 10;

/// The same in time: a coordinator that starves for a while on a busy machine keeps its sessions.
const ORPHAN_SILENCE: Duration = Duration::from_secs(10);

/// Coordinators without a session here whose life is followed: far more than a fleet has. Those with
/// sessions always are.
const MAX_COORDINATORS: usize = 1024;

/// Ended sessions whose way is still known: more than end within the fraction of a millisecond in
/// which the broker answers that nobody hears a message.
const MAX_ENDED: usize = 64;

/// The way of a session's steps in one epoch, as far as this stage needs it.
#[derive(Debug)]
pub(crate) struct Route {
    /// Gets head rows and faults.
    pub coordinator: CoordinatorId,
    /// Subject of head rows and faults.
    pub head_subject: String,
    /// Worker of the stage before this one.
    pub previous: Option<WorkerId>,
    /// Subjects of the worker after this one; none for the last stage.
    pub next: Option<NextSubjects>,
    /// First step whose result, or fault, has not been sent. What goes as bulk counts when it has
    /// arrived: it may be on its way for long.
    pub unsent: AtomicU32,
    /// The step after the last one that went as bulk.
    pub bulk_end: AtomicU32,
}

/// Where the steps of a worker go.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NextSubjects {
    /// For steps that others must not hold up.
    pub step: String,
    /// For large ones.
    pub bulk: String,
}

impl Route {
    /// Notes that the result of a step, or its fault, has been handed to the connection, or has
    /// arrived as bulk.
    pub(crate) fn has_sent(&self, step: StepNumber) {
        self.unsent.fetch_max(step.next().number(), Ordering::Relaxed);
    }

    /// Whether the result of a step goes as bulk: if it is large, or earlier ones are still on that
    /// way, which it must not overtake.
    pub(crate) fn takes_bulk(&self, step: StepNumber, is_large: bool) -> bool {
        let is_behind =
            || self.unsent.load(Ordering::Relaxed) < self.bulk_end.load(Ordering::Relaxed);
        let takes = is_large || is_behind();
        if takes {
            self.bulk_end.fetch_max(step.next().number(), Ordering::Relaxed);
        }
        takes
    }

    /// Whether both go the same way from the same worker.
    fn is_same(&self, other: &Self) -> bool {
        self.has_way_of(other) && self.previous == other.previous
    }

    /// Whether results of both may share a message.
    pub(crate) fn has_way_of(&self, other: &Self) -> bool {
        self.coordinator == other.coordinator && self.next == other.next
    }
}

/// One session of this worker.
#[derive(Debug)]
struct Session {
    epoch: Epoch,
    expected: StepNumber,
    route: Arc<Route>,
    last_active: Instant,
}

/// All sessions of a worker.
#[derive(Debug)]
pub(crate) struct Sessions {
    stage: Arc<Stage>,
    max_sessions: usize,
    sessions: HashMap<SessionId, Session>,
    /// Ways of the sessions that ended last, with their epochs.
    ended: VecDeque<(SessionId, Epoch, Arc<Route>)>,
    /// Coordinators that were heard, and when each counts as gone.
    coordinators: HashMap<CoordinatorId, Instant>,
}

/// What an accepted open did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    /// The session is new.
    New,
    /// The session goes on at a higher epoch.
    Raised,
    /// The same open again: its answer may have been lost.
    Repeated,
}

/// What becomes of a step.
#[derive(Debug)]
pub(crate) enum Admission {
    /// It is the expected one; its results go this way.
    Run(Arc<Route>),
    /// It ran already.
    Duplicate,
    /// It cannot run.
    Refused(ErrorReply),
}

impl Sessions {
    pub(crate) fn new(stage: Arc<Stage>, max_sessions: usize) -> Self {
        Self {
            stage,
            max_sessions,
            sessions: HashMap::new(),
            ended: VecDeque::new(),
            coordinators: HashMap::new(),
        }
    }

    /// Number of sessions held.
    pub(crate) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Coordinator of a session.
    pub(crate) fn coordinator(&self, session: SessionId) -> Option<&CoordinatorId> {
        self.sessions.get(&session).map(|session| &session.route.coordinator)
    }

    /// How far the steps of a session are.
    pub(crate) fn progress(&self, session: SessionId) -> Option<StepProgress> {
        let Session { epoch, expected, route, .. } = self.sessions.get(&session)?;
        let unsent = StepNumber::new(route.unsent.load(Ordering::Relaxed));
        Some(StepProgress { epoch: *epoch, expected: *expected, unsent })
    }

    /// Makes a session or raises its epoch. Only new sessions need `accepting` and room.
    ///
    /// # Errors
    /// [`ErrorClass::VersionMismatch`] for another shard set, [`ErrorClass::InvalidRequest`] for
    /// a route or length that does not fit this stage, [`ErrorClass::StaleEpoch`] for an epoch
    /// that is over, [`ErrorClass::Overloaded`] without room or while draining.
    pub(crate) fn open(
        &mut self,
        open: &Open,
        accepting: bool,
        now: Instant,
    ) -> Result<Opening, ErrorReply> {
        let route = Arc::new(self.route(open)?);
        if let Some(session) = self.sessions.get_mut(&open.session) {
            if open.epoch < session.epoch {
                return Err(stale(open.session, open.epoch, session.epoch));
            }
            if open.epoch == session.epoch {
                if !session.route.is_same(&route) {
                    return Err(stale(open.session, open.epoch, session.epoch));
                }
                session.last_active = now;
                return Ok(Opening::Repeated);
            }
            *session = Session::new(open.epoch, route, now);
            return Ok(Opening::Raised);
        }
        if !accepting {
            return Err(self.overloaded("drains and takes no new session"));
        }
        if self.sessions.len() >= self.max_sessions {
            let held = format!("holds {} sessions, as many as fit", self.sessions.len());
            return Err(self.overloaded(&held));
        }
        self.sessions.insert(open.session, Session::new(open.epoch, route, now));
        Ok(Opening::New)
    }

    /// Takes back an open that the backend could not carry out.
    pub(crate) fn forget(&mut self, session: SessionId, epoch: Epoch) {
        if self.sessions.get(&session).is_some_and(|held| held.epoch == epoch) {
            self.end(session);
        }
    }

    /// Ends a session and tells whether it was held.
    ///
    /// # Errors
    /// [`ErrorClass::StaleEpoch`] if the closer's epoch is over; the session stays.
    pub(crate) fn close(&mut self, close: &Close) -> Result<bool, ErrorReply> {
        match self.sessions.get(&close.session) {
            Some(session) if close.epoch < session.epoch => {
                Err(stale(close.session, close.epoch, session.epoch))
            }
            Some(_) => Ok(self.end(close.session)),
            None => Ok(false),
        }
    }

    /// Judges a step by the table in the module's documentation, without moving anything.
    pub(crate) fn admit(&self, step: &Step, from: Option<&WorkerId>) -> Admission {
        let Some(session) = self.sessions.get(&step.session) else {
            return Admission::Refused(self.unknown(step, "is not open"));
        };
        if step.epoch < session.epoch {
            return Admission::Refused(stale(step.session, step.epoch, session.epoch));
        }
        if step.epoch > session.epoch {
            return Admission::Refused(self.unknown(step, "is not open at this epoch"));
        }
        if step.step < session.expected {
            return Admission::Duplicate;
        }
        if step.step > session.expected {
            return Admission::Refused(ErrorReply::new(
                ErrorClass::StepGap,
                format!(
                    "stage {} expected step {} of session {}, got step {}",
                    self.stage.index, session.expected, step.session, step.step
                ),
            ));
        }
        if from != session.route.previous.as_ref() {
            let name = |worker: Option<&WorkerId>| {
                worker.map_or_else(|| "the coordinator".to_owned(), ToString::to_string)
            };
            let (sender, expected) = (name(from), name(session.route.previous.as_ref()));
            return Admission::Refused(ErrorReply::new(
                ErrorClass::InvalidRequest,
                format!(
                    "stage {} got a step of session {} from {sender}, its route has {expected}",
                    self.stage.index, step.session
                ),
            ));
        }
        Admission::Run(Arc::clone(&session.route))
    }

    /// Expects the step after the one that was admitted.
    pub(crate) fn advance(&mut self, session: SessionId, now: Instant) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.expected = session.expected.next();
            session.last_active = now;
        }
    }

    /// Removes the sessions without any activity for `idle` and returns them.
    pub(crate) fn take_idle(&mut self, idle: Duration, now: Instant) -> Vec<SessionId> {
        self.take(|_, session| now.duration_since(session.last_active) >= idle)
    }

    /// Notes that a coordinator lives, and how often it says so. Returns false if it has no session
    /// here and too many others are known.
    pub(crate) fn coordinator_lives(
        &mut self,
        coordinator: &CoordinatorId,
        interval: Duration,
        now: Instant,
    ) -> bool {
        let is_full = self.coordinators.len() >= MAX_COORDINATORS;
        let owns = |session: &Session| session.route.coordinator == *coordinator;
        if is_full
            && !self.coordinators.contains_key(coordinator)
            && !self.sessions.values().any(owns)
        {
            return false;
        }
        let silence = (interval * ORPHAN_INTERVALS).max(ORPHAN_SILENCE);
        self.coordinators.insert(coordinator.clone(), now + silence);
        true
    }

    /// Removes the sessions of coordinators that have fallen silent and returns them. One that was
    /// never heard (it may not be allowed to announce itself) keeps its sessions until they idle.
    pub(crate) fn take_orphans(&mut self, now: Instant) -> Vec<SessionId> {
        let silent: Vec<CoordinatorId> = self
            .coordinators
            .extract_if(|_, until| *until <= now)
            .map(|(coordinator, _)| coordinator)
            .collect();
        if silent.is_empty() {
            return Vec::new();
        }
        self.take(|_, session| silent.contains(&session.route.coordinator))
    }

    /// Gives all coordinators a full time to be heard: this side was not listening.
    pub(crate) fn restart_clocks(&mut self, now: Instant) {
        for until in self.coordinators.values_mut() {
            *until = (*until).max(now + ORPHAN_SILENCE);
        }
    }

    /// Removes the sessions of a coordinator that it does not name and returns them.
    pub(crate) fn take_others(&mut self, keep: &Keep) -> Vec<SessionId> {
        self.take(|id, session| {
            session.route.coordinator == keep.coordinator && !keep.sessions.contains(id)
        })
    }

    fn take(&mut self, which: impl Fn(&SessionId, &Session) -> bool) -> Vec<SessionId> {
        let taken: Vec<SessionId> = self
            .sessions
            .iter()
            .filter(|(id, session)| which(id, session))
            .map(|(id, _)| *id)
            .collect();
        for session in &taken {
            self.end(*session);
        }
        taken
    }

    /// The last steps of all sessions whose next worker is that of a step that nobody heard, with
    /// their coordinators. One message carries steps of many sessions, but its reply subject names
    /// only one; and who is gone hears none of the others either. None if the session has gone on at
    /// another epoch since: its way may be another one.
    pub(crate) fn lost_with(&self, lost: &LostStep) -> Vec<(CoordinatorId, LostStep)> {
        let now = self.sessions.get(&lost.session).filter(|now| now.epoch == lost.epoch);
        let mut ended = self.ended.iter();
        let route = match now {
            Some(session) => Some(&session.route),
            None => ended
                .find(|(session, epoch, _)| (*session, *epoch) == (lost.session, lost.epoch))
                .map(|(_, _, route)| route),
        };
        let Some(next) = route.and_then(|route| route.next.as_ref()) else {
            return Vec::new();
        };
        self.sessions
            .iter()
            .filter(|(id, _)| **id != lost.session)
            .filter(|(_, session)| session.route.next.as_ref() == Some(next))
            .filter_map(|(id, session)| {
                let step = StepNumber::new(session.expected.number().checked_sub(1)?);
                let lost = LostStep { session: *id, epoch: session.epoch, step, ..*lost };
                Some((session.route.coordinator.clone(), lost))
            })
            .collect()
    }

    /// Removes a session and tells whether it was held.
    fn end(&mut self, session: SessionId) -> bool {
        let Some(held) = self.sessions.remove(&session) else { return false };
        self.ended.truncate(MAX_ENDED - 1);
        self.ended.push_front((session, held.epoch, held.route));
        true
    }

    fn route(&self, open: &Open) -> Result<Route, ErrorReply> {
        let stage = &self.stage;
        if open.fingerprint != stage.fingerprint {
            return Err(ErrorReply::new(
                ErrorClass::VersionMismatch,
                format!(
                    "worker {} serves shard set {}, the session was made for {}",
                    stage.worker, stage.fingerprint, open.fingerprint
                ),
            ));
        }
        let place = stage.index.index();
        if open.route.len() != usize::from(stage.n_stages)
            || open.route.get(place) != Some(&stage.worker)
        {
            return Err(ErrorReply::new(
                ErrorClass::InvalidRequest,
                format!(
                    "the route must name {} workers with {} at stage {}",
                    stage.n_stages, stage.worker, stage.index
                ),
            ));
        }
        let len = open.prompt.len().max(open.max_len as usize);
        if len > stage.context_length {
            return Err(ErrorReply::new(
                ErrorClass::InvalidRequest,
                format!(
                    "a session of {len} tokens was asked for, the context holds {}",
                    stage.context_length
                ),
            ));
        }
        let previous = place.checked_sub(1).and_then(|place| open.route.get(place)).cloned();
        let next = open.route.get(place + 1).map(|worker| NextSubjects {
            step: stage.subjects.step(stage.index.next(), worker),
            bulk: stage.subjects.bulk(stage.index.next(), worker),
        });
        Ok(Route {
            coordinator: open.coordinator.clone(),
            head_subject: stage.subjects.head(&open.coordinator),
            previous,
            next,
            unsent: AtomicU32::new(StepNumber::FIRST.number()),
            bulk_end: AtomicU32::new(StepNumber::FIRST.number()),
        })
    }

    fn overloaded(&self, why: &str) -> ErrorReply {
        ErrorReply {
            class: ErrorClass::Overloaded,
            message: format!("worker {} {why}", self.stage.worker),
            retry_after_ms: Some(RETRY_AFTER_MS),
        }
    }

    fn unknown(&self, step: &Step, why: &str) -> ErrorReply {
        ErrorReply::new(
            ErrorClass::UnknownSession,
            format!("session {} {why} on worker {}", step.session, self.stage.worker),
        )
    }
}

impl Session {
    fn new(epoch: Epoch, route: Arc<Route>, now: Instant) -> Self {
        Self { epoch, expected: StepNumber::FIRST, route, last_active: now }
    }
}

fn stale(session: SessionId, found: Epoch, current: Epoch) -> ErrorReply {
    ErrorReply::new(
        ErrorClass::StaleEpoch,
        format!("session {session} is at epoch {current}, the message has epoch {found}"),
    )
}

#[cfg(test)]
mod tests;
