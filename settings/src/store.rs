//! `[store]`: what processes keep of the shard sets that they pull from the broker.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The table `[store]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreSettings {
    /// Folder for pulled files, by model and fingerprint; one inside the runtime folder, else in the
    /// user's cache folder, when absent.
    pub cache_dir: Option<PathBuf>,
}
