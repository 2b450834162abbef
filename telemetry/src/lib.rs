//! What processes show of themselves: metrics for Prometheus, and spans for an OpenTelemetry
//! collector.
//!
//! [`names`] lists every metric; [`WorkerMetrics`], [`CoordinatorMetrics`] and [`GatewayMetrics`] are
//! the handles that the owners of state change as things happen; [`Telemetry`] shows them over HTTP
//! where `metrics.listen` says so, and a gateway shows its own beside its API. A [`Tracer`] makes
//! spans where `telemetry.otlp_endpoint` names a collector. Nothing here knows what these processes
//! do.

mod endpoint;
mod metrics;
pub mod names;
mod traces;

use std::net::SocketAddr;
use std::sync::Arc;

use stagebus_settings::{MetricsSettings, TelemetrySettings, environment};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use endpoint::EndpointError;
pub use metrics::{
    CONTENT_TYPE, CoordinatorMetrics, Counter, GatewayMetrics, Gauge, Outcome, Recovery,
    WorkerMetrics, encode, mirror,
};
pub use prometheus_client::registry::Registry;
pub use traces::{ExporterError, Span, Tracer};

use endpoint::Endpoint;
use traces::Exporter;

/// Why a process cannot show what it is asked to.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// Nobody can scrape metrics.
    #[error(transparent)]
    Metrics(#[from] EndpointError),
    /// Nothing can be traced.
    #[error(transparent)]
    Traces(#[from] ExporterError),
}

/// What a worker shows of itself.
#[derive(Debug, Clone, Default)]
pub struct WorkerTelemetry {
    /// What it counts and measures.
    pub metrics: WorkerMetrics,
    /// Makes its spans.
    pub tracer: Tracer,
}

/// What a coordinator shows of itself.
#[derive(Debug, Clone, Default)]
pub struct CoordinatorTelemetry {
    /// What it counts and measures.
    pub metrics: CoordinatorMetrics,
    /// Makes its spans.
    pub tracer: Tracer,
}

/// The telemetry of one process.
#[derive(Debug)]
pub struct Telemetry {
    registry: Registry,
    endpoint: Option<Endpoint>,
    exporter: Option<Exporter>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Telemetry {
    /// Listens for scrapers where the settings say so ([`Telemetry::serve`] answers), and opens the
    /// way to a collector; `service` is the name of the process there.
    ///
    /// # Errors
    /// [`TelemetryError`].
    pub async fn start(
        metrics: &MetricsSettings,
        traces: &TelemetrySettings,
        service: &'static str,
    ) -> Result<Self, TelemetryError> {
        let endpoint = match metrics.listen {
            Some(listen) => Some(Endpoint::bind(listen).await?),
            None => None,
        };
        let exporter = match &traces.otlp_endpoint {
            Some(collector) => Some(Exporter::start(collector, traces.sample_ratio, service)?),
            None => {
                if let Some(value) = environment::otlp_endpoint() {
                    let variable = environment::OTLP_ENDPOINT;
                    tracing::warn!(
                        variable,
                        ?value,
                        "no address of OTLP over HTTP, no spans are sent"
                    );
                }
                None
            }
        };
        if let Some(exporter) = &exporter {
            tracing::info!(url = exporter.url(), "spans are sent to a collector");
        }
        Ok(Self {
            registry: Registry::default(),
            endpoint,
            exporter,
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        })
    }

    /// What a worker of a stage in this process shows.
    #[must_use]
    pub fn worker(&mut self, stage: u16) -> WorkerTelemetry {
        let metrics = WorkerMetrics::registered(&mut self.registry, stage);
        WorkerTelemetry { metrics, tracer: self.tracer() }
    }

    /// What the coordinator of this process shows.
    #[must_use]
    pub fn coordinator(&mut self) -> CoordinatorTelemetry {
        let metrics = CoordinatorMetrics::registered(&mut self.registry);
        CoordinatorTelemetry { metrics, tracer: self.tracer() }
    }

    fn tracer(&self) -> Tracer {
        self.exporter.as_ref().map(Exporter::tracer).unwrap_or_default()
    }

    /// Where metrics are to be had, if anywhere.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.endpoint.as_ref().map(Endpoint::address)
    }

    /// Answers scrapers with what is registered, until [`Telemetry::end`].
    pub fn serve(&mut self) {
        let Some(endpoint) = self.endpoint.take() else { return };
        tracing::info!(address = %endpoint.address(), "metrics can be scraped");
        let registry = Arc::new(std::mem::take(&mut self.registry));
        self.tasks.spawn(endpoint.serve(registry, self.stop.clone()));
    }

    /// Ends what runs here, and sends the last spans, which takes three seconds at most.
    pub async fn end(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        if let Some(exporter) = self.exporter {
            exporter.end().await;
        }
    }
}
