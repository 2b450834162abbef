//! A worker from start to end.
//!
//! ```text
//!                      ┌─ Intake::select ─┐
//! broker ─ messages ──▶│                  │─ Action ─▶ Worker::apply ─▶ outbox ─▶ broker
//! thread "inference" ─▶│ owner (run)      │                 │
//! signals, timer ─────▶└──────────────────┘                 └─ commands ─▶ thread "inference" ─▶ broker
//! ```
//! The owner runs where [`run()`] is awaited. Large results travel over a second connection
//! ([`Connections`]) in parts, which two tasks take apart and put together; constraints are compiled
//! on blocking threads. The owner's [`Intake`] holds all of them, and they end with it. The inference
//! thread ends when the owner drops its command sender; the owner then waits for the thread's event
//! channel to close and only then joins it.
//! Order of the end: announce leaving, stop listening, let the micro-batch finish, close the
//! connections. One deadline spans all of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;
use stagebus_bus::{
    Bulk, BulkReceiver, BulkSender, Bus, BusEvent, BusEvents, BusOptions, PublishError, Role,
};
use stagebus_draft::constraint::Grammars;
use stagebus_engine::backend::Backend;
use stagebus_schemas::ids::{ModelName, StageIndex, WorkerId};
use stagebus_telemetry::{WorkerMetrics, WorkerTelemetry, mirror};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

use crate::config::{WorkerConfig, WorkerSettings};
use crate::error::WorkerError;
use crate::inference::{Inference, InferenceOptions};
use crate::intake::{BulkEnds, Intake};
use crate::joining::Joined;
use crate::load::{load, load_pulled};
use crate::results::{Manner, Outgoing};
use crate::schedule::Policy;
use crate::shutdown::Shutdown;
use crate::stage::Stage;
use crate::worker::{Action, Worker, WorkerLimits};

/// How long the broker may take to take in the subscriptions.
const SUBSCRIBED_TIMEOUT: Duration = Duration::from_secs(5);

/// Parts of large messages that wait in the subscription: what eight senders have on their way at
/// most.
const BULK_PARTS: usize = 8192;

/// Bytes of large results that wait and are on their way: far more than coordinators let prompts
/// run ahead.
const BULK_BYTES: u32 = 512 << 20;

/// A worker's connections to the broker.
#[derive(Debug, Clone)]
pub(crate) struct Connections {
    /// For everything but bulk.
    pub(crate) steps: Bus,
    /// For bulk, so that nothing else waits behind it in a socket.
    pub(crate) bulk: Bus,
}

/// What a worker says when it is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ready {
    /// True.
    pub ready: bool,
    /// `worker`.
    pub role: &'static str,
    /// Name of this start.
    pub id: WorkerId,
    /// The stage served.
    pub stage: StageIndex,
    /// The model served.
    pub model: ModelName,
}

/// Runs a worker until `shutdown` asks for its end, a drain over the broker ends, or it fails.
/// Calls `on_ready` once it takes sessions.
///
/// # Errors
/// [`WorkerError`].
pub async fn run(
    config: WorkerConfig,
    shutdown: impl Into<Shutdown>,
    on_ready: impl FnOnce(&Ready),
) -> Result<(), WorkerError> {
    run_joined(config, None, &shutdown.into(), on_ready).await
}

/// The same for a worker that the fleet has heard of already.
pub(crate) async fn run_joined(
    config: WorkerConfig,
    mut joined: Option<Joined>,
    shutdown: &Shutdown,
    on_ready: impl FnOnce(&Ready),
) -> Result<(), WorkerError> {
    config.settings.validate()?;
    // Loading takes seconds to minutes and cannot be called off; whoever asks for the end meanwhile
    // does not wait for it.
    let started = Box::pin(shutdown.unless_asked(start(&config, joined.as_mut()))).await;
    let (connections, stage, backend) = match started {
        Some(Ok(started)) => started,
        ended => {
            if let Some(joined) = &mut joined {
                joined.presence.leave().await;
            }
            return ended.map_or(Ok(()), |failed| failed.map(drop));
        }
    };
    // From here on the worker speaks for itself; the files stay where they are to its end.
    let cached = joined.map(|joined| joined.cached);
    let settings = (&config.settings, &config.telemetry);
    let outcome = serve(connections, stage, backend, settings, shutdown, on_ready).await;
    drop(cached);
    outcome
}

/// Messages that wait in one subscription. Enough for every step that the queue takes, so the
/// queue's "overloaded" comes before a silent drop.
fn subscription_capacity(queue_capacity: u32) -> usize {
    queue_capacity as usize + 256
}

async fn start(
    config: &WorkerConfig,
    joined: Option<&mut Joined>,
) -> Result<(Connections, Arc<Stage>, Box<dyn Backend>), WorkerError> {
    let settings = config.settings.clone();
    let loaded = match joined {
        None => spawn_blocking(move || load(&settings)).await,
        Some(Joined { worker, presence, .. }) => {
            let worker = worker.clone();
            presence.during(spawn_blocking(move || load_pulled(&settings, worker))).await
        }
    };
    let (stage, backend) =
        loaded.map_err(|error| WorkerError::Thread { name: "loading", source: error.into() })??;
    let name = format!("worker {}", stage.worker);
    let options = BusOptions {
        subscription_capacity: subscription_capacity(config.settings.queue_capacity),
        connect_wait: Duration::from_millis(config.settings.connect_wait_ms),
        switch: config.switch.clone(),
        ..BusOptions::from_settings(&config.broker, Role::Worker(&stage.model), &name)?
    };
    let for_bulk = BusOptions {
        name: format!("{name} bulk"),
        subscription_capacity: BULK_PARTS,
        ..options.clone()
    };
    let (steps, bulk) = (Bus::connect(options).await?, Bus::connect(for_bulk).await?);
    Ok((Connections { steps, bulk }, Arc::new(stage), backend))
}

/// Serves a loaded stage on its connections until the end.
pub(crate) async fn serve(
    connections: Connections,
    stage: Arc<Stage>,
    backend: Box<dyn Backend>,
    (settings, telemetry): (&WorkerSettings, &WorkerTelemetry),
    shutdown: &Shutdown,
    on_ready: impl FnOnce(&Ready),
) -> Result<(), WorkerError> {
    let limits = limits(settings);
    let options = options((settings, telemetry), &limits, stage.n_stages, backend.useful_batch());
    let Connections { steps: bus, bulk } = &connections;
    // Before the subscriptions, whose refusals they tell.
    let (events, bulk_events) = (bus.events(), bulk.events());
    let (sender, bulk_ends) = open_bulk(bulk, &stage).await?;
    let metrics = &telemetry.metrics;
    let outlet = outlet(bus, sender, metrics.clone());
    let (inference, inference_events) =
        Inference::start(backend, Arc::clone(&stage), options, outlet)
            .map_err(|source| WorkerError::Thread { name: "inference", source })?;
    let mut worker = Worker::new(Arc::clone(&stage), limits, inference, metrics.clone());
    let interval = settings.announce_interval();
    let grammars = Grammars::of_shards(settings.shards.clone(), stage.vocab_size, &stage.eos_ids);
    let sources = (inference_events, bulk_ends, grammars);
    let mut intake = Intake::subscribe(bus, &stage, sources, interval, shutdown).await?;
    seen_by_broker(bus, events).await?;
    seen_by_broker(bulk, bulk_events).await?;
    worker.announce();
    send(bus, &mut worker, shutdown).await;
    tracing::info!(
        stage_index = %stage.index, id = %stage.worker, model = %stage.model, url = bus.url(),
        "worker is ready"
    );
    on_ready(&Ready {
        ready: true,
        role: "worker",
        id: stage.worker.clone(),
        stage: stage.index,
        model: stage.model.clone(),
    });
    let outcome = match drive(&connections, &mut worker, &mut intake, (shutdown, metrics)).await {
        Ok(()) => Ok(()),
        Err(error) => {
            // The fleet hears it at once, if the connection still stands.
            worker.leave(Instant::now());
            send(bus, &mut worker, shutdown).await;
            Err(error)
        }
    };
    let deadline = Duration::from_millis(settings.shutdown_ms);
    let ended = tokio::time::timeout(deadline, end(&connections, worker, intake, deadline)).await;
    let ended =
        ended.unwrap_or(Err(WorkerError::ShutdownDeadline { deadline_ms: settings.shutdown_ms }));
    outcome.and(ended)
}

/// Waits until the broker has taken in everything sent so far. A subscription that it has not seen
/// makes whoever hears that we are ready believe that we are dead. The broker handles a connection
/// in order, so a message to ourselves that comes back tells.
pub(crate) async fn seen_by_broker(
    bus: &Bus,
    mut connection: BusEvents,
) -> Result<(), WorkerError> {
    let inbox = bus.new_inbox();
    let mut echo = bus.subscribe(&inbox).await?;
    bus.publish_bytes(&inbox, None, Bytes::new()).await?;
    let refused = async {
        loop {
            match connection.next().await {
                Some(BusEvent::PermissionViolation(violation)) => return violation,
                Some(_) => {}
                None => std::future::pending().await,
            }
        }
    };
    let echoed = tokio::select! {
        biased;
        violation = refused => return Err(violation.into()),
        echoed = tokio::time::timeout(SUBSCRIBED_TIMEOUT, echo.next()) => echoed,
    };
    match echoed {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(WorkerError::BrokerClosed),
        Err(_) => Err(WorkerError::NoEcho { inbox, waited: SUBSCRIBED_TIMEOUT }),
    }
}

/// Makes both ends of the way of large results.
async fn open_bulk(bus: &Bus, stage: &Stage) -> Result<(BulkSender, BulkEnds), WorkerError> {
    let (sender, losses) = BulkSender::start(bus.clone(), BULK_BYTES).await?;
    let subject = stage.subjects.bulk(stage.index, &stage.worker);
    let steps = BulkReceiver::subscribe(bus.clone(), &subject).await?;
    Ok((sender, BulkEnds { steps, losses, connection: bus.events() }))
}

/// Takes in actions until the worker has left.
async fn drive(
    Connections { steps: bus, bulk }: &Connections,
    worker: &mut Worker,
    intake: &mut Intake,
    (shutdown, metrics): (&Shutdown, &WorkerMetrics),
) -> Result<(), WorkerError> {
    let generation = || bus.loss_generation() + bulk.loss_generation();
    let mut losses = generation();
    while !worker.has_left() {
        let action = intake.select().await?;
        let is_tick = matches!(action, Action::Tick);
        if let Action::Step(incoming) = &action {
            metrics.received.inc_by(incoming.payload.len() as u64);
        }
        worker.apply(action, Instant::now())?;
        for (order, constraint) in worker.take_uncompiled() {
            intake.compile(order, constraint);
        }
        if is_tick && !bus.is_connected() {
            // An announcement that waits for the broker is out of date when it leaves.
            worker.take_outbox();
        }
        send(bus, worker, shutdown).await;
        let slow_consumers = bus.slow_consumer_reports() + bulk.slow_consumer_reports();
        mirror(&metrics.slow_consumer, slow_consumers);
        mirror(&metrics.reconnects, bus.reconnects() + bulk.reconnects());
        if generation() != losses {
            losses = generation();
            tracing::warn!(
                slow_consumers,
                "messages may have been lost, gaps in step numbers will tell"
            );
        }
    }
    Ok(())
}

async fn end(
    Connections { steps, bulk }: &Connections,
    worker: Worker,
    intake: Intake,
    deadline: Duration,
) -> Result<(), WorkerError> {
    let counters = worker.counters();
    let thread = worker.into_inference().stop();
    intake.inference_ended().await;
    let joined = thread.join();
    for bus in [steps, bulk] {
        if let Err(error) = bus.drain(deadline).await {
            tracing::warn!(error = %error, "the last messages may not have left");
        }
    }
    tracing::info!(?counters, "worker has ended");
    joined.map_err(|_panic| WorkerError::InferenceEnded)
}

/// Sends what waits. A broker that is away must not keep the owner from hearing that it shall stop.
async fn send(bus: &Bus, worker: &mut Worker, shutdown: &Shutdown) {
    for message in worker.take_outbox() {
        let subject = message.subject.clone();
        let sent = if shutdown.stop.is_cancelled() {
            publish(bus, message).await
        } else {
            tokio::select! {
                sent = publish(bus, message) => sent,
                () = shutdown.stop.cancelled() => return,
            }
        };
        if let Err(error) = sent {
            tracing::warn!(%subject, error = %error, "message not sent");
        }
    }
}

async fn publish(bus: &Bus, message: Outgoing) -> Result<(), PublishError> {
    let Outgoing { subject, reply, payload } = message;
    match reply {
        Some(reply) => bus.publish_with_reply(&subject, &reply, payload).await,
        None => bus.publish_bytes(&subject, None, payload).await,
    }
}

/// The way of results from the inference thread: straight into the connection's queue, without a
/// detour over the owner. The thread waits a bounded time while the queue is full. Bulk goes to its
/// task.
fn outlet(
    bus: &Bus,
    sender: BulkSender,
    metrics: WorkerMetrics,
) -> impl FnMut(Outgoing, Manner) -> Result<(), PublishError> + Send + 'static {
    let (bus, runtime) = (bus.clone(), Handle::current());
    move |message, manner| match manner {
        Manner::Direct => {
            metrics.sent_direct.inc_by(message.payload.len() as u64);
            runtime.block_on(publish(&bus, message))
        }
        Manner::Bulk(on_arrival) => {
            let Outgoing { subject, reply, payload } = message;
            metrics.sent_bulk.inc_by(payload.len() as u64);
            sender.send(Bulk { subject, reply, payload, on_arrival })
        }
    }
}

fn limits(settings: &WorkerSettings) -> WorkerLimits {
    WorkerLimits {
        max_sessions: settings.max_sessions,
        queue_capacity: settings.queue_capacity,
        session_idle: Duration::from_secs(settings.session_idle_s),
        drain_deadline: Duration::from_millis(settings.drain_ms),
        announce_interval: settings.announce_interval(),
        device: settings.device.clone(),
        profile: settings.profile.profile().as_str().to_owned(),
        host: gethostname::gethostname().to_string_lossy().into_owned(),
    }
}

fn options(
    (settings, telemetry): (&WorkerSettings, &WorkerTelemetry),
    limits: &WorkerLimits,
    n_stages: u16,
    useful_batch: usize,
) -> InferenceOptions {
    let max_sessions = match settings.max_batch_sessions {
        0 => useful_batch,
        chosen => chosen,
    };
    InferenceOptions {
        command_capacity: limits.command_capacity(),
        policy: Policy {
            n_stages: usize::from(n_stages),
            max_sessions,
            batch_rows: settings.batch_rows,
            // An engine that runs sessions one by one only loses by mixing and splitting.
            mixes: useful_batch > 1,
            prefill_percent: settings.prefill_percent,
            decodes_per_prefill: settings.decodes_per_prefill,
        },
        wire_dtype: settings.wire_dtype,
        telemetry: telemetry.clone(),
    }
}

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod tests;
