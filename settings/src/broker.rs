//! `[broker]`: where the broker is and how to log in.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::SettingsError;
use crate::secret::Secret;

/// The table `[broker]`, the same for every process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BrokerSettings {
    /// Address, `nats://host:port` or `tls://host:port`; several are separated by commas.
    pub url: String,
    /// A token, when the broker asks for one.
    pub token: Option<Secret>,
    /// User name, together with `password`.
    pub user: Option<String>,
    /// Password, together with `user`.
    pub password: Option<Secret>,
    /// File that holds an nkey seed.
    pub nkey_seed_file: Option<PathBuf>,
    /// Certificates.
    pub tls: TlsSettings,
}

/// The table `[broker.tls]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsSettings {
    /// Refuse a broker that does not offer TLS.
    pub required: bool,
    /// PEM file of the certificate authorities to trust besides the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM file of the own certificate, together with `key_file`.
    pub cert_file: Option<PathBuf>,
    /// PEM file of the own private key, together with `cert_file`.
    pub key_file: Option<PathBuf>,
}

impl Default for BrokerSettings {
    fn default() -> Self {
        Self {
            url: "nats://127.0.0.1:4222".to_owned(),
            token: None,
            user: None,
            password: None,
            nkey_seed_file: None,
            tls: TlsSettings::default(),
        }
    }
}

impl BrokerSettings {
    /// Checks what no single key can tell: pairs are complete and there is one way to log in.
    ///
    /// # Errors
    /// [`SettingsError::Incomplete`] for half a pair, [`SettingsError::Conflict`] for two ways to
    /// log in.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let pairs = [
            ("broker.user", self.user.is_some(), "broker.password", self.password.is_some()),
            (
                "broker.tls.cert_file",
                self.tls.cert_file.is_some(),
                "broker.tls.key_file",
                self.tls.key_file.is_some(),
            ),
        ];
        for (left, has_left, right, has_right) in pairs {
            if has_left != has_right {
                let (key, needs) = if has_left { (left, right) } else { (right, left) };
                return Err(SettingsError::Incomplete { key, needs });
            }
        }
        let ways: Vec<&'static str> = [
            ("broker.token", self.token.is_some()),
            ("broker.user", self.user.is_some()),
            ("broker.nkey_seed_file", self.nkey_seed_file.is_some()),
        ]
        .into_iter()
        .filter_map(|(key, set)| set.then_some(key))
        .collect();
        if ways.len() > 1 {
            return Err(SettingsError::Conflict { keys: ways });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_pair_and_two_logins_are_refused() {
        let user_only =
            BrokerSettings { user: Some("ann".to_owned()), ..BrokerSettings::default() };
        assert!(matches!(
            user_only.validate(),
            Err(SettingsError::Incomplete { key: "broker.user", needs: "broker.password" })
        ));
        let two = BrokerSettings {
            token: Some(Secret::new("t".to_owned())),
            nkey_seed_file: Some("seed".into()),
            ..BrokerSettings::default()
        };
        assert!(matches!(two.validate(), Err(SettingsError::Conflict { keys }) if keys.len() == 2));
        BrokerSettings::default().validate().expect("the defaults fit together");
    }

    #[test]
    fn debug_hides_secrets() {
        let settings = BrokerSettings {
            token: Some(Secret::new("hunter2".to_owned())),
            ..BrokerSettings::default()
        };
        assert!(!format!("{settings:?}").contains("hunter2"));
    }
}
