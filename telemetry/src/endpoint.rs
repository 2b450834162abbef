//! The HTTP endpoint that Prometheus scrapes: `/metrics` and `/health`.
//!
//! ```text
//! Telemetry ─ TaskTracker ─▶ accepting task ─ JoinSet ─▶ one task per connection
//! ```
//! The accepting task ends with the token, and its connections with it. A connection carries one
//! request and has a deadline; while [`MAX_CONNECTIONS`] are open, others wait in the system's
//! queue.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::registry::Registry;
use stagebus_settings::ListenAddress;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::metrics::{CONTENT_TYPE, encode};

/// Connections at the same time: a few scrapers, and a person.
const MAX_CONNECTIONS: usize = 16;

/// How long a connection may take: a scrape is answered in less than a millisecond.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(10);

/// Pause after the system has refused a connection, for want of file handles most likely.
const REFUSED_PAUSE: Duration = Duration::from_millis(200);

/// Longest head of a request, in bytes: far above that of any scraper.
const MAX_HEAD_BYTES: usize = 8 << 10;

/// Most headers of a request.
const MAX_HEADERS: usize = 64;

/// The form of all other answers.
const PLAIN: &str = "text/plain; charset=utf-8";

/// Why the endpoint does not listen.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot listen on {address} for metrics: give another metrics.listen, or port 0 for any free one"
)]
pub struct EndpointError {
    /// The address.
    pub address: SocketAddr,
    /// Why.
    #[source]
    pub source: std::io::Error,
}

/// A listener that does not answer yet.
#[derive(Debug)]
pub(crate) struct Endpoint {
    listener: TcpListener,
    address: SocketAddr,
}

impl Endpoint {
    /// Listens, so that an address that is taken stops the start of the process.
    ///
    /// # Errors
    /// [`EndpointError`].
    pub(crate) async fn bind(listen: ListenAddress) -> Result<Self, EndpointError> {
        let failed = |source| EndpointError { address: listen.address(), source };
        let listener = TcpListener::bind(listen.address()).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address })
    }

    /// Where it listens; the port is the one that the system chose if any free one was asked for.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `stop` is cancelled.
    pub(crate) async fn serve(self, registry: Arc<Registry>, stop: CancellationToken) {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                Some(ended) = connections.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "a connection for metrics failed");
                    }
                }
                accepted = self.listener.accept(), if connections.len() < MAX_CONNECTIONS => {
                    match accepted {
                        Ok((stream, _)) => {
                            connections.spawn(answer(stream, Arc::clone(&registry)));
                        }
                        Err(error) => {
                            tracing::warn!(%error, "a connection for metrics was not accepted");
                            tokio::time::sleep(REFUSED_PAUSE).await;
                        }
                    }
                }
            }
        }
    }
}

async fn answer(stream: TcpStream, registry: Arc<Registry>) {
    match tokio::time::timeout(CONNECTION_DEADLINE, exchange(stream, &registry)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a connection for metrics broke"),
        Err(_) => tracing::debug!("a connection for metrics was too slow"),
    }
}

/// Reads one request and answers it. A body is left alone: nobody who is answered sends one.
async fn exchange(mut stream: TcpStream, registry: &Registry) -> std::io::Result<()> {
    let mut head = Vec::with_capacity(1 << 10);
    let answer = loop {
        if (&mut stream).take(room(&head)).read_buf(&mut head).await? == 0 {
            break Answer::new(400, PLAIN, "the request has no end, or is too long");
        }
        if let Some(answer) = respond(&head, registry) {
            break answer;
        }
    };
    stream.write_all(&answer.bytes()).await?;
    stream.shutdown().await
}

/// Bytes that may still come.
fn room(head: &[u8]) -> u64 {
    MAX_HEAD_BYTES.saturating_sub(head.len()) as u64
}

/// The answer to a request; nothing while its head has not come to its end.
fn respond(head: &[u8], registry: &Registry) -> Option<Answer> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return None,
        Err(_) => return Some(Answer::new(400, PLAIN, "this is no HTTP request")),
    }
    let path = request.path.unwrap_or_default();
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    let answer = match (request.method, path) {
        (Some("GET" | "HEAD"), "/metrics") => scrape(registry),
        (Some("GET" | "HEAD"), "/health") => Answer::new(200, PLAIN, "ok"),
        (Some("GET" | "HEAD"), _) => Answer::new(404, PLAIN, "only /metrics and /health"),
        _ => Answer::new(405, PLAIN, "only GET and HEAD"),
    };
    Some(Answer { is_head: request.method == Some("HEAD"), ..answer })
}

fn scrape(registry: &Registry) -> Answer {
    match encode(registry) {
        Ok(body) => Answer { status: 200, content: CONTENT_TYPE, body, is_head: false },
        Err(error) => {
            tracing::error!(%error, "metrics cannot be written");
            Answer::new(500, PLAIN, "metrics cannot be written")
        }
    }
}

/// What goes back.
struct Answer {
    status: u16,
    content: &'static str,
    body: String,
    /// Only the head is wanted.
    is_head: bool,
}

impl Answer {
    fn new(status: u16, content: &'static str, line: &str) -> Self {
        Self { status, content, body: format!("{line}\n"), is_head: false }
    }

    fn bytes(&self) -> Vec<u8> {
        let Self { status, content, body, is_head } = self;
        let reason = match status {
            200 => "OK",
            404 => "Not Found",
            405 => "Method Not Allowed\r\nAllow: GET, HEAD",
            500 => "Internal Server Error",
            _ => "Bad Request",
        };
        let n_bytes = body.len();
        let mut bytes = format!(
            "HTTP/1.1 {status} {reason}\r\nContent-Type: {content}\r\nContent-Length: {n_bytes}\r\n\
             Connection: close\r\n\r\n"
        );
        if !is_head {
            bytes.push_str(body);
        }
        bytes.into_bytes()
    }
}
