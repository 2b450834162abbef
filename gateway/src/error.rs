//! Why a gateway does not start, or ends.

use std::net::SocketAddr;
use std::path::PathBuf;

use stagebus_bus::{BusError, SeedError, SubscribeError, Violation};
use stagebus_settings::SettingsError;
use stagebus_settings::logging::LogError;
use stagebus_shards::ShardSetError;
use stagebus_shards::text::TextError;

use crate::config::SettingError;
use crate::keys::KeyError;

/// Why a gateway does not start, or ended other than as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatewayError {
    /// The configuration cannot be loaded.
    #[error("configuration cannot be loaded")]
    Settings(#[from] SettingsError),
    /// A value of `[gateway]` cannot work.
    #[error("configuration is not valid")]
    Setting(#[from] SettingError),
    /// Logging cannot be started.
    #[error("logging cannot be started")]
    Log(#[from] LogError),
    /// The keys of clients cannot be used.
    #[error("API keys cannot be used")]
    Keys(#[from] KeyError),
    /// A certificate or key file cannot be read.
    #[error("cannot read the certificates or the key of {}", path.display())]
    TlsFile {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: tokio_rustls::rustls::pki_types::pem::Error,
    },
    /// Certificate and key do not make a server.
    #[error("gateway.tls.cert_file and gateway.tls.key_file make no TLS server")]
    Tls(#[from] tokio_rustls::rustls::Error),
    /// A shard set of `gateway.shards` cannot be used.
    #[error("shard set of gateway.shards cannot be used")]
    Shards(#[from] ShardSetError),
    /// The tokenizer of a shard set cannot be used.
    #[error("tokenizer of {} cannot be used", folder.display())]
    Text {
        /// The folder.
        folder: PathBuf,
        /// Why.
        #[source]
        source: TextError,
    },
    /// The model of a shard set has a name that no request can have.
    #[error("model name of {} cannot be used", folder.display())]
    ModelName {
        /// The folder.
        folder: PathBuf,
        /// Why.
        #[source]
        source: stagebus_schemas::ids::IdError,
    },
    /// Loading shard sets panicked.
    #[error("loading the shard sets of gateway.shards failed")]
    Load(#[source] tokio::task::JoinError),
    /// The file with the nkey seed cannot be read.
    #[error("the broker's credentials cannot be used")]
    Seed(#[from] SeedError),
    /// There is no connection to the broker.
    #[error("cannot connect to the broker")]
    Broker(#[from] BusError),
    /// Announcements cannot be heard.
    #[error("cannot hear the fleet's announcements")]
    Subscribe(#[from] SubscribeError),
    /// The broker's permissions forbid to hear the announcements.
    #[error(
        "cannot hear the fleet's announcements; where these credentials are for some models only, \
         name them in gateway.models"
    )]
    Forbidden(#[from] Violation),
    /// The address cannot be listened on.
    #[error("cannot listen on {listen}; is it in use")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The thread that watches standard input cannot be started.
    #[error("cannot watch standard input")]
    Thread(#[source] std::io::Error),
    /// The ready line cannot be written.
    #[error("the ready line cannot be written")]
    Ready(#[source] std::io::Error),
    /// The broker stopped accepting our credentials.
    #[error("the broker refuses our credentials")]
    AuthRefused,
    /// The connection to the broker was closed for good.
    #[error("connection to the broker is closed")]
    ConnectionClosed,
    /// Answers were still under way when the time for shutting down had passed.
    #[error("{n_connections} connections did not end within the time for shutting down")]
    DrainDeadline {
        /// Connections cut off.
        n_connections: usize,
    },
}

impl GatewayError {
    /// Whether the broker refuses this gateway, or a connection would not be safe.
    #[must_use]
    pub fn is_access_refusal(&self) -> bool {
        matches!(self, Self::AuthRefused | Self::Setting(SettingError::Insecure { .. }))
            || stagebus_bus::is_access_refusal(self)
    }
}
