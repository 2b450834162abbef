//! The contract between a stage's inference thread and whatever runs the shard.
//!
//! One verb moves a session: *truncate to `start_pos`, then append these rows*. It is idempotent,
//! so rewind, replay, duplicates and stale speculation need no other.

use std::fmt;
use std::time::Duration;

/// Key of a session within one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionKey(pub u64);

impl fmt::Display for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// How the rows of a step run; a row always takes the same path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowPath {
    /// Prompt rows: one multi-token sequence.
    Prefill,
    /// Generated and drafted rows: one-token sequences where the backend tells them apart.
    Decode,
}

/// Rows of one session in a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct StepRows<'a> {
    /// The session; it must be open.
    pub session: SessionKey,
    /// Position of the first row, in tokens, at most the session's current length.
    pub start_pos: usize,
    /// How the rows run.
    pub path: RowPath,
    /// Token id of each row; at least one. The first stage embeds them, every stage knows its
    /// cached prefix by them.
    pub tokens: &'a [u32],
    /// Hidden states `[n_rows, hidden_dim]`, row-major, for the later stages; none for the first.
    pub hidden: Option<&'a [f32]>,
    /// Rows whose logits are wanted, ascending; only the last stage looks at it.
    pub wanted: &'a [u32],
}

/// What leaves a stage, borrowed from the backend for the length of the call.
#[derive(Debug, Clone, Copy)]
pub enum StageOutput<'a> {
    /// Hidden states `[n_rows, hidden_dim]`, row-major.
    Hidden(&'a [f32]),
    /// Logits of the wanted rows `[n_wanted, n_head_rows]`, row-major: a number for each token,
    /// or for those that a cut head has.
    Logits(&'a [f32]),
}

/// Outcome of one step.
#[derive(Debug)]
pub struct StepDone<'a> {
    /// Index of the step in the micro-batch.
    pub index: usize,
    /// Output, or why this step alone failed; the session then keeps its state from before, except
    /// after [`StepError::Runtime`].
    pub output: Result<StageOutput<'a>, StepError>,
    /// Inference time of the call that ran the step.
    pub infer_time: Duration,
    /// Rows of that call, over all its sessions.
    pub n_rows: usize,
    /// Positions of the session that rewinds have masked out but not freed.
    pub masked: usize,
}

impl StepDone<'_> {
    /// A step that failed before anything ran.
    #[must_use]
    pub const fn failed(index: usize, error: StepError) -> Self {
        let infer_time = Duration::ZERO;
        Self { index, output: Err(error), infer_time, n_rows: 0, masked: 0 }
    }
}

/// Memory and length of the sessions of a backend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvUse {
    /// Open sessions.
    pub n_sessions: usize,
    /// Positions held, in tokens, masked ones included.
    pub tokens: u64,
    /// Of these, positions that a rewind has masked out.
    pub masked_tokens: u64,
    /// Memory of the KV caches, in bytes.
    pub bytes: u64,
    /// Memory that the KV caches can take, in bytes; 0 where it is not limited beforehand.
    pub max_bytes: u64,
    /// Sessions whose masked positions slow them down enough that a replay from position 0 pays.
    pub n_to_compact: usize,
}

/// Why one step failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The session is not open here.
    #[error("session {session} is not open on this stage")]
    UnknownSession {
        /// The session.
        session: SessionKey,
    },
    /// The step starts behind the end of the session.
    #[error("session {session} holds {kv_len} positions, the step starts at {start_pos}")]
    Gap {
        /// The session.
        session: SessionKey,
        /// Positions held.
        kv_len: usize,
        /// Start asked for.
        start_pos: usize,
    },
    /// The step would pass the context length of the model.
    #[error("session {session} would reach {len} positions, the context holds {limit}")]
    ContextFull {
        /// The session.
        session: SessionKey,
        /// Length that the step would reach.
        len: usize,
        /// Context length.
        limit: usize,
    },
    /// The rows do not have the form that this stage takes.
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        /// Which property of the rows.
        what: &'static str,
        /// What this stage takes.
        expected: usize,
        /// What came.
        found: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab_size}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// Rewinds have left too many masked positions behind: replay the session from position 0.
    #[error(
        "session {session} would hold {masked} masked positions, at most {limit} are allowed: \
         replay it from position 0"
    )]
    Bloated {
        /// The session.
        session: SessionKey,
        /// Masked positions after the step.
        masked: usize,
        /// Limit.
        limit: usize,
    },
    /// Not enough free KV blocks: end or preempt another session, then send the step again.
    #[error("session {session} needs {needed} more KV blocks, {available} are free")]
    OutOfBlocks {
        /// The session.
        session: SessionKey,
        /// Blocks that the step needs.
        needed: usize,
        /// Blocks that are free.
        available: usize,
    },
    /// The runtime failed. The session is closed: its cache may be half written.
    #[error("inference failed, the session is closed")]
    Runtime(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Why a session could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No room for another session.
    #[error("{n_sessions} sessions are open, at most {max_sessions} fit")]
    Full {
        /// Sessions open.
        n_sessions: usize,
        /// Limit.
        max_sessions: usize,
    },
    /// Not enough KV blocks for the prompt, beside what other sessions hold or were promised.
    #[error("the prompt needs {needed} KV blocks, {available} of {total} are free")]
    OutOfBlocks {
        /// Blocks that the prompt needs.
        needed: usize,
        /// Blocks that nobody holds or was promised.
        available: usize,
        /// Blocks of the pool.
        total: usize,
    },
    /// The runtime failed.
    #[error("session could not be created")]
    Runtime(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// How many of the first tokens of two sequences are the same.
pub(crate) fn common_len(held: &[u32], prompt: &[u32]) -> usize {
    held.iter().zip(prompt).take_while(|(held, token)| held == token).count()
}

/// Runs one stage. It lives on one thread: methods take `&mut self` and block.
pub trait Backend: Send {
    /// Opens a session and returns how many of the first tokens of `prompt` are already cached,
    /// fewer than all: the last row must run to yield a token. A session that is open already
    /// keeps its cache and returns how many of its first rows are those of `prompt`, or 0 if masked
    /// positions make a replay from there pay. Room for the prompt, and for `room` tokens if that is more, is promised to
    /// it where room is limited.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is opened then.
    fn open(
        &mut self,
        session: SessionKey,
        prompt: &[u32],
        room: usize,
    ) -> Result<usize, OpenError>;

    /// Ends a session and frees its memory; unknown sessions are ignored.
    fn close(&mut self, session: SessionKey);

    /// Runs the steps of one micro-batch and reports each to `done` as soon as its result exists,
    /// exactly once per step, in any order. At most one step per session.
    fn run(&mut self, steps: &[StepRows<'_>], done: &mut dyn FnMut(StepDone<'_>));

    /// Reports memory and lengths.
    fn kv_use(&self) -> KvUse;

    /// Most sessions that gain from running in one micro-batch; 1 where they run one by one, so
    /// that waiting for each other would only delay them.
    fn useful_batch(&self) -> usize {
        1
    }
}
