//! An OpenTelemetry collector of a few lines: it takes OTLP over HTTP and keeps the spans.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// What the collector answers.
const TAKEN: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// A span as it came.
#[derive(Debug, Clone)]
pub struct Received {
    /// Name of the process that sent it.
    pub service: String,
    /// What it is.
    pub name: String,
    /// Its trace.
    pub trace_id: u128,
    /// Its id.
    pub span_id: u64,
    /// The span that it is within.
    pub parent: Option<u64>,
    /// Notes, as text.
    pub attributes: BTreeMap<String, String>,
    /// Names of what happened within it.
    pub events: Vec<String>,
    /// Start and end, in nanoseconds.
    pub time: (u64, u64),
}

/// A running collector.
#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    kept: Arc<Mutex<Kept>>,
    _tasks: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Kept {
    spans: Vec<Received>,
    failures: Vec<String>,
}

impl Collector {
    /// Listens on a free port of this machine.
    ///
    /// # Errors
    /// There is none.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let kept = Arc::new(Mutex::new(Kept::default()));
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(listener, Arc::clone(&kept)));
        Ok(Self { address, kept, _tasks: tasks })
    }

    /// Its address, as processes take it.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The spans that have come so far.
    ///
    /// # Errors
    /// Something came that was no spans.
    pub fn spans(&self) -> Result<Vec<Received>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(kept.failures.is_empty(), "{:?}", kept.failures);
        Ok(kept.spans.clone())
    }
}

async fn serve(listener: TcpListener, kept: Arc<Mutex<Kept>>) {
    while let Ok((stream, _)) = listener.accept().await {
        if let Err(error) = take(stream, &kept).await {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.failures.push(format!("{error:#}"));
        }
    }
}

/// Reads one request, keeps its spans and answers it.
async fn take(mut stream: TcpStream, kept: &Mutex<Kept>) -> Result<()> {
    let mut bytes = Vec::new();
    let (head, body) = loop {
        ensure!(stream.read_buf(&mut bytes).await? > 0, "half a request");
        let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let head = String::from_utf8(bytes[..end].to_vec())?.to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        let n_bytes: usize = length.context("no length")?.trim().parse()?;
        if bytes.len() >= end + 4 + n_bytes {
            break (head, bytes[end + 4..].to_vec());
        }
    };
    ensure!(head.starts_with("post /v1/traces http/1.1"), "{head}");
    ensure!(head.contains("content-type: application/x-protobuf"), "{head}");
    let spans = received(ExportTraceServiceRequest::decode(&body[..])?)?;
    kept.lock().unwrap_or_else(PoisonError::into_inner).spans.extend(spans);
    stream.write_all(TAKEN).await?;
    Ok(stream.shutdown().await?)
}

fn received(request: ExportTraceServiceRequest) -> Result<Vec<Received>> {
    let mut all = Vec::new();
    for of_process in request.resource_spans {
        let resource = texts(of_process.resource.context("no resource")?.attributes)?;
        let service = resource.get("service.name").context("no service")?;
        for span in of_process.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            all.push(one(service.clone(), span)?);
        }
    }
    Ok(all)
}

fn one(service: String, span: Span) -> Result<Received> {
    let parent = match span.parent_span_id.as_slice() {
        [] => None,
        id => Some(u64::from_be_bytes(id.try_into()?)),
    };
    Ok(Received {
        service,
        name: span.name,
        trace_id: u128::from_be_bytes(span.trace_id.as_slice().try_into()?),
        span_id: u64::from_be_bytes(span.span_id.as_slice().try_into()?),
        parent,
        attributes: texts(span.attributes)?,
        events: span.events.into_iter().map(|event| event.name).collect(),
        time: (span.start_time_unix_nano, span.end_time_unix_nano),
    })
}

fn texts(attributes: Vec<KeyValue>) -> Result<BTreeMap<String, String>> {
    let text = |value: Option<AnyValue>| match value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => Ok(text),
        Some(Value::IntValue(number)) => Ok(number.to_string()),
        Some(Value::DoubleValue(number)) => Ok(number.to_string()),
        other => bail!("{other:?} is not expected"),
    };
    attributes.into_iter().map(|pair| Ok((pair.key, text(pair.value)?))).collect()
}
