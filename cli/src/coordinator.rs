//! `stagebus coordinator`: a coordinator, alone or with a worker of the first stage in its process.
//!
//! The hosted worker is the ordinary one, with its own connection to the broker, its own key and
//! its own threads: `hosted-stage` for its owner and connection, `inference` for its backend. Only
//! the messages between the two do not cross the broker (`stagebus_bus::Switch`).
//!
//! Order of the start: worker, coordinator, ready line. Order of the end: the coordinator finishes
//! its requests, then the worker what others have on it, within the coordinator's time to drain;
//! then it is stopped. A worker that ends by itself (drained, or broken) leaves a coordinator that
//! goes on with other workers.

use std::io;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use stagebus_bus::Switch;
use stagebus_coordinator::{CoordinatorArgs, Hosted, Prepared};
use stagebus_schemas::ids::WorkerId;
use stagebus_settings::{Overrides, ProcessArgs};
use stagebus_worker::{Shutdown, WorkerConfig, WorkerError, WorkerSettings};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::exit::Outcome;

/// Beginning of a hosted worker's id, unless `worker.name` says otherwise.
const HOSTED_NAME: &str = "hosted";

/// Name of the thread that runs a hosted worker.
const THREAD: &str = "hosted-stage";

/// Runs a coordinator, with a worker if its settings ask for one, until `stop` is cancelled.
///
/// # Errors
/// What keeps either from starting, the end of the coordinator other than as asked, or a worker
/// that did not end in time.
pub async fn run(args: CoordinatorArgs, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let process = args.process.clone();
    let Some(mut prepared) = stagebus_coordinator::prepare(args, &stop).await? else {
        return Ok(Outcome::Good);
    };
    if !prepared.config.settings.host_stage0 {
        stagebus_coordinator::serve(prepared, stop).await?;
        return Ok(Outcome::Good);
    }
    let switch = Switch::new();
    let settings = worker_config(&process, &mut prepared, switch.clone())?;
    let mut hosted = HostedWorker::start(settings)?;
    let ready = tokio::select! {
        ready = hosted.ready() => ready?,
        () = stop.cancelled() => None,
    };
    let Some(worker) = ready else {
        hosted.end(Instant::now()).await?;
        return Ok(Outcome::Good);
    };
    let drain = Duration::from_millis(prepared.config.settings.drain_ms);
    prepared.config.hosted = Some(Hosted { worker, switch });
    let mut asked = None;
    let mut serving = Box::pin(stagebus_coordinator::serve(prepared, stop.clone()));
    let outcome = loop {
        tokio::select! {
            outcome = &mut serving => break outcome,
            () = stop.cancelled(), if asked.is_none() => asked = Some(Instant::now()),
            () = hosted.tell_end(), if !hosted.has_ended() => {}
        }
    };
    let ended = hosted.end(asked.unwrap_or_else(Instant::now) + drain).await;
    outcome?;
    ended?;
    Ok(Outcome::Good)
}

/// The settings of the hosted worker: the table `[worker]`, the coordinator's shard set and broker,
/// and a key of its own where roles have keys.
fn worker_config(
    process: &ProcessArgs,
    prepared: &mut Prepared,
    switch: Switch,
) -> Result<WorkerConfig, WorkerError> {
    let mut flags = Overrides::default();
    flags.set("worker.shards", Path::display(&prepared.config.shards), "--shards");
    flags.set("worker.stage", 0, "--host-stage0");
    let loaded = process.load::<WorkerSettings>("worker", &flags)?;
    let (mut broker, mut settings) = (loaded.broker, loaded.process);
    settings.name.get_or_insert_with(|| HOSTED_NAME.to_owned());
    if let Some(seed) = &prepared.config.settings.host_nkey_seed_file {
        (broker.token, broker.user, broker.password) = (None, None, None);
        broker.nkey_seed_file = Some(seed.clone());
    }
    tracing::info!(?settings, "hosted worker");
    let telemetry = prepared.telemetry.worker(0);
    Ok(WorkerConfig { broker, settings, switch: Some(switch), telemetry })
}

/// A worker on a thread of this process.
#[derive(Debug)]
struct HostedWorker {
    shutdown: Shutdown,
    /// Tells its id when it is ready.
    ready: oneshot::Receiver<WorkerId>,
    ended: oneshot::Receiver<Result<(), WorkerError>>,
    /// How it ended, once it has.
    outcome: Option<Result<(), WorkerError>>,
    thread: JoinHandle<()>,
}

impl HostedWorker {
    /// Starts it.
    ///
    /// # Errors
    /// The system has no thread, or no means for a runtime on it.
    fn start(config: WorkerConfig) -> Result<Self, WorkerError> {
        let failed = |source| WorkerError::Thread { name: THREAD, source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(failed)?;
        let shutdown = Shutdown::new();
        let ((tell_ready, ready), (tell_end, ended)) = (oneshot::channel(), oneshot::channel());
        let stop = shutdown.clone();
        let work = move || {
            // Nobody waits for either once the coordinator is gone.
            let on_ready = |ready: &stagebus_worker::Ready| drop(tell_ready.send(ready.id.clone()));
            let outcome = runtime.block_on(stagebus_worker::run(config, stop, on_ready));
            // A shard that is still loading cannot be called off; nobody waits for it.
            runtime.shutdown_background();
            drop(tell_end.send(outcome));
        };
        let thread = std::thread::Builder::new().name(THREAD.to_owned()).spawn(work);
        Ok(Self { shutdown, ready, ended, outcome: None, thread: thread.map_err(failed)? })
    }

    /// Waits until it takes sessions; nothing if it ended before, as asked.
    ///
    /// # Errors
    /// It cannot start.
    async fn ready(&mut self) -> Result<Option<WorkerId>, WorkerError> {
        if let Ok(worker) = (&mut self.ready).await {
            return Ok(Some(worker));
        }
        self.wait().await;
        self.outcome.take().unwrap_or(Ok(())).map(|()| None)
    }

    fn has_ended(&self) -> bool {
        self.outcome.is_some()
    }

    /// Waits for its end and logs it.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    async fn tell_end(&mut self) {
        self.wait().await;
        match &self.outcome {
            Some(Err(error)) => tracing::error!(
                error = error as &dyn std::error::Error,
                "the hosted worker has failed, sessions go to other workers"
            ),
            _ => tracing::info!("the hosted worker has left, sessions go to other workers"),
        }
    }

    /// Waits for its end.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    async fn wait(&mut self) {
        if self.outcome.is_none() {
            let panicked = |_gone| {
                let source = io::Error::other("it has panicked");
                Err(WorkerError::Thread { name: THREAD, source })
            };
            self.outcome = Some((&mut self.ended).await.unwrap_or_else(panicked));
        }
    }

    /// Lets it finish what others have on it until `deadline`, then stops it.
    ///
    /// # Errors
    /// How it ended, if it was still there.
    async fn end(mut self, deadline: Instant) -> Result<(), WorkerError> {
        if self.has_ended() {
            return Ok(());
        }
        self.shutdown.drain.cancel();
        if tokio::time::timeout_at(deadline.into(), self.wait()).await.is_err() {
            self.shutdown.stop.cancel();
            self.wait().await;
        }
        // The thread has sent its last word.
        drop(self.thread.join());
        self.outcome.unwrap_or(Ok(()))
    }
}
