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
//! The thread runs what [`crate::schedule::Schedule`] chooses; results of one micro-batch leave together when it ends.
//! A step that fails ends the epoch of its session on this stage: later steps of that epoch are
//! skipped without another fault, because a row must never be appended behind one that is missing.
//! The next open of the session lifts that.
//!
//! When the KV blocks run out, a session gives way: see [`preemption`].

mod needless;
mod preemption;
mod thread;
mod times;
mod traces;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
#[cfg(test)]
use std::sync::mpsc::Receiver;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use stagebus_bus::PublishError;
use stagebus_draft::constraint::Guide;
use stagebus_engine::backend::Backend;
use stagebus_schemas::error::ErrorReply;
use stagebus_schemas::ids::{Epoch, SessionId};
use stagebus_schemas::messages::control::Open;
use stagebus_schemas::tensor::Dtype;
use stagebus_schemas::trace::TraceContext;
use stagebus_telemetry::{WorkerMetrics, WorkerTelemetry};
use tokio::sync::{mpsc, watch};

use crate::results::{Job, Manner, Outgoing, u32_of};
use crate::schedule::Policy;
use crate::stage::Stage;
use thread::Thread;

/// A request to the inference thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// Opens a session, with its compiled constraint, or lets it go on at a higher epoch; steps that
    /// wait are dropped.
    Open(Box<OpenOrder>, Option<Guide>),
    /// Ends a session; steps that wait are dropped.
    Close { session: SessionId },
    /// Runs the steps of one message when their turn comes.
    Run(Vec<Job>),
}

/// A session that is to be opened, or to go on at a higher epoch.
#[derive(Debug, PartialEq)]
pub(crate) struct OpenOrder {
    /// What its coordinator asks for.
    pub(crate) open: Open,
    /// The coordinator's span.
    pub(crate) trace: Option<TraceContext>,
}

impl Command {
    fn n_steps(&self) -> u32 {
        match self {
            Self::Run(jobs) => u32_of(jobs.len()),
            Self::Open(..) | Self::Close { .. } => 0,
        }
    }
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
    /// Rows run since the start.
    pub rows_completed: u64,
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
    /// The micro-batch that runs.
    pub running: Option<RunningBatch>,
}

/// A micro-batch that runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RunningBatch {
    /// When it began.
    pub since: Instant,
    /// How long it should take, from what was measured; nothing if something in it never was.
    pub expected: Option<Duration>,
}

/// How the thread works.
#[derive(Debug, Clone)]
pub(crate) struct InferenceOptions {
    /// Commands that wait for the thread. Whoever sends bounds steps and opens, so that a close
    /// always finds room.
    pub command_capacity: usize,
    /// Which steps run next.
    pub policy: Policy,
    /// Number format of hidden states on the wire.
    pub wire_dtype: Dtype,
    /// What it shows of itself.
    pub telemetry: WorkerTelemetry,
}

/// The owner's handle to the thread.
#[derive(Debug)]
pub(crate) struct Inference {
    commands: SyncSender<Command>,
    queued: Arc<AtomicU32>,
    load: watch::Receiver<InferenceLoad>,
    thread: JoinHandle<()>,
    metrics: WorkerMetrics,
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
        F: FnMut(Outgoing, Manner) -> Result<(), PublishError> + Send + 'static,
    {
        let (commands, inbox) = sync_channel(options.command_capacity);
        let (events, event_receiver) = mpsc::channel(options.command_capacity);
        let (load_sender, load) = watch::channel(InferenceLoad::default());
        let metrics = options.telemetry.metrics.clone();
        let worker = Thread::new(backend, stage, options, events, load_sender, outlet);
        let queued = worker.queued();
        let thread =
            std::thread::Builder::new().name("inference".to_owned()).spawn(|| worker.run(inbox))?;
        Ok((Self { commands, queued, load, thread, metrics }, event_receiver))
    }

    /// Hands a command to the thread without waiting.
    ///
    /// # Errors
    /// [`CommandError`].
    pub(crate) fn send(&self, command: Command) -> Result<(), CommandError> {
        let n_steps = command.n_steps();
        self.queued.fetch_add(n_steps, Ordering::Relaxed);
        self.metrics.queue_steps.inc_by(n_steps.into());
        self.commands.try_send(command).map_err(|error| {
            self.queued.fetch_sub(n_steps, Ordering::Relaxed);
            self.metrics.queue_steps.dec_by(n_steps.into());
            match error {
                TrySendError::Full(_) => CommandError::Full,
                TrySendError::Disconnected(_) => CommandError::Ended,
            }
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

#[cfg(test)]
impl Inference {
    /// A handle whose commands the test reads itself; nothing runs behind it.
    pub(crate) fn by_hand(command_capacity: usize) -> (Self, Receiver<Command>) {
        let (commands, inbox) = sync_channel(command_capacity);
        let (_, load) = watch::channel(InferenceLoad::default());
        let thread = std::thread::Builder::new().spawn(|| ()).expect("a thread");
        let queued = Arc::new(AtomicU32::new(0));
        (Self { commands, queued, load, thread, metrics: WorkerMetrics::default() }, inbox)
    }

    /// Counts steps as done.
    pub(crate) fn done(&self, n_steps: u32) {
        self.queued.fetch_sub(n_steps, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
