//! Where pulled files lie: `<cache>/<model>/<fingerprint>/`, so that nothing is ever written over.

use std::path::{Path, PathBuf};

use stagebus_schemas::ids::ModelName;
use stagebus_settings::StoreSettings;

use crate::error::DeliveryError;

/// Name of the cache inside the runtime folder or the user's cache folder.
const FOLDER: &str = "pulled";

/// The cache folder: what the settings say, else one inside the runtime folder if there is one, else
/// one in the user's cache.
///
/// # Errors
/// [`DeliveryError::NoCache`].
pub fn cache_dir(settings: &StoreSettings) -> Result<PathBuf, DeliveryError> {
    if let Some(dir) = &settings.cache_dir {
        return Ok(dir.clone());
    }
    if let Some(runtime) = stagebus_settings::runtime_dir() {
        return Ok(runtime.join(FOLDER));
    }
    let user = dirs::cache_dir().ok_or(DeliveryError::NoCache)?;
    Ok(user.join("stagebus").join(FOLDER))
}

/// The folder of one shard set.
#[must_use]
pub fn set_dir(cache: &Path, model: &ModelName, fingerprint: &str) -> PathBuf {
    cache.join(model.as_str()).join(fingerprint)
}
