//! What a step becomes when it has run: a message for the next stage, head rows, or a fault.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use stagebus_bus::PublishError;
use stagebus_engine::backend::{SessionKey, StageOutput, StepError};
use stagebus_schemas::codec::{self, CodecError};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{Epoch, SessionId, StepNumber};
use stagebus_schemas::messages::forward::{Forward, StageTime, Step};
use stagebus_schemas::messages::head::{Head, HeadStep, StepFault};
use stagebus_schemas::subjects::LostStep;
use stagebus_schemas::tensor::{Dtype, Tensor};
use stagebus_schemas::version::MessageVersion;

use crate::heads::{Chosen, HeadError, Heads};
use crate::rows::hidden_bytes;
use crate::sessions::Route;
use crate::stage::Stage;

/// A message on its way to the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outgoing {
    pub subject: String,
    /// Where the broker answers if nobody listens on `subject`.
    pub reply: Option<String>,
    pub payload: Bytes,
}

/// A step that waits for inference or has gone through it.
#[derive(Debug)]
pub(crate) struct Job {
    pub step: Step,
    /// Hidden states `[n_rows, hidden_dim]`, row-major; none on the first stage.
    pub hidden: Option<Vec<f32>>,
    pub route: Arc<Route>,
    /// When the message arrived.
    pub arrived: Instant,
}

/// When a step ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunTime {
    /// Start of the micro-batch.
    pub started: Instant,
    /// Inference time of the call that ran the step.
    pub infer: Duration,
    /// Rows of that call.
    pub n_rows: usize,
    /// Positions of the session that rewinds have masked out.
    pub masked: usize,
}

/// Why the result of a step did not leave.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResultError {
    /// The backend gave something else than this stage gives.
    #[error("the stage gave {found} numbers, expected {expected}")]
    Output {
        /// Numbers that belong to the step.
        expected: usize,
        /// Numbers found.
        found: usize,
    },
    /// No token is chosen.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// The message cannot be encoded.
    #[error("the result cannot be encoded")]
    Codec(#[from] CodecError),
    /// The message was not accepted for sending.
    #[error("the result was not sent")]
    Publish(#[from] PublishError),
}

/// Makes the message that carries a step's output on.
///
/// # Errors
/// [`ResultError::Output`], [`ResultError::Head`], [`ResultError::Codec`].
pub(crate) fn result(
    stage: &Stage,
    dtype: Dtype,
    heads: &mut Heads,
    job: &Job,
    output: StageOutput<'_>,
    time: RunTime,
) -> Result<Outgoing, ResultError> {
    match (output, &job.route.next_subject) {
        (StageOutput::Hidden(hidden), Some(subject)) => {
            let n_rows = job.step.tokens.len();
            check_len(hidden.len(), n_rows * stage.hidden_dim)?;
            let tensor = Tensor {
                dtype,
                n_rows: u32_of(n_rows),
                hidden_dim: u32_of(stage.hidden_dim),
                data: hidden_bytes(hidden, dtype).into(),
            };
            let lost = LostStep {
                session: job.step.session,
                epoch: job.step.epoch,
                step: job.step.step,
                stage: stage.index.next(),
            };
            let mut step = job.step.clone();
            step.trace.push(stage_time(stage, job.arrived, time));
            let forward = Forward {
                version: MessageVersion::CURRENT,
                from: Some(stage.worker.clone()),
                steps: vec![step],
                hidden: Some(tensor),
            };
            Ok(Outgoing {
                subject: subject.clone(),
                reply: Some(stage.subjects.lost(&job.route.coordinator, &lost)),
                payload: codec::encode(&forward)?.into(),
            })
        }
        (StageOutput::Logits(logits), None) => {
            check_len(logits.len(), job.step.wanted.len() * stage.vocab_size)?;
            let session = key_of(job.step.session);
            let (rows, logits) = match heads.choose(session, &job.step, logits, stage.vocab_size)? {
                Chosen::Rows(rows) => (rows, None),
                Chosen::AllLogits => (vec![], logits_tensor(stage, &job.step, logits)),
            };
            let mut trace = job.step.trace.clone();
            trace.push(stage_time(stage, job.arrived, time));
            let step = HeadStep {
                session: job.step.session,
                epoch: job.step.epoch,
                step: job.step.step,
                rows,
                logits,
                trace,
            };
            Ok(head(stage, &job.route.head_subject, vec![step], vec![])?)
        }
        (StageOutput::Hidden(numbers), None) | (StageOutput::Logits(numbers), Some(_)) => {
            Err(ResultError::Output { expected: 0, found: numbers.len() })
        }
    }
}

/// Makes the message that tells a coordinator that a step cannot run.
///
/// # Errors
/// [`CodecError`].
pub(crate) fn fault(
    stage: &Stage,
    head_subject: &str,
    lost: (SessionId, Epoch, StepNumber),
    error: ErrorReply,
) -> Result<Outgoing, CodecError> {
    let (session, epoch, step) = lost;
    head(stage, head_subject, vec![], vec![StepFault { session, epoch, step, error }])
}

/// Classifies a failure of the backend.
pub(crate) fn step_error(stage: &Stage, error: &StepError) -> ErrorReply {
    let class = match error {
        StepError::UnknownSession { .. } | StepError::Bloated { .. } => ErrorClass::UnknownSession,
        StepError::Gap { .. } => ErrorClass::StepGap,
        StepError::ContextFull { .. } | StepError::Shape { .. } | StepError::Token { .. } => {
            ErrorClass::InvalidRequest
        }
        StepError::OutOfBlocks { .. } => ErrorClass::Overloaded,
        StepError::Runtime(_) => ErrorClass::Internal,
    };
    ErrorReply::new(class, format!("stage {} on worker {}: {error}", stage.index, stage.worker))
}

/// Classifies a result that did not leave.
pub(crate) fn result_error(stage: &Stage, error: &ResultError) -> ErrorReply {
    match error {
        ResultError::Publish(PublishError::PayloadTooLarge { bytes, limit }) => ErrorReply::new(
            ErrorClass::InvalidRequest,
            format!(
                "the result of stage {} has {bytes} bytes, the broker passes {limit}: send fewer \
                 rows per step",
                stage.index
            ),
        ),
        ResultError::Head(error) => {
            let class = match error {
                HeadError::UnknownSession => ErrorClass::UnknownSession,
                HeadError::Gap { .. } => ErrorClass::StepGap,
                HeadError::AllForbidden(_) => ErrorClass::InvalidRequest,
                HeadError::Logits(_) => ErrorClass::Internal,
            };
            ErrorReply::new(class, format!("stage {}: {error}", stage.index))
        }
        ResultError::Output { .. } | ResultError::Codec(_) | ResultError::Publish(_) => {
            ErrorReply::new(
                ErrorClass::Internal,
                format!("stage {} on worker {}: {error}", stage.index, stage.worker),
            )
        }
    }
}

/// All logits of the wanted rows; none for a step without such.
fn logits_tensor(stage: &Stage, step: &Step, logits: &[f32]) -> Option<Tensor> {
    (!step.wanted.is_empty()).then(|| Tensor {
        dtype: Dtype::F32,
        n_rows: u32_of(step.wanted.len()),
        hidden_dim: u32_of(stage.vocab_size),
        data: hidden_bytes(logits, Dtype::F32).into(),
    })
}

/// Key of a session in the backend.
pub(crate) fn key_of(session: SessionId) -> SessionKey {
    SessionKey(session.as_u64())
}

fn head(
    stage: &Stage,
    subject: &str,
    steps: Vec<HeadStep>,
    faults: Vec<StepFault>,
) -> Result<Outgoing, CodecError> {
    let message = Head {
        version: MessageVersion::CURRENT,
        stage: stage.index,
        worker: stage.worker.clone(),
        steps,
        faults,
    };
    let payload = codec::encode(&message)?.into();
    Ok(Outgoing { subject: subject.to_owned(), reply: None, payload })
}

fn stage_time(stage: &Stage, arrived: Instant, time: RunTime) -> StageTime {
    StageTime {
        stage: stage.index,
        queue_us: micros(time.started.saturating_duration_since(arrived)),
        infer_us: micros(time.infer),
        rows: u32_of(time.n_rows),
        masked: u32_of(time.masked),
        total_us: micros(arrived.elapsed()),
    }
}

fn check_len(found: usize, expected: usize) -> Result<(), ResultError> {
    if found == expected { Ok(()) } else { Err(ResultError::Output { expected, found }) }
}

/// Microseconds of a duration; more than an hour and a bit saturates.
pub(crate) fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

/// Counts on the wire saturate instead of wrapping.
pub(crate) fn u32_of(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
