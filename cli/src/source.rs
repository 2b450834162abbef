//! Where a local fleet's shards come from: a shard set, or a model file that is sharded into a
//! cache.
//!
//! The cache holds one folder per source file and options, and beside it a `.key` file with what
//! the folder was made from. A folder whose key no longer fits is made again in its place, so the
//! cache does not grow when a model file or this program changes.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::Context as _;
use sha2::{Digest as _, Sha256};
use stagebus_shards::manifest::{FORMAT_VERSION, model_name_from};
use stagebus_shards::{FloatCoding, ShardRequest, ShardSet, SourceFormat, WeightMode};
use tokio_util::sync::CancellationToken;

use crate::console;
use crate::exit::UsageError;
use crate::shard::shard_with_progress;
use crate::weights;

/// Bytes read from either end of a model file for its key: the front holds sizes, names and
/// metadata, the end holds weights. Together with size and time of change they tell two files
/// apart without reading a 70B model at every start.
const KEY_SAMPLE_BYTES: u64 = 1 << 20;

/// Folder of the runtime in which `cargo xtask setup` puts models.
const MODELS_FOLDER: &str = "models";

/// The model used when none is named: the one that the set-up fetches.
pub const DEFAULT_MODEL_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Options that say where the shards come from.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct SourceArgs {
    /// A shard set made by `stagebus shard`
    #[arg(long, value_name = "DIR")]
    pub shards: Option<PathBuf>,

    /// Folder in which shard sets made on the way are kept
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
}

/// How a model file is to be cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// Number of stages.
    pub n_stages: usize,
    /// Layers per stage, by hand.
    pub split: Option<Vec<usize>>,
    /// How weights that are stored in integers are mapped.
    pub weights: WeightMode,
    /// What becomes of matrices that are stored in floats; what suits the model if it is not given.
    pub floats: Option<FloatCoding>,
}

/// Opens the shard set that the options name, or shards a model file into the cache.
///
/// `model` is used when the options name no shard set; without both it is the model of the
/// set-up. `quiet` hides the progress bar.
///
/// # Errors
/// A shard set that is not valid or has another number of stages or other weights than `cut`, a
/// missing model, what the sharder says, or that `stop` was cancelled.
pub async fn shard_set(
    args: &SourceArgs,
    model: Option<&Path>,
    cut: &Cut,
    quiet: bool,
    stop: &CancellationToken,
) -> anyhow::Result<ShardSet> {
    let model = match model {
        Some(model) => model.to_owned(),
        None => default_model()?,
    };
    let cache = match &args.cache {
        Some(cache) => cache.clone(),
        None => default_cache()?,
    };
    cached(&model, &cache, cut, quiet, stop).await
}

/// Opens a shard set made before and checks that it is what was asked for.
///
/// # Errors
/// A shard set that is not valid, or [`UsageError::Conflict`] with the other options.
pub fn open(
    dir: &Path,
    n_stages: Option<usize>,
    weights: Option<WeightMode>,
) -> anyhow::Result<ShardSet> {
    let set = ShardSet::open(dir)
        .with_context(|| format!("cannot use the shard set {}", dir.display()))?;
    let found = set.manifest.n_stages();
    if let Some(asked) = n_stages.filter(|&asked| asked != found) {
        return Err(conflict(dir, format!("--stages {asked}"), format!("it has {found} stages")));
    }
    let found = set.manifest.weights;
    if let Some(asked) = weights.filter(|&asked| asked != found) {
        return Err(conflict(dir, format!("--weights {asked}"), format!("it has {found} weights")));
    }
    Ok(set)
}

fn conflict(dir: &Path, right: String, reason: String) -> anyhow::Error {
    UsageError::Conflict { left: format!("--shards {}", dir.display()), right, reason }.into()
}

/// The model that the set-up puts into the runtime folder.
fn default_model() -> anyhow::Result<PathBuf> {
    let runtime = stagebus_settings::runtime_dir().context(
        "no model was named and there is no runtime folder; run `cargo xtask setup`, or name a \
         model with --model or --shards",
    )?;
    let model = runtime.join(MODELS_FOLDER).join(DEFAULT_MODEL_FILE);
    anyhow::ensure!(
        model.is_file(),
        "no model was named and {} does not exist; run `cargo xtask setup`, or name a model with \
         --model or --shards",
        model.display()
    );
    Ok(model)
}

/// The cache folder: inside the runtime folder if there is one, else in the user's cache.
pub(crate) fn default_cache() -> anyhow::Result<PathBuf> {
    if let Some(runtime) = stagebus_settings::runtime_dir() {
        return Ok(runtime.join("shards"));
    }
    dirs::cache_dir()
        .map(|cache| cache.join("stagebus").join("shards"))
        .context("there is neither a runtime folder nor a user cache folder; give --cache")
}

/// Returns the cached shard set of a model file, made first if it is missing or out of date.
async fn cached(
    model: &Path,
    cache: &Path,
    cut: &Cut,
    quiet: bool,
    stop: &CancellationToken,
) -> anyhow::Result<ShardSet> {
    let key = key(model, cut).with_context(|| format!("cannot read {}", model.display()))?;
    let folder = cache.join(folder_name(model, cut));
    let key_file = folder.with_extension("key");
    if let Some(set) = reusable(&folder, &key_file, &key) {
        return Ok(set);
    }
    fs::create_dir_all(cache).with_context(|| format!("cannot create {}", cache.display()))?;
    if !quiet {
        console::note(&format!("sharding {} into {}", model.display(), folder.display()));
    }
    remove_if_there(&key_file).with_context(|| format!("cannot remove {}", key_file.display()))?;
    let request = ShardRequest {
        split: cut.split.clone(),
        weights: cut.weights,
        floats: weights::floats(cut.floats, model),
        force: true,
        ..ShardRequest::new(model.to_owned(), folder.clone(), cut.n_stages)
    };
    shard_with_progress(request, quiet, stop).await?;
    fs::write(&key_file, &key).with_context(|| format!("cannot write {}", key_file.display()))?;
    Ok(ShardSet::open(&folder)?)
}

fn reusable(folder: &Path, key_file: &Path, key: &str) -> Option<ShardSet> {
    let found = fs::read_to_string(key_file).ok()?;
    if found == key { ShardSet::open(folder).ok() } else { None }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// A name that people recognise, unique per source path and options.
fn folder_name(model: &Path, cut: &Cut) -> String {
    let stem = model.file_stem().unwrap_or_default().to_string_lossy();
    let path = fs::canonicalize(model).unwrap_or_else(|_| model.to_owned());
    let hash = hex(&Sha256::digest(path.as_os_str().as_encoded_bytes()));
    let split = match &cut.split {
        Some(split) => split.iter().map(|n| format!("-{n}")).collect(),
        None => String::new(),
    };
    let floats = cut.floats.map_or_else(String::new, |floats| format!("-{floats}"));
    let (name, n, weights) = (model_name_from(&stem), cut.n_stages, cut.weights);
    format!("{name}-{n}{split}-{weights}{floats}-{}", &hash[..8])
}

/// What a shard set was made from: the source, the options, and the program that made it. Of a
/// folder, all files count, and of a graph all files beside it.
fn key(model: &Path, cut: &Cut) -> io::Result<String> {
    let mut hash = Sha256::new();
    hash.update(format!("{FORMAT_VERSION} {cut:?} {}", env!("CARGO_PKG_VERSION")));
    // A program built anew may map weights in another way.
    let program = fs::metadata(std::env::current_exe()?)?;
    hash_change(&mut hash, &program)?;
    let mut files = vec![model.to_owned()];
    let path = std::path::absolute(model)?;
    let beside = path.parent().filter(|_| SourceFormat::of(model) == SourceFormat::OpenVino);
    if let Some(folder) = Some(model).filter(|model| model.is_dir()).or(beside) {
        files = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
        files.retain(|path| path.is_file());
        files.sort();
    }
    for path in files {
        hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        hash_change(&mut hash, &metadata)?;
        let mut sample = Vec::new();
        file.by_ref().take(KEY_SAMPLE_BYTES).read_to_end(&mut sample)?;
        file.seek(SeekFrom::Start(metadata.len().saturating_sub(KEY_SAMPLE_BYTES)))?;
        file.take(KEY_SAMPLE_BYTES).read_to_end(&mut sample)?;
        hash.update(&sample);
    }
    Ok(hex(&hash.finalize()))
}

/// Size and time of change of a file.
fn hash_change(hash: &mut Sha256, file: &fs::Metadata) -> io::Result<()> {
    let changed = file.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
    hash.update(file.len().to_le_bytes());
    hash.update(changed.as_nanos().to_le_bytes());
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(n_stages: usize, weights: WeightMode) -> Cut {
        Cut { n_stages, split: None, weights, floats: None }
    }

    #[test]
    fn a_key_follows_content_and_options() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("Model A.gguf");
        fs::write(&model, [7; 3000]).expect("a file");
        let two = cut(2, WeightMode::Exact);
        let first = key(&model, &two).expect("a key");
        assert_eq!(key(&model, &two).expect("a key"), first);
        assert_ne!(key(&model, &cut(3, WeightMode::Exact)).expect("a key"), first);
        assert_ne!(key(&model, &cut(2, WeightMode::Compact)).expect("a key"), first);
        fs::write(&model, [8; 3000]).expect("a file");
        assert_ne!(key(&model, &two).expect("a key"), first);
        assert!(key(&folder.path().join("absent"), &two).is_err());
    }

    #[test]
    fn the_key_of_a_folder_follows_every_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model");
        fs::create_dir(&model).expect("a folder");
        fs::write(model.join("config.json"), "{}").expect("a file");
        fs::write(model.join("model.safetensors"), [1; 100]).expect("a file");
        let two = cut(2, WeightMode::Exact);
        let first = key(&model, &two).expect("a key");
        assert_eq!(key(&model, &two).expect("a key"), first);
        fs::write(model.join("config.json"), "{ }").expect("a file");
        let second = key(&model, &two).expect("a key");
        assert_ne!(second, first);
        fs::rename(model.join("model.safetensors"), model.join("x")).expect("a file");
        assert_ne!(key(&model, &two).expect("a key"), second);
        let graph = model.join("openvino_model.xml");
        fs::write(&graph, "<net/>").expect("a file");
        fs::write(graph.with_extension("bin"), [1; 100]).expect("a file");
        let third = key(&graph, &two).expect("a key");
        fs::write(graph.with_extension("bin"), [2; 100]).expect("a file");
        assert_ne!(key(&graph, &two).expect("a key"), third);
    }

    #[test]
    fn a_large_file_is_told_apart_by_its_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("m.gguf");
        let mut bytes = vec![1; 3 << 20];
        fs::write(&model, &bytes).expect("a file");
        let changed = fs::metadata(&model).and_then(|data| data.modified()).expect("a time");
        let first = key(&model, &cut(2, WeightMode::Exact)).expect("a key");
        *bytes.last_mut().expect("not empty") = 2;
        fs::write(&model, &bytes).expect("a file");
        let file = File::options().write(true).open(&model).expect("the file");
        file.set_modified(changed).expect("a time");
        assert_ne!(key(&model, &cut(2, WeightMode::Exact)).expect("a key"), first);
    }

    #[test]
    fn folders_are_named_for_people_and_differ_by_options() {
        let model = Path::new("SmolLM2 135M.Q4_1.gguf");
        let name = folder_name(model, &cut(2, WeightMode::Exact));
        assert!(name.starts_with("smollm2-135m-q4_1-2-exact-"), "{name}");
        let split = Cut { split: Some(vec![16, 14]), ..cut(2, WeightMode::Exact) };
        assert!(folder_name(model, &split).contains("-2-16-14-exact-"));
    }

    #[test]
    fn a_folder_without_a_manifest_or_with_another_key_is_not_used() {
        let cache = tempfile::tempdir().expect("a folder");
        let (folder, key_file) = (cache.path().join("set"), cache.path().join("set.key"));
        fs::create_dir(&folder).expect("a folder");
        assert!(reusable(&folder, &key_file, "k").is_none());
        fs::write(&key_file, "k").expect("a file");
        assert!(reusable(&folder, &key_file, "k").is_none(), "there is no manifest");
    }

    #[test]
    fn a_missing_shard_set_is_named() {
        let error = open(Path::new("no/such/set"), None, None).expect_err("it is missing");
        assert!(error.to_string().contains("no/such/set"), "{error}");
    }
}
