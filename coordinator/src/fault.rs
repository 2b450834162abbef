//! What can end a running session, and how the client hears of it.

use std::time::Duration;

use stagebus_draft::sampling::SamplingError;
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{StageIndex, StepNumber};
use stagebus_telemetry::Recovery;

use crate::session::IllegalTransition;

/// A failure of a running session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// A stage could not run a step.
    #[error("stage {stage} failed: {error}")]
    Step { stage: StageIndex, error: ErrorReply },
    /// A worker is dead or left.
    #[error("the worker of stage {stage} is gone")]
    WorkerGone { stage: StageIndex },
    /// The inference of a worker does not come to an end.
    #[error("the worker of stage {stage} is stuck")]
    WorkerStuck { stage: StageIndex },
    /// The stage before has sent a step, and this one has not got it.
    #[error("a step was lost on its way to stage {stage}")]
    StepLost { stage: StageIndex },
    /// The last stage has answered a step, and the answer has not come.
    #[error("the answer to a step was lost")]
    AnswerLost,
    /// A worker does not have the session, or at another epoch.
    #[error("the worker of stage {stage} does not have the session any more")]
    SessionLost { stage: StageIndex },
    /// A step has no answer in time.
    #[error("a step got no answer within {waited:?}")]
    NoAnswer { waited: Duration },
    /// The answer to an earlier step is missing.
    #[error("answer to step {expected} is missing, step {found} was answered")]
    Gap { expected: StepNumber, found: StepNumber },
    /// The last stage answered other rows than those asked for.
    #[error("the last stage answered other rows than those asked for")]
    WrongRows,
    /// The last stage chose a token that the model does not have.
    #[error("the last stage chose token {token}, the vocabulary has {vocab_size}")]
    Token { token: u32, vocab_size: u32 },
    /// No token is left to choose from the logits.
    #[error("no token can be chosen{}", by.map_or_else(String::new, |by| format!(": {by} leaves none")))]
    NoToken {
        /// The parameter of the request that rules tokens out.
        by: Option<&'static str>,
        #[source]
        source: SamplingError,
    },
    /// A step or an event could not be handed to the broker.
    #[error("the connection to the broker is not available")]
    Unsent,
    /// The coordinator ends.
    #[error("the coordinator shuts down; send the request again")]
    Shutdown,
    /// A mistake in this program.
    #[error(transparent)]
    Transition(#[from] IllegalTransition),
}

impl Fault {
    /// What the session recovers from, if it can go on with other workers, or with the same ones from
    /// the start.
    pub(crate) const fn recovery(&self) -> Option<Recovery> {
        match self {
            Self::Step { error, .. } => match error.class {
                ErrorClass::UnknownSession | ErrorClass::StaleEpoch | ErrorClass::StepGap => {
                    Some(Recovery::StepRefused)
                }
                ErrorClass::Preempted => Some(Recovery::Preempted),
                ErrorClass::InvalidRequest
                | ErrorClass::Overloaded
                | ErrorClass::StageUnavailable
                | ErrorClass::VersionMismatch
                | ErrorClass::Cancelled
                | ErrorClass::Internal => None,
            },
            Self::WorkerGone { .. } => Some(Recovery::WorkerGone),
            Self::WorkerStuck { .. } => Some(Recovery::WorkerStuck),
            Self::StepLost { .. } => Some(Recovery::StepLost),
            Self::AnswerLost | Self::Gap { .. } => Some(Recovery::AnswerLost),
            Self::SessionLost { .. } => Some(Recovery::SessionLost),
            Self::NoAnswer { .. } => Some(Recovery::NoAnswer),
            Self::WrongRows
            | Self::Token { .. }
            | Self::NoToken { .. }
            | Self::Unsent
            | Self::Shutdown
            | Self::Transition(_) => None,
        }
    }

    /// Whether the session only had to give way: that may happen any number of times.
    pub(crate) const fn is_preemption(&self) -> bool {
        matches!(self, Self::Step { error, .. } if matches!(error.class, ErrorClass::Preempted))
    }

    /// The class that the client sees.
    fn class(&self) -> ErrorClass {
        match self {
            Self::Step { error, .. } => match error.class {
                // The stage lost the session: for the client, the stage is not available.
                ErrorClass::UnknownSession
                | ErrorClass::StaleEpoch
                | ErrorClass::StepGap
                | ErrorClass::Preempted => ErrorClass::StageUnavailable,
                class => class,
            },
            Self::WorkerGone { .. }
            | Self::WorkerStuck { .. }
            | Self::StepLost { .. }
            | Self::AnswerLost
            | Self::SessionLost { .. }
            | Self::NoAnswer { .. }
            | Self::Gap { .. }
            | Self::Unsent
            | Self::Shutdown => ErrorClass::StageUnavailable,
            Self::NoToken { by: Some(_), .. } => ErrorClass::InvalidRequest,
            Self::WrongRows | Self::Token { .. } | Self::NoToken { .. } | Self::Transition(_) => {
                ErrorClass::Internal
            }
        }
    }

    /// The stage at which it happened.
    pub(crate) const fn stage(&self) -> Option<StageIndex> {
        match self {
            Self::Step { stage, .. }
            | Self::WorkerGone { stage }
            | Self::WorkerStuck { stage }
            | Self::StepLost { stage }
            | Self::SessionLost { stage } => Some(*stage),
            Self::AnswerLost
            | Self::NoAnswer { .. }
            | Self::Gap { .. }
            | Self::WrongRows
            | Self::Token { .. }
            | Self::NoToken { .. }
            | Self::Unsent
            | Self::Shutdown
            | Self::Transition(_) => None,
        }
    }

    /// What the client is told.
    pub(crate) fn reply(&self) -> ErrorReply {
        let retry_after_ms = match self {
            Self::Step { error, .. } => error.retry_after_ms,
            _ => None,
        };
        ErrorReply { class: self.class(), message: self.to_string(), retry_after_ms }
    }
}
