//! Bringing to this machine what a coordinator reads of a shard set that lies on the broker.

use std::path::PathBuf;

use stagebus_bus::{Bus, BusOptions, ModelStore, Role};
use stagebus_delivery::{
    Wanted, cache_dir, choose, connection, find_model, list, log_progress, open, pull as fetch,
    set_dir,
};
use stagebus_settings::{BrokerSettings, StoreSettings};
use tracing::info;

use crate::config::CoordinatorSettings;
use crate::coordinator::CONNECT_WAIT;
use crate::error::CoordinatorError;

/// Pulls manifest, tokenizer and chat template, and the first stage if it is to be hosted; returns
/// their folder.
///
/// # Errors
/// [`CoordinatorError::Delivery`], and what keeps the broker away.
pub(crate) async fn pull(
    broker: &BrokerSettings,
    store: &StoreSettings,
    settings: &CoordinatorSettings,
) -> Result<PathBuf, CoordinatorError> {
    let role = settings.model.as_ref().map_or(Role::Client, Role::Coordinator);
    let options = connection(BusOptions {
        connect_wait: CONNECT_WAIT,
        ..BusOptions::from_settings(broker, role, "coordinator that starts")?
    });
    let bus = Bus::connect(options).await?;
    let model = find_model(&bus, settings.model.as_ref()).await?;
    let cache = cache_dir(store)?;
    let store = ModelStore::new(&bus, &model);
    let sets = list(&store).await?;
    let set = choose(&model, &sets, settings.fingerprint.as_deref())?;
    let dir = set_dir(&cache, &model, &set.fingerprint);
    let shards = open(&store, set, &dir).await?;
    let wanted = Wanted::Text { hosted: settings.host_stage0.then_some(0) };
    let pulled = fetch(&store, set, &shards, &wanted, log_progress()).await?;
    info!(
        %model, fingerprint = %set.fingerprint, fetched_bytes = pulled.fetched_bytes,
        kept_bytes = pulled.kept_bytes, "the shard set is here"
    );
    Ok(dir)
}
