//! What processes show of themselves: metrics for Prometheus.
//!
//! [`names`] lists every metric; [`WorkerMetrics`], [`CoordinatorMetrics`] and [`GatewayMetrics`] are
//! the handles that the owners of state change as things happen; [`Telemetry`] shows them over HTTP
//! where `metrics.listen` says so, and a gateway shows its own beside its API. Nothing here knows
//! what these processes do.

mod endpoint;
mod metrics;
pub mod names;

use std::net::SocketAddr;
use std::sync::Arc;

use stagebus_settings::MetricsSettings;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use endpoint::EndpointError;
pub use metrics::{
    CONTENT_TYPE, CoordinatorMetrics, Counter, GatewayMetrics, Gauge, Outcome, Recovery,
    WorkerMetrics, encode, mirror,
};
pub use prometheus_client::registry::Registry;

use endpoint::Endpoint;

/// The telemetry of one process.
#[derive(Debug)]
pub struct Telemetry {
    /// What is shown; [`Telemetry::serve`] takes it.
    pub registry: Registry,
    endpoint: Option<Endpoint>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Telemetry {
    /// Listens where the settings say so; [`Telemetry::serve`] answers.
    ///
    /// # Errors
    /// [`EndpointError`].
    pub async fn start(metrics: &MetricsSettings) -> Result<Self, EndpointError> {
        let endpoint = match metrics.listen {
            Some(listen) => Some(Endpoint::bind(listen).await?),
            None => None,
        };
        Ok(Self {
            registry: Registry::default(),
            endpoint,
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        })
    }

    /// Where metrics are to be had, if anywhere.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.endpoint.as_ref().map(Endpoint::address)
    }

    /// Shows what is registered from now on, until [`Telemetry::end`].
    pub fn serve(&mut self) {
        let Some(endpoint) = self.endpoint.take() else { return };
        tracing::info!(address = %endpoint.address(), "metrics can be scraped");
        let registry = Arc::new(std::mem::take(&mut self.registry));
        self.tasks.spawn(endpoint.serve(registry, self.stop.clone()));
    }

    /// Ends what runs here.
    pub async fn end(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
