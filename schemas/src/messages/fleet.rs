//! Announcements: who is there, with what load.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::codec::{CodecError, Message, check_count};
use crate::ids::{CoordinatorId, ModelName, StageIndex, WorkerId};
use crate::messages::forward::{MAX_STAGES, MAX_TEXT_BYTES};
use crate::version::MessageVersion;

/// Shortest time after which a micro-batch counts as stuck, however short it should be: far above
/// what a busy machine adds, and with one more interval of announcements still below two seconds.
const STUCK_AFTER: Duration = Duration::from_millis(1000);

/// How many times longer than expected a micro-batch may take before it counts as stuck.
const STUCK_FACTOR: u32 = 20;

/// Whether a worker takes sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    /// Has chosen a stage and waits for word of others that choose at the same time.
    Joining,
    /// Fetches its shard or loads it; takes no sessions yet.
    Starting,
    /// Takes new sessions.
    Ready,
    /// Finishes its sessions and takes no new ones.
    Draining,
    /// Gone after this message.
    Leaving,
}

/// Load of a worker.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerLoad {
    /// Sessions held.
    pub n_sessions: u32,
    /// Sessions that fit.
    pub max_sessions: u32,
    /// Steps that wait for inference.
    pub queue_depth: u32,
    /// Positions held in KV caches, masked ones included, in tokens.
    pub kv_tokens: u64,
    /// Memory of the KV caches, in bytes.
    pub kv_bytes: u64,
    /// Memory that KV caches can take, in bytes; 0 where it is not limited beforehand.
    pub kv_max_bytes: u64,
    /// Steps completed since the start; a worker whose number stands still while its queue is
    /// not empty is wedged.
    pub steps_completed: u64,
    /// Rows run since the start.
    pub rows_completed: u64,
    /// Smoothed inference time of a decode micro-batch, in microseconds; 0 before the first.
    pub decode_us: u32,
    /// Smoothed inference time of one prefill row, in microseconds; 0 before the first.
    pub prefill_row_us: u32,
    /// How long the micro-batch that runs has been running, in milliseconds; 0 if none runs.
    pub busy_ms: u32,
    /// How long that micro-batch was expected to take, in milliseconds, at least 1; 0 if nothing
    /// of its kind has been measured, or none runs.
    pub expected_ms: u32,
    /// Times since the start that messages to the worker may have been lost: a broken connection,
    /// or a subscription that was full.
    pub losses: u64,
}

impl WorkerLoad {
    /// Whether the micro-batch that runs has been running for far too long. `unmeasured` is what
    /// one may take of whose kind nothing has been measured.
    #[must_use]
    pub fn is_stuck(&self, unmeasured: Duration) -> bool {
        let busy = Duration::from_millis(self.busy_ms.into());
        let allowed = match self.expected_ms {
            0 => unmeasured,
            expected => STUCK_AFTER.max(Duration::from_millis(expected.into()) * STUCK_FACTOR),
        };
        busy > allowed
    }
}

/// A worker's announcement, sent at a fixed interval, on every change of state and when probed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerAnnouncement {
    /// Version of this message.
    pub version: MessageVersion,
    /// The worker.
    pub worker: WorkerId,
    /// Model served.
    pub model: ModelName,
    /// Fingerprint of the shard set.
    pub fingerprint: String,
    /// Stage served.
    pub stage: StageIndex,
    /// Number of stages of the shard set.
    pub n_stages: u16,
    /// First layer of the stage.
    pub first_layer: u32,
    /// Layer after the last one of the stage.
    pub end_layer: u32,
    /// Device that runs it, as given to the runtime.
    pub device: String,
    /// Numerics profile.
    pub profile: String,
    /// Name of the host, for people.
    pub host: String,
    /// Whether it takes sessions.
    pub state: WorkerState,
    /// Interval of announcements, in milliseconds; three missed ones mean dead.
    pub interval_ms: u32,
    /// Load.
    pub load: WorkerLoad,
}

/// A coordinator's announcement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoordinatorAnnouncement {
    /// Version of this message.
    pub version: MessageVersion,
    /// The coordinator.
    pub coordinator: CoordinatorId,
    /// Model served.
    pub model: ModelName,
    /// Fingerprint of the shard set.
    pub fingerprint: String,
    /// Number of stages it drives.
    pub n_stages: u16,
    /// Name of the host, for people.
    pub host: String,
    /// False once it drains.
    pub accepting: bool,
    /// Interval of announcements, in milliseconds.
    pub interval_ms: u32,
    /// Sessions that run.
    pub n_sessions: u32,
    /// Requests finished since the start.
    pub requests_done: u64,
    /// Tokens emitted since the start.
    pub tokens_out: u64,
    /// Tokens drafted since the start.
    pub tokens_drafted: u64,
    /// Of these, tokens that the model chose too.
    pub tokens_accepted: u64,
    /// Times that a session lost its place and was replayed.
    pub recoveries: u64,
}

impl Message for WorkerAnnouncement {
    fn version(&self) -> MessageVersion {
        self.version
    }

    fn validate(&self) -> Result<(), CodecError> {
        check_texts([
            ("fingerprint", &self.fingerprint),
            ("device", &self.device),
            ("profile", &self.profile),
            ("host", &self.host),
        ])?;
        let (stages, stage) = (usize::from(self.n_stages), self.stage.index());
        check_count("n_stages", stages, 1..=MAX_STAGES, "1 to 1024 stages")?;
        check_count("stage", stage, 0..=stages - 1, "a stage of the shard set")?;
        if self.first_layer >= self.end_layer {
            return Err(CodecError::Field {
                field: "end_layer",
                found: self.end_layer.into(),
                expected: "a layer above first_layer",
            });
        }
        Ok(())
    }
}

impl Message for CoordinatorAnnouncement {
    fn version(&self) -> MessageVersion {
        self.version
    }

    fn validate(&self) -> Result<(), CodecError> {
        check_texts([("fingerprint", &self.fingerprint), ("host", &self.host)])?;
        check_count("n_stages", usize::from(self.n_stages), 1..=MAX_STAGES, "1 to 1024 stages")
    }
}

fn check_texts<const N: usize>(texts: [(&'static str, &String); N]) -> Result<(), CodecError> {
    texts.into_iter().try_for_each(|(field, text)| {
        check_count(field, text.len(), 0..=MAX_TEXT_BYTES, "at most 256 bytes of text")
    })
}
