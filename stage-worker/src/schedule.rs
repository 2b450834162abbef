//! Which rows run next: the scheduling policy of a stage, and nothing else. It knows no clock: the
//! time is an argument, counted from any start.
//!
//! - A session runs one step at a time, in the order in which its steps came. Sessions take turns,
//!   however many steps of theirs wait.
//! - **Decode** steps run whole; somebody waits for each. **Prefill** steps (prompt chunks, replays)
//!   are only as urgent as the whole prompt, and may run in parts.
//! - **Fair cap**: with S stages and A decoding sessions a micro-batch takes at most ceil(A/S)
//!   decode steps. The sessions then move as S groups and the stages work at the same time; as one
//!   convoy they would leave all stages but one idle. A session counts while its steps keep coming:
//!   one that is open but waits for its client does not.
//! - **Groups stay together**: a session comes back about as long after it left as the others did.
//!   A micro-batch that is not full waits for sessions that are due now, at most half of its own
//!   time: rows run together share the reading of the weights. With A <= S nothing waits.
//! - **Row budget**: prefill fills the room that decodes leave in a micro-batch. While sessions
//!   decode, it may lengthen a micro-batch by `prefill_percent` of its time, by what was measured;
//!   without them it takes the whole budget. Each side keeps a share, so neither starves.
//! - **First tokens**: the last step of a short prompt runs whole and before other prefill, up to
//!   [`FIRST_TOKEN_ROWS`] rows in a micro-batch: it costs the others one longer step, once, and a
//!   burst of short prompts is decoding soon instead of trickling in.
//! - **Priorities**: batch sessions use the places that interactive ones leave. Where they were
//!   passed over [`BATCH_PATIENCE`] times, one goes first.
//! - Where the engine runs sessions one by one, nothing is mixed or split: a micro-batch is decodes,
//!   or after `decodes_per_prefill` of those one prefill step.
//!
//! The queue is not bounded here: whoever pushes bounds it, because only the sender of a step can
//! be told that there is no room.

mod pace;

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use stagebus_engine::backend::SessionKey;
use stagebus_schemas::messages::control::Priority;

use pace::{BatchTimes, Pace};

/// Most rows of a decode step: more than any verify has. Longer ones are replays.
pub(crate) const MAX_DECODE_ROWS: usize = 32;

/// Least rows that prefill gets in a micro-batch: fewer would not pay for the work of a part.
pub(crate) const MIN_PREFILL_ROWS: usize = 4;

/// Least row budget: a whole decode step and some prefill.
pub(crate) const LEAST_BATCH_ROWS: usize = MAX_DECODE_ROWS + MIN_PREFILL_ROWS;

/// Most rows of a last prompt step that runs whole, and of all that do so in one micro-batch.
pub(crate) const FIRST_TOKEN_ROWS: usize = 64;

/// Micro-batches that may pass over the batch sessions that wait.
const BATCH_PATIENCE: u32 = 8;

/// How the policy decides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// Stages of the pipeline.
    pub n_stages: usize,
    /// Most decode steps in a micro-batch.
    pub max_sessions: usize,
    /// Most rows in a micro-batch, if it is split and mixed at all.
    pub batch_rows: usize,
    /// Whether prefill may be split and share a micro-batch with decodes.
    pub mixes: bool,
    /// What prefill may add to the time of a micro-batch of decodes, in percent.
    pub prefill_percent: u32,
    /// Decode micro-batches that may pass a waiting prefill step where nothing is mixed.
    pub decodes_per_prefill: u32,
}

/// What a step is to the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Somebody waits for its rows.
    Decode,
    /// The rest of a short prompt: somebody waits for its first token.
    FirstToken,
    /// Rows of a prompt or of a replay; no part of it may have fewer rows than this.
    Prefill { least: usize },
}

/// A step that waits, or what is left of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Waiting<T> {
    pub class: Class,
    /// Rows left to run.
    pub n_rows: usize,
    pub step: T,
}

/// A step of a micro-batch, of which the next `n_rows` rows run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Part<T> {
    pub session: SessionKey,
    pub n_rows: usize,
    pub waiting: Waiting<T>,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Run the parts.
    Run,
    /// Ask again when something comes, at the latest at this time.
    WaitUntil(Duration),
    /// Nothing waits.
    Nothing,
}

#[derive(Debug)]
struct Session<T> {
    priority: Priority,
    steps: VecDeque<Waiting<T>>,
    pace: Pace,
    /// It stands in a list of turns: its oldest step waits.
    in_turn: bool,
}

/// Sessions whose oldest step is of one class, in order of their turn.
#[derive(Debug, Default)]
struct Turns {
    interactive: VecDeque<SessionKey>,
    batch: VecDeque<SessionKey>,
    /// Micro-batches since the batch sessions had a turn.
    batch_passed: u32,
}

/// Steps that wait, and the order in which they leave. `T` is whatever a step carries.
#[derive(Debug)]
pub(crate) struct Schedule<T> {
    policy: Policy,
    sessions: HashMap<SessionKey, Session<T>>,
    decode: Turns,
    first_token: Turns,
    prefill: Turns,
    /// Since when decode steps wait without a break.
    decodes_since: Duration,
    /// End of the last micro-batch.
    idle_since: Duration,
    decodes_since_prefill: u32,
    times: BatchTimes,
    /// Sessions of the micro-batch that runs; they have no second turn in it.
    running: Vec<SessionKey>,
    running_rows: (usize, usize),
}

impl Turns {
    fn of(&mut self, priority: Priority) -> &mut VecDeque<SessionKey> {
        match priority {
            Priority::Interactive => &mut self.interactive,
            Priority::Batch => &mut self.batch,
        }
    }

    fn len(&self) -> usize {
        self.interactive.len() + self.batch.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn forget(&mut self, session: SessionKey) {
        self.interactive.retain(|other| *other != session);
        self.batch.retain(|other| *other != session);
    }

    /// Whose turn it is, given how many batch sessions this micro-batch took already.
    fn first(&self, n_batch: usize) -> Option<(SessionKey, Priority)> {
        let batch = self.batch.front().map(|session| (*session, Priority::Batch));
        if n_batch == 0 && self.batch_passed >= BATCH_PATIENCE && batch.is_some() {
            return batch;
        }
        let interactive = self.interactive.front().map(|session| (*session, Priority::Interactive));
        interactive.or(batch)
    }

    fn took(&mut self, n_batch: usize) {
        let passed = n_batch == 0 && !self.batch.is_empty();
        self.batch_passed = if passed { self.batch_passed.saturating_add(1) } else { 0 };
    }
}

impl<T> Schedule<T> {
    pub(crate) fn new(policy: Policy) -> Self {
        Self {
            policy,
            sessions: HashMap::new(),
            decode: Turns::default(),
            first_token: Turns::default(),
            prefill: Turns::default(),
            decodes_since: Duration::ZERO,
            idle_since: Duration::ZERO,
            decodes_since_prefill: 0,
            times: BatchTimes::default(),
            running: Vec::new(),
            running_rows: (0, 0),
        }
    }

    /// Makes a session known; one that is known keeps its steps.
    pub(crate) fn open(&mut self, session: SessionKey, priority: Priority) {
        let fresh =
            || Session { priority, steps: VecDeque::new(), pace: Pace::Resting, in_turn: false };
        self.sessions.entry(session).or_insert_with(fresh);
    }

    /// Forgets a session and returns its steps.
    pub(crate) fn close(&mut self, session: SessionKey) -> VecDeque<Waiting<T>> {
        for turns in [&mut self.decode, &mut self.first_token, &mut self.prefill] {
            turns.forget(session);
        }
        self.sessions.remove(&session).map(|held| held.steps).unwrap_or_default()
    }

    /// Takes back all steps of a session; it counts as decoding again when its next one comes.
    pub(crate) fn clear(&mut self, session: SessionKey) -> VecDeque<Waiting<T>> {
        for turns in [&mut self.decode, &mut self.first_token, &mut self.prefill] {
            turns.forget(session);
        }
        let Some(held) = self.sessions.get_mut(&session) else { return VecDeque::new() };
        held.pace = Pace::Resting;
        held.in_turn = false;
        std::mem::take(&mut held.steps)
    }

    /// Adds the next step of an open session.
    pub(crate) fn push(&mut self, session: SessionKey, waiting: Waiting<T>, now: Duration) {
        let Some(held) = self.sessions.get_mut(&session) else { return };
        let class = waiting.class;
        if class == Class::Decode {
            if let Some(away) = held.pace.came_back(now) {
                self.times.came_back(away);
            }
            if self.decode.is_empty() {
                self.decodes_since = now;
            }
        }
        held.steps.push_back(waiting);
        self.give_turn(session);
    }

    /// Puts back what is left of a step, before all others of its class: a chunk that was begun
    /// goes on before the next prompt has its turn.
    pub(crate) fn put_back(&mut self, session: SessionKey, waiting: Waiting<T>) {
        let Some(held) = self.sessions.get_mut(&session) else { return };
        let (class, priority) = (waiting.class, held.priority);
        held.steps.push_front(waiting);
        held.in_turn = true;
        for turns in [&mut self.decode, &mut self.first_token, &mut self.prefill] {
            turns.forget(session);
        }
        self.turns(class).of(priority).push_front(session);
    }

    /// The steps of a session that wait, oldest first.
    pub(crate) fn waiting(&mut self, session: SessionKey) -> impl Iterator<Item = &mut T> {
        let held = self.sessions.get_mut(&session);
        held.into_iter().flat_map(|held| &mut held.steps).map(|waiting| &mut waiting.step)
    }

    /// Takes out the oldest steps of a session that need no turn.
    pub(crate) fn take_needless(
        &mut self,
        session: SessionKey,
        is_needless: impl Fn(&T) -> bool,
    ) -> Vec<T> {
        let Some(held) = self.sessions.get_mut(&session) else { return Vec::new() };
        let class = held.steps.front().map(|waiting| waiting.class);
        let n = held.steps.iter().take_while(|waiting| is_needless(&waiting.step)).count();
        let taken = held.steps.drain(..n).map(|waiting| waiting.step).collect();
        // The turn is the next step's, unless that is of another class.
        if held.in_turn && held.steps.front().map(|waiting| waiting.class) != class {
            held.in_turn = false;
            for turns in [&mut self.decode, &mut self.first_token, &mut self.prefill] {
                turns.forget(session);
            }
            self.give_turn(session);
        }
        taken
    }

    /// Moves the next micro-batch to `batch`, or says how long to wait for one.
    pub(crate) fn next(&mut self, now: Duration, batch: &mut Vec<Part<T>>) -> Next {
        if self.decode.is_empty() && !self.prompts_wait() {
            return Next::Nothing;
        }
        let n_decoding = self.n_decoding(now);
        let cap = n_decoding.div_ceil(self.policy.n_stages.max(1)).clamp(1, self.max_sessions());
        self.running_rows = if !self.policy.mixes {
            self.take_one_class(cap, batch)
        } else if n_decoding == 0 {
            (0, self.take_prompts(self.policy.batch_rows, self.policy.batch_rows, batch))
        } else if self.decode.is_empty() {
            match self.prefill_alone(now) {
                Ok(n_rows) => (0, self.take_prompts(self.policy.batch_rows, n_rows, batch)),
                Err(until) => return Next::WaitUntil(until),
            }
        } else if let Some(until) = self.wait_for_more(now, cap) {
            return Next::WaitUntil(until);
        } else {
            self.take_mixed(cap, batch)
        };
        Next::Run
    }

    /// Learns from the micro-batch that has run. Whatever is put back must be so before.
    pub(crate) fn ran(&mut self, now: Duration, infer: Duration) {
        let (decode_rows, prefill_rows) = self.running_rows;
        self.times.ran(infer, decode_rows, prefill_rows);
        self.idle_since = now;
        for session in std::mem::take(&mut self.running) {
            self.give_turn(session);
            if let Some(held) = self.sessions.get_mut(&session)
                && held.pace == Pace::Here
                && held.steps.iter().all(|step| step.class != Class::Decode)
            {
                held.pace = Pace::Away { left: now };
            }
        }
    }

    /// Lets a session with steps wait for its turn, if it does not yet.
    fn give_turn(&mut self, session: SessionKey) {
        let Some(held) = self.sessions.get_mut(&session) else { return };
        let Some(class) = held.steps.front().map(|step| step.class) else { return };
        if !std::mem::replace(&mut held.in_turn, true) {
            let priority = held.priority;
            self.turns(class).of(priority).push_back(session);
        }
    }

    fn max_sessions(&self) -> usize {
        self.policy.max_sessions.max(1)
    }

    fn turns(&mut self, class: Class) -> &mut Turns {
        match class {
            Class::Decode => &mut self.decode,
            Class::FirstToken => &mut self.first_token,
            Class::Prefill { .. } => &mut self.prefill,
        }
    }

    /// Sessions that decode: here, or away for no longer than usual.
    fn n_decoding(&self, now: Duration) -> usize {
        let decodes = |session: &&Session<T>| self.times.decodes(session.pace, now);
        self.sessions.values().filter(decodes).count()
    }

    /// How long decodes that do not fill their micro-batch wait for sessions that are due; `None`
    /// if they run at once.
    fn wait_for_more(&self, now: Duration, cap: usize) -> Option<Duration> {
        if self.decode.len() >= cap {
            return None;
        }
        let batch_time = self.times.decodes_take(cap)?;
        let late = BatchTimes::late(batch_time);
        let missing = 1.0 - self.decode.len() as f64 / cap as f64;
        let patience = batch_time.mul_f64(missing.clamp(0.0, 1.0)) + 2 * late;
        let deadline = self.idle_since.max(self.decodes_since) + patience;
        let due = self.next_due(now, late).filter(|due| now < deadline && *due <= deadline)?;
        Some((due + late).min(deadline))
    }

    /// Prefill rows that may run now while all sessions that decode are away, so that they are done
    /// when the next one comes back; or until when to wait for it.
    fn prefill_alone(&self, now: Duration) -> Result<usize, Duration> {
        let gentle = self.times.prefill_rows(1, self.policy.prefill_percent).max(MIN_PREFILL_ROWS);
        let Some(batch_time) = self.times.decodes_take(1) else { return Ok(gentle) };
        let late = BatchTimes::late(batch_time);
        let Some(due) = self.next_due(now, late) else { return Ok(gentle) };
        match self.times.prefill_rows_until(due, now) {
            n_rows if n_rows >= MIN_PREFILL_ROWS => Ok(n_rows.min(gentle)),
            _ => Err(due + late),
        }
    }

    fn next_due(&self, now: Duration, late: Duration) -> Option<Duration> {
        self.times.next_due(self.sessions.values().map(|session| session.pace), now, late)
    }

    /// Takes decodes up to the cap, then prefill into the room that is left.
    fn take_mixed(&mut self, cap: usize, batch: &mut Vec<Part<T>>) -> (usize, usize) {
        let kept = if self.prompts_wait() { MIN_PREFILL_ROWS } else { 0 };
        let decode_rows =
            self.take_whole(Class::Decode, cap, self.policy.batch_rows.saturating_sub(kept), batch);
        let gentle = self.times.prefill_rows(decode_rows, self.policy.prefill_percent);
        let room = self.policy.batch_rows.saturating_sub(decode_rows);
        (decode_rows, self.take_prompts(room, gentle.max(MIN_PREFILL_ROWS), batch))
    }

    /// Whether prompt rows of any kind wait.
    fn prompts_wait(&self) -> bool {
        !self.prefill.is_empty() || !self.first_token.is_empty()
    }

    /// Takes steps that give first tokens, then at most `gentle` rows of other prefill, together at
    /// most `room` rows.
    fn take_prompts(&mut self, room: usize, gentle: usize, batch: &mut Vec<Part<T>>) -> usize {
        let first =
            self.take_whole(Class::FirstToken, usize::MAX, room.min(FIRST_TOKEN_ROWS), batch);
        let rest = room.min(gentle).saturating_sub(first);
        first + self.take_prefill(rest, batch)
    }

    /// Takes at most `cap` whole steps of one class while they fit `room`, at least one: room may be
    /// scarce for as long as others decode.
    fn take_whole(
        &mut self,
        class: Class,
        cap: usize,
        room: usize,
        batch: &mut Vec<Part<T>>,
    ) -> usize {
        let (mut n_rows, mut n_batch) = (0, 0);
        for _ in 0..cap {
            let Some((session, priority)) = self.turns(class).first(n_batch) else { break };
            let front = self.sessions.get(&session).and_then(|held| held.steps.front());
            let more = front.map_or(0, |front| front.n_rows);
            if n_rows > 0 && n_rows + more > room {
                break;
            }
            n_rows += more;
            n_batch += usize::from(priority == Priority::Batch);
            batch.extend(self.take_front(session, None));
        }
        self.turns(class).took(n_batch);
        n_rows
    }

    fn take_prefill(&mut self, room: usize, batch: &mut Vec<Part<T>>) -> usize {
        let (mut prefill_rows, mut n_batch) = (0, 0);
        while let Some((session, priority)) = self.prefill.first(n_batch) {
            let front = self.sessions.get(&session).and_then(|held| held.steps.front());
            let n_rows = front.map_or(0, |front| part_of(front, room - prefill_rows));
            if n_rows == 0 {
                break;
            }
            n_batch += usize::from(priority == Priority::Batch);
            prefill_rows += n_rows;
            batch.extend(self.take_front(session, Some(n_rows)));
        }
        self.prefill.took(n_batch);
        prefill_rows
    }

    /// Takes decodes, or one prefill step alone.
    fn take_one_class(&mut self, cap: usize, batch: &mut Vec<Part<T>>) -> (usize, usize) {
        let passed_over = self.decodes_since_prefill >= self.policy.decodes_per_prefill.max(1);
        if self.prompts_wait() && (self.decode.is_empty() || passed_over) {
            self.decodes_since_prefill = 0;
            let short = !self.first_token.is_empty();
            let turns = if short { &mut self.first_token } else { &mut self.prefill };
            let Some((session, priority)) = turns.first(0) else { return (0, 0) };
            turns.took(usize::from(priority == Priority::Batch));
            batch.extend(self.take_front(session, None));
            return (0, batch.last().map_or(0, |part| part.n_rows));
        }
        self.decodes_since_prefill =
            if self.prompts_wait() { self.decodes_since_prefill + 1 } else { 0 };
        (self.take_whole(Class::Decode, cap, usize::MAX, batch), 0)
    }

    /// Takes the oldest step of the session whose turn it is, to run `n_rows` of it or all.
    fn take_front(&mut self, session: SessionKey, n_rows: Option<usize>) -> Option<Part<T>> {
        let held = self.sessions.get_mut(&session)?;
        let waiting = held.steps.pop_front()?;
        let priority = held.priority;
        held.in_turn = false;
        let n_rows = n_rows.unwrap_or(waiting.n_rows);
        self.turns(waiting.class).of(priority).pop_front();
        self.running.push(session);
        Some(Part { session, n_rows, waiting })
    }
}

/// Rows of a step that fit `room` so that neither the part nor the rest is too short; 0 if none.
fn part_of<T>(waiting: &Waiting<T>, room: usize) -> usize {
    let Class::Prefill { least } = waiting.class else { return 0 };
    if waiting.n_rows <= room {
        return waiting.n_rows;
    }
    let part = room.min(waiting.n_rows.saturating_sub(least));
    if part < least.max(1) { 0 } else { part }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
