//! The ends of a session: done, cancelled, failed.

use std::time::Instant;

use stagebus_schemas::error::ErrorReply;
use stagebus_schemas::ids::{Epoch, RequestId, SessionId, StageIndex, WorkerId};
use stagebus_schemas::messages::control::Close;
use stagebus_schemas::messages::public::{Event, FinishReason, Usage};
use stagebus_telemetry::Outcome;
use tracing::{info, warn};

use super::State;
use crate::action::Effect;
use crate::client::Client;
use crate::drafting::DraftCommand;
use crate::fault::Fault;
use crate::session::{Session, SessionState};
use crate::trace::RequestTrace;
use crate::transcript::Output;

/// Recoveries of a session without a new token between them, after which it fails.
pub(super) const MAX_RECOVERIES: u32 = 3;

/// Weight of one session's acceptance in what the next ones expect.
const ACCEPTANCE_WEIGHT: f64 = 0.2;

impl State {
    /// Ends all requests of that name; other coordinators hear the same and may know it.
    pub(super) fn on_cancel(&mut self, request: &RequestId, now: Instant) {
        let named = self.sessions.values().filter(|session| session.request == *request);
        for session in named.map(|session| session.id).collect::<Vec<_>>() {
            self.finish(session, FinishReason::Cancelled, now);
        }
    }

    /// Ends everything that is under way.
    pub(super) fn on_stop(&mut self, now: Instant) {
        for session in self.sessions.keys().copied().collect::<Vec<_>>() {
            self.on_session_fault(session, Fault::Shutdown, now);
        }
    }

    /// Decides what follows from a fault of a session: it ends, and the client hears why.
    pub(super) fn on_session_fault(&mut self, id: SessionId, fault: Fault, now: Instant) {
        let Some(session) = self.sessions.get(&id) else { return };
        let may_recover = session.running().is_some()
            && (fault.is_preemption() || session.recoveries < MAX_RECOVERIES);
        if let Some(recovery) = fault.recovery().filter(|_| may_recover) {
            warn!(session_id = %id, error = %fault, "session is replayed");
            self.metrics.recovered(recovery);
            return self.recover(id, &fault, now);
        }
        warn!(session_id = %id, error = %fault, "session failed");
        self.fail(id, fault.reply(), now);
    }

    /// Looks for new places for a running session, where its prompt and output are replayed as far
    /// as they are missing. Its workers keep what they have until the new places are known, unless
    /// it gave way: then it makes room everywhere. The client loses no token and gets none twice.
    fn recover(&mut self, id: SessionId, fault: &Fault, now: Instant) {
        let gives_way = fault.is_preemption();
        let route = self.leave_route(id);
        if gives_way {
            self.close_on(id, route);
        } else if let Some(session) = self.sessions.get_mut(&id) {
            session.held = route;
        }
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.recoveries += u32::from(!gives_way);
        if let (Some(trace), Some(recovery)) = (&mut session.trace, fault.recovery()) {
            trace.recovers(recovery.as_str(), now);
        }
        session.speculation.interrupted();
        self.counters.recoveries += 1;
        match session.enter(SessionState::Routing) {
            Ok(()) => {
                if !gives_way {
                    self.tell_state(id, fault.stage(), Some(fault.to_string()), now);
                }
                self.place(id, now);
            }
            Err(error) => self.fail(id, Fault::from(error).reply(), now),
        }
    }

    /// Tells the client how its request fares.
    pub(super) fn tell_state(
        &mut self,
        id: SessionId,
        stage: Option<StageIndex>,
        message: Option<String>,
        now: Instant,
    ) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.last_event = now;
        if session.client.job.is_some() {
            // Nobody waits for it, and what is stored need not tell how it came about.
            return;
        }
        let event = Event::Status { state: session.request_state(), stage, message };
        let client = session.client.clone();
        self.effects.push(Effect::Event { session: Some(id), client, event });
    }

    /// Ends the requests of a client that does not listen any more.
    pub(super) fn on_client_gone(&mut self, reply: &str, now: Instant) {
        let gone = self.sessions.values().filter(|session| *session.client.reply == *reply);
        for id in gone.map(|session| session.id).collect::<Vec<_>>() {
            info!(session_id = %id, "nobody hears the events, session ends");
            let session = self.remove(id, now);
            self.counters.clients_gone += 1;
            self.request_ended(session, Outcome::ClientGone, now);
        }
    }

    /// Ends a session with an error event.
    pub(super) fn fail(&mut self, id: SessionId, error: ErrorReply, now: Instant) {
        if let Some(session) = self.remove(id, now) {
            self.refuse((session.client, session.trace), error, now);
        }
    }

    /// Notes the end of a request that ends without a word to its client.
    pub(super) fn request_ended(
        &mut self,
        session: Option<Session>,
        outcome: Outcome,
        now: Instant,
    ) {
        self.metrics.request_ended(outcome);
        if let Some(trace) = session.and_then(|session| session.trace) {
            trace.end(outcome, None, now);
        }
    }

    /// Answers a request with an error event and nothing else, and ends its spans.
    pub(super) fn refuse(
        &mut self,
        (client, trace): (Client, Option<Box<RequestTrace>>),
        error: ErrorReply,
        now: Instant,
    ) {
        let outcome = Outcome::Failed(error.class);
        self.counters.requests_failed += 1;
        self.metrics.request_ended(outcome);
        if let Some(trace) = trace {
            trace.end(outcome, None, now);
        }
        let ErrorReply { class, message, retry_after_ms } = error;
        let event = Event::Error { class, message, retry_after_ms };
        self.effects.push(Effect::Event { session: None, client: client.clone(), event });
        self.effects.push(Effect::EndOfEvents { client });
    }

    /// Ends a session with what it has generated.
    pub(super) fn finish(&mut self, id: SessionId, reason: FinishReason, now: Instant) {
        let Some(mut session) = self.remove(id, now) else { return };
        if reason != FinishReason::Cancelled {
            self.output_share.observe(&session);
        }
        let stopped = session.transcript.finish();
        let finish_reason = match reason {
            FinishReason::Length if stopped => FinishReason::Stop,
            reason => reason,
        };
        let n_tokens = u32::try_from(session.output.len()).unwrap_or(u32::MAX);
        let n_own = session.output.len().saturating_sub(session.n_resumed);
        let timings = session.watch.report(u32::try_from(n_own).unwrap_or(u32::MAX), now);
        info!(
            session_id = %id,
            n_tokens,
            n_drafted = session.speculation.drafted,
            n_accepted = session.speculation.accepted,
            elapsed_us = session.watch.elapsed(now).as_micros(),
            ?finish_reason,
            "session ended"
        );
        let usage = Usage {
            prompt_tokens: u32::try_from(session.prompt.len()).unwrap_or(u32::MAX),
            completion_tokens: n_tokens,
            cached_tokens: session.cached_tokens,
            drafted_tokens: session.speculation.drafted,
            accepted_tokens: session.speculation.accepted,
            steps: session.speculation.steps,
            bloat: session.bloat,
        };
        if let Some(trace) = session.trace.take() {
            trace.end(Outcome::Done(finish_reason), Some(&usage), now);
        }
        let mut events = Vec::with_capacity(3);
        if !session.accepted {
            let (request_id, prompt_tokens) = (session.request.clone(), usage.prompt_tokens);
            events.push(Event::Accepted { request_id, prompt_tokens, seed: session.seed() });
        }
        let (text, tokens, logprobs) = if session.stream {
            events.extend(session.transcript.rest_event());
            (None, None, Vec::new())
        } else {
            let Output { text, tokens, logprobs, .. } = session.transcript.take();
            (Some(text), Some(tokens), logprobs)
        };
        events.push(Event::Done { finish_reason, usage, timings, text, tokens, logprobs });
        self.counters.requests_done += 1;
        self.metrics.request_ended(Outcome::Done(finish_reason));
        self.metrics.request_took(session.watch.elapsed(now));
        let client = session.client;
        self.effects.extend(events.into_iter().map(|event| Effect::Event {
            session: None,
            client: client.clone(),
            event,
        }));
        self.effects.push(Effect::EndOfEvents { client });
    }

    /// Takes a session out of the state and closes it on its workers.
    pub(super) fn remove(&mut self, id: SessionId, now: Instant) -> Option<Session> {
        self.close_route(id);
        let session = self.sessions.remove(&id)?;
        self.queue.retain(|queued| *queued != id);
        if let Some(held) = session.watch.running(now) {
            self.place_time.add(held);
        }
        if let Some(acceptance) = session.speculation.acceptance() {
            self.acceptance += (acceptance - self.acceptance) * ACCEPTANCE_WEIGHT;
        }
        if session.drafter.is_some() {
            self.effects.push(Effect::Draft(DraftCommand::Close(id)));
        }
        Some(session)
    }

    /// Closes a session on the workers that hold it.
    fn close_route(&mut self, id: SessionId) {
        let route = self.leave_route(id);
        self.close_on(id, route);
        let held = self.sessions.get_mut(&id).and_then(|session| session.held.take());
        self.close_on(id, held);
    }

    /// The workers that hold a session or may; they are not counted as such any more.
    fn leave_route(&mut self, id: SessionId) -> Option<Held> {
        let (epoch, route) = self.sessions.get(&id).and_then(Session::route)?;
        let route: Vec<_> = self.fleet.stages().zip(route.iter().cloned()).collect();
        route.iter().for_each(|(_, worker)| self.fleet.session_closed(worker));
        Some((epoch, route))
    }

    fn close_on(&mut self, id: SessionId, held: Option<Held>) {
        let Some((epoch, workers)) = held else { return };
        self.effects.extend(workers.into_iter().map(|(stage, worker)| Effect::Close {
            stage,
            worker,
            close: Close { session: id, epoch },
        }));
    }
}

/// Workers that hold a session, and the epoch that they know.
type Held = (Epoch, Vec<(StageIndex, WorkerId)>);
