//! The table `[coordinator]`, and everything that a coordinator needs to run.

mod jobs;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagebus_bus::Switch;
use stagebus_draft::alternatives::MAX_ALTERNATIVES;
use stagebus_draft::control::MAX_DRAFT_TOKENS;
use stagebus_draft::windows::MAX_WINDOWS;
use stagebus_schemas::ids::{ModelName, WorkerId};
use stagebus_schemas::messages::control::HeadMode;
use stagebus_schemas::messages::forward::MAX_ROWS;
use stagebus_settings::BrokerSettings;
use stagebus_telemetry::CoordinatorTelemetry;

pub use jobs::{JobSettings, JobsMode};

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
    /// The worker of the first stage in this process; given if and only if
    /// [`CoordinatorSettings::host_stage0`] asks for it.
    pub hosted: Option<Hosted>,
    /// What it shows of itself.
    pub telemetry: CoordinatorTelemetry,
}

/// A worker in the coordinator's process.
#[derive(Debug, Clone)]
pub struct Hosted {
    /// Name of its start.
    pub worker: WorkerId,
    /// The way to it past the broker.
    pub switch: Switch,
}

/// Who drafts tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase", try_from = "String")]
pub enum DraftChoice {
    /// `hybrid` where a draft model is given, else `ngram`.
    #[default]
    Auto,
    /// Nobody.
    Off,
    /// What followed the longest suffix of the text that stood before.
    Ngram,
    /// The draft model.
    Model,
    /// `ngram` after a long match, else `model`.
    Hybrid,
}

impl TryFrom<String> for DraftChoice {
    type Error = DraftSettingError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        clap::ValueEnum::from_str(&text, false).map_err(|_unknown| DraftSettingError {
            found: text,
            expected: "auto, off, ngram, model or hybrid",
        })
    }
}

/// A number, or whatever the coordinator finds best by what it measures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "NumberOrText")]
pub enum AutoOr {
    /// As many as pay.
    #[default]
    Auto,
    /// Always this many.
    Fixed(u32),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(u32),
    Text(String),
}

impl FromStr for AutoOr {
    type Err = DraftSettingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        text.parse().map(Self::Fixed).map_err(|_not_a_number| DraftSettingError {
            found: text.to_owned(),
            expected: "auto or a number",
        })
    }
}

impl std::fmt::Display for AutoOr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(n) => n.fmt(f),
        }
    }
}

impl TryFrom<NumberOrText> for AutoOr {
    type Error = DraftSettingError;

    fn try_from(value: NumberOrText) -> Result<Self, Self::Error> {
        match value {
            NumberOrText::Number(n) => Ok(Self::Fixed(n)),
            NumberOrText::Text(text) => text.parse(),
        }
    }
}

impl From<AutoOr> for NumberOrText {
    fn from(value: AutoOr) -> Self {
        match value {
            AutoOr::Auto => Self::Text("auto".to_owned()),
            AutoOr::Fixed(n) => Self::Number(n),
        }
    }
}

/// Text that names no way of drafting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not {expected}")]
pub struct DraftSettingError {
    /// The text.
    pub found: String,
    /// What is known.
    pub expected: &'static str,
}

/// The table `[coordinator]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CoordinatorSettings {
    /// Model whose shard set is pulled from the broker where no folder is given; the only one that
    /// the broker has when absent.
    pub model: Option<ModelName>,
    /// Fingerprint of the shard set that is pulled, or its beginning; the one that was pushed last
    /// when absent.
    pub fingerprint: Option<String>,
    /// Sessions that run at the same time; more requests wait.
    pub max_sessions: usize,
    /// Requests that wait for a session; more are answered "overloaded" at once.
    pub max_queued: usize,
    /// Requests of one client that run or wait; more are answered "overloaded". 0 is no limit.
    pub max_per_client: usize,
    /// Longest wait for a session, as far as it is known beforehand, in milliseconds; requests that
    /// would wait longer are answered "overloaded" at once.
    pub max_wait_ms: u64,
    /// How much of the workers' KV memory sessions may be expected to need together, in percent;
    /// others wait. 0 is no limit: then sessions push each other out.
    pub kv_percent: u32,
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
    /// Where tokens are chosen: on the last stage (`token`), or here from whole rows of logits
    /// (`full`).
    pub head: HeadMode,
    /// How long a session that lost a worker waits for another one, in milliseconds.
    pub recovery_wait_ms: u64,
    /// How long the events of a request may go unheard before its client counts as gone, in
    /// milliseconds.
    pub client_wait_ms: u64,
    /// How long a session that had to give way waits for room, in milliseconds.
    pub preempted_wait_ms: u64,
    /// Who drafts tokens for the stages to verify.
    pub draft: DraftChoice,
    /// Shard set of the draft model: one stage, the tokenizer of the model. Where the shard set is
    /// pulled, the draft model that was pushed for it when absent.
    pub draft_shards: Option<PathBuf>,
    /// Tokens to draft per step; requests may say otherwise.
    pub draft_tokens: AutoOr,
    /// Most verifies of one session under way at the same time; requests may say otherwise.
    pub windows: AutoOr,
    /// Most second guesses beside what is drafted, each only where it pays; requests may say otherwise.
    pub alternatives: u32,
    /// Most tokens to draft per step.
    pub max_draft_tokens: u32,
    /// Inference threads of the draft model; 0 leaves the choice to the device.
    pub draft_threads: u16,
    /// Run a worker of the first stage in this process, with the table `[worker]`: the hop to it
    /// costs nothing.
    pub host_stage0: bool,
    /// File that holds the nkey seed of the hosted worker, where roles have keys of their own; it
    /// logs in as the coordinator does when absent.
    pub host_nkey_seed_file: Option<PathBuf>,
    /// Durable requests.
    pub jobs: JobSettings,
}

impl Default for CoordinatorSettings {
    fn default() -> Self {
        Self {
            model: None,
            fingerprint: None,
            max_sessions: 64,
            max_queued: 256,
            max_per_client: 0,
            max_wait_ms: 60_000,
            kv_percent: 100,
            max_request_bytes: 1 << 20,
            default_max_tokens: 512,
            prefill_chunk: 128,
            route_wait_ms: 2_000,
            open_timeout_ms: 5_000,
            step_timeout_ms: 30_000,
            drain_ms: 10_000,
            announce_ms: 500,
            head: HeadMode::Token,
            recovery_wait_ms: 60_000,
            client_wait_ms: 2_000,
            preempted_wait_ms: 600_000,
            draft: DraftChoice::Auto,
            draft_shards: None,
            draft_tokens: AutoOr::Auto,
            windows: AutoOr::Auto,
            alternatives: 2,
            max_draft_tokens: 10,
            draft_threads: 1,
            host_stage0: false,
            host_nkey_seed_file: None,
            jobs: JobSettings::default(),
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
        let or = |value: AutoOr, least| match value {
            AutoOr::Auto => least,
            AutoOr::Fixed(n) => u64::from(n),
        };
        let checks = [
            ("max_sessions", self.max_sessions as u64, 1, 1 << 16),
            ("max_queued", self.max_queued as u64, 0, 1 << 20),
            ("max_per_client", self.max_per_client as u64, 0, 1 << 20),
            ("max_wait_ms", self.max_wait_ms, 1, DAY_MS),
            ("kv_percent", u64::from(self.kv_percent), 0, 10_000),
            ("max_request_bytes", self.max_request_bytes as u64, 1, 64 << 20),
            ("default_max_tokens", u64::from(self.default_max_tokens), 1, u64::from(u32::MAX)),
            ("prefill_chunk", self.prefill_chunk as u64, MIN_CHUNK_ROWS as u64, MAX_ROWS as u64),
            ("route_wait_ms", self.route_wait_ms, 0, DAY_MS),
            ("open_timeout_ms", self.open_timeout_ms, 1, DAY_MS),
            ("step_timeout_ms", self.step_timeout_ms, 1, DAY_MS),
            ("drain_ms", self.drain_ms, 0, DAY_MS),
            ("announce_ms", u64::from(self.announce_ms), 20, 60_000),
            ("recovery_wait_ms", self.recovery_wait_ms, 0, DAY_MS),
            ("client_wait_ms", self.client_wait_ms, 1, DAY_MS),
            ("preempted_wait_ms", self.preempted_wait_ms, 0, DAY_MS),
            ("max_draft_tokens", u64::from(self.max_draft_tokens), 0, MAX_DRAFT_TOKENS),
            ("draft_tokens", or(self.draft_tokens, 0), 0, u64::from(self.max_draft_tokens)),
            ("windows", or(self.windows, 1), 1, MAX_WINDOWS as u64),
            ("alternatives", u64::from(self.alternatives), 0, MAX_ALTERNATIVES as u64),
        ];
        for (key, found, least, most) in checks.into_iter().chain(self.jobs.ranges()) {
            if !(least..=most).contains(&found) {
                return Err(SettingError { key, found, least, most });
            }
        }
        Ok(())
    }

    pub(crate) fn route_wait(&self) -> Duration {
        Duration::from_millis(self.route_wait_ms)
    }

    pub(crate) fn recovery_wait(&self) -> Duration {
        Duration::from_millis(self.recovery_wait_ms)
    }

    pub(crate) fn client_wait(&self) -> Duration {
        Duration::from_millis(self.client_wait_ms)
    }

    pub(crate) fn preempted_wait(&self) -> Duration {
        Duration::from_millis(self.preempted_wait_ms)
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
    fn some_settings_are_numbers_or_auto() {
        let read = |json: &str| serde_json::from_str::<AutoOr>(json).map_err(|e| e.to_string());
        assert_eq!(read("7"), Ok(AutoOr::Fixed(7)));
        assert_eq!(read(r#""7""#), Ok(AutoOr::Fixed(7)));
        assert_eq!(read(r#""auto""#), Ok(AutoOr::Auto));
        assert!(read(r#""some""#).unwrap_err().contains("auto or a number"));
        let long = AutoOr::Fixed(11);
        let settings = CoordinatorSettings { draft_tokens: long, ..CoordinatorSettings::default() };
        assert_eq!(settings.validate().unwrap_err().key, "draft_tokens");
        let many = AutoOr::Fixed(9);
        let settings = CoordinatorSettings { windows: many, ..CoordinatorSettings::default() };
        assert_eq!(settings.validate().unwrap_err().key, "windows");
    }

    #[test]
    fn the_defaults_are_valid_and_a_wrong_value_is_named() {
        CoordinatorSettings::default().validate().unwrap();
        let one_row = CoordinatorSettings { prefill_chunk: 1, ..CoordinatorSettings::default() };
        let error = one_row.validate().unwrap_err();
        assert_eq!((error.key, error.found, error.least), ("prefill_chunk", 1, 3));
    }
}
