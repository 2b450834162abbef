//! One connection to the broker.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Client, ConnectErrorKind, ConnectOptions};
use tokio::time::Instant;

use crate::address::{self, Addresses};
use crate::credentials::Credentials;
use crate::error::{BusError, CloseError};
use crate::events::{BusEvents, Signals};
use crate::options::BusOptions;
use crate::switch::Switch;
use crate::violation::Refusals;

/// How often a caller that waits for the connection looks again; the client offers no wake-up.
const STATE_CHECK: Duration = Duration::from_millis(5);

/// One connection to the broker; clones share it.
#[derive(Clone)]
pub struct Bus {
    pub(crate) client: Client,
    pub(crate) signals: Arc<Signals>,
    pub(crate) publish_timeout: Duration,
    pub(crate) switch: Option<Switch>,
    /// Messages that wait in one subscription.
    pub(crate) capacity: usize,
    url: Arc<str>,
}

impl std::fmt::Debug for Bus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bus").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Bus {
    /// Connects, going on for [`BusOptions::connect_wait`] while nobody answers.
    ///
    /// # Errors
    /// [`BusError`]: the address or the TLS files are wrong, the broker is not to be reached,
    /// refuses us, or TLS fails. A host other than this machine without TLS and credentials is
    /// [`BusError::Insecure`].
    pub async fn connect(options: BusOptions) -> Result<Self, BusError> {
        let addresses = address::check(&options)?;
        check_tls_files(&options).await?;
        let deadline = Instant::now() + options.connect_wait;
        let mut attempt = 0;
        loop {
            attempt += 1;
            match connect_once(&options, &addresses).await {
                Ok(bus) => return Ok(bus),
                Err(error @ (BusError::Unreachable { .. } | BusError::TimedOut { .. })) => {
                    let delay = backoff(&options, attempt + 1);
                    if Instant::now() + delay > deadline {
                        return Err(error);
                    }
                    tokio::time::sleep(delay).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the broker's address or addresses, without secrets.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the largest message that the broker accepts, in bytes, headers included.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        self.client.max_payload()
    }

    /// Tells whether the connection stands at this moment.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Returns a number that rises whenever messages to us may have been lost: by a full
    /// subscription or by a broken connection. It says that there was a gap, not how large.
    #[must_use]
    pub fn loss_generation(&self) -> u64 {
        self.signals.losses()
    }

    /// Returns how often a full subscription was reported; many drops may be one report.
    #[must_use]
    pub fn slow_consumer_reports(&self) -> u64 {
        self.signals.slow_consumers()
    }

    /// Returns how often the connection was made again.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.signals.reconnects()
    }

    /// Reads the connection's events from now on.
    #[must_use]
    pub fn events(&self) -> BusEvents {
        self.signals.subscribe()
    }

    /// Hears of what the broker forbids from now on.
    pub(crate) fn refusals(&self) -> Refusals {
        Refusals::new(self.events())
    }

    /// Makes a subject for answers that nobody else uses.
    #[must_use]
    pub fn new_inbox(&self) -> String {
        self.client.new_inbox()
    }

    /// Waits until everything published so far is handed to the operating system. It says nothing
    /// about arrival. Not needed after a publish: messages leave at once.
    ///
    /// # Errors
    /// [`CloseError::Timeout`], [`CloseError::Closed`].
    pub async fn flush(&self, timeout: Duration) -> Result<(), CloseError> {
        match tokio::time::timeout(timeout, self.client.flush()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(CloseError::Closed),
            Err(_) => Err(CloseError::Timeout { timeout }),
        }
    }

    /// Ends the connection for all clones: sends what is queued, ends all subscriptions (what
    /// they already hold can still be read), and waits until the connection is closed.
    ///
    /// # Errors
    /// [`CloseError::Timeout`] if messages may be unsent, [`CloseError::Closed`] if it was closed
    /// before.
    pub async fn drain(&self, timeout: Duration) -> Result<(), CloseError> {
        // The client closes without another write once it drains, so the queue goes first.
        let drained = async {
            self.client.flush().await.map_err(|_closed| CloseError::Closed)?;
            self.client.drain().await.map_err(|_closed| CloseError::Closed)?;
            self.signals.closed().await;
            Ok(())
        };
        match tokio::time::timeout(timeout, drained).await {
            Ok(result) => result,
            Err(_) => Err(CloseError::Timeout { timeout }),
        }
    }

    /// Waits for a standing connection.
    ///
    /// # Errors
    /// The deadline passed.
    pub(crate) async fn connected(&self, deadline: Instant) -> Result<(), DeadlinePassed> {
        while !self.is_connected() {
            if Instant::now() >= deadline {
                return Err(DeadlinePassed);
            }
            tokio::time::sleep(STATE_CHECK).await;
        }
        Ok(())
    }
}

/// The connection did not come back in time.
pub(crate) struct DeadlinePassed;

async fn connect_once(options: &BusOptions, addresses: &Addresses) -> Result<Bus, BusError> {
    let signals = Arc::new(Signals::new());
    let client = client_options(options, addresses, &signals)
        .connect(addresses.servers.as_slice())
        .await
        .map_err(|error| connect_error(options, addresses, error))?;
    Ok(Bus {
        client,
        signals,
        publish_timeout: options.publish_timeout,
        switch: options.switch.clone(),
        capacity: options.subscription_capacity,
        url: addresses.display().into(),
    })
}

fn client_options(
    options: &BusOptions,
    addresses: &Addresses,
    signals: &Arc<Signals>,
) -> ConnectOptions {
    let (on_event, delays) = (Arc::clone(signals), options.clone());
    let mut client = ConnectOptions::new()
        .name(&options.name)
        .custom_inbox_prefix(&options.inbox_prefix)
        .ping_interval(options.ping_interval)
        .subscription_capacity(options.subscription_capacity)
        .client_capacity(options.client_capacity)
        .connection_timeout(options.connect_timeout)
        .request_timeout(None)
        .require_tls(addresses.require_tls)
        .reconnect_delay_callback(move |attempt| backoff(&delays, attempt))
        .event_callback(move |event| {
            on_event.on_event(event);
            std::future::ready(())
        });
    client = match &addresses.credentials {
        Credentials::None => client,
        Credentials::Token(token) => client.token(token.clone()),
        Credentials::UserPassword { user, password } => {
            client.user_and_password(user.clone(), password.clone())
        }
        Credentials::NkeySeed(seed) => client.nkey(seed.clone()),
    };
    if let Some(ca) = &options.tls.ca {
        client = client.add_root_certificates(ca.clone());
    }
    if let Some(identity) = &options.tls.identity {
        client = client.add_client_certificate(identity.certificate.clone(), identity.key.clone());
    }
    if addresses.require_tls {
        client
    } else {
        // A broker names its cluster mates; without TLS we go nowhere that was not configured.
        client.ignore_discovered_servers()
    }
}

async fn check_tls_files(options: &BusOptions) -> Result<(), BusError> {
    let identity = options.tls.identity.as_ref();
    let files = [
        options.tls.ca.as_deref(),
        identity.map(|identity| identity.certificate.as_path()),
        identity.map(|identity| identity.key.as_path()),
    ];
    for path in files.into_iter().flatten() {
        check_readable(path).await?;
    }
    Ok(())
}

async fn check_readable(path: &Path) -> Result<(), BusError> {
    match tokio::fs::File::open(path).await {
        Ok(_file) => Ok(()),
        Err(source) => Err(BusError::TlsFile { path: path.to_owned(), source }),
    }
}

/// Classifies a failed attempt by the client's kind and, for I/O, by the type of the cause.
fn connect_error(
    options: &BusOptions,
    addresses: &Addresses,
    error: async_nats::ConnectError,
) -> BusError {
    let url = addresses.display();
    let is_tls = std::error::Error::source(&error)
        .and_then(|source| source.downcast_ref::<std::io::Error>())
        .and_then(std::io::Error::get_ref)
        .is_some_and(|cause| cause.is::<async_nats::rustls::Error>());
    match error.kind() {
        ConnectErrorKind::AuthorizationViolation => BusError::AuthRefused {
            url,
            offered: addresses.credentials.kind(),
            source: error.into(),
        },
        ConnectErrorKind::Authentication => BusError::NkeySeed { url, source: error.into() },
        ConnectErrorKind::Tls => BusError::Tls { url, source: error.into() },
        ConnectErrorKind::Io if is_tls => BusError::Tls { url, source: error.into() },
        ConnectErrorKind::ServerParse => BusError::Url { url, source: error.into() },
        ConnectErrorKind::TimedOut => BusError::TimedOut { url, timeout: options.connect_timeout },
        ConnectErrorKind::Io | ConnectErrorKind::Dns | ConnectErrorKind::MaxReconnects => {
            BusError::Unreachable { url, source: error.into() }
        }
    }
}

/// Wait before an attempt: none before the first, then doubling from a random point between the
/// minimum and twice the minimum.
fn backoff(options: &BusOptions, attempt: usize) -> Duration {
    let Some(doublings) = attempt.checked_sub(2) else {
        return Duration::ZERO;
    };
    let doublings = u32::try_from(doublings).unwrap_or(u32::MAX).min(16);
    let percent = RandomState::new().build_hasher().finish() % 101;
    let first =
        options.reconnect_min + options.reconnect_min / 100 * u32::try_from(percent).unwrap_or(0);
    first.saturating_mul(1 << doublings).min(options.reconnect_max)
}
