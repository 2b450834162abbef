//! From the table `[broker]` to the options of a connection.

use std::path::PathBuf;

use stagebus_settings::{BrokerSettings, Secret};

use crate::{BusOptions, Credentials, Tls, TlsIdentity};

/// Who connects. Each role has a prefix of its own for reply subjects, which the broker's
/// permissions allow to it alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Sends requests.
    Client,
    /// Drives sessions.
    Coordinator,
    /// Runs a stage.
    Worker,
}

impl Role {
    fn inbox_prefix(self) -> &'static str {
        match self {
            Self::Client => "_INBOX.client",
            Self::Coordinator => "_INBOX.coordinator",
            Self::Worker => "_INBOX.worker",
        }
    }
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

impl BusOptions {
    /// Options for a role from the settings; `name` is shown in the broker's lists.
    ///
    /// # Errors
    /// [`SeedError`].
    pub fn from_settings(
        settings: &BrokerSettings,
        role: Role,
        name: &str,
    ) -> Result<Self, SeedError> {
        let tls = &settings.tls;
        let identity = tls
            .cert_file
            .clone()
            .zip(tls.key_file.clone())
            .map(|(certificate, key)| TlsIdentity { certificate, key });
        Ok(Self {
            urls: settings.url.split(',').map(|url| url.trim().to_owned()).collect(),
            name: name.to_owned(),
            inbox_prefix: role.inbox_prefix().to_owned(),
            credentials: credentials(settings)?,
            tls: Tls { required: tls.required, ca: tls.ca_file.clone(), identity },
            ..Self::default()
        })
    }
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
        let options =
            BusOptions::from_settings(&settings, Role::Client, "test").expect("valid settings");
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
