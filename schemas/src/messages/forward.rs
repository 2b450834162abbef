//! A forward message: rows of one or several sessions for the next stage.

use serde::{Deserialize, Serialize};

use crate::ids::{Epoch, SessionId, StageIndex, StepNumber, WorkerId};
use crate::tensor::Tensor;
use crate::version::MessageVersion;

/// Most steps in one message.
pub const MAX_STEPS: usize = 256;

/// Most rows in one message.
pub const MAX_ROWS: usize = 8192;

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
    /// What each earlier stage spent on this step.
    pub trace: Vec<StageTime>,
}

/// Time that one stage spent on one step.
///
/// **Units**: microseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageTime {
    /// The stage.
    pub stage: StageIndex,
    /// From the message's arrival to the start of inference.
    pub queue_us: u32,
    /// Inference of the micro-batch that held the step.
    pub infer_us: u32,
    /// From arrival to the moment the result was handed to the broker connection.
    pub total_us: u32,
}

/// Rows for the next stage. Stage 0 gets no tensor: it embeds `tokens` itself.
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
    /// Hidden states of all rows, in order of `steps`; absent for stage 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden: Option<Tensor>,
}
