//! What all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use stagebus_bus::Bus;
use stagebus_schemas::ids::{ModelName, RequestId};
use stagebus_schemas::subjects::Subjects;
use stagebus_telemetry::{GatewayMetrics, Registry};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::api_error::ApiError;
use crate::config::GatewaySettings;
use crate::fleet::{FleetDocument, Model, Models};
use crate::keys::ApiKeys;
use crate::readiness::Readiness;
use crate::text::Texts;

/// Cancellations that wait for the connection. Beyond it they are counted and left to the
/// coordinator, which notices by itself that nobody hears the events.
pub(crate) const MAX_CANCELS: usize = 4096;

/// Questions for readiness that wait for the one answer; more are told that it is unknown.
pub(crate) const MAX_PROBES: usize = 64;

/// The shared state, as handlers have it.
pub(crate) type Shared = Arc<Gateway>;

/// What all requests share.
#[derive(Debug)]
pub(crate) struct Gateway {
    pub(crate) settings: GatewaySettings,
    pub(crate) bus: Bus,
    pub(crate) keys: Option<ApiKeys>,
    pub(crate) texts: Texts,
    pub(crate) metrics: GatewayMetrics,
    /// What shows the metrics.
    pub(crate) registry: Registry,
    models: watch::Receiver<Models>,
    fleet: watch::Receiver<FleetDocument>,
    answers: Arc<Semaphore>,
    cancels: mpsc::Sender<Cancel>,
    probes: mpsc::Sender<oneshot::Sender<Readiness>>,
    began: Instant,
    /// When the last token came, in milliseconds since the start and one; 0 before the first.
    last_token: AtomicU64,
}

/// A request that is to be ended.
#[derive(Debug)]
pub(crate) struct Cancel {
    model: ModelName,
    request: RequestId,
}

/// The ends of the channels that the gateway's own tasks hold.
#[derive(Debug)]
pub(crate) struct TaskEnds {
    pub(crate) models: watch::Receiver<Models>,
    pub(crate) fleet: watch::Receiver<FleetDocument>,
    pub(crate) cancels: mpsc::Sender<Cancel>,
    pub(crate) probes: mpsc::Sender<oneshot::Sender<Readiness>>,
}

/// Room for some answers; given back when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    gateway: Shared,
    n: u32,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.gateway.metrics.answers.dec_by(self.n.into());
    }
}

impl Gateway {
    pub(crate) fn new(
        settings: GatewaySettings,
        bus: Bus,
        keys: Option<ApiKeys>,
        texts: Texts,
        ends: TaskEnds,
    ) -> Self {
        let TaskEnds { models, fleet, cancels, probes } = ends;
        let mut registry = Registry::default();
        Self {
            answers: Arc::new(Semaphore::new(settings.max_requests)),
            metrics: GatewayMetrics::registered(&mut registry),
            registry,
            began: Instant::now(),
            last_token: AtomicU64::new(0),
            settings,
            bus,
            keys,
            texts,
            models,
            fleet,
            cancels,
            probes,
        }
    }

    /// The models that are served.
    pub(crate) fn models(&self) -> Models {
        self.models.borrow().clone()
    }

    /// The fleet as JSON, as it is and as it changes; the stream ends with the gateway.
    pub(crate) fn fleet(&self) -> watch::Receiver<FleetDocument> {
        self.fleet.clone()
    }

    /// What is known of a model that is served.
    pub(crate) fn model(&self, name: &ModelName) -> Option<Model> {
        self.models.borrow().iter().find(|model| model.name == *name).cloned()
    }

    /// Whether a model should be served: it was a moment ago, or the settings name it.
    pub(crate) fn is_expected(&self, name: &ModelName) -> bool {
        self.settings.models.contains(name) || self.model(name).is_some()
    }

    /// Reads the name of a model that may be asked here.
    ///
    /// # Errors
    /// No model can have this name, or the settings leave it out.
    pub(crate) fn allowed_model(&self, name: &str) -> Result<ModelName, ApiError> {
        let allowed = &self.settings.models;
        ModelName::new(name)
            .ok()
            .filter(|model| allowed.is_empty() || allowed.contains(model))
            .ok_or_else(|| ApiError::no_model(name))
    }

    /// Takes room for `n` answers.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn take_place(self: &Arc<Self>, n: u32) -> Result<Place, ApiError> {
        let permit = Arc::clone(&self.answers)
            .try_acquire_many_owned(n)
            .map_err(|_none_left| ApiError::busy(self.settings.max_requests))?;
        self.metrics.answers.inc_by(n.into());
        Ok(Place { gateway: Arc::clone(self), n, _permit: permit })
    }

    /// Ends a request whose client is gone. Never waits.
    pub(crate) fn cancel(&self, model: ModelName, request: RequestId) {
        self.metrics.cancelled.inc();
        if self.cancels.try_send(Cancel { model, request }).is_err() {
            self.metrics.cancels_lost.inc();
        }
    }

    /// Notes that a token came.
    pub(crate) fn token_came(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_token.store(now.saturating_add(1), Ordering::Relaxed);
    }

    /// Whether a token came within a time that ends now.
    pub(crate) fn token_came_within(&self, time: Duration) -> bool {
        let at = self.last_token.load(Ordering::Relaxed);
        let age = self.began.elapsed().saturating_sub(Duration::from_millis(at));
        at > 0 && age < time
    }

    /// Asks whether requests can be answered.
    pub(crate) async fn readiness(&self) -> Readiness {
        let (ask, answer) = oneshot::channel();
        match self.probes.try_send(ask) {
            Ok(()) => answer.await.unwrap_or(Readiness::Unknown),
            Err(_) => Readiness::Unknown,
        }
    }
}

/// Publishes cancellations, one after the other, until `ended` is cancelled and none is left.
pub(crate) async fn send_cancels(
    bus: Bus,
    mut cancels: mpsc::Receiver<Cancel>,
    ended: CancellationToken,
) {
    loop {
        let cancel = tokio::select! {
            biased;
            cancel = cancels.recv() => cancel,
            () = ended.cancelled() => None,
        };
        let Some(Cancel { model, request }) = cancel else { return };
        let subject = Subjects::new(&model).cancel(&request);
        if let Err(error) = bus.publish_bytes(&subject, None, Bytes::new()).await {
            warn!(subject, %error, "cancellation was not sent");
        }
    }
}
