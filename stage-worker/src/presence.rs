//! What the fleet hears of a worker before it serves, and what the worker hears of the fleet.

use std::pin::pin;
use std::time::{Duration, Instant};

use bytes::Bytes;
use stagebus_bus::{Bus, Subscription};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::messages::fleet::{WorkerAnnouncement, WorkerState};
use stagebus_schemas::subjects::Subjects;
use stagebus_view::FleetView;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::error::WorkerError;

/// A worker that does not serve yet, as the fleet sees it.
#[derive(Debug)]
pub(crate) struct Presence {
    bus: Bus,
    announcements: Subscription,
    probes: Subscription,
    view: FleetView,
    /// What it tells of itself; nothing before it has chosen a stage.
    told: Option<WorkerAnnouncement>,
    every: Duration,
}

impl Presence {
    /// Listens to the fleet of a model, or of all models, and asks the models `asked` who is there.
    ///
    /// # Errors
    /// [`WorkerError::Subscribe`], [`WorkerError::Publish`].
    pub(crate) async fn start(
        bus: &Bus,
        model: Option<&ModelName>,
        asked: &[ModelName],
        every: Duration,
    ) -> Result<Self, WorkerError> {
        let scope = model.map_or_else(Subjects::any_model, Subjects::new);
        let presence = Self {
            announcements: bus.subscribe(&scope.fleet_all()).await?,
            probes: bus.subscribe(&scope.probe()).await?,
            bus: bus.clone(),
            view: FleetView::default(),
            told: None,
            every,
        };
        for model in asked {
            bus.publish_bytes(&Subjects::new(model).probe(), None, Bytes::new()).await?;
        }
        Ok(presence)
    }

    /// The workers that were heard of a moment ago.
    pub(crate) fn workers(&self) -> impl Iterator<Item = &WorkerAnnouncement> {
        self.view.workers().map(|heard| &heard.announcement)
    }

    /// Tells the fleet something else than before; a place that was taken before is given up.
    pub(crate) async fn tell(&mut self, told: WorkerAnnouncement) {
        if let Some(before) = self.told.take()
            && before.worker != told.worker
        {
            self.say(&WorkerAnnouncement { state: WorkerState::Leaving, ..before }).await;
        }
        self.say(&told).await;
        self.told = Some(told);
    }

    /// Says good-bye.
    pub(crate) async fn leave(&mut self) {
        if let Some(told) = self.told.take() {
            self.say(&WorkerAnnouncement { state: WorkerState::Leaving, ..told }).await;
        }
    }

    async fn say(&self, told: &WorkerAnnouncement) {
        let subject = Subjects::new(&told.model).worker(told.stage, &told.worker);
        if let Err(error) = self.bus.publish(&subject, told).await {
            // The next announcement comes soon.
            tracing::warn!(%subject, error = %error, "announcement not sent");
        }
    }

    /// Hears the fleet and is heard by it for a while.
    pub(crate) async fn listen(&mut self, window: Duration) {
        // It ends with the time, or with the connection.
        drop(timeout(window, self.present()).await);
    }

    /// Hears the fleet and is heard by it while `work` runs.
    pub(crate) async fn during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        tokio::select! {
            done = &mut work => return done,
            () = self.present() => {}
        }
        work.await
    }

    /// Hears the fleet and is heard by it, as long as the connection is not closed.
    ///
    /// # Cancel safety
    /// An announcement may be lost when the future is dropped; the next one comes soon.
    async fn present(&mut self) {
        let mut ticks = interval(self.every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                heard = self.announcements.next() => {
                    let Some(heard) = heard else { return };
                    let (subject, now) = (heard.subject(), Instant::now());
                    if let Err(error) = self.view.hear(subject, &heard.payload, now) {
                        tracing::debug!(error = %error, "nothing is learnt from a message");
                    }
                }
                Some(_probe) = self.probes.next() => self.repeat().await,
                _ = ticks.tick() => {
                    self.view.forget_silent(Instant::now());
                    self.repeat().await;
                }
            }
        }
    }

    async fn repeat(&self) {
        if let Some(told) = &self.told {
            self.say(told).await;
        }
    }
}
