//! The table `[worker]`, and everything that a worker needs to run.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagebus_bus::Switch;
use stagebus_engine::testing::{Fault, FaultParseError, TestOptions};
use stagebus_engine::{EngineKind, EngineOptions, Profile};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::messages::forward::MAX_ROWS;
use stagebus_schemas::tensor::Dtype;
use stagebus_settings::BrokerSettings;
use stagebus_telemetry::WorkerTelemetry;

use crate::schedule::LEAST_BATCH_ROWS;

/// Everything that a worker needs.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The broker.
    pub broker: BrokerSettings,
    /// The table `[worker]`.
    pub settings: WorkerSettings,
    /// The way to the coordinator that hosts this worker, if it is in the same process.
    pub switch: Option<Switch>,
    /// What it shows of itself.
    pub telemetry: WorkerTelemetry,
}

/// What runs the shard.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase", try_from = "String")]
pub enum EngineChoice {
    /// The best that shard set and device support.
    #[default]
    Auto,
    /// Paged attention: sessions share micro-batches and equal prefixes of their KV cache.
    Paged,
    /// One inference request per session.
    Stateful,
    /// Graphs of fixed shapes, for shard sets of the static form.
    Static,
    /// A toy model without OpenVINO, for tests of everything around it.
    Test,
}

/// Which numbers the device computes with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase", try_from = "String")]
pub enum ProfileChoice {
    /// The device's own precision.
    #[default]
    Fast,
    /// Single precision everywhere: the tokens of the unsplit model, for any number of stages.
    Exact,
}

impl EngineChoice {
    /// The engine's name for it.
    #[must_use]
    pub const fn kind(self) -> EngineKind {
        match self {
            Self::Auto => EngineKind::Auto,
            Self::Paged => EngineKind::Paged,
            Self::Stateful => EngineKind::Stateful,
            Self::Static => EngineKind::Static,
            Self::Test => EngineKind::Test,
        }
    }
}

impl ProfileChoice {
    /// The engine's name for it.
    #[must_use]
    pub const fn profile(self) -> Profile {
        match self {
            Self::Fast => Profile::Fast,
            Self::Exact => Profile::Exact,
        }
    }
}

/// Reads the name from configuration; the error lists what is known.
impl TryFrom<String> for EngineChoice {
    type Error = <EngineKind as FromStr>::Err;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        Ok(match name.parse()? {
            EngineKind::Auto => Self::Auto,
            EngineKind::Paged => Self::Paged,
            EngineKind::Stateful => Self::Stateful,
            EngineKind::Static => Self::Static,
            EngineKind::Test => Self::Test,
        })
    }
}

/// Reads the name from configuration; the error lists what is known.
impl TryFrom<String> for ProfileChoice {
    type Error = <Profile as FromStr>::Err;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        Ok(match name.parse()? {
            Profile::Fast => Self::Fast,
            Profile::Exact => Self::Exact,
        })
    }
}

/// The table `[worker]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerSettings {
    /// Folder of the shard set; pulled from the broker when empty.
    pub shards: PathBuf,
    /// Stage to serve, from 0; of a pulled shard set the one that needs it most, when absent.
    pub stage: Option<u16>,
    /// Model whose shard set is pulled; any model that the broker has when absent.
    pub model: Option<ModelName>,
    /// Fingerprint of the shard set that is pulled, or its beginning; the one that was pushed last
    /// when absent.
    pub fingerprint: Option<String>,
    /// Beginning of the worker's id, for readable logs; `w<stage>` when absent.
    pub name: Option<String>,
    /// Device in OpenVINO's words: `CPU`, `GPU`, `NPU`, `AUTO`, `HETERO:GPU,CPU`.
    pub device: String,
    /// Numerics.
    pub profile: ProfileChoice,
    /// What runs the shard.
    pub engine: EngineChoice,
    /// Inference threads; 0 leaves the choice to the device.
    pub threads: u16,
    /// Folder for compiled stages, so that the next start is quicker; none when absent.
    pub cache_dir: Option<PathBuf>,
    /// Longest session, in tokens, if less than the model's context.
    pub context_limit: Option<usize>,
    /// Most masked positions of a session, in tokens, before it must be filled again.
    pub max_masked: usize,
    /// Properties for OpenVINO, as a table of keys and values; they win over the profile's.
    pub properties: BTreeMap<String, String>,
    /// What the test engine does besides computing.
    pub test: TestSettings,
    /// Number format of the hidden states that this worker sends: `f32`, `f16`, `bf16` or `int8`. The
    /// shorter ones spare traffic and round.
    pub wire_dtype: Dtype,
    /// Most sessions held; more are answered "overloaded".
    pub max_sessions: usize,
    /// Most steps that wait; more are answered "overloaded".
    pub queue_capacity: u32,
    /// Memory of the paged engine's KV blocks, in MiB; 0 takes a quarter of what is free at start.
    pub kv_memory_mib: u64,
    /// Runs prompt rows of the paged engine as one-token sequences: a slower prefill, but then
    /// prefixes that were generated are found in the cache too.
    pub invariant_prefill: bool,
    /// Most sessions in one micro-batch; 0 leaves it to the engine: the paged one gains from many,
    /// the stateful one runs them one by one.
    pub max_batch_sessions: usize,
    /// Most rows in one micro-batch of an engine that runs sessions together; longer prefill chunks
    /// are split.
    pub batch_rows: usize,
    /// Time that prefill may add to a micro-batch of decoding sessions, in percent of its own.
    pub prefill_percent: u32,
    /// Decode micro-batches that may pass a waiting prefill chunk, where the engine runs sessions
    /// one by one.
    pub decodes_per_prefill: u32,
    /// Interval of announcements, in milliseconds.
    pub announce_ms: u32,
    /// A session without a step for this long is closed, in seconds.
    pub session_idle_s: u64,
    /// How long running sessions may take to finish at a drain, in milliseconds.
    pub drain_ms: u64,
    /// How long the end may take after the last session: the micro-batch that runs, the farewell,
    /// the flush. In milliseconds.
    pub shutdown_ms: u64,
    /// How long to go on trying while the broker cannot be reached at the start, in milliseconds.
    pub connect_wait_ms: u64,
}

impl Default for WorkerSettings {
    fn default() -> Self {
        Self {
            shards: PathBuf::new(),
            stage: None,
            model: None,
            fingerprint: None,
            name: None,
            device: "CPU".to_owned(),
            profile: ProfileChoice::Fast,
            engine: EngineChoice::Auto,
            threads: 0,
            cache_dir: None,
            context_limit: None,
            max_masked: EngineOptions::default().max_masked,
            properties: BTreeMap::new(),
            test: TestSettings::default(),
            wire_dtype: Dtype::F32,
            max_sessions: 64,
            queue_capacity: 1024,
            kv_memory_mib: 0,
            invariant_prefill: false,
            max_batch_sessions: 0,
            batch_rows: 128,
            prefill_percent: 45,
            decodes_per_prefill: 8,
            announce_ms: 500,
            session_idle_s: 600,
            drain_ms: 60_000,
            shutdown_ms: 10_000,
            connect_wait_ms: 10_000,
        }
    }
}

/// The table `[worker.test]`, for the engine `test`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TestSettings {
    /// Time of every micro-batch, in microseconds.
    pub run_us: u64,
    /// Time of every row, in microseconds.
    pub row_us: u64,
    /// What goes wrong and when, such as `fail@3` or `hang@10:2.5`: see
    /// [`stagebus_engine::testing::Fault`].
    pub faults: Vec<String>,
}

/// A value of `[worker]` that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// No stage of a shard set on this machine was named.
    #[error("worker.stage is not set: give the stage of worker.shards to serve, from 0")]
    NoStage,
    /// No device was named.
    #[error("worker.device is empty, expected a name such as CPU")]
    NoDevice,
    /// No such fault.
    #[error("worker.test.faults cannot be read")]
    Fault(#[from] FaultParseError),
    /// A number outside its range.
    #[error("worker.{key} is {found}, expected {least} to {most}")]
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
}

impl WorkerSettings {
    /// Checks what the types do not express.
    ///
    /// # Errors
    /// The first [`SettingError`] found.
    pub fn validate(&self) -> Result<(), SettingError> {
        if !self.is_pulled() && self.stage.is_none() {
            return Err(SettingError::NoStage);
        }
        if self.device.trim().is_empty() {
            return Err(SettingError::NoDevice);
        }
        self.faults()?;
        let day_ms = 24 * 3600 * 1000;
        let ranges = [
            ("context_limit", self.context_limit.map_or(1, |limit| limit as u64), 1, 1 << 32),
            ("max_sessions", self.max_sessions as u64, 1, 65_536),
            ("queue_capacity", u64::from(self.queue_capacity), 1, 1 << 20),
            ("kv_memory_mib", self.kv_memory_mib, 0, 1 << 32),
            ("max_batch_sessions", self.max_batch_sessions as u64, 0, 256),
            ("batch_rows", self.batch_rows as u64, LEAST_BATCH_ROWS as u64, MAX_ROWS as u64),
            ("prefill_percent", u64::from(self.prefill_percent), 1, 10_000),
            ("decodes_per_prefill", u64::from(self.decodes_per_prefill), 1, 1_000_000),
            ("announce_ms", u64::from(self.announce_ms), 10, 60_000),
            ("session_idle_s", self.session_idle_s, 1, 30 * 24 * 3600),
            ("drain_ms", self.drain_ms, 0, day_ms),
            ("shutdown_ms", self.shutdown_ms, 100, day_ms),
            ("connect_wait_ms", self.connect_wait_ms, 0, day_ms),
        ];
        for (key, found, least, most) in ranges {
            if !(least..=most).contains(&found) {
                return Err(SettingError::Range { key, found, least, most });
            }
        }
        Ok(())
    }

    /// Whether the files come from the broker.
    pub(crate) fn is_pulled(&self) -> bool {
        self.shards.as_os_str().is_empty()
    }

    fn faults(&self) -> Result<Vec<Fault>, FaultParseError> {
        self.test.faults.iter().map(|text| text.parse()).collect()
    }

    /// What the engine needs of these settings.
    ///
    /// # Errors
    /// [`SettingError::Fault`].
    pub fn engine_options(&self) -> Result<EngineOptions, SettingError> {
        let properties = self.properties.iter();
        Ok(EngineOptions {
            device: self.device.clone(),
            profile: self.profile.profile(),
            threads: (self.threads > 0).then_some(usize::from(self.threads)),
            cache_dir: self.cache_dir.clone(),
            max_sessions: self.max_sessions,
            context_limit: self.context_limit,
            max_masked: self.max_masked,
            kv_bytes: (self.kv_memory_mib > 0).then_some(self.kv_memory_mib << 20),
            invariant_prefill: self.invariant_prefill,
            properties: properties.map(|(key, value)| (key.clone(), value.clone())).collect(),
            test: TestOptions {
                max_sessions: self.max_sessions,
                delay_per_run: Duration::from_micros(self.test.run_us),
                delay_per_row: Duration::from_micros(self.test.row_us),
                faults: self.faults()?,
                ..TestOptions::default()
            },
            ..EngineOptions::default()
        })
    }

    pub(crate) fn announce_interval(&self) -> Duration {
        Duration::from_millis(u64::from(self.announce_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_cannot_work_are_named() {
        let valid = || WorkerSettings {
            shards: "shards".into(),
            stage: Some(0),
            ..WorkerSettings::default()
        };
        assert_eq!(valid().validate(), Ok(()));
        assert_eq!(WorkerSettings::default().validate(), Ok(()));
        let spoilt = WorkerSettings { stage: None, ..valid() };
        assert_eq!(spoilt.validate(), Err(SettingError::NoStage));
        let spoilt = WorkerSettings { device: " ".to_owned(), ..valid() };
        assert_eq!(spoilt.validate(), Err(SettingError::NoDevice));
        type Spoil = fn(&mut WorkerSettings);
        let keys: [(&str, Spoil); 4] = [
            ("max_sessions", |s| s.max_sessions = 0),
            ("queue_capacity", |s| s.queue_capacity = 0),
            ("max_batch_sessions", |s| s.max_batch_sessions = 257),
            ("announce_ms", |s| s.announce_ms = 1),
        ];
        for (expected, spoil) in keys {
            let mut spoilt = valid();
            spoil(&mut spoilt);
            let found = spoilt.validate();
            assert!(
                matches!(found, Err(SettingError::Range { key, .. }) if key == expected),
                "{found:?}"
            );
        }
    }
}
