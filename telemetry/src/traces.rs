//! Spans on their way to an OpenTelemetry collector, by OTLP over HTTP.
//!
//! ```text
//! owner tasks, inference thread ─ ended spans ─▶ bounded queue ─▶ thread of the SDK ─▶ collector
//! ```
//! Spans are made with the SDK itself and not from the log's spans: a request lives over many
//! actions of its owner, and the log's filters shall not decide what is traced. A span that finds
//! the queue full is dropped and counted by the SDK, which tells it in the log. Without a collector
//! there is no thread, and a [`Tracer`] is an empty option.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use opentelemetry::trace::{
    Span as _, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _,
    TraceFlags, TraceId, TraceState, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{
    ExporterBuildError, Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use stagebus_schemas::trace::TraceContext;
use stagebus_settings::{Collector, SampleRatio};

/// How long the collector may take to answer.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the end of a process waits for the last spans to leave.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Largest answer of a collector that is read: it says which spans it refused.
const MAX_ANSWER_BYTES: u64 = 64 << 10;

/// Name of the instrumentation.
const SCOPE: &str = "stagebus";

/// Makes spans, or none; clones make them for the same collector.
#[derive(Debug, Clone, Default)]
pub struct Tracer(Option<SdkTracer>);

/// The same moment by both clocks. Spans have the times of the wall clock: what a process makes of a
/// trace has one of these, so that a clock that is set meanwhile moves no span against another.
#[derive(Debug, Clone, Copy)]
struct WallClock {
    at: Instant,
    time: SystemTime,
}

/// A span that has not ended. It ends when it is dropped, at that moment.
#[derive(Debug)]
pub struct Span {
    inner: opentelemetry_sdk::trace::Span,
    clock: WallClock,
    tracer: SdkTracer,
}

impl Tracer {
    /// Begins a span of the outermost kind, in the client's trace or in a new one. There is none if
    /// the client does not record its own, or the request is not in the sample.
    #[must_use]
    pub fn begin(
        &self,
        name: &'static str,
        parent: Option<TraceContext>,
        at: Instant,
    ) -> Option<Span> {
        let tracer = self.0.as_ref()?;
        span(tracer, (name, SpanKind::Server), parent.map(remote), at, WallClock::now())
    }

    /// Begins a span within one of another process.
    #[must_use]
    pub fn within(&self, parent: TraceContext, name: &'static str, at: Instant) -> Option<Span> {
        let tracer = self.0.as_ref()?;
        span(tracer, (name, SpanKind::Internal), Some(remote(parent)), at, WallClock::now())
    }
}

fn span(
    tracer: &SdkTracer,
    (name, kind): (&'static str, SpanKind),
    parent: Option<SpanContext>,
    at: Instant,
    clock: WallClock,
) -> Option<Span> {
    let around = match parent {
        Some(parent) => Context::new().with_remote_span_context(parent),
        None => Context::new(),
    };
    let builder = SpanBuilder::from_name(name).with_kind(kind).with_start_time(clock.read(at));
    let inner = tracer.build_with_context(builder, &around);
    inner.is_recording().then(|| Span { inner, clock, tracer: tracer.clone() })
}

impl WallClock {
    fn now() -> Self {
        Self { at: Instant::now(), time: SystemTime::now() }
    }

    /// The time of a moment before or after.
    fn read(self, at: Instant) -> SystemTime {
        match at.checked_duration_since(self.at) {
            Some(later) => self.time + later,
            None => self.time.checked_sub(self.at - at).unwrap_or(self.time),
        }
    }
}

impl Span {
    /// What whoever goes on with the work has to know.
    #[must_use]
    pub fn context(&self) -> TraceContext {
        let context = self.inner.span_context();
        TraceContext {
            trace_id: u128::from_be_bytes(context.trace_id().to_bytes()),
            span_id: u64::from_be_bytes(context.span_id().to_bytes()),
            is_sampled: context.is_sampled(),
        }
    }

    /// Begins a span within this one.
    #[must_use]
    pub fn within(&self, name: &'static str, at: Instant) -> Option<Span> {
        let around = Some(self.inner.span_context().clone());
        span(&self.tracer, (name, SpanKind::Internal), around, at, self.clock)
    }

    /// Notes a number or a word; never what was asked or answered.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.inner.set_attribute(KeyValue::new(key, value));
    }

    /// Notes that something happened.
    pub fn event(&mut self, name: &'static str, at: Instant) {
        let at = self.clock.read(at);
        self.inner.add_event_with_timestamp(name, at, Vec::new());
    }

    /// Notes a failure by its class.
    pub fn fail(&mut self, class: &'static str) {
        self.inner.set_attribute(KeyValue::new("error.type", class));
        self.inner.set_status(Status::error(class));
    }

    /// Ends it.
    pub fn end(mut self, at: Instant) {
        let at = self.clock.read(at);
        self.inner.end_with_timestamp(at);
    }
}

/// The span of another process.
fn remote(context: TraceContext) -> SpanContext {
    SpanContext::new(
        TraceId::from_bytes(context.trace_id.to_be_bytes()),
        SpanId::from_bytes(context.span_id.to_be_bytes()),
        TraceFlags::default().with_sampled(context.is_sampled),
        true,
        TraceState::NONE,
    )
}

/// Why nothing can be traced.
#[derive(Debug, thiserror::Error)]
#[error("spans cannot be sent to {url}: give telemetry.otlp_endpoint another address, or none")]
pub struct ExporterError {
    /// Where to.
    pub url: String,
    /// Why.
    #[source]
    pub source: ExporterBuildError,
}

/// The way of spans to the collector.
#[derive(Debug)]
pub(crate) struct Exporter {
    provider: SdkTracerProvider,
    url: String,
}

impl Exporter {
    /// Starts the SDK's thread. Whether the collector is there shows when the first spans leave.
    ///
    /// # Errors
    /// [`ExporterError`].
    pub(crate) fn start(
        collector: &Collector,
        ratio: SampleRatio,
        service: &'static str,
    ) -> Result<Self, ExporterError> {
        let url = collector.traces_url();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Client::new())
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(&url)
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .map_err(|source| ExporterError { url: url.clone(), source })?;
        let ratio = Sampler::TraceIdRatioBased(ratio.get());
        let resource = Resource::builder()
            .with_service_name(service)
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_sampler(Sampler::ParentBased(Box::new(ratio)))
            .with_resource(resource.build())
            .build();
        Ok(Self { provider, url })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn tracer(&self) -> Tracer {
        Tracer(Some(self.provider.tracer(SCOPE)))
    }

    /// Sends what waits and ends the thread, within [`FLUSH_TIMEOUT`].
    pub(crate) async fn end(self) {
        let Self { provider, url } = self;
        let flush = move || provider.shutdown_with_timeout(FLUSH_TIMEOUT);
        match tokio::task::spawn_blocking(flush).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%url, %error, "the last spans were not sent"),
            Err(error) => tracing::warn!(%url, %error, "the last spans were not sent"),
        }
    }
}

/// The HTTP client of the SDK's thread, which may block.
#[derive(Debug)]
struct Client {
    agent: ureq::Agent,
    /// Whether the last batch was not taken: why is told once, until one is.
    is_failing: AtomicBool,
}

impl Client {
    fn new() -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(EXPORT_TIMEOUT))
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None);
        Self { agent: config.build().into(), is_failing: AtomicBool::new(false) }
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, ureq::Error> {
        let (head, body) = request.into_parts();
        let answer = self.agent.run(Request::from_parts(head, &body[..]))?;
        let (head, mut body) = answer.into_parts();
        let body = body.with_config().limit(MAX_ANSWER_BYTES).read_to_vec()?;
        Ok(Response::from_parts(head, body.into()))
    }
}

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let url = request.uri().clone();
        let answer = self.send(request);
        let failed = match &answer {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(format!("the collector answered {}", answer.status())),
            Err(error) => Some(error.to_string()),
        };
        let was_failing = self.is_failing.swap(failed.is_some(), Ordering::Relaxed);
        match failed {
            Some(why) if !was_failing => tracing::warn!(%url, %why, "spans are lost"),
            None if was_failing => tracing::info!(%url, "spans are taken again"),
            _ => {}
        }
        Ok(answer?)
    }
}
