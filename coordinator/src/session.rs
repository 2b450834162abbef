//! One session: what it is to generate, how far it is, and which steps are under way.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use stagebus_schemas::error::ErrorReply;
use stagebus_schemas::ids::{Epoch, RequestId, SessionId, StageIndex, StepNumber, WorkerId};
use stagebus_schemas::messages::control::Priority;
use stagebus_schemas::messages::forward::{Forward, Phase, Step};
use stagebus_schemas::messages::head::{HeadRow, HeadStep};
use stagebus_schemas::messages::sampling::Sampling;
use stagebus_schemas::subjects::LostStep;
use stagebus_schemas::version::MessageVersion;

use crate::action::{Effect, OpenFailure};
use crate::client::Client;
use crate::timings::Stopwatch;
use crate::transcript::Transcript;

/// One session, from the arrival of its request to its last event.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) request: RequestId,
    pub(crate) client: Client,
    /// False: the text and tokens come with `done` only.
    pub(crate) stream: bool,
    /// Most tokens to generate; within the context once the prompt is known.
    pub(crate) max_tokens: u32,
    /// How tokens are chosen.
    pub(crate) sampling: Sampling,
    /// Who goes first where sessions compete.
    pub(crate) priority: Priority,
    /// Token ids of the prompt; empty while it is being encoded.
    pub(crate) prompt: Vec<u32>,
    /// Tokens generated.
    pub(crate) output: Vec<u32>,
    pub(crate) transcript: Transcript,
    pub(crate) watch: Stopwatch,
    pub(crate) placement: Placement,
    state: SessionState,
}

/// What the search for workers knows, over all attempts.
#[derive(Debug, Default)]
pub(crate) struct Placement {
    /// When to give up waiting for a stage without a worker; set at the first attempt.
    pub(crate) deadline: Option<Instant>,
    /// Epoch of the next attempt.
    pub(crate) epoch: Epoch,
    /// Workers that refused.
    pub(crate) avoid: HashSet<WorkerId>,
    /// The last refusal of each stage.
    pub(crate) refusals: Vec<(StageIndex, ErrorReply)>,
}

/// How far a session is.
#[derive(Debug)]
pub(crate) enum SessionState {
    /// Its text is becoming token ids.
    Encoding,
    /// It waits for a session to end.
    Queued,
    /// It waits for a worker of some stage.
    Routing,
    /// The workers are asked to open it.
    Opening(Opening),
    /// Its steps run.
    Running(Running),
}

/// A step from one state to another that the session's life does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("session cannot go from {from} to {to}")]
pub(crate) struct IllegalTransition {
    from: &'static str,
    to: &'static str,
}

/// Opens that are under way on all stages.
#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) epoch: Epoch,
    /// Worker of every stage.
    pub(crate) route: Vec<WorkerId>,
    /// Answer of every stage.
    pub(crate) answers: Vec<Option<Result<u32, OpenFailure>>>,
}

/// A session whose steps run.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) epoch: Epoch,
    /// Worker of every stage.
    pub(crate) route: Vec<WorkerId>,
    /// Sizes of the prompt chunks that are not sent yet.
    chunks: VecDeque<usize>,
    /// Position of the next prompt row to send.
    next_pos: usize,
    next_step: StepNumber,
    /// Steps without an answer, oldest first.
    in_flight: VecDeque<InFlight>,
    /// When a step was last answered, or sent while none was under way.
    last_progress: Instant,
    /// When the workers were last asked whether they live.
    last_check: Instant,
    /// When the steps under way count as lost because the connection to the broker broke.
    lost_at: Option<Instant>,
}

/// A step that was sent and not answered.
#[derive(Debug, Clone)]
struct InFlight {
    step: StepNumber,
    phase: Phase,
    /// Positions whose next token the step chooses.
    wanted: Vec<u32>,
    sent: Instant,
}

/// Rows of the next step.
#[derive(Debug)]
struct Rows {
    phase: Phase,
    start_pos: u32,
    tokens: Vec<u32>,
    wanted: Vec<u32>,
}

/// What an answer to a step meant.
#[derive(Debug, PartialEq)]
pub(crate) enum Answer {
    /// Not for a step that is under way: a repeat or a latecomer.
    Late,
    /// The step is done; these are its wanted rows with the tokens that follow them.
    Done { phase: Phase, rows: Vec<HeadRow>, round_trip: Duration },
    /// An earlier step has no answer: a message was lost.
    Gap { expected: StepNumber },
    /// The rows are not those that the step asked for.
    WrongRows,
}

impl SessionState {
    const fn name(&self) -> &'static str {
        match self {
            Self::Encoding => "encoding",
            Self::Queued => "queued",
            Self::Routing => "routing",
            Self::Opening(_) => "opening",
            Self::Running(_) => "running",
        }
    }

    /// The legal transitions.
    const fn may_become(&self, next: &Self) -> bool {
        matches!(
            (self, next),
            (Self::Encoding, Self::Queued)
                | (Self::Queued, Self::Routing | Self::Opening(_))
                | (Self::Routing, Self::Opening(_))
                | (Self::Opening(_), Self::Routing | Self::Opening(_) | Self::Running(_))
        )
    }
}

/// What a request asks for, once it is known to be valid.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) request: RequestId,
    pub(crate) client: Client,
    pub(crate) stream: bool,
    pub(crate) max_tokens: u32,
    pub(crate) sampling: Sampling,
    pub(crate) priority: Priority,
}

impl Session {
    /// Makes a session whose prompt is not known yet.
    pub(crate) fn new(order: Order, transcript: Transcript, watch: Stopwatch) -> Self {
        Self {
            id: SessionId::random(),
            request: order.request,
            client: order.client,
            stream: order.stream,
            max_tokens: order.max_tokens,
            sampling: order.sampling,
            priority: order.priority,
            prompt: Vec::new(),
            output: Vec::new(),
            transcript,
            watch,
            placement: Placement::default(),
            state: SessionState::Encoding,
        }
    }

    pub(crate) fn state(&self) -> &SessionState {
        &self.state
    }

    /// Enters the next state.
    pub(crate) fn enter(&mut self, next: SessionState) -> Result<(), IllegalTransition> {
        if !self.state.may_become(&next) {
            return Err(IllegalTransition { from: self.state.name(), to: next.name() });
        }
        self.state = next;
        Ok(())
    }

    /// Whether the session holds one of the places of running sessions.
    pub(crate) fn is_active(&self) -> bool {
        !matches!(self.state, SessionState::Encoding | SessionState::Queued)
    }

    /// Whether the client has been told that the session exists.
    pub(crate) fn is_accepted(&self) -> bool {
        matches!(self.state, SessionState::Running(_))
    }

    /// The seed of the noise, if tokens are drawn.
    pub(crate) fn seed(&self) -> Option<u64> {
        (!self.sampling.is_greedy()).then_some(self.sampling.seed)
    }

    pub(crate) fn opening_mut(&mut self) -> Option<&mut Opening> {
        match &mut self.state {
            SessionState::Opening(opening) => Some(opening),
            _ => None,
        }
    }

    pub(crate) fn running(&self) -> Option<&Running> {
        match &self.state {
            SessionState::Running(running) => Some(running),
            _ => None,
        }
    }

    pub(crate) fn running_mut(&mut self) -> Option<&mut Running> {
        match &mut self.state {
            SessionState::Running(running) => Some(running),
            _ => None,
        }
    }

    /// The workers that hold the session, or may, with the epoch that they know.
    pub(crate) fn route(&self) -> Option<(Epoch, &[WorkerId])> {
        match &self.state {
            SessionState::Opening(opening) => Some((opening.epoch, &opening.route)),
            SessionState::Running(running) => Some((running.epoch, &running.route)),
            SessionState::Encoding | SessionState::Queued | SessionState::Routing => None,
        }
    }

    /// The next prompt chunk, if there is one and fewer than `window` steps are under way.
    pub(crate) fn send_chunk(&mut self, window: usize, now: Instant) -> Option<Effect> {
        let SessionState::Running(running) = &mut self.state else { return None };
        if running.in_flight.len() >= window {
            return None;
        }
        let n_rows = running.chunks.pop_front()?;
        let start_pos = running.next_pos;
        running.next_pos += n_rows;
        let last_row = running.chunks.is_empty().then(|| position(n_rows - 1));
        let rows = Rows {
            phase: Phase::Prefill,
            start_pos: position(start_pos),
            tokens: self.prompt[start_pos..running.next_pos].to_vec(),
            wanted: last_row.into_iter().collect(),
        };
        self.watch.step_sent(now);
        Some(running.send(self.id, rows, now))
    }

    /// The step that appends the last generated token.
    pub(crate) fn send_decode(&mut self, now: Instant) -> Option<Effect> {
        let SessionState::Running(running) = &mut self.state else { return None };
        let token = *self.output.last()?;
        let rows = Rows {
            phase: Phase::Decode,
            start_pos: position(self.prompt.len() + self.output.len() - 1),
            tokens: vec![token],
            wanted: vec![0],
        };
        Some(running.send(self.id, rows, now))
    }

    /// Takes the answer to a step.
    pub(crate) fn answer(&mut self, head: &HeadStep, worker: &WorkerId, now: Instant) -> Answer {
        let SessionState::Running(running) = &mut self.state else { return Answer::Late };
        if head.epoch != running.epoch || running.route.last() != Some(worker) {
            return Answer::Late;
        }
        running.answer(head, now)
    }
}

impl Running {
    /// Makes a session that sends prompt rows from `start_pos` on, in `chunks`.
    pub(crate) fn new(
        epoch: Epoch,
        route: Vec<WorkerId>,
        start_pos: usize,
        chunks: Vec<usize>,
        now: Instant,
    ) -> Self {
        Self {
            epoch,
            route,
            chunks: chunks.into(),
            next_pos: start_pos,
            next_step: StepNumber::FIRST,
            in_flight: VecDeque::new(),
            last_progress: now,
            last_check: now,
            lost_at: None,
        }
    }

    /// Notes that answers may be lost: those that are not here by `deadline` are.
    pub(crate) fn expect_loss(&mut self, deadline: Instant) {
        self.lost_at = Some(deadline);
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

    /// Whether a step is under way.
    pub(crate) fn is_under_way(&self, step: StepNumber) -> bool {
        self.in_flight.iter().any(|in_flight| in_flight.step == step)
    }

    fn send(&mut self, session: SessionId, rows: Rows, now: Instant) -> Effect {
        let Rows { phase, start_pos, tokens, wanted } = rows;
        let step = self.next_step;
        self.next_step = step.next();
        if self.in_flight.is_empty() {
            self.last_progress = now;
        }
        self.in_flight.push_back(InFlight {
            step,
            phase,
            wanted: wanted.iter().map(|row| start_pos + row).collect(),
            sent: now,
        });
        let epoch = self.epoch;
        let step_rows =
            Step { session, epoch, step, start_pos, phase, tokens, wanted, trace: Vec::new() };
        let version = MessageVersion::CURRENT;
        Effect::Step {
            worker: self.route[0].clone(),
            lost: LostStep { session, epoch, step, stage: StageIndex::FIRST },
            forward: Forward { version, from: None, steps: vec![step_rows], hidden: None },
        }
    }

    fn answer(&mut self, head: &HeadStep, now: Instant) -> Answer {
        let Some(oldest) = self.in_flight.front() else { return Answer::Late };
        if head.step < oldest.step {
            return Answer::Late;
        }
        if head.step > oldest.step {
            return Answer::Gap { expected: oldest.step };
        }
        if !head.rows.iter().map(|row| row.pos).eq(oldest.wanted.iter().copied()) {
            return Answer::WrongRows;
        }
        let answer = Answer::Done {
            phase: oldest.phase,
            rows: head.rows.clone(),
            round_trip: now.saturating_duration_since(oldest.sent),
        };
        self.in_flight.pop_front();
        self.last_progress = now;
        self.lost_at = None;
        answer
    }
}

/// A position as it stands on the wire; prompts longer than the context are refused at intake,
/// and contexts of 2^32 tokens do not exist.
fn position(pos: usize) -> u32 {
    u32::try_from(pos).unwrap_or(u32::MAX)
}
