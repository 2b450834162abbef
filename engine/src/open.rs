//! From a shard set to a running backend.

use std::path::Path;

use stagebus_shards::shard_set::StageFiles;
use stagebus_shards::{Form, ShardSet, ShardSetError, StaticForm};

use crate::backend::Backend;
use crate::load::LoadError;
use crate::openvino::{Runtime, RuntimeError};
use crate::options::{EngineKind, EngineOptions};
use crate::paged::{PagedBackend, PagedError};
use crate::stage::{StageSpec, StageSpecError};
use crate::stateful::StatefulBackend;
use crate::static_form::StaticBackend;
use crate::testing::{TestBackend, TestModel};

/// Which stage to run.
#[derive(Debug, Clone, Copy)]
pub struct StageRequest<'a> {
    /// The model. Its files are not verified here: see [`ShardSet::verify_stage`].
    pub shards: &'a ShardSet,
    /// The stage.
    pub stage: usize,
    /// OpenVINO's C library; may be absent for an engine that does not use it.
    pub library: Option<&'a Path>,
}

/// Why a stage does not run.
#[derive(Debug, thiserror::Error)]
pub enum OpenStageError {
    /// The model has no such stage.
    #[error(transparent)]
    Stage(#[from] StageSpecError),
    /// The engine takes graphs of another form.
    #[error(
        "the engine {engine} does not run a shard set of the {} form: choose auto, or make one with \
         `stagebus shard --form {}`", found.as_str(), needed
    )]
    Form {
        /// The engine asked for.
        engine: EngineKind,
        /// The form of the shard set.
        found: Form,
        /// The form that the engine takes.
        needed: &'static str,
    },
    /// The shard set has no such files.
    #[error(transparent)]
    Shards(#[from] ShardSetError),
    /// OpenVINO cannot be used.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The stage cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The stage cannot be loaded for paged attention.
    #[error(transparent)]
    Paged(#[from] PagedError),
}

/// Opens the backend that `kind` names; [`EngineKind::Auto`] goes by the form of the shard set and
/// by what the device allows. The backend may move to another thread once.
///
/// # Errors
/// [`OpenStageError`].
pub fn open_backend(
    kind: EngineKind,
    request: &StageRequest<'_>,
    options: &EngineOptions,
) -> Result<Box<dyn Backend>, OpenStageError> {
    let spec = StageSpec::from_manifest(&request.shards.manifest, request.stage)?;
    let found = request.shards.manifest.form;
    let other_form = |needed| Err(OpenStageError::Form { engine: kind, found, needed });
    match (kind, found) {
        (EngineKind::Test, _) => {
            let mut model = TestModel::from_manifest(&request.shards.manifest);
            model.context_length = options.context_limit(spec.context_length);
            let test = options.test.clone();
            Ok(Box::new(TestBackend::new(model, spec, test)))
        }
        (EngineKind::Static | EngineKind::Auto, Form::Static(form)) => {
            Ok(Box::new(open_static(request, spec, form, options)?))
        }
        (EngineKind::Static, Form::Stateful) => other_form("static"),
        (EngineKind::Paged | EngineKind::Stateful, Form::Static(_)) => other_form("stateful"),
        (EngineKind::Paged, Form::Stateful) => Ok(Box::new(open_paged(request, spec, options)?)),
        (EngineKind::Stateful, Form::Stateful) => {
            Ok(Box::new(open_stateful(request, spec, options)?))
        }
        (EngineKind::Auto, Form::Stateful) => match open_paged(request, spec.clone(), options) {
            Ok(backend) => Ok(Box::new(backend)),
            Err(OpenStageError::Paged(error)) => {
                let reason = &error as &dyn std::error::Error;
                tracing::warn!(reason, "no paged attention here, sessions run one by one");
                Ok(Box::new(open_stateful(request, spec, options)?))
            }
            Err(error) => Err(error),
        },
    }
}

/// What a stage is loaded with and from.
fn runtime_and_files(request: &StageRequest<'_>) -> Result<(Runtime, StageFiles), OpenStageError> {
    let library = request.library.ok_or(RuntimeError::NotGiven)?;
    Ok((Runtime::load(library)?, request.shards.stage_files(request.stage)?))
}

fn open_paged(
    request: &StageRequest<'_>,
    spec: StageSpec,
    options: &EngineOptions,
) -> Result<PagedBackend, OpenStageError> {
    let (runtime, files) = runtime_and_files(request)?;
    let fingerprint = &request.shards.manifest.fingerprint;
    let backend = PagedBackend::load(&runtime, &files, spec, fingerprint, options)?;
    let info = backend.info();
    tracing::info!(
        openvino = runtime.build(),
        device = options.device,
        profile = options.profile.as_str(),
        kv_precision = info.kv_precision,
        kv_bytes_per_token = info.kv_bytes_per_token,
        n_blocks = info.n_blocks,
        decode_rows = ?info.decode_rows,
        load_ms = info.load_time.as_millis() as u64,
        "stage loaded for paged attention"
    );
    if !info.rows_agree {
        tracing::warn!(
            device = options.device,
            "the last bits of a row depend on the rows beside it: tokens may differ in near ties"
        );
    }
    Ok(backend)
}

fn open_stateful(
    request: &StageRequest<'_>,
    spec: StageSpec,
    options: &EngineOptions,
) -> Result<StatefulBackend, OpenStageError> {
    let (runtime, files) = runtime_and_files(request)?;
    let options = &with_own_cache(request, options);
    let backend = StatefulBackend::load(&runtime, &files, spec, options)?;
    let info = backend.info();
    tracing::info!(
        openvino = info.openvino,
        device = options.device,
        profile = options.profile.as_str(),
        inference_precision = info.inference_precision,
        kv_precision = info.kv_precision,
        kv_bytes_per_token = info.kv_bytes_per_token,
        load_ms = info.load_time.as_millis() as u64,
        "stage loaded"
    );
    Ok(backend)
}

fn open_static(
    request: &StageRequest<'_>,
    spec: StageSpec,
    form: StaticForm,
    options: &EngineOptions,
) -> Result<StaticBackend, OpenStageError> {
    let (runtime, files) = runtime_and_files(request)?;
    let options = &with_own_cache(request, options);
    let backend = StaticBackend::load(&runtime, &files, spec, form, options)?;
    let info = backend.info();
    tracing::info!(
        openvino = info.openvino,
        device = options.device,
        profile = options.profile.as_str(),
        inference_precision = info.inference_precision,
        window = form.window,
        rows = form.rows,
        slots = form.slots,
        bank_bytes = info.bank_bytes,
        load_ms = info.load_time.as_millis() as u64,
        "stage of fixed shapes loaded"
    );
    Ok(backend)
}

/// The options with a folder per model: compiled models are told apart by path and time of their
/// files.
fn with_own_cache(request: &StageRequest<'_>, options: &EngineOptions) -> EngineOptions {
    let fingerprint = &request.shards.manifest.fingerprint;
    let cache_dir = options.cache_dir.as_ref().map(|dir| dir.join(fingerprint));
    EngineOptions { cache_dir, ..options.clone() }
}
