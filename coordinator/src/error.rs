//! Why a coordinator does not start, or ends.

use stagebus_bus::{BusError, JobError, PublishError, SeedError, SubscribeError, Violation};
use stagebus_delivery::DeliveryError;
use stagebus_draft::drafter::DraftLoadError;
use stagebus_schemas::ids::IdError;
use stagebus_settings::logging::LogError;
use stagebus_settings::{RuntimeError, SettingsError};
use stagebus_shards::ShardSetError;
use stagebus_shards::text::TextError;
use stagebus_telemetry::TelemetryError;

use crate::config::SettingError;

/// Why a coordinator does not start, or ended other than as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoordinatorError {
    /// The configuration cannot be loaded.
    #[error("configuration cannot be loaded")]
    Settings(#[from] SettingsError),
    /// A value of `[coordinator]` is out of range.
    #[error("configuration is not valid")]
    Setting(#[from] SettingError),
    /// Logging cannot be started.
    #[error("logging cannot be started")]
    Log(#[from] LogError),
    /// Metrics or traces have no way out.
    #[error("the coordinator cannot show what it is asked to")]
    Telemetry(#[from] TelemetryError),
    /// The shard set cannot be pulled from the broker.
    #[error("shard set cannot be pulled")]
    Delivery(#[from] DeliveryError),
    /// The shard set cannot be used.
    #[error("shard set cannot be used")]
    Shards(#[from] ShardSetError),
    /// The tokenizer or the chat template cannot be used.
    #[error("tokenizer or chat template cannot be used")]
    Text(#[from] TextError),
    /// A draft model is asked for and none is given.
    #[error(
        "coordinator.draft asks for a draft model: set coordinator.draft_shards, or push one with `stagebus push --draft-of`"
    )]
    NoDraftModel,
    /// The draft model cannot be used.
    #[error("draft model cannot be used")]
    Draft(#[from] DraftLoadError),
    /// OpenVINO, which runs the draft model, is not there.
    #[error("the draft model cannot run")]
    Runtime(#[source] RuntimeError),
    /// The model's name cannot be a subject token.
    #[error("model name of the shard set cannot be used")]
    ModelName(#[from] IdError),
    /// A number of the shard set does not fit the wire.
    #[error("{name} of the shard set is {found}, which no message can carry")]
    Dimension {
        /// Which number.
        name: &'static str,
        /// The number.
        found: usize,
    },
    /// A worker in this process is asked for, and the program has none.
    #[error(
        "coordinator.host_stage0 is set, but this program runs no worker: start `stagebus \
         coordinator`"
    )]
    NoHost,
    /// The file with the nkey seed cannot be read.
    #[error("the broker's credentials cannot be used")]
    Seed(#[from] SeedError),
    /// There is no connection to the broker.
    #[error("cannot connect to the broker")]
    Broker(#[from] BusError),
    /// A subject cannot be subscribed to.
    #[error("cannot subscribe")]
    Subscribe(#[from] SubscribeError),
    /// The first message cannot be sent.
    #[error("cannot publish")]
    Publish(#[from] PublishError),
    /// Durable jobs must be on and cannot.
    #[error("durable jobs cannot be taken (coordinator.jobs.mode is on)")]
    Jobs(#[from] JobError),
    /// Messages between stages do not fit the broker's limit.
    #[error(
        "the broker passes messages of {max_payload} bytes, room for {rows} rows of {hidden_dim} \
         elements; raise max_payload until {needed} rows fit"
    )]
    MaxPayload {
        /// The broker's limit.
        max_payload: usize,
        /// Rows that fit.
        rows: usize,
        /// Rows that must fit.
        needed: usize,
        /// Elements of a row.
        hidden_dim: usize,
    },
    /// The broker's messages are too small for a row of logits.
    #[error(
        "coordinator.head is \"full\", but a row of {vocab_size} logits does not fit the broker's \
         max_payload of {max_payload} bytes"
    )]
    LogitsPayload {
        /// The broker's limit.
        max_payload: usize,
        /// Elements of a row.
        vocab_size: u32,
    },
    /// The thread that watches standard input cannot be started.
    #[error("cannot watch standard input")]
    Thread(#[source] std::io::Error),
    /// The system's signals cannot be watched.
    #[error("cannot watch signals")]
    Signals(#[source] std::io::Error),
    /// The broker stopped accepting our credentials.
    #[error("the broker refuses our credentials")]
    AuthRefused,
    /// The broker's permissions forbid what this coordinator needs.
    #[error("this coordinator cannot do its work")]
    Forbidden(#[from] Violation),
    /// The connection to the broker was closed for good.
    #[error("connection to the broker is closed")]
    ConnectionClosed,
    /// Requests were still under way when the time for shutting down had passed; their clients
    /// got an error.
    #[error("{n_sessions} requests did not end within the time for shutting down")]
    DrainDeadline {
        /// Requests cut off.
        n_sessions: usize,
    },
}

impl CoordinatorError {
    /// Whether the broker refuses this coordinator, or the connection would not be safe.
    #[must_use]
    pub fn is_access_refusal(&self) -> bool {
        matches!(self, Self::AuthRefused) || stagebus_bus::is_access_refusal(self)
    }
}
