//! From the table `[broker]` to a connection.

use std::path::Path;

use anyhow::Context as _;
use stagebus_bus::{Bus, BusOptions, Credentials, Tls, TlsIdentity};
use stagebus_settings::{BrokerSettings, Secret};

/// Prefix of a client's reply subjects; `nats.conf` lets the client role use it.
const INBOX_PREFIX: &str = "_INBOX.client";

/// Connects as a client; `name` is shown in the broker's lists.
///
/// # Errors
/// A key file that cannot be read and a broker that cannot be reached or refuses us.
pub async fn connect(settings: &BrokerSettings, name: &str) -> anyhow::Result<Bus> {
    Ok(Bus::connect(options(settings, name)?).await?)
}

fn options(settings: &BrokerSettings, name: &str) -> anyhow::Result<BusOptions> {
    let tls = &settings.tls;
    let identity = match (&tls.cert_file, &tls.key_file) {
        (Some(certificate), Some(key)) => {
            Some(TlsIdentity { certificate: certificate.clone(), key: key.clone() })
        }
        _ => None,
    };
    Ok(BusOptions {
        urls: settings.url.split(',').map(|url| url.trim().to_owned()).collect(),
        name: name.to_owned(),
        inbox_prefix: INBOX_PREFIX.to_owned(),
        credentials: credentials(settings)?,
        tls: Tls { required: tls.required, ca: tls.ca_file.clone(), identity },
        ..BusOptions::default()
    })
}

fn credentials(settings: &BrokerSettings) -> anyhow::Result<Credentials> {
    if let Some(token) = &settings.token {
        return Ok(Credentials::Token(token.expose().to_owned()));
    }
    if let Some(user) = &settings.user {
        let password = settings.password.as_ref().map_or("", Secret::expose).to_owned();
        return Ok(Credentials::UserPassword { user: user.clone(), password });
    }
    match &settings.nkey_seed_file {
        Some(path) => Ok(Credentials::NkeySeed(read_seed(path)?)),
        None => Ok(Credentials::None),
    }
}

fn read_seed(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read broker.nkey_seed_file {}", path.display()))?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_reaches_the_connection() {
        let mut settings = BrokerSettings {
            url: "tls://a:1, tls://b:2".to_owned(),
            user: Some("ann".to_owned()),
            password: Some(Secret::new("p".to_owned())),
            ..BrokerSettings::default()
        };
        settings.tls.required = true;
        settings.tls.ca_file = Some("ca.pem".into());
        settings.tls.cert_file = Some("cert.pem".into());
        settings.tls.key_file = Some("key.pem".into());
        let options = options(&settings, "test").expect("valid settings");
        assert_eq!(options.urls, ["tls://a:1", "tls://b:2"]);
        let password = "p".to_owned();
        assert_eq!(
            options.credentials,
            Credentials::UserPassword { user: "ann".to_owned(), password }
        );
        let identity = TlsIdentity { certificate: "cert.pem".into(), key: "key.pem".into() };
        assert_eq!(
            options.tls,
            Tls { required: true, ca: Some("ca.pem".into()), identity: Some(identity) }
        );
    }

    #[test]
    fn a_missing_seed_file_is_named() {
        let settings = BrokerSettings {
            nkey_seed_file: Some("no/such.nk".into()),
            ..BrokerSettings::default()
        };
        let error = credentials(&settings).expect_err("no such file");
        assert!(error.to_string().contains("no/such.nk"), "{error}");
    }
}
