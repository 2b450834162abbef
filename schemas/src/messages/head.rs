//! What the last stage (or a stage that fails) sends to the coordinator.

use serde::{Deserialize, Serialize};

use crate::codec::{CodecError, Message, check_count};
use crate::error::ErrorReply;
use crate::ids::{Epoch, SessionId, StageIndex, StepNumber, WorkerId};
use crate::messages::forward::{MAX_ROWS, MAX_STAGES, MAX_STEPS, StageTime};
use crate::version::MessageVersion;

/// The chosen token of one wanted row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadRow {
    /// Position of the row whose logits chose the token; the token itself stands at `pos + 1`.
    pub pos: u32,
    /// The chosen token.
    pub token: u32,
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
    /// One entry per wanted row, in ascending position.
    pub rows: Vec<HeadRow>,
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
        for step in &self.steps {
            check_count("rows", step.rows.len(), 0..=MAX_ROWS, "at most 8192 rows per step")?;
            check_count("trace", step.trace.len(), 0..=MAX_STAGES, "one entry per stage")?;
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
