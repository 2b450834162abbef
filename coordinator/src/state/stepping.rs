//! Prompt chunks, decode steps and their answers.

use std::time::Instant;

use stagebus_schemas::ids::{SessionId, WorkerId};
use stagebus_schemas::messages::forward::Phase;
use stagebus_schemas::messages::head::{Head, HeadRow, HeadStep};
use stagebus_schemas::messages::public::FinishReason;
use stagebus_schemas::subjects::LostStep;
use tracing::warn;

use super::{State, Unsettled};
use crate::action::Effect;
use crate::fault::Fault;
use crate::logprobs;
use crate::session::Answer;

impl State {
    pub(super) fn on_head(&mut self, head: &Head, now: Instant) {
        for step in &head.steps {
            self.on_answer(step, &head.worker, now);
        }
        for fault in &head.faults {
            let session = self.sessions.get(&fault.session);
            let running = session.and_then(|session| session.running());
            let current = running.is_some_and(|running| {
                running.epoch == fault.epoch
                    && running.route.get(head.stage.index()) == Some(&head.worker)
                    && running.is_under_way(fault.step)
            });
            if current {
                let fault_of_stage = Fault::Step { stage: head.stage, error: fault.error.clone() };
                self.on_session_fault(fault.session, fault_of_stage, now);
            } else {
                self.counters.late_answers += 1;
            }
        }
    }

    /// Nobody hears the worker that a step was for: it is gone, with all its sessions.
    pub(super) fn on_lost(&mut self, lost: LostStep, now: Instant) {
        let session = self.sessions.get(&lost.session);
        let running = session
            .and_then(|session| session.running())
            .filter(|running| running.epoch == lost.epoch && running.is_under_way(lost.step));
        let worker = running.and_then(|running| running.route.get(lost.stage.index())).cloned();
        match worker {
            Some(worker) => {
                warn!(%worker, stage_index = %lost.stage, "nobody hears the worker, counts as dead");
                self.on_worker_gone(&worker, now);
            }
            None => self.counters.late_answers += 1,
        }
    }

    /// Sends prompt chunks while the window has room: one step per stage keeps all stages busy,
    /// and one more is on its way to the first.
    pub(super) fn send_chunks(&mut self, id: SessionId, now: Instant) {
        let window = usize::from(self.model.identity.n_stages) + 1;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        while let Some(step) = session.send_chunk(window, now) {
            self.effects.push(step);
        }
    }

    /// Makes text of new tokens and events of new text, or ends the session.
    pub(super) fn settle_session(&mut self, unsettled: &Unsettled, now: Instant) {
        let Some(session) = self.sessions.get_mut(&unsettled.session) else { return };
        let mut end = unsettled.end;
        for row in &unsettled.rows {
            let (token, logprobs) = (row.token, logprobs::of_row(&self.model.text, row));
            if self.model.eos_ids.contains(&token) {
                session.transcript.push_end(token, logprobs);
            } else if session.transcript.push(token, logprobs) {
                end = Some(FinishReason::Stop);
                break;
            }
        }
        match end {
            Some(reason) => self.finish(unsettled.session, reason, now),
            None if session.stream => {
                if let Some(event) = session.transcript.text_event() {
                    let (session, client) = (Some(session.id), session.client.clone());
                    self.effects.push(Effect::Event { session, client, event });
                }
            }
            None => {}
        }
    }

    fn on_answer(&mut self, step: &HeadStep, worker: &WorkerId, now: Instant) {
        let id = step.session;
        let Some(session) = self.sessions.get_mut(&id) else {
            self.counters.late_answers += 1;
            return;
        };
        let (phase, rows, round_trip) = match session.answer(step, worker, now) {
            Answer::Done { phase, rows, round_trip } => (phase, rows, round_trip),
            Answer::Late => {
                self.counters.late_answers += 1;
                return;
            }
            Answer::Gap { expected } => {
                let gap = Fault::Gap { expected, found: step.step };
                return self.on_session_fault(id, gap, now);
            }
            Answer::WrongRows => return self.on_session_fault(id, Fault::WrongRows, now),
        };
        self.round_trip.add(round_trip);
        if phase == Phase::Decode {
            session.watch.decode_step(round_trip, &step.trace);
        }
        if rows.is_empty() {
            self.send_chunks(id, now);
        } else {
            self.on_tokens(id, rows, now);
        }
    }

    /// Takes chosen tokens and sends the next step unless they end the session.
    fn on_tokens(&mut self, id: SessionId, rows: Vec<HeadRow>, now: Instant) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let vocab_size = self.model.limits.vocab_size;
        let tokens = || rows.iter().map(|row| row.token);
        if let Some(token) = tokens().find(|token| *token >= vocab_size) {
            return self.on_session_fault(id, Fault::Token { token, vocab_size }, now);
        }
        let n_tokens = u32::try_from(rows.len()).unwrap_or(u32::MAX);
        session.output.extend(tokens());
        session.watch.tokens(n_tokens, now);
        self.counters.tokens_out += u64::from(n_tokens);
        let end = if tokens().any(|token| self.model.eos_ids.contains(&token)) {
            Some(FinishReason::Stop)
        } else if session.output.len() >= session.max_tokens as usize {
            Some(FinishReason::Length)
        } else {
            self.effects.extend(session.send_decode(now));
            None
        };
        self.unsettled.push(Unsettled { session: id, rows, end });
    }
}
