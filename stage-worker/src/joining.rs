//! The start of a worker without files of its own: it chooses a stage, unless it was given one,
//! and fetches that stage's shard from the broker. The fleet hears of it from the moment on in which
//! it has chosen, so others that start choose something else.

use std::path::PathBuf;
use std::time::Duration;

use stagebus_bus::{Bus, BusOptions, ModelStore, Role};
use stagebus_delivery::{
    Cache, CachedSet, DeliveryError, StoredSet, Wanted, choose, find_model, list, log_progress,
};
use stagebus_schemas::ids::{ModelName, StageIndex, WorkerId};
use stagebus_schemas::messages::fleet::{WorkerAnnouncement, WorkerLoad, WorkerState};
use stagebus_schemas::version::MessageVersion;
use stagebus_settings::{BrokerSettings, StoreSettings};

use crate::config::WorkerSettings;
use crate::error::WorkerError;
use crate::load::{n_stages, random_suffix, worker_id};
use crate::need::{Offer, forsaken, neediest};
use crate::presence::Presence;
use crate::results::u32_of;
use crate::run::seen_by_broker;

/// How long the fleet's answers to the question who is there are waited for, and then word of others
/// that choose at the same time: several times the way of a message over a slow link.
const LISTEN: Duration = Duration::from_millis(700);

/// How often a worker may choose again because others chose the same: more than start together.
const MAX_CHOICES: usize = 64;

/// A worker that has its files and waits to load them.
#[derive(Debug)]
pub(crate) struct Joined {
    /// The settings, with the folder and the stage.
    pub(crate) settings: WorkerSettings,
    /// Its id, which the fleet knows already.
    pub(crate) worker: WorkerId,
    pub(crate) presence: Presence,
    /// Keeps the files in the cache.
    pub(crate) cached: CachedSet,
}

/// A shard set that the broker has, with its manifest on this machine.
#[derive(Debug)]
struct Stored {
    store: ModelStore,
    set: StoredSet,
    cached: CachedSet,
    model: ModelName,
}

/// Chooses a stage, if the settings name none, and brings its files to the cache.
///
/// # Errors
/// [`WorkerError::Delivery`], [`WorkerError::NothingToServe`], [`WorkerError::CutHead`], and what
/// keeps the broker away.
pub(crate) async fn join(
    broker: &BrokerSettings,
    store: &StoreSettings,
    settings: &WorkerSettings,
) -> Result<Joined, WorkerError> {
    let role = settings.model.as_ref().map_or(Role::Client, Role::Worker);
    let options = stagebus_delivery::connection(BusOptions {
        connect_wait: Duration::from_millis(settings.connect_wait_ms),
        ..BusOptions::from_settings(broker, role, "worker that joins")?
    });
    let bus = Bus::connect(options).await?;
    let events = bus.events();
    let cache = Cache::new(store)?;
    let stored = stored_sets(&bus, settings, &cache).await?;
    let models: Vec<_> = stored.iter().map(|stored| stored.model.clone()).collect();
    let (model, every) = (settings.model.as_ref(), settings.announce_interval());
    let mut presence = Presence::start(&bus, model, &models, every).await?;
    seen_by_broker(&bus, events).await?;
    let offers = offers(&stored, settings)?;
    let joiner = Joiner { settings, cache: &cache, stored: &stored, suffix: random_suffix() };
    let fetched = fetch(&joiner, &offers, &mut presence).await;
    match fetched {
        Ok((worker, settings, cached)) => Ok(Joined { settings, worker, presence, cached }),
        Err(error) => {
            presence.leave().await;
            Err(error)
        }
    }
}

/// What does not change while a worker joins.
struct Joiner<'a> {
    settings: &'a WorkerSettings,
    cache: &'a Cache,
    stored: &'a [Stored],
    suffix: String,
}

impl Joiner<'_> {
    fn id(&self, stage: u16) -> Result<WorkerId, WorkerError> {
        worker_id(self.settings.name.as_deref(), stage, &self.suffix)
    }

    /// The shard set of an offer.
    fn stored(&self, offer: &Offer) -> Result<&Stored, WorkerError> {
        let found = self.stored.iter().find(|stored| {
            stored.model == offer.model && stored.set.fingerprint == offer.fingerprint
        });
        found.ok_or(WorkerError::NothingToServe)
    }

    /// What the fleet hears of a worker that takes an offer.
    fn told(&self, offer: &Offer, state: WorkerState) -> Result<WorkerAnnouncement, WorkerError> {
        let Stored { cached: CachedSet { shards, .. }, model, .. } = self.stored(offer)?;
        let entry = shards.stage(usize::from(offer.stage))?;
        let settings = self.settings;
        Ok(WorkerAnnouncement {
            version: MessageVersion::CURRENT,
            worker: self.id(offer.stage)?,
            model: model.clone(),
            fingerprint: offer.fingerprint.clone(),
            stage: StageIndex::new(offer.stage),
            n_stages: n_stages(&shards.manifest, &shards.dir)?,
            first_layer: u32_of(entry.first_layer),
            end_layer: u32_of(entry.end_layer),
            device: settings.device.clone(),
            profile: settings.profile.profile().as_str().to_owned(),
            host: gethostname::gethostname().to_string_lossy().into_owned(),
            state,
            interval_ms: settings.announce_ms,
            load: WorkerLoad::default(),
        })
    }
}

/// The shard sets that may be served: that of the model that was named, or one of every model.
async fn stored_sets(
    bus: &Bus,
    settings: &WorkerSettings,
    cache: &Cache,
) -> Result<Vec<Stored>, WorkerError> {
    let fingerprint = settings.fingerprint.as_deref();
    let models = match (&settings.model, settings.stage) {
        (Some(_), _) | (None, Some(_)) => vec![find_model(bus, settings.model.as_ref()).await?],
        (None, None) => bus.stored_models().await.map_err(DeliveryError::from)?,
    };
    let is_only_one = models.len() == 1;
    let mut stored = Vec::new();
    for model in models {
        let store = ModelStore::new(bus, &model);
        let sets = list(&store).await?;
        let set = match choose(&model, &sets, fingerprint) {
            Ok(set) => set.clone(),
            // Another model may do.
            Err(DeliveryError::NoSet { .. } | DeliveryError::Fingerprint { .. })
                if !is_only_one =>
            {
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let cached = cache.open(&store, &set).await?;
        stored.push(Stored { store, set, cached, model });
    }
    if stored.is_empty() {
        return Err(DeliveryError::NothingStored.into());
    }
    Ok(stored)
}

/// The stages that may be served; the one that was named alone, if one was.
fn offers(stored: &[Stored], settings: &WorkerSettings) -> Result<Vec<Offer>, WorkerError> {
    let mut offers = Vec::new();
    for Stored { set, cached: CachedSet { shards, .. }, model, .. } in stored {
        if shards.manifest.head_tokens.is_some() {
            if stored.len() == 1 {
                return Err(WorkerError::CutHead { path: PathBuf::from(model.as_str()) });
            }
            continue;
        }
        for stage in 0..n_stages(&shards.manifest, &shards.dir)? {
            offers.push(Offer {
                model: model.clone(),
                fingerprint: set.fingerprint.clone(),
                stage,
                cost_share: shards.stage(usize::from(stage))?.cost_share,
            });
        }
        if let Some(stage) = settings.stage {
            // Says so if there is no such stage.
            shards.stage(usize::from(stage))?;
            offers.retain(|offer| offer.stage == stage);
        }
    }
    Ok(offers)
}

/// Takes a stage and fetches it.
async fn fetch(
    joiner: &Joiner<'_>,
    offers: &[Offer],
    presence: &mut Presence,
) -> Result<(WorkerId, WorkerSettings, CachedSet), WorkerError> {
    let mut taken = take(joiner, offers, presence).await?;
    loop {
        let Stored { store, set, cached, model } = joiner.stored(taken)?;
        presence.tell(joiner.told(taken, WorkerState::Starting)?).await;
        tracing::info!(%model, stage_index = taken.stage, fingerprint = %set.fingerprint, "joining");
        let wanted = Wanted::Stage(usize::from(taken.stage));
        let pulling = joiner.cache.pull((store, set), cached, &wanted, log_progress());
        let pulled = presence.during(pulling).await?;
        tracing::info!(
            stage_index = taken.stage,
            fetched_bytes = pulled.fetched_bytes,
            kept_bytes = pulled.kept_bytes,
            "the shard is here"
        );
        let me = joiner.id(taken.stage)?;
        let Some(empty) = forsaken(offers, || presence.workers(), (&me, taken)) else {
            let settings = WorkerSettings {
                shards: cached.shards.dir.clone(),
                stage: Some(taken.stage),
                ..joiner.settings.clone()
            };
            return Ok((me, settings, cached.clone()));
        };
        tracing::info!(from = taken.stage, to = empty.stage, "another worker has this stage");
        taken = empty;
    }
}

/// Chooses a stage and waits until nobody else chooses the same.
async fn take<'a>(
    joiner: &Joiner<'_>,
    offers: &'a [Offer],
    presence: &mut Presence,
) -> Result<&'a Offer, WorkerError> {
    if let [only] = offers {
        return Ok(only);
    }
    presence.listen(LISTEN).await;
    let mut taken: Option<&Offer> = None;
    for _ in 0..MAX_CHOICES {
        let me = joiner.id(taken.map_or(0, |offer| offer.stage))?;
        let chosen = neediest(offers, || presence.workers(), (&me, taken));
        let chosen = chosen.ok_or(WorkerError::NothingToServe)?;
        if taken.is_some_and(|taken| taken == chosen) {
            return Ok(chosen);
        }
        taken = Some(chosen);
        presence.tell(joiner.told(chosen, WorkerState::Joining)?).await;
        presence.listen(LISTEN).await;
    }
    taken.ok_or(WorkerError::NothingToServe)
}
