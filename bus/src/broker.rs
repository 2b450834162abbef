//! What the broker tells of itself.

use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use stagebus_schemas::codec::CodecError;

use crate::connection::Bus;
use crate::error::RequestError;

/// Where the broker answers with the account of the connection, and with its time.
const USER_INFO: &str = "$SYS.REQ.USER.INFO";

/// Where JetStream answers.
const JETSTREAM_INFO: &str = "$JS.API.INFO";

/// What is read of the answer on [`USER_INFO`].
#[derive(Debug, Deserialize)]
struct UserInfo {
    server: Server,
}

#[derive(Debug, Deserialize)]
struct Server {
    #[serde(deserialize_with = "rfc3339")]
    time: SystemTime,
}

impl Bus {
    /// Returns the version of the broker, as it says.
    #[must_use]
    pub fn broker_version(&self) -> String {
        self.client.server_info().version
    }

    /// Asks the broker what time it is. An error that comes from the broker
    /// ([`RequestError::Forbidden`], [`RequestError::NoResponders`]) takes one round trip, as the
    /// answer does.
    ///
    /// # Errors
    /// [`RequestError`]. Permissions of roles do not allow the question.
    pub async fn broker_time(&self, timeout: Duration) -> Result<SystemTime, RequestError> {
        let answer = self.request_bytes(USER_INFO, None, Bytes::new(), timeout).await?;
        match serde_json::from_slice::<UserInfo>(&answer.payload) {
            Ok(info) => Ok(info.server.time),
            Err(error) => Err(RequestError::Decode {
                subject: USER_INFO.to_owned(),
                source: CodecError::Json(error),
            }),
        }
    }

    /// Measures the way to the broker and back, by a question to the broker itself: a refusal
    /// travels as far as an answer.
    ///
    /// # Errors
    /// [`RequestError`], if neither comes.
    pub async fn round_trip(&self, timeout: Duration) -> Result<Duration, RequestError> {
        let asked = Instant::now();
        match self.broker_time(timeout).await {
            Ok(_) | Err(RequestError::Forbidden { .. } | RequestError::NoResponders { .. }) => {
                Ok(asked.elapsed())
            }
            Err(error) => Err(error),
        }
    }

    /// Tells whether there is a JetStream, in the broker itself or in one that it is a leaf of.
    ///
    /// # Errors
    /// [`RequestError`], if neither its greeting nor an answer tells.
    pub async fn has_jetstream(&self, timeout: Duration) -> Result<bool, RequestError> {
        if self.client.server_info().jetstream {
            return Ok(true);
        }
        match self.request_bytes(JETSTREAM_INFO, None, Bytes::new(), timeout).await {
            Ok(_) => Ok(true),
            Err(RequestError::NoResponders { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn rfc3339<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
    let text = String::deserialize(deserializer)?;
    async_nats::datetime::parse_rfc3339(&text).map(SystemTime::from).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_brokers_time_is_read_from_its_answer() {
        let answer = br#"{"server":{"name":"n","id":"N","ver":"2.14.3","jetstream":true,
            "time":"2026-11-30T08:00:00.5Z"},"data":{"user":"","account":"$G"}}"#;
        let info: UserInfo = serde_json::from_slice(answer).expect("an answer");
        let since = info.server.time.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
        assert_eq!(since, Duration::new(1_796_025_600, 500_000_000));
        serde_json::from_slice::<UserInfo>(br#"{"server":{"time":"noon"}}"#).expect_err("no time");
    }
}
