//! Keys for one test, and connections with them.

use std::path::Path;

use anyhow::{Context, Result};
use stagebus_bus::{BusOptions, Role};
use stagebus_keys::KeyFolder;
use stagebus_settings::BrokerSettings;

/// How the holder `name` connects in `role` to the broker at `url`.
///
/// # Errors
/// No such key.
pub fn options(keys: &Path, name: &str, role: Role<'_>, url: &str) -> Result<BusOptions> {
    let folder = KeyFolder::open(keys)?;
    let mut holders = folder.holders().iter();
    let holder = holders.find(|holder| holder.name.as_str() == name);
    let holder = holder.with_context(|| format!("nobody named {name} has a key"))?;
    let mut settings = BrokerSettings {
        url: url.to_owned(),
        nkey_seed_file: Some(folder.seed_of(holder)),
        ..BrokerSettings::default()
    };
    settings.tls.ca_file = Some(folder.ca());
    Ok(BusOptions::from_settings(&settings, role, name)?)
}
