//! How to connect.

use std::time::Duration;

use crate::credentials::{Credentials, Tls};
use crate::switch::Switch;

/// How to connect. The defaults reach a broker on this machine without credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BusOptions {
    /// Addresses of the broker, `nats://host:port` or `tls://host:port`. A user and password in
    /// an address are moved to `credentials` when that is empty.
    pub urls: Vec<String>,
    /// Name of this connection in the broker's lists and logs.
    pub name: String,
    /// Prefix of reply subjects; the broker's permissions may demand one per role.
    pub inbox_prefix: String,
    /// What proves our identity.
    pub credentials: Credentials,
    /// Encryption.
    pub tls: Tls,
    /// Lets a host other than this machine be used without TLS and credentials.
    pub allow_insecure: bool,
    /// Interval of pings; a silent broker counts as gone after three. Three intervals must be
    /// longer than the longest bulk transfer queued before a ping.
    pub ping_interval: Duration,
    /// Messages that wait in one subscription; the newest are dropped when it is full, which
    /// raises [`Bus::loss_generation`](crate::Bus::loss_generation).
    pub subscription_capacity: usize,
    /// Messages that wait for the socket; publishing waits when it is full.
    pub client_capacity: usize,
    /// Shortest wait before a second attempt to reconnect (the first is immediate); up to twice as
    /// long by chance, so that a fleet does not return in one wave, and doubled at each attempt.
    pub reconnect_min: Duration,
    /// Longest wait between attempts to reconnect.
    pub reconnect_max: Duration,
    /// Time for one attempt to connect, with TLS and authentication.
    pub connect_timeout: Duration,
    /// How long [`Bus::connect`](crate::Bus::connect) goes on while the broker cannot be reached;
    /// zero for one attempt. A refusal ends it at once.
    pub connect_wait: Duration,
    /// Longest wait of a publish or subscribe for a connection that is away or full.
    pub publish_timeout: Duration,
    /// The way to other connections of this process.
    pub switch: Option<Switch>,
}

impl Default for BusOptions {
    fn default() -> Self {
        Self {
            urls: vec!["nats://127.0.0.1:4222".to_owned()],
            name: "stagebus".to_owned(),
            inbox_prefix: "_INBOX".to_owned(),
            credentials: Credentials::None,
            tls: Tls::default(),
            allow_insecure: false,
            ping_interval: Duration::from_secs(5),
            subscription_capacity: 1024,
            client_capacity: 128,
            reconnect_min: Duration::from_millis(25),
            reconnect_max: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(5),
            connect_wait: Duration::ZERO,
            publish_timeout: Duration::from_secs(2),
            switch: None,
        }
    }
}

impl BusOptions {
    /// Makes options for one address, with a name for the broker's logs.
    #[must_use]
    pub fn new(url: impl Into<String>, name: impl Into<String>) -> Self {
        Self { urls: vec![url.into()], name: name.into(), ..Self::default() }
    }
}
