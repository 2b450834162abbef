//! One session: what it is to generate, how far it is, and which steps are under way.

mod fill;
mod running;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stagebus_draft::chain::Alternative;
use stagebus_draft::constraint::Guide;
use stagebus_draft::drafter::Doubt;
use stagebus_schemas::error::ErrorReply;
use stagebus_schemas::ids::{Epoch, RequestId, SessionId, StageIndex, WorkerId};
use stagebus_schemas::messages::control::Priority;
use stagebus_schemas::messages::forward::{Phase, StageTime};
use stagebus_schemas::messages::head::HeadStep;
use stagebus_schemas::messages::public::{FinishReason, RequestState};
use stagebus_schemas::messages::sampling::Sampling;

pub(crate) use fill::plan_fill;
pub(crate) use running::{Answer, DraftWait, Running};

use crate::action::{Effect, OpenFailure};
use crate::client::Client;
use crate::drafting::{DraftCommand, DraftOrder};
use crate::speculation::Speculation;
use crate::timings::Stopwatch;
use crate::trace::RequestTrace;
use crate::transcript::Transcript;
use running::Rows;

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
    pub(crate) sampling: Arc<Sampling>,
    /// The same for the drafter, with what it is to report.
    draft_sampling: Arc<Sampling>,
    /// The compiled constraint, if there is one.
    pub(crate) guide: Option<Guide>,
    /// Who goes first where sessions compete.
    pub(crate) priority: Priority,
    /// Token ids of the prompt; empty while it is being encoded.
    pub(crate) prompt: Vec<u32>,
    /// Tokens generated.
    pub(crate) output: Vec<u32>,
    pub(crate) transcript: Transcript,
    pub(crate) watch: Stopwatch,
    pub(crate) placement: Placement,
    pub(crate) speculation: Speculation,
    /// Tokens of the prompt that every stage had cached at the first start.
    pub(crate) cached_tokens: u32,
    /// Largest share of KV positions that rewinds left behind on a stage.
    pub(crate) bloat: f64,
    /// Whether the client has been told that the session exists.
    pub(crate) accepted: bool,
    /// Recoveries since the last new token.
    pub(crate) recoveries: u32,
    /// What the drafter knows of the session; nothing if it does not have it.
    pub(crate) drafter: Option<DrafterView>,
    /// Tokens of the output that another delivery of the job has generated.
    pub(crate) n_resumed: usize,
    /// The end that is known before the session runs, of a job.
    pub(crate) known_end: Option<FinishReason>,
    /// Workers that still have the session's caches while it looks for a place, and the epoch
    /// that they know.
    pub(crate) held: Option<(Epoch, Vec<(StageIndex, WorkerId)>)>,
    /// When the client last heard of the session.
    pub(crate) last_event: Instant,
    /// Its spans, if it is traced.
    pub(crate) trace: Option<Box<RequestTrace>>,
    state: SessionState,
}

/// What the drafter knows of a session.
#[derive(Debug, Default)]
pub(crate) struct DrafterView {
    /// Generated tokens that it has been told.
    n_output: usize,
    /// Drafts that it was asked for.
    n_orders: u64,
}

/// What the search for workers knows, over all attempts.
#[derive(Debug, Default)]
pub(crate) struct Placement {
    /// When to give up waiting for a stage without a worker; set at the first attempt.
    pub(crate) deadline: Option<Instant>,
    /// Not before: the workers that are there have refused for a while.
    pub(crate) retry_at: Option<Instant>,
    /// When to give up waiting for room; set at the first refusal of a session that has begun.
    pub(crate) room_deadline: Option<Instant>,
    /// Epoch of the next attempt.
    pub(crate) epoch: Epoch,
    /// Whether the client was told that the session waits.
    pub(crate) told: bool,
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
    Running(Box<Running>),
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
    /// When the workers were asked, or last whether they live.
    pub(crate) last_check: Instant,
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
                | (Self::Running(_), Self::Routing)
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
    pub(crate) speculation: Speculation,
}

impl Session {
    /// Makes a session whose prompt is not known yet.
    pub(crate) fn new(order: Order, transcript: Transcript, watch: Stopwatch) -> Self {
        let top_logprobs = order.speculation.may_guess().then_some(2);
        let draft_sampling = Sampling { top_logprobs, ..order.sampling.clone() };
        Self {
            draft_sampling: Arc::new(draft_sampling),
            id: SessionId::random(),
            request: order.request,
            client: order.client,
            stream: order.stream,
            max_tokens: order.max_tokens,
            sampling: Arc::new(order.sampling),
            guide: None,
            priority: order.priority,
            prompt: Vec::new(),
            output: Vec::new(),
            transcript,
            last_event: watch.arrival(),
            watch,
            placement: Placement::default(),
            speculation: order.speculation,
            cached_tokens: 0,
            bloat: 0.0,
            accepted: false,
            recoveries: 0,
            drafter: None,
            n_resumed: 0,
            known_end: None,
            held: None,
            trace: None,
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

    /// Whether its caches are filled and it generates tokens.
    pub(crate) fn is_decoding(&self) -> bool {
        self.running().is_some_and(Running::is_decoding)
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

    /// The next chunk that fills the caches, if there is one and fewer than `window` steps are
    /// under way. The last row of a prompt chooses the first token, unless that is known.
    pub(crate) fn send_chunk(&mut self, window: usize, now: Instant) -> Option<Effect> {
        let SessionState::Running(running) = &mut self.state else { return None };
        let (chunk, start_pos) = running.take_chunk(window)?;
        let (n_rows, prompt_len) = (chunk.n_rows, self.prompt.len());
        let tokens = match chunk.phase {
            Phase::Prefill => self.prompt.get(start_pos..start_pos + n_rows),
            Phase::Decode => {
                self.output.get(start_pos - prompt_len..start_pos + n_rows - prompt_len)
            }
        };
        let chooses = running.is_filled() && self.output.is_empty();
        let rows = Rows {
            phase: chunk.phase,
            start_pos: position(start_pos),
            tokens: tokens?.to_vec(),
            wanted: chooses.then(|| position(n_rows - 1)).into_iter().collect(),
            held_from: chunk.held_from,
            is_beside: false,
        };
        self.watch.step_sent(now);
        Some(running.send(self.id, rows, now))
    }

    /// The next window: at most `n` rows of the last generated token and what was drafted after it,
    /// and the alternatives beside them. Returns its steps, and how many tokens are drafted, too.
    pub(crate) fn send_window(&mut self, n: usize, now: Instant) -> (Vec<Effect>, usize) {
        let SessionState::Running(running) = &mut self.state else { return (Vec::new(), 0) };
        let last_pos = self.prompt.len() + self.output.len() - 1;
        let pieces = running.chain.send(&self.output, n);
        let n_drafted = pieces.iter().map(|piece| piece.n_drafted).sum();
        let n_beside = pieces.len().saturating_sub(1);
        let mut steps = Vec::with_capacity(pieces.len());
        for (index, piece) in pieces.into_iter().enumerate() {
            let rows = Rows {
                phase: Phase::Decode,
                start_pos: position(last_pos.saturating_add_signed(piece.first)),
                wanted: (position(piece.n_again)..position(piece.tokens.len())).collect(),
                tokens: piece.tokens,
                held_from: None,
                is_beside: index < n_beside,
            };
            steps.push(running.send(self.id, rows, now));
        }
        (steps, n_drafted)
    }

    /// Tokens that may still be drafted: verifying them yields one token more.
    pub(crate) fn draft_room(&self) -> usize {
        let n_drafted = self.running().map_or(0, |running| running.chain.len());
        (self.max_tokens as usize).saturating_sub(self.output.len() + 1 + n_drafted)
    }

    /// Takes a draft, as far as it agrees with what came to stand meanwhile, and looks for places of
    /// alternatives among its tokens.
    pub(crate) fn take_draft(&mut self, wait: DraftWait, drafted: &[u32], doubts: &[Doubt]) {
        let SessionState::Running(running) = &mut self.state else { return };
        let end = self.prompt.len() + self.output.len();
        if let Some(token) = wait.alternative {
            let tokens = std::iter::once(&token).chain(drafted).copied().collect();
            if let Some(at) = (wait.from - 1).checked_sub(end) {
                running.chain.add(Alternative { at, tokens });
            }
            return;
        }
        let known = wait.from.saturating_sub(self.prompt.len());
        let known = self.output.get(known..).unwrap_or_default();
        let Some(rest) = drafted.strip_prefix(known) else { return };
        let n_before = running.chain.len();
        running.chain.extend(rest, wait.n.saturating_sub(known.len()));
        if doubts.len() == drafted.len() {
            let first = running.chain.first_open().saturating_sub(n_before);
            let places = self.speculation.places(&doubts[known.len()..], n_before, first);
            running.plan_alternatives(places, end + n_before);
        }
    }

    /// Orders the draft of the next alternative, if one is planned, after the tokens before it.
    pub(crate) fn order_alternative(&mut self, now: Instant, patience: Duration) -> Option<Effect> {
        let end = self.prompt.len() + self.output.len();
        let SessionState::Running(running) = &mut self.state else { return None };
        while let Some((pos, token, n)) = running.next_alternative() {
            let Some(at) = pos.checked_sub(end) else { continue };
            if n > 1 {
                let before = running.chain.tokens().take(at);
                let assumed: Vec<u32> = before.chain(std::iter::once(token)).collect();
                return self.order(assumed, n - 1, Some(token), (now, patience));
            }
            running.chain.add(Alternative { at, tokens: vec![token] });
        }
        None
    }

    /// Orders a draft of `n` tokens and waits for it, at most for `patience`.
    pub(crate) fn order_draft(
        &mut self,
        n: usize,
        now: Instant,
        patience: Duration,
    ) -> Option<Effect> {
        let assumed: Vec<u32> = self.running()?.chain.tokens().collect();
        self.order(assumed, n, None, (now, patience))
    }

    fn order(
        &mut self,
        assumed: Vec<u32>,
        n: usize,
        alternative: Option<u32>,
        (now, patience): (Instant, Duration),
    ) -> Option<Effect> {
        let SessionState::Running(running) = &mut self.state else { return None };
        let view = self.drafter.as_mut()?;
        view.n_orders += 1;
        running.wait_for_draft(DraftWait {
            ticket: view.n_orders,
            from: self.prompt.len() + self.output.len() + assumed.len(),
            n,
            alternative,
            since: now,
            deadline: now + patience,
        });
        let accepted = self.output.get(view.n_output..).unwrap_or_default().to_vec();
        view.n_output = self.output.len();
        Some(Effect::Draft(DraftCommand::Draft(DraftOrder {
            session: self.id,
            ticket: view.n_orders,
            accepted,
            assumed,
            n,
            params: Arc::clone(&self.draft_sampling),
        })))
    }

    /// What the client is told of a session that runs or looks for a place.
    pub(crate) fn request_state(&self) -> RequestState {
        match &self.state {
            SessionState::Running(_) if !self.output.is_empty() => RequestState::Generating,
            SessionState::Routing if self.placement.told => RequestState::Waiting,
            SessionState::Routing | SessionState::Opening(_) => RequestState::Recovering,
            SessionState::Encoding | SessionState::Queued | SessionState::Running(_) => {
                RequestState::Prefilling
            }
        }
    }

    /// All tokens so far: the prompt and what was generated.
    pub(crate) fn all_tokens(&self) -> Vec<u32> {
        [&self.prompt[..], &self.output[..]].concat()
    }

    /// Notes how much of the caches rewinds have left behind.
    pub(crate) fn note_bloat(&mut self, trace: &[StageTime]) {
        let masked = trace.iter().map(|time| time.masked).max().unwrap_or(0);
        let len = (self.prompt.len() + self.output.len()).max(1);
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        self.bloat = self.bloat.max(f64::from(masked) / f64::from(len));
    }

    /// Forgets generated tokens from `len` on, which follow a stop string, and returns their number.
    pub(crate) fn truncate_output(&mut self, len: usize) -> usize {
        let n_cut = self.output.len().saturating_sub(len);
        self.output.truncate(len);
        n_cut
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

/// A position as it stands on the wire; prompts longer than the context are refused at intake,
/// and contexts of 2^32 tokens do not exist.
fn position(pos: usize) -> u32 {
    u32::try_from(pos).unwrap_or(u32::MAX)
}
