//! From the table `[broker]` to the options of a connection.

use std::path::PathBuf;

use stagebus_schemas::access::Role;
use stagebus_schemas::ids::ClientName;
use stagebus_settings::{BrokerSettings, Secret};

use crate::{BusOptions, Credentials, Tls, TlsIdentity};

/// Why the file that proves our identity cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SeedError {
    /// It cannot be read.
    #[error("cannot read broker.nkey_seed_file {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// It holds something else.
    #[error("broker.nkey_seed_file {} holds no nkey seed, expected the text that starts with SU",
        path.display())]
    NotASeed {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: nkeys::error::Error,
    },
}

impl BusOptions {
    /// Options for a role from the settings; `name` is shown in the broker's lists.
    ///
    /// # Errors
    /// [`SeedError`].
    pub fn from_settings(
        settings: &BrokerSettings,
        role: Role<'_>,
        name: &str,
    ) -> Result<Self, SeedError> {
        let tls = &settings.tls;
        let (credentials, holder) = credentials(settings)?;
        let identity = tls
            .cert_file
            .clone()
            .zip(tls.key_file.clone())
            .map(|(certificate, key)| TlsIdentity { certificate, key });
        Ok(Self {
            urls: settings.url.split(',').map(|url| url.trim().to_owned()).collect(),
            name: name.to_owned(),
            inbox_prefix: role.inbox_prefix(holder.as_ref()),
            credentials,
            tls: Tls { required: tls.required, ca: tls.ca_file.clone(), identity },
            ..Self::default()
        })
    }
}

/// The credentials, and the name under which the broker's permissions know their holder.
fn credentials(settings: &BrokerSettings) -> Result<(Credentials, Option<ClientName>), SeedError> {
    if let Some(token) = &settings.token {
        return Ok((Credentials::Token(token.expose().to_owned()), None));
    }
    if let Some(user) = &settings.user {
        let password = settings.password.as_ref().map_or("", Secret::expose).to_owned();
        // A name that is no subject token gets no inbox of its own.
        let name = ClientName::new(user.as_str()).ok();
        return Ok((Credentials::UserPassword { user: user.clone(), password }, name));
    }
    let Some(path) = &settings.nkey_seed_file else { return Ok((Credentials::None, None)) };
    let seed = std::fs::read_to_string(path)
        .map_err(|source| SeedError::Unreadable { path: path.clone(), source })?;
    let seed = seed.trim();
    let key = nkeys::KeyPair::from_seed(seed)
        .map_err(|source| SeedError::NotASeed { path: path.clone(), source })?;
    Ok((Credentials::NkeySeed(seed.to_owned()), ClientName::new(key.public_key()).ok()))
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

    #[test]
    fn answers_to_a_client_go_to_an_inbox_of_its_own() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("seed.nk");
        let key = nkeys::KeyPair::new_user();
        std::fs::write(&file, format!("{}\n", key.seed().expect("a seed"))).expect("writable");
        let with_key =
            BrokerSettings { nkey_seed_file: Some(file.clone()), ..BrokerSettings::default() };
        let prefix = |settings: &BrokerSettings, role| {
            BusOptions::from_settings(settings, role, "test").expect("valid").inbox_prefix
        };
        assert_eq!(prefix(&with_key, Role::Client), format!("_INBOX.client.{}", key.public_key()));
        let model = "m-1".parse().expect("a valid name");
        assert_eq!(prefix(&with_key, Role::Worker(&model)), "_INBOX.worker.m-1");
        assert_eq!(prefix(&BrokerSettings::default(), Role::Client), "_INBOX.client");
        let user = |user: &str| BrokerSettings {
            user: Some(user.to_owned()),
            password: Some(Secret::new("p".to_owned())),
            ..BrokerSettings::default()
        };
        assert_eq!(prefix(&user("ann"), Role::Client), "_INBOX.client.ann");
        assert_eq!(prefix(&user("a.>"), Role::Client), "_INBOX.client");

        std::fs::write(&file, "SUNOSEED").expect("writable");
        let error = credentials(&with_key).expect_err("no seed");
        assert!(matches!(error, SeedError::NotASeed { .. }), "{error}");
        assert!(!format!("{error:?}").contains("SUNOSEED"), "{error:?}");
    }
}
