//! The table `[gateway]`: where to listen, who may ask, and every bound.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagebus_schemas::ids::ModelName;
use stagebus_settings::Secret;

/// The table `[gateway]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewaySettings {
    /// Address and port; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Certificate of the server.
    pub tls: ServerTls,
    /// Says that a proxy in front of the gateway ends TLS; needed for an address that other
    /// machines reach, where the gateway has no certificate itself.
    pub tls_in_front: bool,
    /// File of the keys that clients must show, as names and SHA-256.
    pub api_keys_file: Option<PathBuf>,
    /// Keys themselves, separated by commas; meant for the environment.
    pub api_keys: Option<Secret>,
    /// Origins whose pages may ask from a browser; none if empty.
    pub cors_origins: Vec<String>,
    /// Models that may be asked; all that the broker has if empty.
    pub models: Vec<ModelName>,
    /// Folders of shard sets whose tokenizers serve `/tokenize` and `/detokenize`.
    pub shards: Vec<PathBuf>,
    /// Connections at the same time; more wait to be accepted.
    pub max_connections: usize,
    /// Answers under way at the same time; more are refused with status 429.
    pub max_requests: usize,
    /// Answers that one request may ask for.
    pub max_choices: u32,
    /// Largest body of a request, in bytes.
    pub max_body_bytes: usize,
    /// How long a client may take to send the head of a request, and stay idle between two, in
    /// milliseconds.
    pub header_timeout_ms: u64,
    /// How long a client may take to send the body, in milliseconds.
    pub body_timeout_ms: u64,
    /// How long a client may take to read what waits for it, in milliseconds.
    pub write_timeout_ms: u64,
    /// How long an answer may take, in milliseconds.
    pub request_timeout_ms: u64,
    /// How long answers that are under way may take to finish at shutdown, in milliseconds.
    pub drain_ms: u64,
}

/// The table `[gateway.tls]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerTls {
    /// PEM file of the certificate and those that signed it, together with `key_file`.
    pub cert_file: Option<PathBuf>,
    /// PEM file of the private key, together with `cert_file`.
    pub key_file: Option<PathBuf>,
}

impl Default for GatewaySettings {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8000)),
            tls: ServerTls::default(),
            tls_in_front: false,
            api_keys_file: None,
            api_keys: None,
            cors_origins: Vec::new(),
            models: Vec::new(),
            shards: Vec::new(),
            max_connections: 1024,
            max_requests: 256,
            max_choices: 16,
            max_body_bytes: 1 << 20,
            header_timeout_ms: 30_000,
            body_timeout_ms: 30_000,
            write_timeout_ms: 30_000,
            request_timeout_ms: 600_000,
            drain_ms: 30_000,
        }
    }
}

/// A value of `[gateway]` that cannot work, or values that do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// A number is out of its range.
    #[error("gateway.{key} is {found}, expected {least} to {most}")]
    Range {
        /// The key.
        key: &'static str,
        /// Its value.
        found: u64,
        /// Least value.
        least: u64,
        /// Greatest value.
        most: u64,
    },
    /// A key was given without its partner.
    #[error("gateway.{key} is set but gateway.{needs} is not")]
    Incomplete {
        /// The key that is set.
        key: &'static str,
        /// The key that is missing.
        needs: &'static str,
    },
    /// Other machines could ask without a key, or read along.
    #[error(
        "gateway.listen is {listen}, which other machines reach, and needs {missing}; see \
         docs/gateway.md"
    )]
    Insecure {
        /// The address.
        listen: SocketAddr,
        /// What is missing.
        missing: &'static str,
    },
    /// An origin is not one.
    #[error("gateway.cors_origins has {found:?}, expected an origin like https://example.org")]
    Origin {
        /// The text.
        found: String,
    },
}

impl GatewaySettings {
    /// Checks the ranges of all keys, and that whoever may reach the address is kept out or known.
    ///
    /// # Errors
    /// The first [`SettingError`] found.
    pub fn validate(&self) -> Result<(), SettingError> {
        const DAY_MS: u64 = 24 * 60 * 60 * 1000;
        let checks = [
            ("max_connections", self.max_connections as u64, 1, 1 << 20),
            ("max_requests", self.max_requests as u64, 1, 1 << 20),
            ("max_choices", u64::from(self.max_choices), 1, 128),
            ("max_body_bytes", self.max_body_bytes as u64, 1, 64 << 20),
            ("header_timeout_ms", self.header_timeout_ms, 1, DAY_MS),
            ("body_timeout_ms", self.body_timeout_ms, 1, DAY_MS),
            ("write_timeout_ms", self.write_timeout_ms, 1, DAY_MS),
            ("request_timeout_ms", self.request_timeout_ms, 1, DAY_MS),
            ("drain_ms", self.drain_ms, 0, DAY_MS),
        ];
        for (key, found, least, most) in checks {
            if !(least..=most).contains(&found) {
                return Err(SettingError::Range { key, found, least, most });
            }
        }
        let has_certificate = match (&self.tls.cert_file, &self.tls.key_file) {
            (Some(_), Some(_)) => true,
            (None, None) => false,
            (Some(_), None) => {
                return Err(SettingError::Incomplete {
                    key: "tls.cert_file",
                    needs: "tls.key_file",
                });
            }
            (None, Some(_)) => {
                return Err(SettingError::Incomplete {
                    key: "tls.key_file",
                    needs: "tls.cert_file",
                });
            }
        };
        let listen = self.listen;
        if !listen.ip().is_loopback() {
            if !self.has_keys() {
                let missing = "API keys (gateway.api_keys_file or gateway.api_keys)";
                return Err(SettingError::Insecure { listen, missing });
            }
            if !has_certificate && !self.tls_in_front {
                let missing =
                    "TLS (gateway.tls, or gateway.tls_in_front if a proxy in front ends it)";
                return Err(SettingError::Insecure { listen, missing });
            }
        }
        match self.cors_origins.iter().find(|origin| !is_origin(origin)) {
            Some(found) => Err(SettingError::Origin { found: found.clone() }),
            None => Ok(()),
        }
    }

    /// Whether clients must show a key.
    #[must_use]
    pub const fn has_keys(&self) -> bool {
        self.api_keys_file.is_some() || self.api_keys.is_some()
    }

    pub(crate) const fn header_timeout(&self) -> Duration {
        Duration::from_millis(self.header_timeout_ms)
    }

    pub(crate) const fn body_timeout(&self) -> Duration {
        Duration::from_millis(self.body_timeout_ms)
    }

    pub(crate) const fn write_timeout(&self) -> Duration {
        Duration::from_millis(self.write_timeout_ms)
    }

    pub(crate) const fn request_timeout(&self) -> Duration {
        Duration::from_millis(self.request_timeout_ms)
    }

    pub(crate) const fn drain(&self) -> Duration {
        Duration::from_millis(self.drain_ms)
    }
}

/// Whether a text is a scheme and an authority and nothing else, as browsers send it.
fn is_origin(text: &str) -> bool {
    let authority = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    authority.is_some_and(|authority| {
        !authority.is_empty()
            && authority
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl FnOnce(&mut GatewaySettings)) -> Result<(), SettingError> {
        let mut settings = GatewaySettings::default();
        change(&mut settings);
        settings.validate()
    }

    #[test]
    fn the_defaults_are_valid_and_a_wrong_value_is_named() {
        check(|_| {}).expect("the defaults");
        let error = check(|settings| settings.max_requests = 0).expect_err("none at all");
        assert!(matches!(error, SettingError::Range { key: "max_requests", .. }), "{error}");
        let error = check(|s| s.tls.key_file = Some("k".into())).expect_err("half a pair");
        assert!(matches!(error, SettingError::Incomplete { key: "tls.key_file", .. }), "{error}");
    }

    #[test]
    fn an_address_that_others_reach_needs_keys_and_tls() {
        let open = |settings: &mut GatewaySettings| {
            settings.listen = "0.0.0.0:8000".parse().expect("an address");
        };
        let keys = |settings: &mut GatewaySettings| settings.api_keys_file = Some("keys".into());
        let missing = |result: Result<(), SettingError>| match result {
            Err(SettingError::Insecure { missing, .. }) => missing,
            other => panic!("{other:?}"),
        };
        assert!(missing(check(open)).contains("API keys"));
        assert!(
            missing(check(|s| {
                open(s);
                keys(s);
            }))
            .contains("TLS")
        );
        check(|s| {
            open(s);
            keys(s);
            s.tls_in_front = true;
        })
        .expect("a proxy in front");
        check(|s| {
            open(s);
            s.api_keys = Some(Secret::new("k".to_owned()));
            s.tls = ServerTls { cert_file: Some("c".into()), key_file: Some("k".into()) };
        })
        .expect("a certificate");
    }

    #[test]
    fn origins_are_what_browsers_send() {
        for good in ["https://example.org", "http://localhost:3000", "http://[::1]:80"] {
            check(|s| s.cors_origins = vec![good.to_owned()]).expect(good);
        }
        for wrong in ["*", "example.org", "https://", "https://a.b/", "https://a b"] {
            let error = check(|s| s.cors_origins = vec![wrong.to_owned()]).expect_err(wrong);
            assert!(matches!(error, SettingError::Origin { .. }), "{error}");
        }
    }
}
