//! Layered configuration, logging, signals and the search for the runtime, shared by all processes.
//!
//! Layers, weakest first: defaults, one TOML file, `STAGEBUS_*` variables, command-line flags.
//! One file may serve a whole machine: each process reads `[broker]`, `[log]`, `[metrics]`,
//! `[telemetry]`, `[store]` and the table of its own name, and leaves the tables of the other processes
//! alone. A value that does not fit and a key that does not exist stop the start with an error that
//! names key, value and source.
//!
//! ```
//! # use serde::{Deserialize, Serialize};
//! #[derive(Debug, Default, Serialize, Deserialize)]
//! #[serde(default, deny_unknown_fields)]
//! struct Worker { stage: u32, device: String }
//!
//! # fn main() -> Result<(), stagebus_settings::SettingsError> {
//! let mut flags = stagebus_settings::Overrides::default();
//! flags.set("worker.stage", 2, "--stage");
//! let settings = stagebus_settings::load::<Worker>("worker", None, &flags)?;
//! assert_eq!(settings.process.stage, 2);
//! # Ok(())
//! # }
//! ```

mod args;
mod broker;
pub mod environment;
mod error;
mod load;
pub mod logging;
mod metrics;
pub mod process;
mod runtime;
mod secret;
mod store;
mod telemetry;

pub use args::ProcessArgs;
pub use broker::{BrokerSettings, TlsSettings};
pub use error::{RuntimeError, SettingsError};
pub use load::{Overrides, SECTIONS, Settings, load};
pub use logging::{LogFormat, LogSettings};
pub use metrics::{ListenAddress, ListenAddressError, MetricsSettings};
pub use runtime::{OpenVinoLibrary, draft_folders, find_nats_server, find_openvino, runtime_dir};
pub use secret::Secret;
pub use store::StoreSettings;
pub use telemetry::{Collector, SampleRatio, TelemetrySettingError, TelemetrySettings};
