//! Everything that a worker waits for, as one stream of actions.

use std::time::{Duration, Instant};

use stagebus_bus::{Bus, BusEvent, BusEvents, Delivery, SubscribeError, Subscription};
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::error::WorkerError;
use crate::inference::InferenceEvent;
use crate::shutdown::Shutdown;
use crate::stage::Stage;
use crate::worker::{Action, Incoming};

/// The sources of actions.
#[derive(Debug)]
pub(crate) struct Intake {
    steps: Subscription,
    control: Subscription,
    probe: Subscription,
    lost: Subscription,
    coordinators: Subscription,
    inference: mpsc::Receiver<InferenceEvent>,
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
        inference: mpsc::Receiver<InferenceEvent>,
        announce_interval: Duration,
        shutdown: &Shutdown,
    ) -> Result<Self, SubscribeError> {
        let mut ticks = interval(announce_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Before the subscriptions, whose refusal it tells.
        let connection = bus.events();
        Ok(Self {
            connection,
            steps: bus.subscribe(&stage.subjects.step(stage.index, &stage.worker)).await?,
            control: bus.subscribe(&stage.subjects.control(stage.index, &stage.worker)).await?,
            probe: bus.subscribe(&stage.subjects.probe()).await?,
            lost: bus.subscribe(&stage.subjects.lost_any()).await?,
            coordinators: bus.subscribe(&stage.subjects.coordinator_all()).await?,
            inference,
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
            action = step_or_control(&mut self.steps, &mut self.control) => action,
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
            _ = self.ticks.tick() => Ok(Action::Tick),
            event = self.connection.next() => match event {
                None | Some(BusEvent::Closed) => Err(WorkerError::BrokerClosed),
                Some(BusEvent::AuthRefused) => Err(WorkerError::BrokerRefused),
                Some(BusEvent::PermissionViolation(violation)) if violation.is_fatal() => {
                    Err(violation.into())
                }
                Some(event) => Ok(Action::Connection(event)),
            },
            () = self.drain.cancelled(), if !self.drain_seen => {
                self.drain_seen = true;
                Ok(Action::Drain)
            }
            () = self.stop.cancelled() => Ok(Action::Stop),
        }
    }

    /// Stops listening and waits for the end of the inference thread.
    pub(crate) async fn inference_ended(self) {
        let Self { mut inference, .. } = self;
        while inference.recv().await.is_some() {}
    }
}

/// Steps that are here go first: the answer to a question how far they are must count them.
///
/// # Cancel safety
/// Nothing is lost when the future is dropped.
async fn step_or_control(
    steps: &mut Subscription,
    control: &mut Subscription,
) -> Result<Action, WorkerError> {
    tokio::select! {
        biased;
        delivery = steps.next() => incoming(delivery).map(Action::Step),
        delivery = control.next() => incoming(delivery).map(Action::Control),
    }
}

fn incoming(delivery: Option<Delivery>) -> Result<Incoming, WorkerError> {
    let delivery = delivery.ok_or(WorkerError::BrokerClosed)?;
    let reply = delivery.reply().map(str::to_owned);
    Ok(Incoming { payload: delivery.payload, reply, arrived: Instant::now() })
}
