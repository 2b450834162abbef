//! Prompt chunks, decode steps and their answers.

use std::time::{Duration, Instant};

use stagebus_draft::costs::StageRun;
use stagebus_draft::windows::Plan;
use stagebus_schemas::ids::{SessionId, WorkerId};
use stagebus_schemas::messages::forward::{Phase, StageTime};
use stagebus_schemas::messages::head::{Head, HeadRow, HeadStep};
use stagebus_schemas::messages::public::{FinishReason, StepTimes};
use stagebus_schemas::subjects::LostStep;
use tracing::warn;

use super::{State, Unsettled};
use crate::action::Effect;
use crate::drafting::Drafted;
use crate::fault::Fault;
use crate::full_head;
use crate::logprobs;
use crate::session::{Answer, Running};
use crate::speculation::Measured;
use crate::timings::{TokenGap, unaccounted};

/// How long a step waits for its draft: far beyond any draft that pays.
const DRAFT_PATIENCE: Duration = Duration::from_secs(1);

impl State {
    pub(super) fn on_head(&mut self, head: &Head, now: Instant) {
        self.n_decoding = self.sessions.values().filter(|session| session.is_decoding()).count();
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

    /// Fills the caches while the window has room: one step per stage keeps all stages busy, and
    /// one more is on its way to the first. When they are full, decoding starts or goes on.
    pub(super) fn fill(&mut self, id: SessionId, now: Instant) {
        let window = usize::from(self.model.identity.n_stages) + 1;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        while let Some(step) = session.send_chunk(window, now) {
            self.effects.push(step);
        }
        if session.running().is_some_and(Running::is_idle) {
            self.decode(id, now);
        }
    }

    /// Goes on decoding after an answer: decides how to speculate, and sends what may leave.
    pub(super) fn decode(&mut self, id: SessionId, now: Instant) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.drafter.is_some() {
            let costs = (self.costs.costs(self.n_decoding), self.costs.windows(self.n_decoding));
            let fit = &mut self.fit;
            let measured = costs.0.zip(costs.1);
            let measured = measured.map(|(step, windows)| Measured { step, windows, fit });
            session.speculation.replan(measured, now);
        }
        self.pump(id, now);
    }

    /// Sends the windows that are complete while fewer than planned are under way, and orders the
    /// draft of the next one.
    ///
    /// A window waits for the draft that completes it, except where the plan lets the first row of
    /// a chain lead, and where there is nothing to wait for; and for its alternatives.
    fn pump(&mut self, id: SessionId, now: Instant) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let most_rows = self.limits.wanted_rows;
        loop {
            if session.running().is_some_and(|running| !running.is_drafting())
                && let Some(order) = session.order_alternative(now, DRAFT_PATIENCE)
            {
                self.effects.push(order);
                return;
            }
            let Plan { k, depth, lead } = session.speculation.plan();
            let may_draft = k > 0 && session.drafter.is_some() && session.draft_room() > 0;
            let Some(running) = session.running() else { return };
            let chain = running.chain();
            let ends = || chain.tokens().any(|token| self.model.eos_ids.contains(&token));
            let may_draft = may_draft && !chain.is_dry() && !ends();
            let n_rows = (k + usize::from(chain.starts())).clamp(1, most_rows);
            let has_slot = running.n_live() < depth && !running.awaits_alternative();
            let is_complete = chain.n_unsent() >= n_rows;
            let leads = lead && chain.starts();
            let waits = may_draft || running.is_drafting();
            if has_slot && chain.n_unsent() > 0 && (is_complete || leads || !waits) {
                let (steps, n_drafted) = session.send_window(n_rows, now);
                session.speculation.sent(n_drafted);
                self.counters.tokens_drafted += n_drafted as u64;
                self.effects.extend(steps);
                continue;
            }
            if may_draft && !running.is_drafting() && !is_complete && (depth > 1 || has_slot) {
                let n = if depth > 1 { k } else { n_rows - chain.n_unsent() };
                let n = n.min(session.draft_room());
                self.effects.extend(session.order_draft(n, now, DRAFT_PATIENCE));
            }
            return;
        }
    }

    /// Takes drafts and sends the windows that waited for them.
    pub(super) fn on_drafted(&mut self, drafted: Vec<Drafted>, now: Instant) {
        for Drafted { session: id, ticket, tokens, doubts } in drafted {
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            let wait = session.running_mut().and_then(|r| r.end_draft_wait(Some(ticket)));
            let Some(wait) = wait else { continue };
            let tokens = tokens.unwrap_or_else(|| {
                session.speculation.switch_off();
                Vec::new()
            });
            // The first draft of a session may have waited for its prompt to be taken in.
            if let Some(n) = u32::try_from(tokens.len()).ok().filter(|n| *n > 0 && ticket > 1) {
                self.costs.draft(now.duration_since(wait.since) / n);
            }
            session.take_draft(wait, &tokens, &doubts);
            self.pump(id, now);
        }
    }

    /// Goes on without the drafts that do not come.
    pub(super) fn end_draft_waits(&mut self, now: Instant) {
        let mut late = Vec::new();
        for session in self.sessions.values_mut() {
            let Some(running) = session.running_mut() else { continue };
            if running.draft_deadline().is_some_and(|deadline| deadline <= now)
                && running.end_draft_wait(None).is_some()
            {
                warn!(session_id = %session.id, "no draft came, the session goes on without");
                session.speculation.switch_off();
                late.push(session.id);
            }
        }
        for session in late {
            self.pump(session, now);
        }
    }

    /// Makes text of new tokens and events of new text, or ends the session.
    pub(super) fn settle_session(&mut self, unsettled: &Unsettled, now: Instant) {
        let Some(session) = self.sessions.get_mut(&unsettled.session) else { return };
        let mut end = unsettled.end;
        let mut n_after = unsettled.rows.len();
        for row in &unsettled.rows {
            n_after -= 1;
            let (token, logprobs) = (row.token, logprobs::of_row(&self.model.text, row));
            if self.model.eos_ids.contains(&token) {
                session.transcript.push_end(token, logprobs);
            } else if session.transcript.push(token, logprobs) {
                end = Some(FinishReason::Stop);
                // Tokens that follow the stop string were never asked for.
                let n_cut = session.truncate_output(unsettled.output_len - n_after);
                self.counters.tokens_out -= n_cut as u64;
                break;
            }
        }
        self.metrics.generated_tokens.inc_by((unsettled.rows.len() - n_after) as u64);
        if let Some(times) = &unsettled.times {
            let tokens = u32::try_from(unsettled.rows.len() - n_after).unwrap_or(u32::MAX);
            session.transcript.push_times(StepTimes { tokens, ..times.clone() });
        }
        match end {
            Some(reason) => self.finish(unsettled.session, reason, now),
            None if session.stream => {
                if let Some(event) = session.transcript.text_event() {
                    session.last_event = now;
                    let (session, client) = (Some(session.id), session.client.clone());
                    self.effects.push(Effect::Event { session, client, event });
                }
            }
            None => {}
        }
    }

    /// Chooses the tokens of a step that came as logits.
    fn chosen_here(&mut self, step: &HeadStep) -> Result<Option<HeadStep>, Fault> {
        let Some(logits) = &step.logits else { return Ok(None) };
        let Some(session) = self.sessions.get_mut(&step.session) else { return Ok(None) };
        let guide = session.guide.take();
        let mut history = full_head::history(session, guide);
        let running = session.running();
        let expected = running.and_then(|running| running.expected(step.epoch, step.step));
        let (sampler, vocab_size) = (&mut self.sampler, self.model.limits.vocab_size);
        let chosen = expected.map(|rows| {
            full_head::choose(sampler, session, &mut history, rows, logits, vocab_size)
        });
        session.guide = history.into_guide();
        let of = |rows| HeadStep { rows, logits: None, ..step.clone() };
        chosen.transpose().map(|rows| rows.map(of))
    }

    fn on_answer(&mut self, step: &HeadStep, worker: &WorkerId, now: Instant) {
        let id = step.session;
        let chosen = match self.chosen_here(step) {
            Ok(chosen) => chosen,
            Err(fault) => return self.on_session_fault(id, fault, now),
        };
        let step = chosen.as_ref().unwrap_or(step);
        let Some(session) = self.sessions.get_mut(&id) else {
            self.counters.late_answers += 1;
            return;
        };
        let (phase, mut rows, round_trip) = match session.answer(step, worker, now) {
            Answer::Done { phase, rows, round_trip } => (phase, rows, round_trip),
            Answer::Stale => return,
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
        self.metrics.step(phase, round_trip);
        session.note_bloat(&step.trace);
        if rows.is_empty() {
            return self.fill(id, now);
        }
        if phase == Phase::Decode {
            session.watch.decode_step(round_trip, &step.trace);
            let on_the_way = unaccounted(round_trip, &step.trace);
            self.costs.step(&runs(&step.trace), on_the_way);
            self.metrics.hop(on_the_way / (u32::from(self.model.identity.n_stages) + 1));
        }
        let times = session.watch.step_times(round_trip, &step.trace);
        let Some(running) = session.running_mut() else { return };
        let verdict = running.judge(&rows);
        let is_over = running.chain().starts();
        session.speculation.observe(&verdict);
        if is_over {
            session.speculation.chain_ended(&mut self.fit, now);
        }
        self.counters.tokens_accepted += verdict.n_sent as u64;
        rows.truncate(verdict.n_standing);
        self.on_tokens(id, rows, times, now);
    }

    /// Takes tokens that stand and sends the next step unless they end the session.
    fn on_tokens(
        &mut self,
        id: SessionId,
        mut rows: Vec<HeadRow>,
        times: Option<StepTimes>,
        now: Instant,
    ) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let vocab_size = self.model.limits.vocab_size;
        if let Some(HeadRow { token, .. }) = rows.iter().find(|row| row.token >= vocab_size) {
            return self.on_session_fault(id, Fault::Token { token: *token, vocab_size }, now);
        }
        let left = (session.max_tokens as usize).saturating_sub(session.output.len());
        rows.truncate(left);
        let eos = rows.iter().position(|row| self.model.eos_ids.contains(&row.token));
        if let Some(eos) = eos {
            rows.truncate(eos + 1);
        }
        session.output.extend(rows.iter().map(|row| row.token));
        let output_len = session.output.len();
        let n_tokens = u32::try_from(rows.len()).unwrap_or(u32::MAX);
        match session.watch.tokens(now) {
            TokenGap::First(since_arrival) => {
                self.metrics.first_token(since_arrival);
                if let Some(trace) = &mut session.trace {
                    trace.event("first token", now);
                }
            }
            TokenGap::Later(since_last) => self.metrics.more_tokens(n_tokens, since_last),
        }
        session.recoveries = 0;
        self.counters.tokens_out += rows.len() as u64;
        let end = if eos.is_some() {
            Some(FinishReason::Stop)
        } else if session.output.len() >= session.max_tokens as usize {
            Some(FinishReason::Length)
        } else {
            None
        };
        if end.is_none() {
            self.decode(id, now);
        }
        self.unsettled.push(Unsettled { session: id, rows, output_len, end, times });
    }
}

/// What each stage ran.
fn runs(trace: &[StageTime]) -> Vec<StageRun> {
    let run = |time: &StageTime| StageRun {
        rows: time.rows,
        infer: Duration::from_micros(u64::from(time.infer_us)),
    };
    trace.iter().map(run).collect()
}
