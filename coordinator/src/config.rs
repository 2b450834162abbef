//! The table `[coordinator]`, and everything that a coordinator needs to run.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagebus_schemas::messages::forward::MAX_ROWS;
use stagebus_settings::BrokerSettings;

use crate::prefill::MIN_CHUNK_ROWS;

/// Everything that a coordinator needs.
#[derive(Debug, Clone)]
pub struct CoordinatorConfig {
    /// Folder of the shard set: manifest, tokenizer and chat template are read, no weights.
    pub shards: PathBuf,
    /// The broker.
    pub broker: BrokerSettings,
    /// The table `[coordinator]`.
    pub settings: CoordinatorSettings,
    /// Be ready only when every stage has a worker that takes sessions.
    pub wait_for_workers: bool,
}

/// The table `[coordinator]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CoordinatorSettings {
    /// Sessions that run at the same time; more requests wait.
    pub max_sessions: usize,
    /// Requests that wait for a session; more are answered "overloaded" at once.
    pub max_queued: usize,
    /// Largest request, in bytes.
    pub max_request_bytes: usize,
    /// Tokens to generate when a request names no number.
    pub default_max_tokens: u32,
    /// Most prompt rows in one step. Fewer where a message between stages would otherwise exceed
    /// the broker's limit.
    pub prefill_chunk: usize,
    /// How long a request waits for a stage without a live worker, in milliseconds.
    pub route_wait_ms: u64,
    /// How long a worker may take to open a session, in milliseconds.
    pub open_timeout_ms: u64,
    /// How long a step may take, in milliseconds. Where measured round trips are long, a step may
    /// take twenty times as long as they do.
    pub step_timeout_ms: u64,
    /// How long requests that are under way may take to finish at shutdown, in milliseconds.
    pub drain_ms: u64,
    /// Interval of announcements, in milliseconds.
    pub announce_ms: u32,
}

impl Default for CoordinatorSettings {
    fn default() -> Self {
        Self {
            max_sessions: 64,
            max_queued: 256,
            max_request_bytes: 1 << 20,
            default_max_tokens: 512,
            prefill_chunk: 128,
            route_wait_ms: 2_000,
            open_timeout_ms: 5_000,
            step_timeout_ms: 30_000,
            drain_ms: 10_000,
            announce_ms: 500,
        }
    }
}

/// A value of `[coordinator]` that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("coordinator.{key} is {found}, expected {least} to {most}")]
pub struct SettingError {
    /// The key.
    pub key: &'static str,
    /// Its value.
    pub found: u64,
    /// Least value.
    pub least: u64,
    /// Greatest value.
    pub most: u64,
}

impl CoordinatorSettings {
    /// Checks the ranges of all keys.
    ///
    /// # Errors
    /// The first [`SettingError`] found.
    pub fn validate(&self) -> Result<(), SettingError> {
        const DAY_MS: u64 = 24 * 60 * 60 * 1000;
        let checks = [
            ("max_sessions", self.max_sessions as u64, 1, 1 << 16),
            ("max_queued", self.max_queued as u64, 0, 1 << 20),
            ("max_request_bytes", self.max_request_bytes as u64, 1, 64 << 20),
            ("default_max_tokens", u64::from(self.default_max_tokens), 1, u64::from(u32::MAX)),
            ("prefill_chunk", self.prefill_chunk as u64, MIN_CHUNK_ROWS as u64, MAX_ROWS as u64),
            ("route_wait_ms", self.route_wait_ms, 0, DAY_MS),
            ("open_timeout_ms", self.open_timeout_ms, 1, DAY_MS),
            ("step_timeout_ms", self.step_timeout_ms, 1, DAY_MS),
            ("drain_ms", self.drain_ms, 0, DAY_MS),
            ("announce_ms", u64::from(self.announce_ms), 20, 60_000),
        ];
        for (key, found, least, most) in checks {
            if !(least..=most).contains(&found) {
                return Err(SettingError { key, found, least, most });
            }
        }
        Ok(())
    }

    pub(crate) fn route_wait(&self) -> Duration {
        Duration::from_millis(self.route_wait_ms)
    }

    pub(crate) fn open_timeout(&self) -> Duration {
        Duration::from_millis(self.open_timeout_ms)
    }

    pub(crate) fn step_timeout(&self) -> Duration {
        Duration::from_millis(self.step_timeout_ms)
    }

    pub(crate) fn drain(&self) -> Duration {
        Duration::from_millis(self.drain_ms)
    }

    pub(crate) fn announce(&self) -> Duration {
        Duration::from_millis(u64::from(self.announce_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_a_wrong_value_is_named() {
        CoordinatorSettings::default().validate().unwrap();
        let one_row = CoordinatorSettings { prefill_chunk: 1, ..CoordinatorSettings::default() };
        let error = one_row.validate().unwrap_err();
        assert_eq!((error.key, error.found, error.least), ("prefill_chunk", 1, 3));
    }
}
