//! The table `[coordinator.jobs]`: durable requests.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagebus_bus::JobLimits;

/// Whether durable requests are taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobsMode {
    /// Where the broker has JetStream.
    #[default]
    Auto,
    /// Always: the coordinator does not start without JetStream.
    On,
    /// Never.
    Off,
}

/// The table `[coordinator.jobs]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JobSettings {
    /// Whether jobs are taken.
    pub mode: JobsMode,
    /// Jobs that run at the same time.
    pub max_running: usize,
    /// Jobs in the queue, running ones included; more are refused by the broker.
    pub max_queued: u64,
    /// A job whose coordinator is silent for this long goes to another one, in milliseconds.
    pub ack_wait_ms: u64,
    /// Times that a job is tried without a new event before it is given up.
    pub max_deliveries: u64,
    /// How long results are kept, in seconds.
    pub keep_s: u64,
    /// Room for results on the broker's disk, in MiB; the oldest give way.
    pub keep_mib: u64,
}

impl Default for JobSettings {
    fn default() -> Self {
        Self {
            mode: JobsMode::Auto,
            max_running: 16,
            max_queued: 10_000,
            ack_wait_ms: 10_000,
            max_deliveries: 5,
            keep_s: 24 * 60 * 60,
            keep_mib: 1024,
        }
    }
}

impl JobSettings {
    /// Key, value, least and greatest value of every number.
    pub(super) fn ranges(&self) -> [(&'static str, u64, u64, u64); 6] {
        const YEAR_S: u64 = 365 * 24 * 60 * 60;
        [
            ("jobs.max_running", self.max_running as u64, 1, 1 << 16),
            ("jobs.max_queued", self.max_queued, 1, 1 << 32),
            ("jobs.ack_wait_ms", self.ack_wait_ms, 100, 60 * 60 * 1000),
            ("jobs.max_deliveries", self.max_deliveries, 1, 1 << 16),
            ("jobs.keep_s", self.keep_s, 1, YEAR_S),
            ("jobs.keep_mib", self.keep_mib, 1, 1 << 30),
        ]
    }

    /// What the broker is told.
    pub(crate) fn limits(&self, max_request_bytes: usize) -> JobLimits {
        JobLimits {
            ack_wait: self.ack_wait(),
            max_jobs: self.max_queued,
            max_job_bytes: u32::try_from(max_request_bytes).unwrap_or(u32::MAX),
            keep: Duration::from_secs(self.keep_s),
            keep_bytes: self.keep_mib << 20,
        }
    }

    pub(crate) fn ack_wait(&self) -> Duration {
        Duration::from_millis(self.ack_wait_ms)
    }
}
