//! Everything that a worker waits for, as one stream of actions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stagebus_bus::{
    BulkDelivery, BulkLosses, BulkReceiver, Bus, BusEvent, BusEvents, Delivery, SubscribeError,
    Subscription,
};
use stagebus_draft::constraint::{Constraint, Grammars};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::error::WorkerError;
use crate::inference::{InferenceEvent, OpenOrder};
use crate::shutdown::Shutdown;
use crate::stage::Stage;
use crate::worker::{Action, Incoming};

/// What comes over the connection for bulk.
#[derive(Debug)]
pub(crate) struct BulkEnds {
    /// Large steps for this worker.
    pub steps: BulkReceiver,
    /// Large results of this worker that did not arrive.
    pub losses: BulkLosses,
    /// News from the connection.
    pub connection: BusEvents,
}

/// The sources of actions.
#[derive(Debug)]
pub(crate) struct Intake {
    bulk: BulkEnds,
    steps: Subscription,
    control: Subscription,
    probe: Subscription,
    lost: Subscription,
    coordinators: Subscription,
    inference: mpsc::Receiver<InferenceEvent>,
    grammars: Arc<Grammars>,
    /// Constraints that are being compiled, each on a blocking thread: as many as sessions open.
    compiling: JoinSet<Action>,
    connection: BusEvents,
    ticks: Interval,
    drain: CancellationToken,
    stop: CancellationToken,
    drain_seen: bool,
}

impl Intake {
    /// Subscribes to the worker's subjects.
    ///
    /// # Errors
    /// [`SubscribeError`].
    pub(crate) async fn subscribe(
        bus: &Bus,
        stage: &Stage,
        (inference, bulk, grammars): (mpsc::Receiver<InferenceEvent>, BulkEnds, Grammars),
        announce_interval: Duration,
        shutdown: &Shutdown,
    ) -> Result<Self, SubscribeError> {
        let mut ticks = interval(announce_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Before the subscriptions, whose refusal it tells.
        let connection = bus.events();
        let subjects = &stage.subjects;
        Ok(Self {
            bulk,
            connection,
            steps: bus.subscribe_address(&subjects.step(stage.index, &stage.worker)).await?,
            control: bus.subscribe_address(&subjects.control(stage.index, &stage.worker)).await?,
            probe: bus.subscribe(&subjects.probe()).await?,
            lost: bus.subscribe(&subjects.lost_any()).await?,
            coordinators: bus.subscribe(&subjects.coordinator_all()).await?,
            inference,
            grammars: Arc::new(grammars),
            compiling: JoinSet::new(),
            ticks,
            drain: shutdown.drain.clone(),
            stop: shutdown.stop.clone(),
            drain_seen: false,
        })
    }

    /// Waits for what happens next.
    ///
    /// # Errors
    /// [`WorkerError::InferenceEnded`], [`WorkerError::BrokerClosed`],
    /// [`WorkerError::BrokerRefused`], [`WorkerError::Forbidden`].
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub(crate) async fn select(&mut self) -> Result<Action, WorkerError> {
        tokio::select! {
            action = step_or_control(&mut self.bulk.steps, &mut self.steps, &mut self.control) => {
                action
            }
            lost = self.bulk.losses.next() => {
                let subject = lost.ok_or(WorkerError::BrokerClosed)?;
                Ok(Action::Lost { subject, told: false })
            }
            delivery = self.probe.next() => incoming(delivery).map(|_| Action::Probe),
            delivery = self.lost.next() => {
                let delivery = delivery.ok_or(WorkerError::BrokerClosed)?;
                Ok(Action::Lost { subject: delivery.subject().to_owned(), told: !delivery.no_responders })
            }
            delivery = self.coordinators.next() => {
                let delivery = delivery.ok_or(WorkerError::BrokerClosed)?;
                Ok(delivery.decode().map_or(Action::Nothing, Action::Coordinator))
            }
            event = self.inference.recv() => {
                event.map(Action::Inference).ok_or(WorkerError::InferenceEnded)
            }
            Some(compiled) = self.compiling.join_next() => Ok(compiled.unwrap_or_else(|error| {
                // The coordinator hears nothing of this open, and asks again.
                tracing::error!(%error, "the compilation of a constraint has panicked");
                Action::Nothing
            })),
            _ = self.ticks.tick() => Ok(Action::Tick),
            event = self.connection.next() => connection(event),
            event = self.bulk.connection.next() => match event {
                // Everything else is said when the other connection stands again.
                Some(BusEvent::Connected) => Ok(Action::Nothing),
                event => connection(event),
            },
            () = self.drain.cancelled(), if !self.drain_seen => {
                self.drain_seen = true;
                Ok(Action::Drain)
            }
            () = self.stop.cancelled() => Ok(Action::Stop),
        }
    }

    /// Compiles the constraint of a session that opens.
    pub(crate) fn compile(&mut self, order: Box<OpenOrder>, constraint: Arc<Constraint>) {
        let grammars = Arc::clone(&self.grammars);
        self.compiling.spawn_blocking(move || {
            let guide = grammars.compile(&constraint);
            Action::Compiled { order, guide }
        });
    }

    /// Stops listening and waits for the end of the inference thread.
    pub(crate) async fn inference_ended(self) {
        let Self { mut inference, steps, control, .. } = self;
        // Whoever sends more hears at once that nobody listens.
        drop((steps, control));
        while inference.recv().await.is_some() {}
    }
}

fn connection(event: Option<BusEvent>) -> Result<Action, WorkerError> {
    match event {
        None | Some(BusEvent::Closed) => Err(WorkerError::BrokerClosed),
        Some(BusEvent::AuthRefused) => Err(WorkerError::BrokerRefused),
        Some(BusEvent::PermissionViolation(violation)) if violation.is_fatal() => {
            Err(violation.into())
        }
        Some(event) => Ok(Action::Connection(event)),
    }
}

/// Steps that are here go first: the answer to a question how far they are must count them. Large
/// ones go before others, which their sender may have sent once it knew that the large ones are here.
///
/// # Cancel safety
/// Nothing is lost when the future is dropped.
async fn step_or_control(
    bulk: &mut BulkReceiver,
    steps: &mut Subscription,
    control: &mut Subscription,
) -> Result<Action, WorkerError> {
    tokio::select! {
        biased;
        delivery = bulk.next() => {
            let BulkDelivery { payload, reply } = delivery.ok_or(WorkerError::BrokerClosed)?;
            Ok(Action::Step(Incoming { payload, reply, trace: None, arrived: Instant::now() }))
        }
        delivery = steps.next() => incoming(delivery).map(Action::Step),
        delivery = control.next() => incoming(delivery).map(Action::Control),
    }
}

fn incoming(delivery: Option<Delivery>) -> Result<Incoming, WorkerError> {
    let delivery = delivery.ok_or(WorkerError::BrokerClosed)?;
    let reply = delivery.reply().map(str::to_owned);
    let trace = delivery.trace();
    Ok(Incoming { payload: delivery.payload, reply, trace, arrived: Instant::now() })
}
