//! Requests on a worker's control subject and their answers.

use serde::{Deserialize, Serialize};

use crate::codec::{CodecError, Message, check_count};
use crate::error::ErrorReply;
use crate::ids::{CoordinatorId, Epoch, SessionId, StepNumber, WorkerId};
use crate::messages::fleet::WorkerLoad;
use crate::messages::forward::{MAX_STAGES, MAX_TEXT_BYTES};
use crate::messages::sampling::Sampling;
use crate::version::MessageVersion;

/// Most sessions that a coordinator may run.
pub const MAX_SESSIONS: usize = 1 << 16;

/// Most sessions that one question names.
pub const MAX_ASKED: usize = 256;

/// A request to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Control {
    /// Version of this message.
    pub version: MessageVersion,
    /// What is asked.
    pub action: ControlAction,
}

/// What is asked of a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlAction {
    /// Make a session, or raise the epoch of one that exists.
    Open(Open),
    /// End a session and free its KV cache; unknown sessions are no error.
    Close(Close),
    /// Take no new sessions; leave when the running ones have ended.
    Drain(Drain),
    /// End the sessions of a coordinator that it no longer has.
    Keep(Keep),
    /// Report load.
    Stats,
    /// Tell how far the steps of these sessions are, at most [`MAX_ASKED`]. Whoever answers lives,
    /// so the question may name none.
    Progress(Vec<SessionId>),
}

/// Who goes first where sessions compete.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Somebody waits for it.
    #[default]
    Interactive,
    /// Nobody waits: it runs in the room that interactive sessions leave, and gives way first.
    Batch,
}

/// What the last stage sends back for a wanted row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadMode {
    /// The chosen token.
    #[default]
    Token,
    /// All logits of the row; the coordinator chooses.
    Full,
}

/// Makes a session on one stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Open {
    /// The session.
    pub session: SessionId,
    /// Fencing number; steps of a lower epoch are refused from then on.
    pub epoch: Epoch,
    /// Coordinator that gets the head rows and the faults.
    pub coordinator: CoordinatorId,
    /// Worker of every stage, by stage index.
    pub route: Vec<WorkerId>,
    /// Fingerprint of the shard set that the coordinator works with.
    pub fingerprint: String,
    /// Token ids of the prompt (at a recovery, of all tokens so far), to find a cached prefix.
    pub prompt: Vec<u32>,
    /// Leading tokens of `prompt` that the client sent; the rest was generated before a recovery.
    pub prompt_len: u32,
    /// Most tokens that the session can reach (prompt and output), for admission by KV memory.
    pub max_len: u32,
    /// How the last stage chooses tokens.
    pub sampling: Sampling,
    /// What the last stage sends back.
    pub head: HeadMode,
    /// Who goes first.
    pub priority: Priority,
}

/// Ends a session on one stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Close {
    /// The session.
    pub session: SessionId,
    /// Epoch of the closer; a lower one than the session's is ignored.
    pub epoch: Epoch,
}

/// Lets a worker leave.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// How long the running sessions may take, in milliseconds; those that still run then are
    /// replayed on other workers. The worker's own setting when absent, and at most that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
}

/// The sessions that a coordinator has on a worker. It says so after a broken connection: the word
/// that a session is over may have been lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keep {
    /// The coordinator.
    pub coordinator: CoordinatorId,
    /// Its sessions; all others of it end.
    pub sessions: Vec<SessionId>,
}

/// How far a session's steps are on a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionProgress {
    /// The session.
    pub session: SessionId,
    /// Its steps; absent if it is not open there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<StepProgress>,
}

/// Which steps of an epoch have reached a worker, and which have left it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepProgress {
    /// The session's epoch.
    pub epoch: Epoch,
    /// First step that has not arrived.
    pub expected: StepNumber,
    /// First step whose result, or fault, has not been sent.
    pub unsent: StepNumber,
}

/// The answer to a [`Control`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControlReply {
    /// Version of this message.
    pub version: MessageVersion,
    /// The outcome.
    pub outcome: ControlOutcome,
}

/// The outcome of a [`Control`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlOutcome {
    /// The session exists at this epoch; its first `cached_len` positions are already cached.
    Opened {
        /// Cached prefix, in tokens.
        cached_len: u32,
    },
    /// The session is gone, or all that were not to be kept.
    Closed,
    /// The worker drains.
    Draining,
    /// Load of the worker.
    Stats(WorkerLoad),
    /// How far the sessions are that were asked for, in their order.
    Progress(Vec<SessionProgress>),
    /// The request failed.
    Failed(ErrorReply),
}

impl Message for Control {
    fn version(&self) -> MessageVersion {
        self.version
    }

    fn validate(&self) -> Result<(), CodecError> {
        let open = match &self.action {
            ControlAction::Open(open) => open,
            ControlAction::Keep(keep) => {
                let n_sessions = keep.sessions.len();
                return check_count("sessions", n_sessions, 0..=MAX_SESSIONS, "at most 65536");
            }
            ControlAction::Progress(sessions) => return check_asked(sessions.len()),
            ControlAction::Close(_) | ControlAction::Drain(_) | ControlAction::Stats => {
                return Ok(());
            }
        };
        check_count("route", open.route.len(), 1..=MAX_STAGES, "one worker per stage")?;
        let bytes = open.fingerprint.len();
        check_count("fingerprint", bytes, 1..=MAX_TEXT_BYTES, "1 to 256 bytes of text")?;
        let prompt = open.prompt.len();
        let room = open.max_len as usize;
        check_count("prompt", prompt, 0..=room, "at most max_len tokens")?;
        let prompt_len = open.prompt_len as usize;
        check_count("prompt_len", prompt_len, 0..=prompt, "at most the tokens of prompt")?;
        open.sampling.validate()
    }
}

impl Message for ControlReply {
    fn version(&self) -> MessageVersion {
        self.version
    }

    fn validate(&self) -> Result<(), CodecError> {
        match &self.outcome {
            ControlOutcome::Failed(error) => error.validate(),
            ControlOutcome::Progress(sessions) => check_asked(sessions.len()),
            _ => Ok(()),
        }
    }
}

fn check_asked(n_sessions: usize) -> Result<(), CodecError> {
    check_count("sessions", n_sessions, 0..=MAX_ASKED, "at most 256")
}
