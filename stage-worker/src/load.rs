//! From a shard set on disk to a stage that can run.

use std::path::Path;

use stagebus_engine::backend::Backend;
use stagebus_engine::{OpenStageError, StageRequest, open_backend};
use stagebus_schemas::ids::{ModelName, StageIndex, WorkerId};
use stagebus_schemas::subjects::Subjects;
use stagebus_settings::{OpenVinoLibrary, find_openvino};
use stagebus_shards::{Manifest, ShardSet};

use crate::config::{EngineChoice, SettingError, WorkerSettings};
use crate::error::WorkerError;
use crate::stage::Stage;

/// What a worker starts with: its place in the pipeline and what runs it.
type Loaded = (Stage, Box<dyn Backend>);

/// Opens the shard set, checks the stage's files against the manifest, and loads the stage. Reads
/// the files in full and compiles the graph: seconds to minutes.
///
/// # Errors
/// [`WorkerError`].
pub(crate) fn load(settings: &WorkerSettings) -> Result<Loaded, WorkerError> {
    let (shards, index) = open(settings)?;
    shards.verify_stage(usize::from(index))?;
    let worker = worker_id(settings.name.as_deref(), index, &random_suffix())?;
    load_as(worker, &shards, (index, settings))
}

/// Loads a stage whose files were checked when they came, under a name that the fleet knows.
///
/// # Errors
/// [`WorkerError`].
pub(crate) fn load_pulled(
    settings: &WorkerSettings,
    worker: WorkerId,
) -> Result<Loaded, WorkerError> {
    let (shards, index) = open(settings)?;
    load_as(worker, &shards, (index, settings))
}

fn open(settings: &WorkerSettings) -> Result<(ShardSet, u16), WorkerError> {
    let index = settings.stage.ok_or(SettingError::NoStage)?;
    let shards = ShardSet::open(&settings.shards)?;
    if shards.manifest.head_tokens.is_some() {
        return Err(WorkerError::CutHead { path: settings.shards.clone() });
    }
    shards.stage(usize::from(index))?;
    Ok((shards, index))
}

fn load_as(
    worker: WorkerId,
    shards: &ShardSet,
    (index, settings): (u16, &WorkerSettings),
) -> Result<Loaded, WorkerError> {
    let stage = stage(worker, &shards.manifest, (index, settings))?;
    let backend = backend(shards, index, settings)?;
    Ok((stage, backend))
}

fn backend(
    shards: &ShardSet,
    index: u16,
    settings: &WorkerSettings,
) -> Result<Box<dyn Backend>, WorkerError> {
    let library = match settings.engine {
        EngineChoice::Test => None,
        EngineChoice::Auto
        | EngineChoice::Paged
        | EngineChoice::Stateful
        | EngineChoice::Static => Some(find_openvino()?),
    };
    let path = library.as_ref().map(OpenVinoLibrary::path);
    let request = StageRequest { shards, stage: usize::from(index), library: path };
    let options = settings.engine_options()?;
    open_backend(settings.engine.kind(), &request, &options).map_err(|source| {
        // The loader did not know the library's plain name either: say where it was looked for.
        let missing = library.as_ref().and_then(OpenVinoLibrary::not_found);
        match (missing, source) {
            (Some(missing), OpenStageError::Runtime(_)) => WorkerError::Runtime(missing),
            (_, source) => WorkerError::Load {
                stage: index,
                device: settings.device.clone(),
                source: Box::new(source),
            },
        }
    })
}

fn stage(
    worker: WorkerId,
    manifest: &Manifest,
    (index, settings): (u16, &WorkerSettings),
) -> Result<Stage, WorkerError> {
    let n_stages = n_stages(manifest, &settings.shards)?;
    let entry = &manifest.stages[usize::from(index)];
    let model = ModelName::new(manifest.model.as_str())
        .map_err(|source| WorkerError::Name { what: "the model's name", source })?;
    Ok(Stage {
        worker,
        subjects: Subjects::new(&model),
        model,
        fingerprint: manifest.fingerprint.clone(),
        index: StageIndex::new(index),
        n_stages,
        first_layer: crate::results::u32_of(entry.first_layer),
        end_layer: crate::results::u32_of(entry.end_layer),
        hidden_dim: manifest.dims.hidden_dim,
        vocab_size: manifest.dims.vocab_size,
        eos_ids: manifest.eos_ids.clone(),
        context_length: manifest.dims.context_length,
    })
}

/// The number of stages, as the wire names it.
///
/// # Errors
/// [`WorkerError::TooManyStages`].
pub(crate) fn n_stages(manifest: &Manifest, path: &Path) -> Result<u16, WorkerError> {
    let n_stages = manifest.n_stages();
    u16::try_from(n_stages)
        .map_err(|_too_many| WorkerError::TooManyStages { path: path.to_owned(), n_stages })
}

/// The end of an id that is unique per start.
pub(crate) fn random_suffix() -> String {
    suffix(&WorkerId::random(StageIndex::FIRST)).to_owned()
}

/// The end of an id.
pub(crate) fn suffix(worker: &WorkerId) -> &str {
    worker.as_str().rsplit('-').next().unwrap_or_default()
}

/// An id that is unique per start: a given name, or that of the stage, and a random end.
///
/// # Errors
/// [`WorkerError::Name`].
pub(crate) fn worker_id(
    name: Option<&str>,
    stage: u16,
    suffix: &str,
) -> Result<WorkerId, WorkerError> {
    let id = match name {
        Some(name) => format!("{name}-{suffix}"),
        None => format!("w{stage}-{suffix}"),
    };
    WorkerId::new(id).map_err(|source| WorkerError::Name { what: "worker.name", source })
}

#[cfg(test)]
mod tests;
