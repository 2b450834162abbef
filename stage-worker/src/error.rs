//! Why a worker did not start, or ended by itself.

use std::path::PathBuf;
use std::time::Duration;

use stagebus_bus::{BusError, PublishError, SeedError, SubscribeError, Violation};
use stagebus_delivery::DeliveryError;
use stagebus_engine::OpenStageError;
use stagebus_schemas::ids::IdError;
use stagebus_settings::logging::LogError;
use stagebus_settings::{RuntimeError, SettingsError};
use stagebus_shards::ShardSetError;
use stagebus_telemetry::TelemetryError;

use crate::config::SettingError;
use crate::inference::CommandError;

/// Why a worker did not start, or ended by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The configuration cannot be loaded.
    #[error("the configuration cannot be loaded")]
    Settings(#[from] SettingsError),
    /// A value of `[worker]` cannot work.
    #[error("the configuration cannot work")]
    Setting(#[from] SettingError),
    /// Logging did not start.
    #[error("logging cannot be started")]
    Log(#[from] LogError),
    /// Metrics or traces have no way out.
    #[error("the worker cannot show what it is asked to")]
    Telemetry(#[from] TelemetryError),
    /// The shard set cannot be pulled from the broker.
    #[error("the shard set cannot be pulled")]
    Delivery(#[from] DeliveryError),
    /// The broker has shard sets, but none of them can be served.
    #[error("nothing that the broker has can be served: draft models cannot")]
    NothingToServe,
    /// The shard set cannot be opened, or its files are not those of the manifest.
    #[error("the shard set cannot be used")]
    Shards(#[from] ShardSetError),
    /// A name in the manifest or the configuration cannot be part of a subject.
    #[error("{what} is not valid")]
    Name {
        /// Which name.
        what: &'static str,
        /// Why.
        #[source]
        source: IdError,
    },
    /// The shard set has more stages than the wire can name.
    #[error("{} has {n_stages} stages, at most 65535 can be served", path.display())]
    TooManyStages {
        /// The shard set.
        path: PathBuf,
        /// Its stages.
        n_stages: usize,
    },
    /// The model's head has rows for some tokens only.
    #[error("{} is a draft model with a cut head: it can draft, but not be served", path.display())]
    CutHead {
        /// The shard set.
        path: PathBuf,
    },
    /// The OpenVINO runtime was not found.
    #[error("the OpenVINO runtime cannot be found")]
    Runtime(#[from] RuntimeError),
    /// The shard did not load.
    #[error("stage {stage} cannot be loaded on {device}")]
    Load {
        /// The stage.
        stage: u16,
        /// The device.
        device: String,
        /// Why.
        #[source]
        source: Box<OpenStageError>,
    },
    /// A thread could not be started or did not survive.
    #[error("cannot run the {name} thread")]
    Thread {
        /// Name of the thread.
        name: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The system does not pass signals on.
    #[error("cannot watch for signals")]
    Signals(#[source] std::io::Error),
    /// A file with our identity cannot be read.
    #[error("the broker's credentials cannot be used")]
    Seed(#[from] SeedError),
    /// No connection.
    #[error("cannot connect to the broker")]
    Connect(#[from] BusError),
    /// The worker cannot listen.
    #[error("cannot subscribe to the worker's subjects")]
    Subscribe(#[from] SubscribeError),
    /// The worker cannot send.
    #[error("cannot send to the broker")]
    Publish(#[from] PublishError),
    /// A message to ourselves did not come back.
    #[error(
        "nothing came back on {inbox} within {waited:?}; the worker's role must be allowed to \
         publish and to subscribe there"
    )]
    NoEcho {
        /// Subject of the message.
        inbox: String,
        /// How long was waited.
        waited: Duration,
    },
    /// The connection ended for good.
    #[error("the connection to the broker is closed")]
    BrokerClosed,
    /// The broker refuses our identity while we reconnect.
    #[error("the broker refuses this worker's credentials; check the credentials of its role")]
    BrokerRefused,
    /// The broker's permissions forbid what this worker needs.
    #[error("this worker cannot do its work")]
    Forbidden(#[from] Violation),
    /// The inference thread ended by itself: the runtime crashed or the backend has a bug.
    #[error("the inference thread has ended unexpectedly; its last words are in the log")]
    InferenceEnded,
    /// The inference thread takes no more commands.
    #[error("the inference thread cannot be reached")]
    Command(#[from] CommandError),
    /// The end took longer than `worker.shutdown_ms`.
    #[error("the end took longer than {deadline_ms} ms, the step that runs was cut off")]
    ShutdownDeadline {
        /// The deadline.
        deadline_ms: u64,
    },
}

impl WorkerError {
    /// Whether the broker refuses this worker, or the connection would not be safe.
    #[must_use]
    pub fn is_access_refusal(&self) -> bool {
        matches!(self, Self::BrokerRefused) || stagebus_bus::is_access_refusal(self)
    }
}
