//! From the table `[broker]` to the options of a connection.

use std::path::PathBuf;
use std::time::Duration;

use stagebus_bus::{BusOptions, Credentials, Tls, TlsIdentity};
use stagebus_settings::{BrokerSettings, Secret};

/// Prefix of a worker's reply subjects; `nats.conf` lets the worker role use it.
const INBOX_PREFIX: &str = "_INBOX.worker";

/// Messages that wait in one subscription. Enough for every step that the queue takes, so the
/// queue's "overloaded" comes before a silent drop.
fn subscription_capacity(queue_capacity: u32) -> usize {
    queue_capacity as usize + 256
}

/// A file that proves our identity cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read broker.nkey_seed_file {}", path.display())]
pub struct SeedError {
    /// The file.
    pub path: PathBuf,
    /// The system's reason.
    #[source]
    pub source: std::io::Error,
}

/// Turns the settings into options.
pub(crate) fn options(
    settings: &BrokerSettings,
    name: &str,
    queue_capacity: u32,
    connect_wait: Duration,
) -> Result<BusOptions, SeedError> {
    let tls = &settings.tls;
    let identity = tls
        .cert_file
        .clone()
        .zip(tls.key_file.clone())
        .map(|(certificate, key)| TlsIdentity { certificate, key });
    Ok(BusOptions {
        urls: settings.url.split(',').map(|url| url.trim().to_owned()).collect(),
        name: name.to_owned(),
        inbox_prefix: INBOX_PREFIX.to_owned(),
        credentials: credentials(settings)?,
        tls: Tls { required: tls.required, ca: tls.ca_file.clone(), identity },
        subscription_capacity: subscription_capacity(queue_capacity),
        connect_wait,
        ..BusOptions::default()
    })
}

fn credentials(settings: &BrokerSettings) -> Result<Credentials, SeedError> {
    if let Some(token) = &settings.token {
        return Ok(Credentials::Token(token.expose().to_owned()));
    }
    if let Some(user) = &settings.user {
        let password = settings.password.as_ref().map_or("", Secret::expose).to_owned();
        return Ok(Credentials::UserPassword { user: user.clone(), password });
    }
    let Some(path) = &settings.nkey_seed_file else { return Ok(Credentials::None) };
    match std::fs::read_to_string(path) {
        Ok(seed) => Ok(Credentials::NkeySeed(seed.trim().to_owned())),
        Err(source) => Err(SeedError { path: path.clone(), source }),
    }
}
