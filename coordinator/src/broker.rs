//! From the table `[broker]` to a connection in the role of a coordinator.

use std::time::Duration;

use stagebus_bus::{Bus, BusOptions, Credentials, Tls, TlsIdentity};
use stagebus_schemas::ids::CoordinatorId;
use stagebus_settings::{BrokerSettings, Secret};

use crate::error::CoordinatorError;

/// Prefix of reply subjects; the broker's permissions allow it to this role only.
const INBOX_PREFIX: &str = "_INBOX.coordinator";

/// How long the start waits for a broker that is not there yet.
const CONNECT_WAIT: Duration = Duration::from_secs(10);

/// Messages that wait in one subscription. Head rows are bounded by the steps under way; prompts
/// beyond this number, come faster than they can be refused, are dropped by the client.
const SUBSCRIPTION_CAPACITY: usize = 8192;

/// Connects.
///
/// # Errors
/// [`CoordinatorError::SeedFile`] and [`CoordinatorError::Broker`].
pub(crate) async fn connect(
    settings: &BrokerSettings,
    id: &CoordinatorId,
) -> Result<Bus, CoordinatorError> {
    Ok(Bus::connect(options(settings, id)?).await?)
}

fn options(settings: &BrokerSettings, id: &CoordinatorId) -> Result<BusOptions, CoordinatorError> {
    let tls = &settings.tls;
    let identity = match (&tls.cert_file, &tls.key_file) {
        (Some(certificate), Some(key)) => {
            Some(TlsIdentity { certificate: certificate.clone(), key: key.clone() })
        }
        _ => None,
    };
    Ok(BusOptions {
        urls: settings.url.split(',').map(|url| url.trim().to_owned()).collect(),
        name: format!("coordinator {id}"),
        inbox_prefix: INBOX_PREFIX.to_owned(),
        credentials: credentials(settings)?,
        tls: Tls { required: tls.required, ca: tls.ca_file.clone(), identity },
        connect_wait: CONNECT_WAIT,
        subscription_capacity: SUBSCRIPTION_CAPACITY,
        ..BusOptions::default()
    })
}

fn credentials(settings: &BrokerSettings) -> Result<Credentials, CoordinatorError> {
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
        Err(source) => Err(CoordinatorError::SeedFile { path: path.clone(), source }),
    }
}
