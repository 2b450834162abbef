//! The loop of the inference thread.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Instant;

use stagebus_bus::PublishError;
use stagebus_draft::constraint::Guide;
use stagebus_engine::backend::{
    Backend, OpenError, RowPath, SessionKey, StepDone, StepError, StepRows,
};
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::Epoch;
use stagebus_schemas::messages::control::Priority;
use stagebus_schemas::messages::forward::Phase;
use stagebus_schemas::tensor::Dtype;
use stagebus_telemetry::WorkerMetrics;
use tokio::sync::{mpsc, watch};

use super::times::{self, Times};
use super::traces::Traces;
use super::{Command, InferenceEvent, InferenceLoad, InferenceOptions, OpenOrder, RunningBatch};
use crate::heads::Heads;
use crate::results::{self, Job, Manner, Outgoing, Output, ResultError, RunTime, key_of, u32_of};
use crate::schedule::{Class, FIRST_TOKEN_ROWS, MAX_DECODE_ROWS, Next, Part, Schedule};
use crate::stage::Stage;

/// One session as the thread sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    pub(super) epoch: Epoch,
    pub(super) standing: Standing,
    pub(super) priority: Priority,
    /// Order of the first opens: the higher, the younger the session.
    pub(super) born: u64,
    /// It may hold KV blocks.
    pub(super) holds_rows: bool,
}

/// Whether steps of a session run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// They do.
    Runs,
    /// The session gave its blocks up; the next step of its epoch is told.
    Preempted,
    /// The epoch is over, and its coordinator was told.
    Failed,
}

pub(super) struct Thread<F> {
    pub(super) backend: Box<dyn Backend>,
    pub(super) stage: Arc<Stage>,
    wire_dtype: Dtype,
    pub(super) schedule: Schedule<Job>,
    /// Time 0 of the schedule.
    pub(super) origin: Instant,
    pub(super) sessions: HashMap<SessionKey, Held>,
    n_born: u64,
    /// The last that gave way, with their age: they come back as old as they are.
    pub(super) gave_way: VecDeque<(SessionKey, u64)>,
    /// Filled on the last stage only.
    heads: Heads,
    queued: Arc<AtomicU32>,
    events: mpsc::Sender<InferenceEvent>,
    load: watch::Sender<InferenceLoad>,
    pub(super) metrics: WorkerMetrics,
    pub(super) traces: Traces,
    outlet: F,
}

/// What became of one part of a micro-batch.
struct Ran {
    outcome: Result<Output, Failure>,
    time: RunTime,
}

impl<F: FnMut(Outgoing, Manner) -> Result<(), PublishError>> Thread<F> {
    pub(super) fn new(
        backend: Box<dyn Backend>,
        stage: Arc<Stage>,
        options: InferenceOptions,
        events: mpsc::Sender<InferenceEvent>,
        load: watch::Sender<InferenceLoad>,
        outlet: F,
    ) -> Self {
        Self {
            backend,
            stage,
            wire_dtype: options.wire_dtype,
            schedule: Schedule::new(options.policy),
            origin: Instant::now(),
            sessions: HashMap::new(),
            n_born: 0,
            gave_way: VecDeque::new(),
            heads: Heads::default(),
            queued: Arc::new(AtomicU32::new(0)),
            events,
            load,
            metrics: options.telemetry.metrics,
            traces: Traces::new(options.telemetry.tracer),
            outlet,
        }
    }

    /// The count of steps that wait or run.
    pub(super) fn queued(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.queued)
    }

    pub(super) fn run(mut self, inbox: Receiver<Command>) {
        self.serve(&inbox);
        self.traces.end_all();
    }

    fn serve(&mut self, inbox: &Receiver<Command>) {
        let mut batch = Vec::new();
        loop {
            loop {
                match inbox.try_recv() {
                    Ok(command) => self.take(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            let now = self.origin.elapsed();
            match self.schedule.next(now, &mut batch) {
                Next::Run => self.run_batch(&mut batch),
                Next::Nothing => match inbox.recv() {
                    Ok(command) => self.take(command),
                    Err(_) => return,
                },
                Next::WaitUntil(until) => match inbox.recv_timeout(until.saturating_sub(now)) {
                    Ok(command) => self.take(command),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                },
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Open(order, guide) => {
                let (session, epoch) = (order.open.session, order.open.epoch);
                let outcome = self.open(&order, guide);
                self.tell(InferenceEvent::Opened { session, epoch, outcome });
                self.report(|_| ());
            }
            Command::Close { session } => {
                self.forget(key_of(session));
                self.report(|_| ());
            }
            Command::Run(jobs) => {
                let mut held = Vec::new();
                jobs.into_iter().for_each(|job| self.enqueue(job, &mut held));
                self.pass_on(held);
            }
        }
    }

    /// Sends results that left the engine, or did not need it.
    fn pass_on(&mut self, jobs: Vec<Job>) {
        let unsent = results::send(&self.stage, self.wire_dtype, jobs, &mut self.outlet);
        for (job, reply) in unsent {
            self.fail(&job, &Failure::Result(reply));
        }
    }

    /// Lets a step wait for its turn, unless its epoch is over on this stage. Steps that need no turn
    /// are added to `passes`: the cache stays as it is.
    fn enqueue(&mut self, job: Job, passes: &mut Vec<Job>) {
        let session = key_of(job.step.session);
        let held = self.sessions.get(&session).filter(|held| held.epoch == job.step.epoch);
        match held.map(|held| held.standing) {
            Some(Standing::Runs) => self.wait_for_turn(session, job, passes),
            Some(Standing::Preempted) => {
                self.count_done(1);
                self.tell_preempted(&job);
            }
            // It was answered when the epoch ended.
            Some(Standing::Failed) | None => self.count_done(1),
        }
    }

    fn open(&mut self, order: &OpenOrder, guide: Option<Guide>) -> Result<u32, ErrorReply> {
        let OpenOrder { open, trace } = order;
        let key = key_of(open.session);
        let held = self.sessions.get(&key).copied();
        if held.is_none_or(|held| held.epoch != open.epoch) {
            self.drop_waiting(key);
        }
        match self.open_backend(open) {
            Ok(cached_len) => {
                if self.stage.is_last() && held.is_none_or(|held| held.epoch != open.epoch) {
                    self.heads.open(key, open, guide);
                }
                let is_new = held.is_none();
                let standing = held
                    .filter(|held| held.epoch == open.epoch)
                    .map_or(Standing::Runs, |held| held.standing);
                let born = held.map_or_else(|| self.age_of(key), |held| held.born);
                let (epoch, priority, holds_rows) = (open.epoch, open.priority, cached_len > 0);
                let held = Held { epoch, standing, priority, born, holds_rows };
                self.sessions.insert(key, held);
                if is_new {
                    let cached = u32_of(cached_len).min(open.prompt_len);
                    self.metrics.prompt_tokens.inc_by(open.prompt_len.into());
                    self.metrics.prefix_hit_tokens.inc_by(cached.into());
                }
                self.traces.open(key, open, (*trace, cached_len), &self.stage);
                self.schedule.open(key, open.priority);
                Ok(u32_of(cached_len))
            }
            Err(error) => {
                self.forget(key);
                tracing::warn!(
                    session_id = %open.session, stage_index = %self.stage.index,
                    epoch = %open.epoch, error = &error as &dyn std::error::Error,
                    "session not opened"
                );
                Err(open_error(&self.stage, &error))
            }
        }
    }

    fn run_batch(&mut self, batch: &mut Vec<Part<Job>>) {
        let started = Instant::now();
        let mut times = Times::default();
        let parts = batch.iter().map(|part| (part.waiting.step.step.phase, part.n_rows));
        self.load.send_modify(|load| {
            let expected = times::expected(load, parts);
            load.running = Some(RunningBatch { since: started, expected });
        });
        self.measure_start(batch, started);
        let ran = self.infer(batch, started, &mut times);
        let infer = ran.iter().flatten().map(|ran| ran.time.infer).max().unwrap_or_default();
        let (mut finished, mut failed, mut starved) = (Vec::new(), Vec::new(), Vec::new());
        let sessions: Vec<SessionKey> = batch.iter().map(|part| part.session).collect();
        for (part, ran) in batch.drain(..).zip(ran) {
            let Part { session, n_rows, mut waiting } = part;
            match ran {
                Some(Ran { outcome: Ok(output), time }) => {
                    if let Some(held) = self.sessions.get_mut(&session) {
                        held.holds_rows = true;
                    }
                    times.rows(n_rows);
                    self.traces.ran(&waiting.step, n_rows, time);
                    if waiting.step.advance(n_rows, output, time) {
                        finished.push(waiting.step);
                    } else {
                        waiting.n_rows -= n_rows;
                        self.schedule.put_back(session, waiting);
                    }
                }
                Some(Ran {
                    outcome: Err(Failure::Step(error @ StepError::OutOfBlocks { .. })),
                    ..
                }) => starved.push((session, waiting, error)),
                Some(Ran { outcome: Err(failure), .. }) => failed.push((waiting.step, failure)),
                None => failed.push((waiting.step, Failure::Result(unanswered(&self.stage)))),
            }
        }
        times.done(finished.len() + failed.len());
        self.metrics.steps_done.inc_by(finished.len() as u64);
        self.metrics.steps_failed.inc_by(failed.len() as u64);
        self.count_done(finished.len() + failed.len());
        self.pass_on(finished);
        for (job, failure) in failed {
            self.fail(&job, &failure);
        }
        self.make_room(starved);
        let mut passes = Vec::new();
        sessions.into_iter().for_each(|session| self.take_needless(session, &mut passes));
        self.pass_on(passes);
        self.schedule.ran(self.origin.elapsed(), infer);
        self.report(|load| {
            load.running = None;
            times.smooth_into(load);
        });
    }

    /// Counts a micro-batch, and how long its steps have waited.
    fn measure_start(&self, batch: &[Part<Job>], started: Instant) {
        let n_rows = batch.iter().map(|part| part.n_rows).sum();
        // A session runs one step at a time.
        self.metrics.micro_batch(u32_of(n_rows), u32_of(batch.len()));
        for job in batch.iter().map(|part| &part.waiting.step) {
            if job.progress.n_rows == 0 {
                self.metrics.step_started(started.saturating_duration_since(job.arrived));
            }
        }
    }

    /// Runs the parts; the answers stand in their order.
    fn infer(
        &mut self,
        batch: &[Part<Job>],
        started: Instant,
        times: &mut Times,
    ) -> Vec<Option<Ran>> {
        let mut ran: Vec<Option<Ran>> = batch.iter().map(|_| None).collect();
        let rows: Vec<_> = batch.iter().map(|part| part.waiting.step.part(part.n_rows)).collect();
        let wanted: Vec<_> =
            batch.iter().zip(&rows).map(|(part, rows)| part.waiting.step.wanted_in(rows)).collect();
        let steps: Vec<StepRows<'_>> = batch
            .iter()
            .zip(rows.iter().zip(&wanted))
            .map(|(part, (rows, wanted))| {
                let Job { step, hidden, .. } = &part.waiting.step;
                let width = self.stage.hidden_dim;
                StepRows {
                    session: part.session,
                    start_pos: step.start_pos as usize + rows.start,
                    path: path_of(step.phase),
                    tokens: &step.tokens[rows.clone()],
                    hidden: hidden
                        .as_ref()
                        .and_then(|hidden| hidden.get(rows.start * width..rows.end * width)),
                    wanted,
                }
            })
            .collect();
        let (stage, dtype, heads) = (&self.stage, self.wire_dtype, &mut self.heads);
        let metrics = &self.metrics;
        self.backend.run(&steps, &mut |done: StepDone<'_>| {
            let StepDone { index, output, infer_time: infer, n_rows, masked } = done;
            let (Some(part), Some(place)) = (batch.get(index), ran.get_mut(index)) else { return };
            let job = &part.waiting.step;
            times.add(&job.step, part.n_rows, infer);
            if output.is_ok() {
                match class_of(job) {
                    Class::Decode => metrics.decode(infer),
                    Class::FirstToken | Class::Prefill { .. } => metrics.prefill(infer),
                }
            }
            let outcome = match output {
                Ok(output) => results::output(stage, dtype, heads, job, &rows[index], output)
                    .map_err(|error| Failure::Result(results::result_error(stage, &error))),
                Err(error) => Err(Failure::Step(error)),
            };
            *place = Some(Ran { outcome, time: RunTime { started, infer, n_rows, masked } });
        });
        ran
    }

    /// Ends the epoch of a session whose step failed, and tells the coordinator once.
    pub(super) fn fail(&mut self, job: &Job, failure: &Failure) {
        let (key, step) = (key_of(job.step.session), &job.step);
        tracing::warn!(
            session_id = %step.session, stage_index = %self.stage.index, epoch = %step.epoch,
            step = %step.step, error = failure.as_error(), "step failed"
        );
        let reply = failure.reply(&self.stage);
        self.traces.fail(key, reply.class.as_str());
        self.drop_waiting(key);
        if failure.loses_cache() {
            self.forget(key);
            self.tell(InferenceEvent::Lost { session: step.session, epoch: step.epoch });
        } else if let Some(held) = self.sessions.get_mut(&key) {
            held.standing = Standing::Failed;
        }
        self.send_fault(job, reply);
    }

    pub(super) fn send_fault(&mut self, job: &Job, reply: ErrorReply) {
        let lost = (job.step.session, job.step.epoch, job.step.step);
        let told = results::fault(&self.stage, &job.route.head_subject, lost, reply)
            .map_err(ResultError::from)
            .and_then(|message| Ok((self.outlet)(message, Manner::Direct)?));
        if let Err(error) = told {
            tracing::warn!(
                session_id = %job.step.session, stage_index = %self.stage.index,
                error = &error as &dyn std::error::Error, "fault not sent"
            );
        }
        // A fault that did not leave is found as one that was lost.
        job.route.has_sent(job.step.step);
    }

    /// Where a session that is not held stands in the order of first opens.
    fn age_of(&mut self, session: SessionKey) -> u64 {
        let known = self.gave_way.iter().position(|(known, _)| *known == session);
        if let Some((_, born)) = known.and_then(|at| self.gave_way.remove(at)) {
            return born;
        }
        self.n_born += 1;
        self.n_born
    }

    /// Ends everything that the thread knows of a session.
    fn forget(&mut self, session: SessionKey) {
        let dropped = self.schedule.close(session);
        self.count_done(dropped.len());
        self.sessions.remove(&session);
        self.heads.close(session);
        self.backend.close(session);
        self.traces.end(session);
    }

    fn drop_waiting(&mut self, session: SessionKey) {
        let dropped = self.schedule.clear(session);
        self.count_done(dropped.len());
    }

    pub(super) fn count_done(&self, n_steps: usize) {
        self.queued.fetch_sub(u32_of(n_steps), Ordering::Relaxed);
        self.metrics.queue_steps.dec_by(n_steps as u64);
    }

    /// Tells the owner; without one there is nobody to tell.
    fn tell(&self, event: InferenceEvent) {
        drop(self.events.blocking_send(event));
    }

    fn report(&self, change: impl FnOnce(&mut InferenceLoad)) {
        let kv_use = self.backend.kv_use();
        self.metrics.kv(kv_use.tokens, kv_use.bytes, kv_use.max_bytes);
        self.load.send_modify(|load| {
            load.kv_tokens = kv_use.tokens;
            load.kv_bytes = kv_use.bytes;
            load.kv_max_bytes = kv_use.max_bytes;
            change(load);
        });
    }
}

/// Why a step has no result.
pub(super) enum Failure {
    Step(StepError),
    Result(ErrorReply),
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
            Self::Result(reply) => reply.clone(),
        }
    }

    fn as_error(&self) -> &(dyn std::error::Error + 'static) {
        match self {
            Self::Step(error) => error,
            Self::Result(reply) => reply,
        }
    }
}

fn unanswered(stage: &Stage) -> ErrorReply {
    let message =
        format!("the engine of stage {} on worker {} left the step out", stage.index, stage.worker);
    ErrorReply::new(ErrorClass::Internal, message)
}

fn open_error(stage: &Stage, error: &OpenError) -> ErrorReply {
    let message = format!("stage {} on worker {}: {error}", stage.index, stage.worker);
    match error {
        OpenError::Full { .. } => overloaded(message),
        OpenError::OutOfBlocks { needed, total, .. } if needed > total => {
            ErrorReply::new(ErrorClass::InvalidRequest, message)
        }
        OpenError::OutOfBlocks { .. } => overloaded(message),
        OpenError::Runtime(_) => ErrorReply::new(ErrorClass::Internal, message),
    }
}

fn overloaded(message: String) -> ErrorReply {
    ErrorReply {
        class: ErrorClass::Overloaded,
        message,
        retry_after_ms: Some(crate::sessions::RETRY_AFTER_MS),
    }
}

/// A long decode step is a replay: nobody waits for its single rows.
pub(super) fn class_of(job: &Job) -> Class {
    match job.step.phase {
        Phase::Prefill
            if !job.step.wanted.is_empty() && job.step.tokens.len() <= FIRST_TOKEN_ROWS =>
        {
            Class::FirstToken
        }
        Phase::Prefill => Class::Prefill { least: 2 },
        Phase::Decode if job.step.tokens.len() > MAX_DECODE_ROWS => Class::Prefill { least: 1 },
        Phase::Decode => Class::Decode,
    }
}

fn path_of(phase: Phase) -> RowPath {
    match phase {
        Phase::Prefill => RowPath::Prefill,
        Phase::Decode => RowPath::Decode,
    }
}
