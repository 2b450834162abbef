//! The inference thread: it owns the backend and everything that blocks on it.
//!
//! ```text
//! owner task ──commands (bounded, std)──▶ thread "inference" ──results──▶ broker connection
//!     ▲                                        │
//!     └──────── events (bounded, tokio) ───────┤
//!     ◀──────── load (latest value) ───────────┘
//! ```
//! The thread ends when the command sender is dropped: it finishes the micro-batch that runs and
//! leaves what waits. Its end closes the event channel, which is how the owner notices a panic of
//! the backend; only then may it be joined.
//!
//! A step that fails ends the epoch of its session on this stage: later steps of that epoch are
//! skipped without another fault, because a row must never be appended behind one that is missing.
//! The next open of the session lifts that.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use stagebus_bus::PublishError;
use stagebus_engine::backend::{
    Backend, OpenError, RowPath, SessionKey, StepDone, StepError, StepRows,
};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{Epoch, SessionId};
use stagebus_schemas::messages::control::Open;
use stagebus_schemas::messages::forward::{Phase, Step};
use stagebus_schemas::tensor::Dtype;
use tokio::sync::{mpsc, watch};

use crate::heads::Heads;
use crate::results::{self, Job, Outgoing, ResultError, RunTime, key_of, micros, u32_of};
use crate::schedule::Schedule;
use crate::stage::Stage;

/// Weight of a new measurement in the smoothed times: settles within about twenty steps, so a
/// busy spell shows and one outlier does not.
const SMOOTHING: f64 = 0.1;

/// A request to the inference thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// Opens a session or lets it go on at a higher epoch; steps that wait are dropped.
    Open(Box<Open>),
    /// Ends a session; steps that wait are dropped.
    Close { session: SessionId },
    /// Runs a step when its turn comes.
    Run(Job),
}

/// What the inference thread tells its owner.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum InferenceEvent {
    /// The answer to [`Command::Open`]: length of the prefix that is cached, in tokens.
    Opened { session: SessionId, epoch: Epoch, outcome: Result<u32, ErrorReply> },
    /// The session's cache is gone; it must be opened and filled again.
    Lost { session: SessionId, epoch: Epoch },
}

/// What the thread has measured, as of the last micro-batch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct InferenceLoad {
    /// Steps completed since the start, failed ones included.
    pub steps_completed: u64,
    /// Positions held, in tokens.
    pub kv_tokens: u64,
    /// Memory of the KV caches, in bytes.
    pub kv_bytes: u64,
    /// Memory that the KV caches can take, in bytes; 0 if it is not limited beforehand.
    pub kv_max_bytes: u64,
    /// Smoothed inference time of a decode step, in microseconds; 0 before the first.
    pub decode_us: f64,
    /// Smoothed inference time of a prefill row, in microseconds; 0 before the first.
    pub prefill_row_us: f64,
}

/// How the thread works.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InferenceOptions {
    /// Commands that wait for the thread. Whoever sends bounds steps and opens, so that a close
    /// always finds room.
    pub command_capacity: usize,
    /// Most sessions in one micro-batch.
    pub max_batch_sessions: usize,
    /// See [`Schedule::new`].
    pub decodes_per_prefill: u32,
    /// Number format of hidden states on the wire.
    pub wire_dtype: Dtype,
}

/// The owner's handle to the thread.
#[derive(Debug)]
pub(crate) struct Inference {
    commands: SyncSender<Command>,
    queued: Arc<AtomicU32>,
    load: watch::Receiver<InferenceLoad>,
    thread: JoinHandle<()>,
}

/// Why the inference thread did not take a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// More commands wait than their senders may have in flight.
    #[error("the command channel of the inference thread is full")]
    Full,
    /// The thread has ended.
    #[error("the inference thread has ended")]
    Ended,
}

impl Inference {
    /// Starts the thread. `outlet` hands a message to the broker connection; it may wait a bounded
    /// time.
    ///
    /// # Errors
    /// The system has no thread to give.
    pub(crate) fn start<F>(
        backend: Box<dyn Backend>,
        stage: Arc<Stage>,
        options: InferenceOptions,
        outlet: F,
    ) -> std::io::Result<(Self, mpsc::Receiver<InferenceEvent>)>
    where
        F: FnMut(Outgoing) -> Result<(), PublishError> + Send + 'static,
    {
        let (commands, inbox) = sync_channel(options.command_capacity);
        let (events, event_receiver) = mpsc::channel(options.command_capacity);
        let (load_sender, load) = watch::channel(InferenceLoad::default());
        let queued = Arc::new(AtomicU32::new(0));
        let worker = Thread {
            backend,
            stage,
            wire_dtype: options.wire_dtype,
            max_batch_sessions: options.max_batch_sessions,
            schedule: Schedule::new(options.decodes_per_prefill),
            sessions: HashMap::new(),
            heads: Heads::default(),
            queued: Arc::clone(&queued),
            events,
            load: load_sender,
            outlet,
        };
        let thread =
            std::thread::Builder::new().name("inference".to_owned()).spawn(|| worker.run(inbox))?;
        Ok((Self { commands, queued, load, thread }, event_receiver))
    }

    /// Hands a command to the thread without waiting.
    ///
    /// # Errors
    /// [`CommandError`].
    pub(crate) fn send(&self, command: Command) -> Result<(), CommandError> {
        if matches!(command, Command::Run(_)) {
            self.queued.fetch_add(1, Ordering::Relaxed);
        }
        self.commands.try_send(command).map_err(|error| {
            let (command, error) = match error {
                TrySendError::Full(command) => (command, CommandError::Full),
                TrySendError::Disconnected(command) => (command, CommandError::Ended),
            };
            if matches!(command, Command::Run(_)) {
                self.queued.fetch_sub(1, Ordering::Relaxed);
            }
            error
        })
    }

    /// Steps that wait or run.
    pub(crate) fn queued(&self) -> u32 {
        self.queued.load(Ordering::Relaxed)
    }

    /// What the thread has measured.
    pub(crate) fn load(&self) -> InferenceLoad {
        *self.load.borrow()
    }

    /// Lets the thread end after the micro-batch that runs. Join the handle once the event channel
    /// is closed.
    pub(crate) fn stop(self) -> JoinHandle<()> {
        self.thread
    }
}

/// One session as the thread sees it.
#[derive(Debug, Clone, Copy)]
struct Held {
    epoch: Epoch,
    /// A step of this epoch failed.
    failed: bool,
}

struct Thread<F> {
    backend: Box<dyn Backend>,
    stage: Arc<Stage>,
    wire_dtype: Dtype,
    max_batch_sessions: usize,
    schedule: Schedule<Job>,
    sessions: HashMap<SessionKey, Held>,
    /// Filled on the last stage only.
    heads: Heads,
    queued: Arc<AtomicU32>,
    events: mpsc::Sender<InferenceEvent>,
    load: watch::Sender<InferenceLoad>,
    outlet: F,
}

impl<F: FnMut(Outgoing) -> Result<(), PublishError>> Thread<F> {
    fn run(mut self, inbox: Receiver<Command>) {
        let mut batch = Vec::new();
        loop {
            if self.schedule.is_empty() {
                match inbox.recv() {
                    Ok(command) => self.take(command),
                    Err(_) => return,
                }
            }
            loop {
                match inbox.try_recv() {
                    Ok(command) => self.take(command),
                    Err(std::sync::mpsc::TryRecvError::Empty) => break,
                    Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
                }
            }
            self.schedule.take(self.max_batch_sessions, &mut batch);
            if !batch.is_empty() {
                self.run_batch(&batch);
                batch.clear();
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Open(open) => {
                let (session, epoch) = (open.session, open.epoch);
                let outcome = self.open(&open);
                self.tell(InferenceEvent::Opened { session, epoch, outcome });
                self.report(|_| ());
            }
            Command::Close { session } => {
                self.drop_waiting(key_of(session));
                self.forget(key_of(session));
                self.report(|_| ());
            }
            Command::Run(job) => {
                let session = key_of(job.step.session);
                // Steps of an epoch that has failed or ended were answered when it did.
                let runs = self
                    .sessions
                    .get(&session)
                    .is_some_and(|held| held.epoch == job.step.epoch && !held.failed);
                if runs {
                    self.schedule.push(session, path_of(job.step.phase), job);
                } else {
                    self.queued.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn open(&mut self, open: &Open) -> Result<u32, ErrorReply> {
        let (session, epoch) = (open.session, open.epoch);
        let key = key_of(session);
        let held = self.sessions.get(&key).copied();
        if held.is_none_or(|held| held.epoch != epoch) {
            self.drop_waiting(key);
        }
        match self.backend.open(key, &open.prompt, open.max_len as usize) {
            Ok(cached_len) => {
                if self.stage.is_last() && held.is_none_or(|held| held.epoch != epoch) {
                    self.heads.open(key, open);
                }
                let failed = held.is_some_and(|held| held.epoch == epoch && held.failed);
                self.sessions.insert(key, Held { epoch, failed });
                Ok(u32_of(cached_len))
            }
            Err(error) => {
                self.forget(key);
                tracing::warn!(
                    session_id = %session, stage_index = %self.stage.index, epoch = %epoch,
                    error = &error as &dyn std::error::Error, "session not opened"
                );
                Err(open_error(&self.stage, &error))
            }
        }
    }

    fn run_batch(&mut self, batch: &[(SessionKey, Job)]) {
        let started = Instant::now();
        let mut failed = Vec::new();
        let mut times = Times::default();
        let steps: Vec<StepRows<'_>> = batch.iter().map(|(key, job)| rows_of(*key, job)).collect();
        let (stage, dtype) = (&self.stage, self.wire_dtype);
        let (heads, outlet) = (&mut self.heads, &mut self.outlet);
        self.backend.run(&steps, &mut |done: StepDone<'_>| {
            let Some((_, job)) = batch.get(done.index) else { return };
            times.add(&job.step, done.infer_time);
            let StepDone { infer_time: infer, n_rows, masked, .. } = done;
            let time = RunTime { started, infer, n_rows, masked };
            let sent = match done.output {
                Ok(output) => results::result(stage, dtype, heads, job, output, time)
                    .and_then(|message| Ok(outlet(message)?))
                    .map_err(Failure::Result),
                Err(error) => Err(Failure::Step(error)),
            };
            if let Err(failure) = sent {
                failed.push((done.index, failure));
            }
        });
        for (index, failure) in failed {
            self.fail(&batch[index], &failure);
        }
        let n_done = u32_of(batch.len());
        self.queued.fetch_sub(n_done, Ordering::Relaxed);
        self.report(|load| times.smooth_into(load, n_done));
    }

    /// Ends the epoch of a session whose step failed, and tells the coordinator once.
    fn fail(&mut self, (key, job): &(SessionKey, Job), failure: &Failure) {
        let (key, step) = (*key, &job.step);
        tracing::warn!(
            session_id = %step.session, stage_index = %self.stage.index, epoch = %step.epoch,
            step = %step.step, error = failure.as_error(), "step failed"
        );
        self.drop_waiting(key);
        if failure.loses_cache() {
            self.forget(key);
            self.tell(InferenceEvent::Lost { session: step.session, epoch: step.epoch });
        } else if let Some(held) = self.sessions.get_mut(&key) {
            held.failed = true;
        }
        let reply = failure.reply(&self.stage);
        let lost = (step.session, step.epoch, step.step);
        let told = results::fault(&self.stage, &job.route.head_subject, lost, reply)
            .map_err(ResultError::from)
            .and_then(|message| Ok((self.outlet)(message)?));
        if let Err(error) = told {
            tracing::warn!(
                session_id = %step.session, stage_index = %self.stage.index,
                error = &error as &dyn std::error::Error, "fault not sent"
            );
        }
    }

    fn forget(&mut self, session: SessionKey) {
        self.sessions.remove(&session);
        self.heads.close(session);
        self.backend.close(session);
    }

    fn drop_waiting(&mut self, session: SessionKey) {
        let dropped = self.schedule.remove(session);
        self.queued.fetch_sub(u32_of(dropped), Ordering::Relaxed);
    }

    /// Tells the owner; without one there is nobody to tell.
    fn tell(&self, event: InferenceEvent) {
        drop(self.events.blocking_send(event));
    }

    fn report(&self, change: impl FnOnce(&mut InferenceLoad)) {
        let kv_use = self.backend.kv_use();
        self.load.send_modify(|load| {
            load.kv_tokens = kv_use.tokens;
            load.kv_bytes = kv_use.bytes;
            load.kv_max_bytes = kv_use.max_bytes;
            change(load);
        });
    }
}

/// Why a step has no result.
enum Failure {
    Step(StepError),
    Result(ResultError),
}

impl Failure {
    /// Whether the session must be filled again from position 0.
    fn loses_cache(&self) -> bool {
        matches!(
            self,
            Self::Step(
                StepError::UnknownSession { .. }
                    | StepError::Bloated { .. }
                    | StepError::Runtime(_)
            )
        )
    }

    fn reply(&self, stage: &Stage) -> ErrorReply {
        match self {
            Self::Step(error) => results::step_error(stage, error),
            Self::Result(error) => results::result_error(stage, error),
        }
    }

    fn as_error(&self) -> &(dyn std::error::Error + 'static) {
        match self {
            Self::Step(error) => error,
            Self::Result(error) => error,
        }
    }
}

/// Inference times of one micro-batch.
#[derive(Default)]
struct Times {
    decode: Vec<f64>,
    prefill_row: Vec<f64>,
}

impl Times {
    fn add(&mut self, step: &Step, infer: Duration) {
        let infer_us = f64::from(micros(infer));
        match step.phase {
            Phase::Decode => self.decode.push(infer_us),
            Phase::Prefill => {
                let n_rows = u32_of(step.tokens.len().max(1));
                self.prefill_row.push(infer_us / f64::from(n_rows));
            }
        }
    }

    fn smooth_into(&self, load: &mut InferenceLoad, n_steps: u32) {
        load.steps_completed += u64::from(n_steps);
        for (smoothed, measured) in
            [(&mut load.decode_us, &self.decode), (&mut load.prefill_row_us, &self.prefill_row)]
        {
            for time in measured {
                let weight = if *smoothed == 0.0 { 1.0 } else { SMOOTHING };
                *smoothed += (time - *smoothed) * weight;
            }
        }
    }
}

fn open_error(stage: &Stage, error: &OpenError) -> ErrorReply {
    let message = format!("stage {} on worker {}: {error}", stage.index, stage.worker);
    match error {
        OpenError::Full { .. } => ErrorReply {
            class: ErrorClass::Overloaded,
            message,
            retry_after_ms: Some(crate::sessions::RETRY_AFTER_MS),
        },
        OpenError::Runtime(_) => ErrorReply::new(ErrorClass::Internal, message),
    }
}

fn rows_of(session: SessionKey, job: &Job) -> StepRows<'_> {
    StepRows {
        session,
        start_pos: job.step.start_pos as usize,
        path: path_of(job.step.phase),
        tokens: &job.step.tokens,
        hidden: job.hidden.as_deref(),
        wanted: &job.step.wanted,
    }
}

fn path_of(phase: Phase) -> RowPath {
    match phase {
        Phase::Prefill => RowPath::Prefill,
        Phase::Decode => RowPath::Decode,
    }
}

#[cfg(test)]
impl Inference {
    /// A handle whose commands the test reads itself; nothing runs behind it.
    pub(crate) fn by_hand(command_capacity: usize) -> (Self, Receiver<Command>) {
        let (commands, inbox) = sync_channel(command_capacity);
        let (_, load) = watch::channel(InferenceLoad::default());
        let thread = std::thread::Builder::new().spawn(|| ()).expect("a thread");
        (Self { commands, queued: Arc::new(AtomicU32::new(0)), load, thread }, inbox)
    }

    /// Counts steps as done.
    pub(crate) fn done(&self, n_steps: u32) {
        self.queued.fetch_sub(n_steps, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
