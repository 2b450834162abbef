//! Drafts with a small model: a one-stage shard set with the target's tokenizer.
//!
//! The model's cache follows the text of each session. It may run ahead by tokens that are assumed
//! or drafted; those that come to stand, or are assumed again, stay, the others are taken back by
//! the next step's `start_pos`. Rows take
//! the path that they take in the target (prompt rows as a prefill, all others one by one), and
//! tokens are chosen with the request's own parameters and noise, so a draft model that is the
//! target drafts exactly what the target will choose.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use stagebus_engine::{Backend, OpenError, RowPath, SessionKey, StageOutput, StepError, StepRows};

use super::head::{DraftHead, HeadRow};
use super::{Doubt, DraftError, DraftRequest, Drafter};
use crate::constraint::Guide;
use crate::sampling::{Choice, History, Sampler, SamplingParams};

/// Most rows of one step while a text is taken in.
const CHUNK_ROWS: usize = 256;

/// Most rows that one call takes in over all sessions whose text is far behind, so that a long
/// prompt delays the drafts of others by a bounded time.
const INTAKE_ROWS: usize = 512;

/// A session that is behind by at most this many rows always gets its draft.
const NEAR_ROWS: usize = 32;

/// Where a session is with respect to the draft model's backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Not opened there yet.
    Outside,
    /// Open.
    Open,
    /// The backend could not take it; tried again once another session has ended.
    Parked,
}

#[derive(Debug)]
struct Session {
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Follows `tokens` once a request needs it, and `ahead` during a call.
    history: Option<History>,
    /// The request's constraint, until the history has it.
    guide: Option<Guide>,
    place: Place,
    /// Tokens that were assumed or drafted after `tokens`.
    ahead: VecDeque<u32>,
    /// Rows in the model's cache: of the leading ones of `tokens` and then `ahead`.
    cached: usize,
    /// How sure the model was of the tokens of the last draft, if that was asked.
    doubts: Vec<Doubt>,
}

impl Session {
    fn new(prompt: &[u32]) -> Self {
        Self {
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            history: None,
            guide: None,
            place: Place::Outside,
            ahead: VecDeque::new(),
            cached: 0,
            doubts: Vec::new(),
        }
    }

    /// Length of the text with what is assumed and drafted.
    fn len(&self) -> usize {
        self.tokens.len() + self.ahead.len()
    }

    /// Appends a token that stands.
    fn push(&mut self, token: u32) {
        if self.ahead.front() == Some(&token) {
            self.ahead.pop_front();
        } else {
            self.assume(&[]);
        }
        self.tokens.push(token);
        if let Some(history) = &mut self.history {
            history.push(token);
        }
    }

    fn need_history(&mut self) {
        if self.history.is_none() {
            let mut history = History::new(self.prompt_len).with_guide(self.guide.take());
            self.tokens.iter().for_each(|token| history.push(*token));
            self.history = Some(history);
        }
    }

    /// Lets the text go on with `assumed`, and keeps the cache as far as it agrees.
    fn assume(&mut self, assumed: &[u32]) {
        let same = self.ahead.iter().zip(assumed).take_while(|(a, b)| a == b).count();
        self.ahead.truncate(same);
        self.cached = self.cached.min(self.len());
        self.ahead.extend(&assumed[same..]);
    }

    /// Some tokens of the text.
    fn text(&self, range: Range<usize>) -> Vec<u32> {
        let n_standing = self.tokens.len();
        let standing = &self.tokens[range.start.min(n_standing)..range.end.min(n_standing)];
        let ahead = self
            .ahead
            .range(range.start.saturating_sub(n_standing)..range.end.saturating_sub(n_standing));
        standing.iter().chain(ahead).copied().collect()
    }
}

/// A request on its way.
#[derive(Debug)]
struct Run<'a> {
    session: SessionKey,
    /// Place of the answer.
    index: usize,
    /// Most tokens to draft; lowered when the draft ends early.
    n: usize,
    params: &'a SamplingParams,
    /// Length of the text before the first drafted token.
    start: usize,
    /// Nothing more is to be done.
    is_over: bool,
}

/// One step of a round.
#[derive(Debug)]
struct Planned {
    run: usize,
    start_pos: usize,
    path: RowPath,
    tokens: Vec<u32>,
    /// The last row, if a token is to be chosen after it.
    wanted: Option<u32>,
}

/// Proposes the tokens that a small model chooses.
///
/// All sessions of a call run as one micro-batch per drafted token. A session that the model has
/// no room for, or whose text passes the model's context, is not drafted for. A long text is taken
/// in over several calls, which give no tokens until it is done; a request for no tokens takes in
/// text ahead of time.
pub struct ModelDrafter {
    backend: Box<dyn Backend>,
    context_length: usize,
    head: DraftHead,
    sessions: HashMap<SessionKey, Session>,
    sampler: Sampler,
    whole_row: Vec<f32>,
}

impl std::fmt::Debug for ModelDrafter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelDrafter")
            .field("context_length", &self.context_length)
            .field("n_head_rows", &self.head.n_rows())
            .field("n_sessions", &self.sessions.len())
            .finish_non_exhaustive()
    }
}

impl ModelDrafter {
    /// Drafts with the whole model that `backend` runs.
    ///
    /// **Units**: `context_length` in tokens, the longest session that the backend takes.
    #[must_use]
    pub fn new(backend: Box<dyn Backend>, context_length: usize, head: DraftHead) -> Self {
        Self {
            backend,
            context_length,
            head,
            sessions: HashMap::new(),
            sampler: Sampler::default(),
            whole_row: Vec::new(),
        }
    }

    /// Opens a session in the backend and makes a request ready, unless nothing can be drafted.
    fn begin<'a>(
        &mut self,
        index: usize,
        request: &DraftRequest<'a>,
    ) -> Result<Option<Run<'a>>, DraftError> {
        let Some(session) = self.sessions.get_mut(&request.session) else { return Ok(None) };
        session.assume(request.assumed);
        let len = session.len();
        // The last drafted token is chosen but not run.
        let room = (self.context_length + 1).saturating_sub(len);
        let n = request.n.min(room);
        if len == 0 || room == 0 || session.place == Place::Parked {
            return Ok(None);
        }
        if session.place == Place::Outside {
            let prompt = &session.tokens[..session.prompt_len];
            match self.backend.open(request.session, prompt, len + n) {
                Ok(cached) => session.cached = cached,
                Err(OpenError::Full { .. }) => return Ok(None),
                Err(source) => {
                    // One session that cannot be opened must not cost the others every draft.
                    session.place = Place::Parked;
                    return Err(DraftError::Open { session: request.session, source });
                }
            }
            session.place = Place::Open;
        }
        if request.params.needs_history() {
            session.need_history();
        }
        if let Some(history) = &mut session.history {
            request.assumed.iter().for_each(|token| history.push(*token));
        }
        session.doubts.clear();
        let (session, params) = (request.session, request.params);
        Ok(Some(Run { session, index, n, params, start: len, is_over: false }))
    }

    /// The next step of a request; `None` if it is over. `intake` is what may still be taken in.
    fn plan(&mut self, at: usize, run: &Run<'_>, intake: &mut usize) -> Option<Planned> {
        let session = self.sessions.get_mut(&run.session).filter(|_| !run.is_over)?;
        let len = session.len();
        // A request for no tokens takes the text in, any other one ends with its last token.
        let is_done = if run.n == 0 { session.cached == len } else { len == run.start + run.n };
        if is_done {
            return None;
        }
        // The last row runs even if it is cached: its logits are wanted.
        let start_pos = session.cached.min(len - 1);
        let (path, until) = if start_pos < session.prompt_len {
            (RowPath::Prefill, session.prompt_len)
        } else {
            (RowPath::Decode, len)
        };
        let mut n_rows = (until - start_pos).min(CHUNK_ROWS);
        if len - start_pos > NEAR_ROWS {
            n_rows = n_rows.min(*intake);
            *intake -= n_rows;
        }
        if n_rows == 0 {
            return None;
        }
        let end = start_pos + n_rows;
        let wanted = (end == len && run.n > 0).then(|| n_rows as u32 - 1);
        session.cached = start_pos;
        Some(Planned { run: at, start_pos, path, tokens: session.text(start_pos..end), wanted })
    }

    /// Runs one micro-batch and chooses the tokens after its wanted rows.
    fn round(&mut self, runs: &mut [Run<'_>], planned: &[Planned]) -> Result<(), DraftError> {
        let Self { backend, head, sessions, sampler, whole_row, .. } = self;
        let steps: Vec<StepRows<'_>> = planned
            .iter()
            .map(|plan| StepRows {
                session: runs[plan.run].session,
                start_pos: plan.start_pos,
                path: plan.path,
                tokens: &plan.tokens,
                hidden: None,
                wanted: plan.wanted.as_slice(),
            })
            .collect();
        let mut failures = Vec::new();
        backend.run(&steps, &mut |done| {
            let plan = &planned[done.index];
            let run = &mut runs[plan.run];
            let Some(session) = sessions.get_mut(&run.session) else { return };
            let logits = match done.output {
                Ok(StageOutput::Logits(logits)) => logits,
                Ok(StageOutput::Hidden(_)) => {
                    failures.push((plan.run, DraftError::NotLogits));
                    return;
                }
                Err(source) => {
                    let session = run.session;
                    failures.push((plan.run, DraftError::Step { session, source }));
                    return;
                }
            };
            session.cached = plan.start_pos + plan.tokens.len();
            if plan.wanted.is_none() {
                return;
            }
            let (expected, found) = (head.n_rows(), logits.len());
            if found != expected {
                failures.push((plan.run, DraftError::RowWidth { expected, found }));
                return;
            }
            choose(run, session, |position, params, history| {
                let row = HeadRow { logits, position, params, history };
                head.choose(sampler, row, whole_row).ok()
            });
        });
        let mut first = Ok(());
        for (at, failure) in failures {
            runs[at].is_over = true;
            if let Some(error) = self.recover(runs[at].session, failure)
                && first.is_ok()
            {
                first = Err(error);
            }
        }
        first
    }

    /// Puts a session in order whose step failed. Lack of room is no error.
    fn recover(&mut self, key: SessionKey, failure: DraftError) -> Option<DraftError> {
        let session = self.sessions.get_mut(&key)?;
        let (place, error) = match failure {
            DraftError::Step { source: StepError::OutOfBlocks { .. }, .. } => (Place::Parked, None),
            // The text is replayed at the next draft.
            DraftError::Step { source: StepError::Bloated { .. }, .. } => (Place::Outside, None),
            error => (Place::Outside, Some(error)),
        };
        self.backend.close(key);
        session.place = place;
        session.cached = 0;
        error
    }
}

/// Appends the token after a row to the draft, or ends the draft.
fn choose(
    run: &mut Run<'_>,
    session: &mut Session,
    choose: impl FnOnce(u32, &SamplingParams, &mut History) -> Option<Choice>,
) {
    let position = session.len() as u32;
    let mut empty = History::default();
    let history = session.history.as_mut().unwrap_or(&mut empty);
    // A row that rules out every token ends the draft; the target will report its own.
    let Some(choice) = choose(position, run.params, history) else {
        run.is_over = true;
        return;
    };
    session.doubts.extend(doubt(&choice));
    let token = choice.token;
    session.ahead.push_back(token);
    if let Some(history) = &mut session.history {
        history.push(token);
    }
}

/// What was nearly chosen, if the row's most likely tokens were asked for.
fn doubt(choice: &Choice) -> Option<Doubt> {
    let share = |logprob: f32| f64::from(logprob).exp();
    let second = choice.top.iter().find(|top| top.token != choice.token)?;
    Some(Doubt {
        first: share(choice.logprob?),
        second: second.token,
        second_share: share(second.logprob),
    })
}

impl Drafter for ModelDrafter {
    fn open(&mut self, session: SessionKey, prompt: &[u32]) {
        self.close(session);
        self.sessions.insert(session, Session::new(prompt));
    }

    fn guide(&mut self, session: SessionKey, guide: Guide) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.guide = Some(guide);
        }
    }

    fn accept(&mut self, session: SessionKey, tokens: &[u32]) {
        if let Some(session) = self.sessions.get_mut(&session) {
            tokens.iter().for_each(|token| session.push(*token));
        }
    }

    fn draft(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Vec<u32>>, DraftError> {
        let mut outcome = Ok(());
        let mut runs: Vec<Run<'_>> = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            match self.begin(index, request) {
                Ok(run) => runs.extend(run),
                Err(error) => outcome = Err(error),
            }
        }
        let mut intake = INTAKE_ROWS;
        while outcome.is_ok() {
            let planned: Vec<Planned> = runs
                .iter()
                .enumerate()
                .filter_map(|(at, run)| self.plan(at, run, &mut intake))
                .collect();
            if planned.is_empty() {
                break;
            }
            outcome = self.round(&mut runs, &planned);
        }
        let mut drafts = vec![Vec::new(); requests.len()];
        for run in runs {
            let Some(session) = self.sessions.get_mut(&run.session) else { continue };
            if let Some(history) = &mut session.history {
                history.truncate(session.tokens.len());
            }
            drafts[run.index] = session.text(run.start..session.len());
        }
        outcome.map(|()| drafts)
    }

    fn doubts(&mut self, session: SessionKey) -> Vec<Doubt> {
        self.sessions
            .get_mut(&session)
            .map_or_else(Vec::new, |held| std::mem::take(&mut held.doubts))
    }

    fn close(&mut self, session: SessionKey) {
        let Some(closed) = self.sessions.remove(&session) else { return };
        if closed.place == Place::Open {
            self.backend.close(session);
        }
        for session in self.sessions.values_mut().filter(|s| s.place == Place::Parked) {
            session.place = Place::Outside;
        }
    }
}
