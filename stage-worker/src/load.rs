//! From a shard set on disk to a stage that can run.

use stagebus_engine::backend::Backend;
use stagebus_engine::{OpenStageError, StageRequest, open_backend};
use stagebus_schemas::ids::{IdError, ModelName, StageIndex, WorkerId};
use stagebus_schemas::subjects::Subjects;
use stagebus_settings::{OpenVinoLibrary, find_openvino};
use stagebus_shards::{Manifest, ShardSet};

use crate::config::{EngineChoice, SettingError, WorkerSettings};
use crate::error::WorkerError;
use crate::stage::Stage;

/// Opens the shard set, checks the stage's files against the manifest, and loads the stage. Reads
/// the files in full and compiles the graph: seconds to minutes.
///
/// # Errors
/// [`WorkerError`].
pub(crate) fn load(settings: &WorkerSettings) -> Result<(Stage, Box<dyn Backend>), WorkerError> {
    let index = settings.stage.ok_or(SettingError::NoStage)?;
    let shards = ShardSet::open(&settings.shards)?;
    if shards.manifest.head_tokens.is_some() {
        return Err(WorkerError::CutHead { path: settings.shards.clone() });
    }
    shards.verify_stage(usize::from(index))?;
    let stage = stage(&shards.manifest, index, settings)?;
    let backend = backend(&shards, index, settings)?;
    Ok((stage, backend))
}

fn backend(
    shards: &ShardSet,
    index: u16,
    settings: &WorkerSettings,
) -> Result<Box<dyn Backend>, WorkerError> {
    let library = match settings.engine {
        EngineChoice::Test => None,
        EngineChoice::Auto | EngineChoice::Paged | EngineChoice::Stateful => Some(find_openvino()?),
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

fn stage(manifest: &Manifest, index: u16, settings: &WorkerSettings) -> Result<Stage, WorkerError> {
    let n_stages = manifest.n_stages();
    let n_stages = u16::try_from(n_stages).map_err(|_too_many| WorkerError::TooManyStages {
        path: settings.shards.clone(),
        n_stages,
    })?;
    let entry = &manifest.stages[usize::from(index)];
    let model = ModelName::new(manifest.model.as_str())
        .map_err(|source| WorkerError::Name { what: "the model's name", source })?;
    let stage_index = StageIndex::new(index);
    let worker = worker_id(settings.name.as_deref(), stage_index)
        .map_err(|source| WorkerError::Name { what: "worker.name", source })?;
    Ok(Stage {
        worker,
        subjects: Subjects::new(&model),
        model,
        fingerprint: manifest.fingerprint.clone(),
        index: stage_index,
        n_stages,
        first_layer: crate::results::u32_of(entry.first_layer),
        end_layer: crate::results::u32_of(entry.end_layer),
        hidden_dim: manifest.dims.hidden_dim,
        vocab_size: manifest.dims.vocab_size,
        eos_ids: manifest.eos_ids.clone(),
        context_length: manifest.dims.context_length,
    })
}

/// An id that is unique per start: a given name keeps the random end.
fn worker_id(name: Option<&str>, stage: StageIndex) -> Result<WorkerId, IdError> {
    let random = WorkerId::random(stage);
    match (name, random.as_str().rsplit_once('-')) {
        (Some(name), Some((_, suffix))) => WorkerId::new(format!("{name}-{suffix}")),
        _ => Ok(random),
    }
}

#[cfg(test)]
mod tests;
