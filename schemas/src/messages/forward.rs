//! A forward message: rows of one or several sessions for the next stage.

use serde::{Deserialize, Serialize};

use crate::codec::{CodecError, Message, check_count};
use crate::ids::{Epoch, SessionId, StageIndex, StepNumber, WorkerId};
use crate::tensor::Tensor;
use crate::version::MessageVersion;

/// Most steps in one message.
pub const MAX_STEPS: usize = 256;

/// Most rows in one message.
pub const MAX_ROWS: usize = 8192;

/// Most stages of a pipeline: above the layer count of any model.
pub const MAX_STAGES: usize = 1024;

/// Longest free text in an internal message (a fingerprint, a device, a host), in bytes.
pub const MAX_TEXT_BYTES: usize = 256;

/// How the rows of a step run; a row always takes the same path, in replays too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Prompt rows, run as one multi-token sequence.
    Prefill,
    /// Generated (and drafted) rows, each run as a one-token sequence.
    Decode,
}

/// One step of one session: truncate to `start_pos`, then append the rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// The session.
    pub session: SessionId,
    /// Fencing number.
    pub epoch: Epoch,
    /// Number within (session, epoch).
    pub step: StepNumber,
    /// Position of the first row, in tokens; the KV cache is truncated to it first.
    pub start_pos: u32,
    /// How the rows run.
    pub phase: Phase,
    /// Token id of each row; its length is the number of rows.
    pub tokens: Vec<u32>,
    /// Rows (indexes into `tokens`, ascending) whose next token the last stage must choose.
    pub wanted: Vec<u32>,
    /// The first of the stages that hold all rows already and pass the step on without running it;
    /// all later ones do. None wants a row then. Absent if every stage runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_from: Option<StageIndex>,
    /// What each earlier stage spent on this step.
    pub trace: Vec<StageTime>,
}

/// Time that one stage spent on one step.
///
/// **Units**: microseconds where the name says so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageTime {
    /// The stage.
    pub stage: StageIndex,
    /// From the message's arrival to the start of inference.
    pub queue_us: u32,
    /// Inference of the micro-batch that held the step.
    pub infer_us: u32,
    /// Rows of that micro-batch, over all its sessions.
    pub rows: u32,
    /// KV positions of the step's session that rewinds have left behind on the stage.
    pub masked: u32,
    /// From arrival to the moment the result was handed to the broker connection.
    pub total_us: u32,
}

/// Rows for the next stage. Stage 0 gets no tensor: it embeds `tokens` itself. Steps that the next
/// stage holds need none and travel by themselves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forward {
    /// Version of this message.
    pub version: MessageVersion,
    /// Sender, absent when the coordinator sends to stage 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<WorkerId>,
    /// The steps, in the order of the tensor's rows.
    pub steps: Vec<Step>,
    /// Hidden states of all rows, in order of `steps`; absent for stage 0 and for steps whose rows
    /// the next stage holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden: Option<Tensor>,
}

impl Message for Forward {
    fn version(&self) -> MessageVersion {
        self.version
    }

    fn validate(&self) -> Result<(), CodecError> {
        check_count("steps", self.steps.len(), 1..=MAX_STEPS, "1 to 256 steps")?;
        let mut n_rows = 0;
        for step in &self.steps {
            step.validate()?;
            n_rows += step.tokens.len();
        }
        check_count("rows", n_rows, 1..=MAX_ROWS, "1 to 8192 rows")?;
        if let Some(hidden) = &self.hidden {
            hidden.validate()?;
            let found = hidden.n_rows as usize;
            check_count("hidden.n_rows", found, n_rows..=n_rows, "one row per token of the steps")?;
        }
        Ok(())
    }
}

impl Step {
    /// Whether a stage holds the rows already.
    #[must_use]
    pub fn is_held_by(&self, stage: StageIndex) -> bool {
        self.held_from.is_some_and(|first| stage >= first)
    }

    fn validate(&self) -> Result<(), CodecError> {
        let n_rows = self.tokens.len();
        check_count("tokens", n_rows, 1..=MAX_ROWS, "1 to 8192 rows per step")?;
        check_count("trace", self.trace.len(), 0..=MAX_STAGES, "one entry per stage")?;
        let ascending = self.wanted.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = self.wanted.last().is_none_or(|last| (*last as usize) < n_rows);
        if !ascending || !inside {
            return Err(CodecError::Field {
                field: "wanted",
                found: self.wanted.last().copied().unwrap_or_default().into(),
                expected: "ascending rows of the step",
            });
        }
        if let Some(first) = self.held_from {
            let stage = first.index();
            check_count("held_from", stage, 1..=MAX_STAGES, "a stage behind the first")?;
            let n_wanted = self.wanted.len();
            check_count("wanted", n_wanted, 0..=0, "no row of a step that a stage does not run")?;
        }
        let end = u32::try_from(n_rows).ok().and_then(|n| self.start_pos.checked_add(n));
        if end.is_none() {
            return Err(CodecError::Field {
                field: "start_pos",
                found: self.start_pos.into(),
                expected: "a position whose rows end below 2^32",
            });
        }
        Ok(())
    }
}
