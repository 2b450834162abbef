//! What the last stage (or a stage that fails) sends to the coordinator.

use serde::{Deserialize, Serialize};

use crate::codec::{CodecError, Message, check_count};
use crate::error::ErrorReply;
use crate::ids::{Epoch, SessionId, StageIndex, StepNumber, WorkerId};
use crate::messages::forward::{MAX_ROWS, MAX_STAGES, MAX_STEPS, StageTime};
use crate::messages::sampling::{MAX_TOP_LOGPROBS, TokenLogprob};
use crate::tensor::Tensor;
use crate::version::MessageVersion;

/// The chosen token of one wanted row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadRow {
    /// Position of the row whose logits chose the token; the token itself stands at `pos + 1`.
    pub pos: u32,
    /// The chosen token.
    pub token: u32,
    /// Its log-probability, if the session asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprob: Option<f32>,
    /// The most likely tokens in falling order, if the session asked for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<TokenLogprob>,
}

impl HeadRow {
    /// A row that carries its token only.
    #[must_use]
    pub const fn new(pos: u32, token: u32) -> Self {
        Self { pos, token, logprob: None, top: Vec::new() }
    }
}

/// The answer to one step. A step without wanted rows is answered with no rows: that is the
/// credit that lets the next prefill chunk go.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadStep {
    /// The session.
    pub session: SessionId,
    /// Fencing number of the step.
    pub epoch: Epoch,
    /// Number of the step.
    pub step: StepNumber,
    /// One entry per wanted row, in ascending position; none if `logits` are sent instead.
    pub rows: Vec<HeadRow>,
    /// Logits of the wanted rows `[n_wanted, vocab_size]`, in the head mode `full`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logits: Option<Tensor>,
    /// What every stage spent on the step.
    pub trace: Vec<StageTime>,
}

/// A step that a stage could not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepFault {
    /// The session.
    pub session: SessionId,
    /// Fencing number of the step.
    pub epoch: Epoch,
    /// Number of the step.
    pub step: StepNumber,
    /// Why.
    pub error: ErrorReply,
}

/// A message on a coordinator's head subject.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// Version of this message.
    pub version: MessageVersion,
    /// Stage that sends it: the last one, or the one that failed.
    pub stage: StageIndex,
    /// Worker that sends it.
    pub worker: WorkerId,
    /// Steps that ran to the end.
    pub steps: Vec<HeadStep>,
    /// Steps that failed in this stage.
    pub faults: Vec<StepFault>,
}

impl Message for Head {
    fn version(&self) -> MessageVersion {
        self.version
    }

    fn validate(&self) -> Result<(), CodecError> {
        check_count("steps", self.steps.len(), 0..=MAX_STEPS, "at most 256 steps")?;
        check_count("faults", self.faults.len(), 0..=MAX_STEPS, "at most 256 faults")?;
        self.faults.iter().try_for_each(|fault| fault.error.validate())?;
        for step in &self.steps {
            check_count("rows", step.rows.len(), 0..=MAX_ROWS, "at most 8192 rows per step")?;
            check_count("trace", step.trace.len(), 0..=MAX_STAGES, "one entry per stage")?;
            let most = step.rows.iter().map(|row| row.top.len()).max().unwrap_or(0);
            check_count("rows.top", most, 0..=MAX_TOP_LOGPROBS as usize, "at most 64 tokens")?;
            if let Some(logits) = &step.logits {
                logits.validate()?;
                check_count("rows", step.rows.len(), 0..=0, "no rows beside logits")?;
            }
            if !step.rows.windows(2).all(|pair| pair[0].pos < pair[1].pos) {
                return Err(CodecError::Field {
                    field: "rows.pos",
                    found: step.rows.len() as u64,
                    expected: "ascending positions",
                });
            }
        }
        Ok(())
    }
}
