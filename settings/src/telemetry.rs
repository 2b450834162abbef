//! `[telemetry]`: where a process sends its spans.

use std::fmt;

use http::Uri;
use serde::{Deserialize, Serialize};

/// The path of traces below a collector's address.
const TRACES: &str = "/v1/traces";

/// The table `[telemetry]`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetrySettings {
    /// Address of an OpenTelemetry collector that takes OTLP over HTTP, such as
    /// `http://127.0.0.1:4318`. Nothing is traced when absent.
    pub otlp_endpoint: Option<Collector>,
    /// Share of the requests that are traced, 0 to 1; a request whose client traces it or not is
    /// traced or not in any case.
    pub sample_ratio: SampleRatio,
}

/// Address of a collector.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Collector(String);

/// A share of all requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct SampleRatio(f64);

/// A value of `[telemetry]` that cannot work.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TelemetrySettingError {
    /// No address of a collector.
    #[error("{found:?} is no address of a collector, expected one such as http://127.0.0.1:4318")]
    Collector {
        /// The text.
        found: String,
    },
    /// No share.
    #[error("{found} is no share of the requests, expected 0 to 1")]
    Ratio {
        /// The number.
        found: f64,
    },
}

impl Collector {
    /// Where spans are sent.
    #[must_use]
    pub fn traces_url(&self) -> String {
        let base = self.0.trim_end_matches('/');
        if base.ends_with(TRACES) { base.to_owned() } else { format!("{base}{TRACES}") }
    }
}

impl TryFrom<String> for Collector {
    type Error = TelemetrySettingError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        match is_address(&text) {
            true => Ok(Self(text)),
            false => Err(TelemetrySettingError::Collector { found: text }),
        }
    }
}

/// Whether spans can be sent there: HTTP, a host, a port that is one if any, and no more than a path.
fn is_address(text: &str) -> bool {
    // A URI keeps no fragment, so it would not be seen below.
    let uri: Uri = match text.parse() {
        Ok(uri) if !text.contains('#') => uri,
        _ => return false,
    };
    let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
    let is_reached = uri.authority().is_some_and(|authority| {
        let host = authority.host();
        // User and password would stand before the host.
        let after = authority.as_str().strip_prefix(host);
        !host.is_empty() && after.is_some_and(|after| after.is_empty() || is_port(after))
    });
    is_http && is_reached && uri.query().is_none()
}

/// Whether a text such as `:4318` names a port.
fn is_port(text: &str) -> bool {
    let port = text.strip_prefix(':').and_then(|port| port.parse::<u16>().ok());
    port.is_some_and(|port| port != 0)
}

impl From<Collector> for String {
    fn from(collector: Collector) -> Self {
        collector.0
    }
}

impl fmt::Display for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl SampleRatio {
    /// The share.
    #[must_use]
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl Default for SampleRatio {
    /// Every request.
    fn default() -> Self {
        Self(1.0)
    }
}

impl TryFrom<f64> for SampleRatio {
    type Error = TelemetrySettingError;

    fn try_from(found: f64) -> Result<Self, Self::Error> {
        if (0.0..=1.0).contains(&found) {
            Ok(Self(found))
        } else {
            Err(TelemetrySettingError::Ratio { found })
        }
    }
}

impl From<SampleRatio> for f64 {
    fn from(ratio: SampleRatio) -> Self {
        ratio.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_go_below_the_address() {
        for (address, expected) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
            ("https://c.example/otlp", "https://c.example/otlp/v1/traces"),
            ("http://c/v1/traces", "http://c/v1/traces"),
            ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ] {
            let collector = Collector::try_from(address.to_owned()).expect("an address");
            assert_eq!(collector.traces_url(), expected);
        }
    }

    #[test]
    fn values_that_cannot_work_are_told() {
        for wrong in [
            "",
            "127.0.0.1:4318",
            "localhost:4317",
            "/v1/traces",
            "http://",
            "http://:4318",
            "http://c:",
            "http://c:0",
            "http://c:99999",
            "http://c:abc",
            "http://[::1",
            "http://c/?a=b",
            "http://c/#a",
            "grpc://c:4317",
            "http://a b",
            "http://u@c",
            "http://u:p@c:4318",
        ] {
            let refused = Collector::try_from(wrong.to_owned());
            assert!(matches!(refused, Err(TelemetrySettingError::Collector { .. })), "{wrong}");
        }
        for wrong in [-0.1, 1.1, f64::NAN] {
            assert!(SampleRatio::try_from(wrong).is_err(), "{wrong}");
        }
    }
}
