//! What a step becomes when it has run: rows for the next stage, head rows, or a fault. Steps of one
//! micro-batch that have the same way share a message.
//!
//! Large results that fill caches go as bulk, which stands in nobody's way on a narrow link, and so
//! does what comes behind them in their session ([`Route::takes_bulk`]).

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use stagebus_bus::PublishError;
use stagebus_engine::backend::{SessionKey, StageOutput, StepError};
use stagebus_schemas::codec::{self, CodecError};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{Epoch, SessionId, StepNumber};
use stagebus_schemas::messages::forward::{Forward, MAX_ROWS, MAX_STEPS, Phase, StageTime, Step};
use stagebus_schemas::messages::head::{Head, HeadRow, HeadStep, StepFault};
use stagebus_schemas::subjects::LostStep;
use stagebus_schemas::tensor::{Dtype, Tensor};
use stagebus_schemas::version::MessageVersion;

use crate::heads::{Chosen, HeadError, Heads};
use crate::sessions::Route;
use crate::stage::Stage;

/// Bytes of hidden states above which a result is large: 13 ms of a link of 20 Mbit/s.
const LARGE: usize = 32 << 10;

/// A message on its way to the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outgoing {
    pub subject: String,
    /// Where the broker answers if nobody listens on `subject`.
    pub reply: Option<String>,
    pub payload: Bytes,
}

/// How a message leaves.
pub(crate) enum Manner {
    /// At once.
    Direct,
    /// As bulk; to be called when it has arrived.
    Bulk(Box<dyn FnOnce() + Send>),
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
    /// It is passed on without having run.
    pub is_needless: bool,
    pub progress: Progress,
}

/// What has run of a step, in one or several parts.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Rows that have run.
    pub n_rows: usize,
    output: Output,
    time: StepTime,
}

/// What has come out of a step so far.
#[derive(Debug, Default)]
pub(crate) struct Output {
    /// Hidden states in the wire's number format.
    hidden: Vec<u8>,
    /// Logits of wanted rows, while other rows have yet to run.
    logits: Vec<f32>,
    /// The chosen tokens.
    rows: Vec<HeadRow>,
    /// Logits of the wanted rows, where the coordinator chooses.
    all_logits: Option<Tensor>,
}

/// Times of a step, summed over its parts.
#[derive(Debug, Default)]
struct StepTime {
    queue: Option<Duration>,
    infer: Duration,
    n_rows: usize,
    masked: usize,
}

/// When a part of a step ran.
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

impl Job {
    pub(crate) fn new(
        step: Step,
        hidden: Option<Vec<f32>>,
        route: Arc<Route>,
        arrived: Instant,
    ) -> Self {
        Self { step, hidden, route, arrived, is_needless: false, progress: Progress::default() }
    }

    /// The next `n_rows` rows.
    pub(crate) fn part(&self, n_rows: usize) -> Range<usize> {
        self.progress.n_rows..(self.progress.n_rows + n_rows).min(self.step.tokens.len())
    }

    /// The wanted rows among some of its rows, counted from the first of those.
    pub(crate) fn wanted_in(&self, rows: &Range<usize>) -> Cow<'_, [u32]> {
        let wanted = &self.step.wanted;
        let place = |row: usize| wanted.partition_point(|wanted| (*wanted as usize) < row);
        let within = &wanted[place(rows.start)..place(rows.end)];
        match u32_of(rows.start) {
            0 => Cow::Borrowed(within),
            first => Cow::Owned(within.iter().map(|row| row - first).collect()),
        }
    }

    /// Takes in what came out of some of its rows, and returns whether all have run.
    pub(crate) fn advance(&mut self, n_rows: usize, output: Output, time: RunTime) -> bool {
        let progress = &mut self.progress;
        progress.n_rows += n_rows;
        if progress.output.hidden.is_empty() {
            progress.output.hidden = output.hidden;
        } else {
            progress.output.hidden.extend_from_slice(&output.hidden);
        }
        progress.output.logits.extend_from_slice(&output.logits);
        progress.output.rows = output.rows;
        progress.output.all_logits = output.all_logits;
        let times = &mut progress.time;
        times.queue.get_or_insert(time.started.saturating_duration_since(self.arrived));
        times.infer += time.infer;
        times.n_rows += time.n_rows;
        times.masked = time.masked;
        progress.n_rows >= self.step.tokens.len()
    }

    fn stage_time(&self, stage: &Stage) -> StageTime {
        let time = &self.progress.time;
        StageTime {
            stage: stage.index,
            queue_us: micros(time.queue.unwrap_or_default()),
            infer_us: micros(time.infer),
            rows: u32_of(time.n_rows),
            masked: u32_of(time.masked),
            total_us: micros(self.arrived.elapsed()),
        }
    }
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

/// Copies what the backend lends of a part of a step, and chooses the tokens once the last row has
/// run.
///
/// # Errors
/// [`ResultError::Output`], [`ResultError::Head`].
pub(crate) fn output(
    stage: &Stage,
    dtype: Dtype,
    heads: &mut Heads,
    job: &Job,
    rows: &Range<usize>,
    output: StageOutput<'_>,
) -> Result<Output, ResultError> {
    match (output, &job.route.next) {
        (StageOutput::Hidden(hidden), Some(_)) => {
            check_len(hidden.len(), rows.len() * stage.hidden_dim)?;
            if !carries_hidden(stage, job) {
                return Ok(Output::default());
            }
            Ok(Output { hidden: dtype.encode(hidden, stage.hidden_dim), ..Output::default() })
        }
        (StageOutput::Logits(logits), None) => {
            check_len(logits.len(), job.wanted_in(rows).len() * stage.vocab_size)?;
            if rows.end < job.step.tokens.len() {
                return Ok(Output { logits: logits.to_vec(), ..Output::default() });
            }
            let earlier = &job.progress.output.logits;
            let logits = match earlier.is_empty() {
                true => Cow::Borrowed(logits),
                false => Cow::Owned([earlier.as_slice(), logits].concat()),
            };
            let session = key_of(job.step.session);
            Ok(match heads.choose(session, &job.step, &logits, stage.vocab_size)? {
                Chosen::Rows(rows) => Output { rows, ..Output::default() },
                Chosen::AllLogits => {
                    let all_logits = logits_tensor(stage, &job.step, &logits);
                    Output { all_logits, ..Output::default() }
                }
            })
        }
        (StageOutput::Hidden(numbers), None) | (StageOutput::Logits(numbers), Some(_)) => {
            Err(ResultError::Output { expected: 0, found: numbers.len() })
        }
    }
}

/// Sends the results of a micro-batch, one message for all steps that have the same way, and
/// returns the steps whose result did not leave.
pub(crate) fn send(
    stage: &Stage,
    dtype: Dtype,
    jobs: Vec<Job>,
    outlet: &mut impl FnMut(Outgoing, Manner) -> Result<(), PublishError>,
) -> Vec<(Job, ErrorReply)> {
    let mut ways: Vec<(bool, Vec<Job>)> = Vec::new();
    for job in jobs {
        let is_bulk = job.route.takes_bulk(job.step.step, is_large(&job));
        let goes_along = |(way_is_bulk, way): &&mut (bool, Vec<Job>)| {
            *way_is_bulk == is_bulk
                && way[0].route.has_way_of(&job.route)
                && carries_hidden(stage, &way[0]) == carries_hidden(stage, &job)
        };
        match ways.iter_mut().find(goes_along) {
            Some((_, way)) => way.push(job),
            None => ways.push((is_bulk, vec![job])),
        }
    }
    // The last is taken first.
    ways.reverse();
    let mut unsent = Vec::new();
    while let Some((is_bulk, mut jobs)) = ways.pop() {
        let n_rows: usize = jobs.iter().map(|job| job.step.tokens.len()).sum();
        let sent = if jobs.len() > 1 && (jobs.len() > MAX_STEPS || n_rows > MAX_ROWS) {
            None
        } else {
            let message = message(stage, (dtype, is_bulk), &jobs);
            let manner = if is_bulk { Manner::Bulk(on_arrival(&jobs)) } else { Manner::Direct };
            match message.and_then(|message| Ok(outlet(message, manner)?)) {
                Err(
                    ResultError::Publish(PublishError::PayloadTooLarge { .. })
                    | ResultError::Codec(CodecError::TooLarge { .. }),
                ) if jobs.len() > 1 => None,
                sent => Some(sent),
            }
        };
        match sent {
            // Too much for one message.
            None => {
                let second = jobs.split_off(jobs.len() / 2);
                ways.extend([(is_bulk, second), (is_bulk, jobs)]);
            }
            Some(Ok(())) if is_bulk => {}
            Some(Ok(())) => jobs.iter().for_each(|job| job.route.has_sent(job.step.step)),
            Some(Err(error)) => {
                let reply = result_error(stage, &error);
                unsent.extend(jobs.into_iter().map(|job| (job, reply.clone())));
            }
        }
    }
    unsent
}

/// Whether nobody is hurt if the rows of a step stand back behind the steps of others: they are many,
/// and no tokens of an answer.
fn is_large(job: &Job) -> bool {
    let is_answer = job.step.phase == Phase::Decode && !job.step.wanted.is_empty();
    job.progress.output.hidden.len() > LARGE && !is_answer
}

/// Notes that steps have arrived.
fn on_arrival(jobs: &[Job]) -> Box<dyn FnOnce() + Send> {
    let of = |job: &Job| (Arc::clone(&job.route), job.step.step);
    let steps: Vec<_> = jobs.iter().map(of).collect();
    Box::new(move || steps.iter().for_each(|(route, step)| route.has_sent(*step)))
}

/// Whether the next stage needs the hidden states of a step.
fn carries_hidden(stage: &Stage, job: &Job) -> bool {
    job.route.next.is_some() && !job.step.is_held_by(stage.index.next())
}

/// Makes the message that carries the results of steps on that have the same way.
///
/// Where nobody hears it, the broker's answer names the first step; the worker knows who shares
/// its way.
fn message(
    stage: &Stage,
    (dtype, is_bulk): (Dtype, bool),
    jobs: &[Job],
) -> Result<Outgoing, ResultError> {
    let first = &jobs[0];
    let Some(next) = &first.route.next else {
        let steps = jobs.iter().map(|job| head_step(stage, job)).collect();
        return Ok(head(stage, &first.route.head_subject, steps, vec![])?);
    };
    let n_bytes = jobs.iter().map(|job| job.progress.output.hidden.len()).sum();
    let mut data = Vec::with_capacity(n_bytes);
    let (mut steps, mut n_rows) = (Vec::with_capacity(jobs.len()), 0);
    for job in jobs {
        data.extend_from_slice(&job.progress.output.hidden);
        n_rows += job.step.tokens.len();
        let mut step = job.step.clone();
        step.trace.push(job.stage_time(stage));
        steps.push(step);
    }
    let hidden_dim = u32_of(stage.hidden_dim);
    let tensor = Tensor { dtype, n_rows: u32_of(n_rows), hidden_dim, data: data.into() };
    let hidden = carries_hidden(stage, first).then_some(tensor);
    let lost = LostStep {
        session: first.step.session,
        epoch: first.step.epoch,
        step: first.step.step,
        stage: stage.index.next(),
    };
    let forward = Forward {
        version: MessageVersion::CURRENT,
        from: Some(stage.worker.clone()),
        steps,
        hidden,
    };
    let subject = if is_bulk { &next.bulk } else { &next.step };
    Ok(Outgoing {
        subject: subject.clone(),
        reply: Some(stage.subjects.lost(&first.route.coordinator, &lost)),
        payload: codec::encode(&forward)?.into(),
    })
}

fn head_step(stage: &Stage, job: &Job) -> HeadStep {
    let mut trace = job.step.trace.clone();
    trace.push(job.stage_time(stage));
    HeadStep {
        session: job.step.session,
        epoch: job.step.epoch,
        step: job.step.step,
        rows: job.progress.output.rows.clone(),
        logits: job.progress.output.all_logits.clone(),
        trace,
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
                HeadError::AllForbidden(_) | HeadError::Constraint(_) => ErrorClass::InvalidRequest,
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
        data: Dtype::F32.encode(logits, stage.vocab_size).into(),
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

#[cfg(test)]
mod tests;
