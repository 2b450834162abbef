//! Bringing to this machine what a coordinator reads of shard sets that lie on the broker.

use stagebus_bus::{Bus, BusOptions, ModelStore, Role, StoreError};
use stagebus_delivery::{
    Cache, CachedSet, DeliveryError, Wanted, choose, connection, find_model, list, log_progress,
};
use stagebus_settings::{BrokerSettings, StoreSettings};
use tracing::info;

use crate::config::{CoordinatorSettings, DraftChoice};
use crate::coordinator::CONNECT_WAIT;
use crate::error::CoordinatorError;

/// What a coordinator reads; it stays in the cache while this is held.
#[derive(Debug)]
pub(crate) struct Files {
    /// Manifest, tokenizer and chat template, and the first stage if it is to be hosted.
    pub(crate) target: CachedSet,
    /// The draft model, if one is wanted and stored.
    pub(crate) draft: Option<CachedSet>,
}

/// Pulls what the settings ask for.
///
/// # Errors
/// [`CoordinatorError::Delivery`], and what keeps the broker away.
pub(crate) async fn pull(
    broker: &BrokerSettings,
    store: &StoreSettings,
    settings: &CoordinatorSettings,
) -> Result<Files, CoordinatorError> {
    let role = settings.model.as_ref().map_or(Role::Client, Role::Coordinator);
    let options = connection(BusOptions {
        connect_wait: CONNECT_WAIT,
        ..BusOptions::from_settings(broker, role, "coordinator that starts")?
    });
    let bus = Bus::connect(options).await?;
    let model = find_model(&bus, settings.model.as_ref()).await?;
    let cache = Cache::new(store)?;
    let wanted = Wanted::Text { hosted: settings.host_stage0.then_some(0) };
    let store = ModelStore::new(&bus, &model);
    let target = bring(&cache, &store, settings.fingerprint.as_deref(), &wanted).await?;
    let may_draft = match settings.draft {
        DraftChoice::Auto | DraftChoice::Model | DraftChoice::Hybrid => {
            settings.draft_shards.is_none()
        }
        DraftChoice::Off | DraftChoice::Ngram => false,
    };
    if !may_draft {
        return Ok(Files { target, draft: None });
    }
    let store = ModelStore::of_drafts(&bus, &model);
    let draft = match bring(&cache, &store, None, &Wanted::Whole).await {
        Ok(draft) => Some(draft),
        Err(DeliveryError::Store(StoreError::NoBucket { .. }) | DeliveryError::NoSet { .. }) => {
            None
        }
        Err(error) => return Err(error.into()),
    };
    Ok(Files { target, draft })
}

async fn bring(
    cache: &Cache,
    store: &ModelStore,
    fingerprint: Option<&str>,
    wanted: &Wanted,
) -> Result<CachedSet, DeliveryError> {
    let sets = list(store).await?;
    let set = choose(store.model(), &sets, fingerprint)?;
    let cached = cache.open(store, set).await?;
    let pulled = cache.pull((store, set), &cached, wanted, log_progress()).await?;
    info!(
        model = %cached.shards.manifest.model, fingerprint = %set.fingerprint,
        fetched_bytes = pulled.fetched_bytes, kept_bytes = pulled.kept_bytes,
        "the shard set is here"
    );
    Ok(cached)
}
