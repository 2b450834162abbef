//! `[store]`: what processes keep of the shard sets that they pull from the broker.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The table `[store]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreSettings {
    /// Folder for pulled files, by model and fingerprint; one inside the runtime folder, else in the
    /// user's cache folder, when absent.
    pub cache_dir: Option<PathBuf>,
    /// Room for pulled files, in MiB: shard sets that nobody uses make room for others, the one that
    /// was used longest ago first. 0 is no limit.
    pub cache_mib: u64,
}

impl Default for StoreSettings {
    fn default() -> Self {
        // A stage of the largest models that a PC serves, in two versions.
        Self { cache_dir: None, cache_mib: 64 << 10 }
    }
}
