//! The steps of a running session: which rows are still to be sent, and which are under way.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use stagebus_draft::alternatives::Place;
use stagebus_draft::chain::{Chain, Verdict};
use stagebus_schemas::ids::{Epoch, SessionId, StageIndex, StepNumber, WorkerId};
use stagebus_schemas::messages::control::StepProgress;
use stagebus_schemas::messages::forward::{Phase, Step};
use stagebus_schemas::messages::head::{HeadRow, HeadStep};

use crate::action::Effect;
use crate::fault::Fault;
use crate::session::fill::{Chunk, Fill};

/// A session whose steps run.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) epoch: Epoch,
    /// Worker of every stage.
    pub(crate) route: Vec<WorkerId>,
    /// Rows that fill the caches and are not sent yet.
    fill: VecDeque<Chunk>,
    /// Position of the next row to fill with.
    next_pos: usize,
    next_step: StepNumber,
    /// Steps without an answer, oldest first.
    in_flight: VecDeque<InFlight>,
    /// What was drafted after the last token.
    pub(super) chain: Chain,
    /// The draft that was ordered.
    drafting: Option<DraftWait>,
    /// Alternatives whose drafts are still to be ordered: position and token of their first place,
    /// and their number of tokens.
    planned: VecDeque<(usize, u32, usize)>,
    /// When a step was last answered, or sent while none was under way.
    last_progress: Instant,
    /// When the workers were last asked whether they live.
    last_check: Instant,
    /// When all workers had opened the session at this epoch.
    started: Instant,
    /// What each worker has said of the oldest step under way.
    heard: Vec<Heard>,
    /// When the steps under way count as lost because the connection to the broker broke.
    lost_at: Option<Instant>,
}

/// Since when it is known of a worker that...
#[derive(Debug, Clone, Copy, Default)]
struct Heard {
    /// ... it has passed on the oldest step under way.
    passed: Option<Instant>,
    /// ... it does not have the session at this epoch.
    missing: Option<Instant>,
}

/// A draft that was ordered and has not come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftWait {
    pub(crate) ticket: u64,
    /// Position of the first token that it drafts.
    pub(crate) from: usize,
    /// Most tokens that it drafts.
    pub(crate) n: usize,
    /// The first token of the alternative that it goes on with.
    pub(crate) alternative: Option<u32>,
    pub(crate) since: Instant,
    pub(crate) deadline: Instant,
}

/// A step that was sent and not answered.
#[derive(Debug, Clone)]
struct InFlight {
    step: StepNumber,
    phase: Phase,
    /// Positions whose next token the step chooses.
    wanted: Vec<u32>,
    /// Its tokens after the first.
    after_first: Vec<u32>,
    sent: Instant,
    /// The session went on in another way: its rows are for nothing.
    is_stale: bool,
    /// It is a part of the window that the next one completes.
    is_beside: bool,
}

/// Rows of the next step.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) phase: Phase,
    pub(super) start_pos: u32,
    pub(super) tokens: Vec<u32>,
    pub(super) wanted: Vec<u32>,
    /// The first of the stages that hold the rows.
    pub(super) held_from: Option<StageIndex>,
    /// The next step completes the window that they are a part of.
    pub(super) is_beside: bool,
}

/// What an answer to a step meant.
#[derive(Debug, PartialEq)]
pub(crate) enum Answer {
    /// Not for a step that is under way: a repeat or a latecomer.
    Late,
    /// The step is done, but the session has gone on in another way.
    Stale,
    /// The step is done; these are its wanted rows with the tokens that follow them.
    Done { phase: Phase, rows: Vec<HeadRow>, round_trip: Duration },
    /// An earlier step has no answer: a message was lost.
    Gap { expected: StepNumber },
    /// The rows are not those that the step asked for.
    WrongRows,
}

impl Running {
    /// Makes a session that fills the caches.
    pub(crate) fn new(epoch: Epoch, route: Vec<WorkerId>, fill: Fill, now: Instant) -> Self {
        let Fill { start_pos, chunks: fill } = fill;
        Self {
            epoch,
            heard: vec![Heard::default(); route.len()],
            started: now,
            route,
            fill,
            next_pos: start_pos,
            next_step: StepNumber::FIRST,
            in_flight: VecDeque::new(),
            chain: Chain::default(),
            drafting: None,
            planned: VecDeque::new(),
            last_progress: now,
            last_check: now,
            lost_at: None,
        }
    }

    /// The next chunk and its first position, if fewer than `window` steps are under way.
    pub(super) fn take_chunk(&mut self, window: usize) -> Option<(Chunk, usize)> {
        if self.in_flight.len() >= window {
            return None;
        }
        let chunk = self.fill.pop_front()?;
        let start_pos = self.next_pos;
        self.next_pos += chunk.n_rows;
        Some((chunk, start_pos))
    }

    /// Whether all rows that fill the caches are sent.
    pub(super) fn is_filled(&self) -> bool {
        self.fill.is_empty()
    }

    /// Whether nothing is under way: the next step must be sent.
    pub(crate) fn is_idle(&self) -> bool {
        self.fill.is_empty() && self.in_flight.is_empty() && self.drafting.is_none()
    }

    /// Whether the caches are filled and tokens are generated.
    pub(crate) fn is_decoding(&self) -> bool {
        self.fill.is_empty() && self.in_flight.iter().all(|step| step.phase == Phase::Decode)
    }

    /// Windows under way whose answers still matter.
    pub(crate) fn n_live(&self) -> usize {
        self.in_flight.iter().filter(|step| !step.is_stale && !step.is_beside).count()
    }

    /// Notes where alternatives are to be drafted; `start` is the position of the draft.
    pub(super) fn plan_alternatives(&mut self, places: Vec<Place>, start: usize) {
        self.planned = places.into_iter().map(|at| (start + at.index, at.token, at.n)).collect();
    }

    /// The next alternative to draft.
    pub(super) fn next_alternative(&mut self) -> Option<(usize, u32, usize)> {
        self.planned.pop_front()
    }

    /// Whether the next window waits for an alternative.
    pub(crate) fn awaits_alternative(&self) -> bool {
        self.drafting.is_some_and(|wait| wait.alternative.is_some())
    }

    /// What was drafted after the last token.
    pub(crate) fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Compares the choices of the oldest window with the chain. If one differs, the windows behind
    /// it are stale, and so is the draft that is made.
    pub(crate) fn judge(&mut self, rows: &[HeadRow]) -> Verdict {
        let chosen: Vec<u32> = rows.iter().map(|row| row.token).collect();
        let verdict = self.chain.judge(&chosen);
        if verdict.differs {
            self.in_flight.iter_mut().for_each(|step| step.is_stale = true);
            self.drafting = None;
            self.planned.clear();
        }
        verdict
    }

    /// Notes that a draft was ordered.
    pub(super) fn wait_for_draft(&mut self, wait: DraftWait) {
        self.drafting = Some(wait);
    }

    /// Whether a draft was ordered and has not come.
    pub(crate) fn is_drafting(&self) -> bool {
        self.drafting.is_some()
    }

    /// When the draft that was ordered comes too late.
    pub(crate) fn draft_deadline(&self) -> Option<Instant> {
        self.drafting.map(|wait| wait.deadline)
    }

    /// Ends the wait for a draft, if it is this one or any.
    pub(crate) fn end_draft_wait(&mut self, ticket: Option<u64>) -> Option<DraftWait> {
        self.drafting.take_if(|wait| ticket.is_none_or(|ticket| ticket == wait.ticket))
    }

    /// Notes that answers may be lost: those that are not here by `deadline` are.
    pub(crate) fn expect_loss(&mut self, deadline: Instant) {
        if !self.in_flight.is_empty() {
            self.lost_at = Some(deadline);
        }
    }

    /// Since when the oldest step under way has been waiting for its answer.
    pub(crate) fn waits_since(&self) -> Option<Instant> {
        (!self.in_flight.is_empty()).then_some(self.last_progress)
    }

    /// When the oldest step under way counts as lost, if it may take `timeout`.
    pub(crate) fn deadline(&self, timeout: Duration) -> Option<Instant> {
        let slow = self.last_progress + timeout;
        let deadline = self.lost_at.map_or(slow, |lost| lost.min(slow));
        (!self.in_flight.is_empty()).then_some(deadline)
    }

    /// When the workers are to be asked whether they live, if a step may take `patience` without
    /// raising the question.
    pub(crate) fn next_check(&self, patience: Duration) -> Option<Instant> {
        let quiet_since = self.last_progress.max(self.last_check);
        (!self.in_flight.is_empty()).then(|| quiet_since + patience)
    }

    /// Notes that the workers were asked.
    pub(crate) fn checked(&mut self, now: Instant) {
        self.last_check = now;
    }

    /// Takes what a worker answered to a question that was asked then and answered now, and says
    /// what is lost.
    ///
    /// A message that was sent has come within `grace` or never does. So one is lost if its sender
    /// said that it has left, and its receiver, asked that much later, does not have it.
    pub(crate) fn hear(
        &mut self,
        worker: &WorkerId,
        steps: Option<StepProgress>,
        (asked, now): (Instant, Instant),
        grace: Duration,
    ) -> Option<Fault> {
        let place = self.route.iter().position(|held| held == worker)?;
        let stage = StageIndex::new(u16::try_from(place).ok()?);
        let oldest = self.in_flight.front()?;
        let is_over = |since: Instant| since + grace <= asked;
        let Some(steps) = steps.filter(|steps| steps.epoch == self.epoch) else {
            if asked < self.started {
                return None;
            }
            // The fault that says why may be on its way.
            let missing = *self.heard[place].missing.get_or_insert(now);
            return is_over(missing).then_some(Fault::SessionLost { stage });
        };
        self.heard[place].missing = None;
        if steps.expected <= oldest.step {
            let sent = match place.checked_sub(1) {
                None => Some(oldest.sent),
                Some(before) => self.heard[before].passed,
            };
            return sent.is_some_and(is_over).then_some(Fault::StepLost { stage });
        }
        if steps.unsent <= oldest.step {
            return None;
        }
        let passed = *self.heard[place].passed.get_or_insert(now);
        let is_last = place + 1 == self.route.len();
        (is_last && is_over(passed)).then_some(Fault::AnswerLost)
    }

    /// Whether a step is under way.
    pub(crate) fn is_under_way(&self, step: StepNumber) -> bool {
        self.in_flight.iter().any(|in_flight| in_flight.step == step)
    }

    /// Positions whose next tokens a step chooses, and its tokens after the first, if its answer is
    /// the next to come and matters.
    pub(crate) fn expected(&self, epoch: Epoch, step: StepNumber) -> Option<(&[u32], &[u32])> {
        let oldest = self.in_flight.front().filter(|oldest| oldest.step == step)?;
        let matters = self.epoch == epoch && !oldest.is_stale;
        matters.then_some((&oldest.wanted, &oldest.after_first))
    }

    pub(super) fn send(&mut self, session: SessionId, rows: Rows, now: Instant) -> Effect {
        let Rows { phase, start_pos, tokens, wanted, held_from, is_beside } = rows;
        let step = self.next_step;
        self.next_step = step.next();
        if self.in_flight.is_empty() {
            self.last_progress = now;
        }
        self.in_flight.push_back(InFlight {
            step,
            phase,
            wanted: wanted.iter().map(|row| start_pos + row).collect(),
            after_first: tokens.iter().skip(1).copied().collect(),
            sent: now,
            is_stale: false,
            is_beside,
        });
        let epoch = self.epoch;
        let trace = Vec::new();
        let step_rows =
            Step { session, epoch, step, start_pos, phase, tokens, wanted, held_from, trace };
        Effect::Step { worker: self.route[0].clone(), step: step_rows }
    }

    pub(super) fn answer(&mut self, head: &HeadStep, now: Instant) -> Answer {
        let Some(oldest) = self.in_flight.front() else { return Answer::Late };
        if head.step < oldest.step {
            return Answer::Late;
        }
        if head.step > oldest.step {
            return Answer::Gap { expected: oldest.step };
        }
        let fits = head.rows.iter().map(|row| row.pos).eq(oldest.wanted.iter().copied());
        // Whoever noticed that it is stale has left its rows out.
        if !fits && !oldest.is_stale {
            return Answer::WrongRows;
        }
        let Some(oldest) = self.in_flight.pop_front() else { return Answer::Late };
        self.last_progress = now;
        self.lost_at = None;
        self.heard.iter_mut().for_each(|heard| heard.passed = None);
        if oldest.is_stale {
            return Answer::Stale;
        }
        Answer::Done {
            phase: oldest.phase,
            rows: head.rows.clone(),
            round_trip: now.saturating_duration_since(oldest.sent),
        }
    }
}
