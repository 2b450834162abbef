//! Bringing to this machine what a coordinator reads of a shard set that lies on the broker.

use stagebus_bus::{Bus, BusOptions, ModelStore, Role};
use stagebus_delivery::{
    Cache, CachedSet, Wanted, choose, connection, find_model, list, log_progress,
};
use stagebus_settings::{BrokerSettings, StoreSettings};
use tracing::info;

use crate::config::CoordinatorSettings;
use crate::coordinator::CONNECT_WAIT;
use crate::error::CoordinatorError;

/// Pulls manifest, tokenizer and chat template, and the first stage if it is to be hosted.
///
/// # Errors
/// [`CoordinatorError::Delivery`], and what keeps the broker away.
pub(crate) async fn pull(
    broker: &BrokerSettings,
    store: &StoreSettings,
    settings: &CoordinatorSettings,
) -> Result<CachedSet, CoordinatorError> {
    let role = settings.model.as_ref().map_or(Role::Client, Role::Coordinator);
    let options = connection(BusOptions {
        connect_wait: CONNECT_WAIT,
        ..BusOptions::from_settings(broker, role, "coordinator that starts")?
    });
    let bus = Bus::connect(options).await?;
    let model = find_model(&bus, settings.model.as_ref()).await?;
    let cache = Cache::new(store)?;
    let store = ModelStore::new(&bus, &model);
    let sets = list(&store).await?;
    let set = choose(&model, &sets, settings.fingerprint.as_deref())?;
    let cached = cache.open(&store, set).await?;
    let wanted = Wanted::Text { hosted: settings.host_stage0.then_some(0) };
    let pulled = cache.pull((&store, set), &cached, &wanted, log_progress()).await?;
    info!(
        %model, fingerprint = %set.fingerprint, fetched_bytes = pulled.fetched_bytes,
        kept_bytes = pulled.kept_bytes, "the shard set is here"
    );
    Ok(cached)
}
