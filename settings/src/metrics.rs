//! `[metrics]`: where a process shows its metrics.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The table `[metrics]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsSettings {
    /// Where Prometheus finds `/metrics`, as `PORT` (on this machine only) or `ADDRESS:PORT`; port 0
    /// takes any free one. Nowhere when absent.
    pub listen: Option<ListenAddress>,
}

/// An address to listen on: reachable from this machine only, unless it names another interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ListenAddress(SocketAddr);

/// Text that names no address to listen on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is no address, expected a port such as 9464, or 0.0.0.0:9464 or [::]:9464")]
pub struct ListenAddressError {
    /// The text.
    pub found: String,
}

impl ListenAddress {
    /// The address.
    #[must_use]
    pub const fn address(self) -> SocketAddr {
        self.0
    }
}

impl FromStr for ListenAddress {
    type Err = ListenAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(port) = text.parse() {
            return Ok(Self(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)));
        }
        text.parse().map(Self).map_err(|_no_address| ListenAddressError { found: text.to_owned() })
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<String> for ListenAddress {
    type Error = ListenAddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ListenAddress> for String {
    fn from(address: ListenAddress) -> Self {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_reachable_from_this_machine_only() {
        let read = |text: &str| text.parse::<ListenAddress>().map(|found| found.to_string());
        assert_eq!(read("9464").as_deref(), Ok("127.0.0.1:9464"));
        assert_eq!(read("0").as_deref(), Ok("127.0.0.1:0"));
        assert_eq!(read("0.0.0.0:9464").as_deref(), Ok("0.0.0.0:9464"));
        assert_eq!(read("[::1]:9464").as_deref(), Ok("[::1]:9464"));
        for wrong in ["", "metrics", "70000", "127.0.0.1", "localhost:9464"] {
            assert_eq!(read(wrong).unwrap_err().found, wrong);
        }
    }
}
