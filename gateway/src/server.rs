//! Connections: accepted, bounded in number and in time, encrypted if there is a certificate.
//!
//! HTTP/1.1 only; a proxy in front may speak what it likes.
//!
//! ```text
//! serve ──accepts──▶ connection task (one each, on the tracker)
//!   │ stop: no more are accepted; each finishes what it is doing and closes
//!   └ cut:  after the time to drain, each ends where it is
//! ```

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::{BoxError, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::config::ServerTls;
use crate::error::GatewayError;
use crate::gateway::Shared;
use crate::router;

/// Pause after the system could not give out a connection, as when it has no more file handles.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long connections that are cut off may take to notice.
const CUT_WAIT: Duration = Duration::from_secs(5);

/// Largest head of a request, in bytes.
const MAX_HEAD: usize = 32 << 10;

/// Reads certificate and key; nothing if none are given.
///
/// # Errors
/// A file that cannot be read, or a key that does not belong to the certificate.
pub(crate) fn load_tls(tls: &ServerTls) -> Result<Option<TlsAcceptor>, GatewayError> {
    let (Some(cert_file), Some(key_file)) = (&tls.cert_file, &tls.key_file) else {
        return Ok(None);
    };
    let failed = |path: &Path| {
        let path: PathBuf = path.to_owned();
        move |source| GatewayError::TlsFile { path, source }
    };
    let certificates = CertificateDer::pem_file_iter(cert_file)
        .and_then(|all| all.collect::<Result<Vec<_>, _>>())
        .map_err(failed(cert_file))?;
    let key = PrivateKeyDer::from_pem_file(key_file).map_err(failed(key_file))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(certificates, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(TlsAcceptor::from(Arc::new(config))))
}

/// Serves connections until `stop` is cancelled, then lets them finish within the time to drain.
///
/// # Errors
/// [`GatewayError::DrainDeadline`] if some had to be cut off.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    gateway: Shared,
    stop: CancellationToken,
) -> Result<(), GatewayError> {
    let drain = gateway.settings.drain();
    let room = Arc::new(Semaphore::new(gateway.settings.max_connections));
    let (connections, cut) = (TaskTracker::new(), CancellationToken::new());
    let router = router::make(Arc::clone(&gateway));
    let server = Arc::new(Server { tls, router, gateway, stop: stop.clone(), cut: cut.clone() });
    while let Some((stream, permit)) = next_connection(&listener, &room, &stop).await {
        let server = Arc::clone(&server);
        connections.spawn(async move {
            server.connection(stream).await;
            drop(permit);
        });
    }
    // Whoever comes now is refused at once.
    drop(listener);
    connections.close();
    if timeout(drain, connections.wait()).await.is_ok() {
        return Ok(());
    }
    let n_connections = connections.len();
    cut.cancel();
    if timeout(CUT_WAIT, connections.wait()).await.is_err() {
        warn!(n_connections = connections.len(), "connections do not end");
    }
    Err(GatewayError::DrainDeadline { n_connections })
}

/// Waits for the next connection; nothing once it is to stop. While there is no room none is
/// accepted: the system keeps some waiting and refuses the rest.
async fn next_connection(
    listener: &TcpListener,
    room: &Arc<Semaphore>,
    stop: &CancellationToken,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let accept = async {
        // The semaphore is never closed.
        let permit = Arc::clone(room).acquire_owned().await.ok()?;
        loop {
            match listener.accept().await {
                Ok((stream, _)) => return Some((stream, permit)),
                Err(error) => {
                    warn!(%error, "a connection cannot be accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => None,
        accepted = accept => accepted,
    }
}

/// What all connections share.
struct Server {
    tls: Option<TlsAcceptor>,
    router: Router,
    gateway: Shared,
    /// Connections end after what they are doing.
    stop: CancellationToken,
    /// Connections end at once.
    cut: CancellationToken,
}

impl Server {
    async fn connection(&self, stream: TcpStream) {
        let metrics = &self.gateway.metrics;
        metrics.connections.inc();
        if let Err(error) = self.serve(stream).await {
            // Clients come and go as they like, and nothing here can be mended.
            debug!(%error, "connection ended early");
        }
        metrics.connections.dec();
    }

    async fn serve(&self, stream: TcpStream) -> Result<(), BoxError> {
        // A token is small and must not wait for the next one.
        stream.set_nodelay(true)?;
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.gateway.settings.write_timeout()));
        let stream = Box::pin(stream);
        let Some(tls) = &self.tls else { return self.requests(stream).await };
        let limit = self.gateway.settings.header_timeout();
        let stream = tokio::select! {
            stream = timeout(limit, tls.accept(stream)) => stream??,
            () = self.stop.cancelled() => return Ok(()),
        };
        self.requests(stream).await
    }

    /// Answers the requests of a connection, one after the other.
    async fn requests<I>(&self, stream: I) -> Result<(), BoxError>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let service = TowerToHyperService::new(self.router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.gateway.settings.header_timeout())
            .max_header_size(MAX_HEAD)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => return Ok(ended?),
            () = self.stop.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        tokio::select! {
            ended = connection => Ok(ended?),
            () = self.cut.cancelled() => Ok(()),
        }
    }
}
