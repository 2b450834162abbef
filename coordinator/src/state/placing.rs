//! From the queue to a worker on every stage: routing and `open`.
//!
//! All stages are asked at the same time and all answers are awaited. If one fails, what was
//! opened is closed and another route is tried under a higher epoch, without the workers that
//! refused or were silent; so the number of attempts is bounded by the number of workers.

use std::time::{Duration, Instant};

use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{Epoch, SessionId, StageIndex, WorkerId};
use stagebus_schemas::messages::control::{Close, Open};
use stagebus_schemas::messages::public::Event;
use tracing::{debug, warn};

use super::State;
use crate::action::{Effect, OpenAnswer, OpenFailure};
use crate::drafting::DraftCommand;
use crate::session::{DrafterView, Opening, Placement, Running, SessionState, plan_fill};

/// Pause before workers that were silent are asked again, if there are no others.
const SILENT_PAUSE: Duration = Duration::from_millis(250);

impl State {
    /// Starts waiting sessions while there are places.
    pub(super) fn admit(&mut self, now: Instant) {
        let mut n_active = self.sessions.values().filter(|session| session.is_active()).count();
        while n_active < self.settings.max_sessions {
            let Some(&session) = self.queue.front() else { return };
            if !self.has_kv_room(session, now) {
                return;
            }
            self.queue.pop_front();
            self.place(session, now);
            n_active += usize::from(self.sessions.contains_key(&session));
        }
    }

    /// Tries again to place the sessions that wait for a worker.
    pub(super) fn place_waiting(&mut self, now: Instant) {
        let due = |at: Option<Instant>| at.is_none_or(|at| at <= now);
        let waiting: Vec<SessionId> = self
            .sessions
            .values()
            .filter(|session| matches!(session.state(), SessionState::Routing))
            .filter(|session| due(session.placement.retry_at))
            .map(|session| session.id)
            .collect();
        for session in waiting {
            self.place(session, now);
        }
    }

    pub(super) fn on_open_answer(&mut self, answer: OpenAnswer, now: Instant) {
        let OpenAnswer { session: id, epoch, stage, worker, outcome } = answer;
        match &outcome {
            Err(OpenFailure::Gone) => self.on_worker_gone(&worker, now),
            Err(OpenFailure::Silent) => self.fleet.suspect(&worker, now),
            Ok(_) | Err(OpenFailure::Refused(_)) => {}
        }
        let opening = self.sessions.get_mut(&id).and_then(|session| session.opening_mut());
        let Some(opening) = opening.filter(|opening| opening.epoch == epoch) else {
            // The session ended meanwhile; its close may have overtaken this open.
            if matches!(outcome, Ok(_) | Err(OpenFailure::Silent)) {
                let close = Close { session: id, epoch };
                self.effects.push(Effect::Close { stage, worker, close });
            }
            return;
        };
        if let Some(slot) = opening.answers.get_mut(stage.index()) {
            *slot = Some(outcome);
        }
        if opening.answers.iter().all(Option::is_some) {
            self.on_all_answered(id, now);
        }
    }

    /// Chooses workers and asks them to open the session, or lets it wait, or gives up.
    pub(super) fn place(&mut self, id: SessionId, now: Instant) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let recovers = session.accepted;
        let wait =
            if recovers { self.settings.recovery_wait() } else { self.settings.route_wait() };
        let deadline = *session.placement.deadline.get_or_insert(now + wait);
        let mut route = Vec::with_capacity(usize::from(self.model.identity.n_stages));
        let matches = self.prefixes.matches(&session.prompt);
        for stage in self.fleet.stages() {
            let keeps = session.held.iter().flat_map(|(_, held)| held).find(|(held, worker)| {
                *held == stage
                    && !session.placement.avoid.contains(worker)
                    && self.fleet.may_keep(worker, now)
            });
            let picked = match keeps {
                Some((_, worker)) => Some(worker.clone()),
                None => self.fleet.pick(stage, &session.placement.avoid, &matches, now),
            };
            if let Some(worker) = picked {
                route.push(worker);
                continue;
            }
            let refusal =
                session.placement.refusals.iter().rev().find(|(refused, _)| *refused == stage);
            if let Some((_, refusal)) = refusal {
                let refusal = refusal.clone();
                return self.fail(id, refusal, now);
            }
            if deadline <= now {
                return self.fail(id, self.no_worker(stage, wait), now);
            }
            if recovers && !session.placement.avoid.is_empty() {
                // Whoever was silent may be well again.
                session.placement.avoid.clear();
                session.placement.retry_at = Some(now + SILENT_PAUSE);
            }
            if !matches!(session.state(), SessionState::Routing)
                && let Err(error) = session.enter(SessionState::Routing)
            {
                return self.on_session_fault(id, error.into(), now);
            }
            let message = format!("stage {stage} has no worker that takes sessions");
            return self.tell_waiting(id, stage, message, now);
        }
        self.open(id, route, now);
    }

    fn open(&mut self, id: SessionId, route: Vec<WorkerId>, now: Instant) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let epoch = session.placement.epoch;
        session.placement.epoch = epoch.next();
        let max_len = u32::try_from(session.prompt.len())
            .unwrap_or(u32::MAX)
            .saturating_add(session.max_tokens);
        let open = Open {
            session: id,
            epoch,
            coordinator: self.name.id.clone(),
            route: route.clone(),
            fingerprint: self.model.identity.fingerprint.clone(),
            prompt: session.all_tokens(),
            prompt_len: u32::try_from(session.prompt.len()).unwrap_or(u32::MAX),
            max_len,
            sampling: session.sampling.as_ref().clone(),
            head: self.settings.head,
            priority: session.priority,
        };
        let answers = vec![None; route.len()];
        let opening = Opening { epoch, route: route.clone(), answers, last_check: now };
        if let Some((epoch, held)) = session.held.take() {
            let left = held.into_iter().filter(|(_, worker)| !route.contains(worker));
            self.effects.extend(left.map(|(stage, worker)| Effect::Close {
                stage,
                worker,
                close: Close { session: id, epoch },
            }));
        }
        if let Err(error) = session.enter(SessionState::Opening(opening)) {
            return self.on_session_fault(id, error.into(), now);
        }
        let trace = session.trace.as_mut().and_then(|trace| trace.opens(&open, now));
        for (stage, worker) in self.fleet.stages().zip(route) {
            self.fleet.session_opened(&worker);
            self.effects.push(Effect::Open { stage, worker, open: open.clone(), trace });
        }
    }

    fn on_all_answered(&mut self, id: SessionId, now: Instant) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Some(opening) = session.opening_mut() else { return };
        let (epoch, route) = (opening.epoch, std::mem::take(&mut opening.route));
        let answers: Vec<_> = std::mem::take(&mut opening.answers).into_iter().flatten().collect();
        let cached: Option<Vec<u32>> =
            answers.iter().map(|answer| answer.as_ref().ok().copied()).collect();
        if let Some(cached) = cached {
            let cached: Vec<usize> = cached.into_iter().map(|len| len as usize).collect();
            return self.start(id, (epoch, route), &cached, now);
        }
        let mut retry_ms = None;
        // A session that has begun keeps what it has elsewhere while one worker is replaced. While
        // it waits for room it must not take any from others.
        let keeps = session.accepted
            && !answers.iter().any(|answer| matches!(answer, Err(OpenFailure::Refused(_))));
        let mut held = Vec::new();
        for ((stage, worker), answer) in self.fleet.stages().zip(route).zip(answers) {
            self.fleet.session_closed(&worker);
            match &answer {
                Ok(_) if keeps => held.push((stage, worker.clone())),
                Err(OpenFailure::Gone) => {}
                Err(OpenFailure::Refused(_)) if !session.accepted => {}
                Ok(_) | Err(OpenFailure::Silent | OpenFailure::Refused(_)) => {
                    let (worker, close) = (worker.clone(), Close { session: id, epoch });
                    self.effects.push(Effect::Close { stage, worker, close });
                }
            }
            let Err(failure) = answer else { continue };
            warn!(session_id = %id, stage_index = %stage, ?failure, "session was not opened");
            match failure {
                // It is out of the fleet, unless it announces itself again.
                OpenFailure::Gone => {}
                OpenFailure::Silent => {
                    session.placement.avoid.insert(worker);
                }
                OpenFailure::Refused(error) => {
                    retry_ms = retry_ms.max(error.retry_after_ms);
                    session.placement.refusals.push((stage, error));
                    session.placement.avoid.insert(worker);
                }
            }
        }
        session.held = (!held.is_empty()).then_some((epoch, held));
        if let Some(retry_ms) = retry_ms.filter(|_| session.accepted) {
            let wait = self.settings.preempted_wait();
            let deadline = *session.placement.room_deadline.get_or_insert(now + wait);
            if deadline <= now {
                return self.place(id, now);
            }
            // A session that has begun waits for room instead of being refused.
            session.placement.avoid.clear();
            session.placement.deadline = None;
            session.placement.retry_at = Some(now + Duration::from_millis(retry_ms));
            let full = session.placement.refusals.last().cloned();
            session.placement.refusals.clear();
            if let Err(error) = session.enter(SessionState::Routing) {
                return self.on_session_fault(id, error.into(), now);
            }
            if let Some((stage, error)) = full {
                self.tell_waiting(id, stage, error.message, now);
            }
            return;
        }
        self.place(id, now);
    }

    /// Tells the client once that its session waits.
    fn tell_waiting(&mut self, id: SessionId, stage: StageIndex, message: String, now: Instant) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.accepted && !std::mem::replace(&mut session.placement.told, true) {
            self.tell_state(id, Some(stage), Some(message), now);
        }
    }

    /// A worker does not answer any more: opens that wait for it are over.
    pub(super) fn end_opens_on(&mut self, worker: &WorkerId, now: Instant) {
        let mut done = Vec::new();
        for session in self.sessions.values_mut() {
            let id = session.id;
            let Some(opening) = session.opening_mut() else { continue };
            let waits = opening.route.iter().zip(&mut opening.answers);
            for (_, answer) in waits.filter(|(held, answer)| *held == worker && answer.is_none()) {
                *answer = Some(Err(OpenFailure::Gone));
                done.push(id);
            }
        }
        done.retain(|id| {
            let opening = self.sessions.get_mut(id).and_then(|session| session.opening_mut());
            opening.is_some_and(|opening| opening.answers.iter().all(Option::is_some))
        });
        for id in done {
            self.on_all_answered(id, now);
        }
    }

    /// Tells the client that its session exists, and sends the first rows; `cached` are the first
    /// positions that each stage holds.
    fn start(
        &mut self,
        id: SessionId,
        (epoch, route): (Epoch, Vec<WorkerId>),
        cached: &[usize],
        now: Instant,
    ) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        self.prefixes.note(&session.prompt, &route);
        let lens = (session.prompt.len(), session.output.len());
        let fill = plan_fill(lens, cached, self.limits.chunk_rows);
        let start_pos = fill.start_pos;
        debug!(session_id = %id, n_tokens = session.prompt.len(), kv_len = start_pos, "session opened");
        session.placement = Placement { epoch: session.placement.epoch, ..Placement::default() };
        let running = Running::new(epoch, route, fill, now);
        if let Err(error) = session.enter(SessionState::Running(Box::new(running))) {
            return self.on_session_fault(id, error.into(), now);
        }
        if !session.accepted {
            session.accepted = true;
            session.last_event = now;
            session.cached_tokens = u32::try_from(start_pos).unwrap_or(u32::MAX);
            self.metrics.session_opened(session.watch.elapsed(now));
            if let Some(trace) = &mut session.trace {
                trace.opened(session.watch.arrival(), now);
            }
            self.metrics.prompt_tokens.inc_by(session.prompt.len() as u64);
            self.metrics.cached_tokens.inc_by(session.cached_tokens.into());
            self.effects.push(Effect::Event {
                session: Some(id),
                client: session.client.clone(),
                event: Event::Accepted {
                    request_id: session.request.clone(),
                    prompt_tokens: u32::try_from(session.prompt.len()).unwrap_or(u32::MAX),
                    seed: session.seed(),
                },
            });
        }
        if session.drafter.is_none() && session.speculation.may_draft() {
            session.drafter = Some(DrafterView::default());
            let (prompt, guide) = (session.prompt.clone(), session.guide.clone());
            self.effects.push(Effect::Draft(DraftCommand::Open(id, prompt, guide)));
        }
        self.fill(id, now);
    }

    fn no_worker(&self, stage: StageIndex, waited: Duration) -> ErrorReply {
        let waited = waited.as_millis();
        let others = match self.fleet.n_refused() {
            0 => String::new(),
            n => format!("; {n} workers of another shard set are not used"),
        };
        ErrorReply::new(
            ErrorClass::StageUnavailable,
            format!("stage {stage} has no worker that takes sessions, waited {waited} ms{others}"),
        )
    }
}
