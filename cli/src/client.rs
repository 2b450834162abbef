//! What every command that talks to a running fleet needs: the broker's address and a connection.

use serde::{Deserialize, Serialize};
use stagebus_bus::{Bus, BusOptions, Role};
use stagebus_settings::{BrokerSettings, Overrides, ProcessArgs};

/// Options of a client.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ClientArgs {
    /// Address of the broker [default: nats://127.0.0.1:4222]
    #[arg(long, value_name = "URL")]
    pub broker: Option<String>,

    /// Flags of the configuration.
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// A client has no table of its own; whatever `[fleet]` holds is for the local fleet.
#[derive(Debug, Default, Serialize, Deserialize)]
struct NoTable {}

impl ClientArgs {
    /// Loads `[broker]` and connects as a client; `name` is shown in the broker's lists.
    ///
    /// # Errors
    /// Configuration that is wrong and a broker that cannot be reached.
    pub async fn connect(&self, name: &str) -> anyhow::Result<Bus> {
        self.connect_as(Role::Client, name).await
    }

    /// The same in another role, which decides where answers go.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn connect_as(&self, role: Role<'_>, name: &str) -> anyhow::Result<Bus> {
        Ok(Bus::connect(self.options(role, name)?).await?)
    }

    /// How to connect in a role.
    ///
    /// # Errors
    /// Configuration that is wrong.
    pub fn options(&self, role: Role<'_>, name: &str) -> anyhow::Result<BusOptions> {
        Ok(BusOptions::from_settings(&self.broker_settings()?, role, name)?)
    }

    /// The settings that the client's own flags make.
    pub(crate) fn overrides(&self) -> Overrides {
        let mut overrides = Overrides::default();
        overrides.set_some("broker.url", self.broker.as_ref(), "--broker");
        overrides
    }

    pub(crate) fn broker_settings(&self) -> anyhow::Result<BrokerSettings> {
        Ok(self.process.load::<NoTable>("fleet", &self.overrides())?.broker)
    }
}
