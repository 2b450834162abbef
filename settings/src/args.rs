//! The command-line flags that every process has.

use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::SettingsError;
use crate::load::{Overrides, Settings, load};

/// Flags of the configuration; put into a command with `#[command(flatten)]`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ProcessArgs {
    /// Configuration file (TOML); without it the file named by STAGEBUS_CONFIG, if any
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Set any key, for example --set broker.url=nats://10.0.0.5:4222 (repeatable)
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    pub set: Vec<String>,
}

impl ProcessArgs {
    /// Loads the settings of `process`; `named` holds the process's own flags, which win over
    /// `--set`.
    ///
    /// # Errors
    /// Every [`SettingsError`].
    pub fn load<T>(&self, process: &str, named: &Overrides) -> Result<Settings<T>, SettingsError>
    where
        T: Serialize + DeserializeOwned + Default,
    {
        let mut overrides = Overrides::default();
        for text in &self.set {
            overrides.assign(text)?;
        }
        overrides.extend(named);
        load(process, self.config.as_deref(), &overrides)
    }
}
