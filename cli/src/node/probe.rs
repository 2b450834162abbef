//! Where a node has the probe from: cut from a model file of its own, or pulled from the broker.

use std::path::PathBuf;

use anyhow::Context as _;
use stagebus_bus::{Bus, BusOptions, ModelStore};
use stagebus_delivery::{
    Cache, CachedSet, StoredSet, Wanted, choose, connection, list, log_progress,
};
use stagebus_schemas::messages::node::Probe;
use stagebus_shards::{FloatCoding, ShardSet};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::source::{self, Cut, SourceArgs};

/// Where a model can be had.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    /// A file or folder of this machine; its probe is kept in a cache.
    Here { model: PathBuf, cache: PathBuf },
    /// The broker, where the planner stores the probe.
    Broker { options: Box<BusOptions>, cache: Cache },
}

/// A probe: the stages of a cut of the model.
#[derive(Debug)]
pub(super) struct ProbeSet {
    /// Its files; of one on the broker those that were brought.
    pub(super) shards: ShardSet,
    stored: Option<Stored>,
}

/// A probe on the broker.
#[derive(Debug)]
struct Stored {
    store: ModelStore,
    set: StoredSet,
    cache: Cache,
    cached: CachedSet,
}

impl ProbeSet {
    /// Finds the probe of a plan, and cuts it if the model is here. Blocks.
    ///
    /// # Errors
    /// A model that cannot be cut or is not the one of the plan; a broker that does not have the
    /// probe.
    pub(super) fn find(
        origin: &Origin,
        probe: &Probe,
        (runtime, stop): (&Handle, &CancellationToken),
    ) -> anyhow::Result<Self> {
        match origin {
            Origin::Here { model, cache } => {
                let source = SourceArgs { shards: None, cache: Some(cache.clone()) };
                let cut = cut(probe)?;
                let set = source::shard_set(&source, Some(model), &cut, true, stop);
                let shards = runtime.block_on(set)?;
                let (found, wanted) = (&shards.manifest.fingerprint, &probe.fingerprint);
                anyhow::ensure!(
                    found == wanted,
                    "{} is another model than {} of the plan: cut in the same way, its shards have \
                     fingerprint {found}, those of the plan {wanted}",
                    model.display(),
                    probe.model
                );
                Ok(Self { shards, stored: None })
            }
            Origin::Broker { options, cache } => {
                let stored = runtime.block_on(Stored::find(options, cache, probe));
                let stored = stored.context("this node has no model file, and no probe either")?;
                Ok(Self { shards: stored.cached.shards.clone(), stored: Some(stored) })
            }
        }
    }

    /// Brings the files of a stage to this machine if they are not here. Blocks.
    ///
    /// # Errors
    /// As [`Cache::pull`]; stopped.
    pub(super) fn bring(
        &self,
        stage: usize,
        (runtime, stop): (&Handle, &CancellationToken),
    ) -> anyhow::Result<()> {
        let Some(Stored { store, set, cache, cached }) = &self.stored else { return Ok(()) };
        let wanted = Wanted::Stage(stage);
        let pulling = cache.pull((store, set), cached, &wanted, log_progress());
        let pulled = runtime.block_on(stop.run_until_cancelled(pulling));
        pulled.context("stopped")?.map(drop)?;
        Ok(())
    }
}

impl Stored {
    async fn find(options: &BusOptions, cache: &Cache, probe: &Probe) -> anyhow::Result<Self> {
        // Questions are answered meanwhile, on another connection.
        let bus = Bus::connect(connection(options.clone())).await?;
        let store = ModelStore::of_probe(&bus, &probe.model);
        let sets = list(&store).await?;
        let set = choose(&probe.model, &sets, Some(&probe.fingerprint))?.clone();
        let cached = cache.open(&store, &set).await?;
        Ok(Self { store, set, cache: cache.clone(), cached })
    }
}

/// The cut of a probe.
fn cut(probe: &Probe) -> anyhow::Result<Cut> {
    let split = probe.split.iter().map(|&layers| usize::try_from(layers));
    let split: Vec<usize> = split.collect::<Result<_, _>>()?;
    let floats = probe.floats.as_deref().map(str::parse::<FloatCoding>).transpose()?;
    let weights = probe.weights.parse()?;
    Ok(Cut { n_stages: split.len(), split: Some(split), weights, floats })
}
