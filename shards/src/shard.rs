//! The sharder: one model file in, one shard set out.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::decoder::config::DecoderConfig;
use crate::decoder::stage::{Model, OnConverted, build_stage};
use crate::decoder::tensors::{DecoderTensors, LayerTensors};
use crate::floats::{CodedTensor, FloatCoding, FloatPlan};
use crate::gguf::{GgmlType, GgufError};
use crate::hugging_face::{self, HfError};
use crate::ir::bin::BinWriter;
use crate::manifest::{
    self, FORMAT_VERSION, FileEntry, MANIFEST_FILE, Manifest, ManifestError, StageEntry, WeightMode,
};
use crate::output::{OutputDir, io_error};
use crate::shard_set::{ShardSet, ShardSetError, hash_file};
use crate::source::Source;
use crate::split::{self, SplitError};
use crate::text::{self, TextError, TextFiles};

/// The file of [`Manifest::head_tokens`].
const HEAD_TOKENS_FILE: &str = "head_tokens.u32";

/// What to shard, and how.
#[derive(Clone, Debug)]
pub struct ShardRequest {
    /// The model: a GGUF file, or a folder in the format of Hugging Face. Nobody may change it
    /// meanwhile.
    pub source: PathBuf,
    /// The folder to create. Its parent must exist.
    pub out_dir: PathBuf,
    /// Number of stages, 1 to the model's layer count.
    pub n_stages: usize,
    /// Layers per stage, by hand; `None` splits by cost.
    pub split: Option<Vec<usize>>,
    /// How weights that are stored in integers are mapped.
    pub weights: WeightMode,
    /// What becomes of matrices that are stored in floats.
    pub floats: FloatPlan,
    /// The model's name on the wire; `None` derives it from the source's file name.
    pub model_name: Option<String>,
    /// The shard set whose tokenizer and chat template the model shares; `None` takes those of the
    /// source.
    pub tokenizer_from: Option<PathBuf>,
    /// Cuts the head to this many of the most frequent tokens, which the source must rank
    /// (`token_rank.u16` or `.u32` in a folder); `None` keeps it whole. See
    /// [`Manifest::head_tokens`].
    pub head_tokens: Option<usize>,
    /// Replace an existing shard set. Any other existing folder is never touched.
    pub force: bool,
}

impl ShardRequest {
    /// A request that leaves every choice at its default: exact weights, split by cost.
    #[must_use]
    pub fn new(source: PathBuf, out_dir: PathBuf, n_stages: usize) -> Self {
        Self {
            source,
            out_dir,
            n_stages,
            split: None,
            weights: WeightMode::Exact,
            floats: FloatPlan::default(),
            model_name: None,
            tokenizer_from: None,
            head_tokens: None,
            force: false,
        }
    }
}

/// How far the work is. Sent once per written tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress<'a> {
    /// The stage being written.
    pub stage: usize,
    /// Stages in all.
    pub n_stages: usize,
    /// Source bytes converted so far; a tensor that two stages need counts twice.
    pub bytes_done: u64,
    /// Source bytes to convert in all.
    pub bytes_total: u64,
    /// What became of the tensor, if it was stored in floats and is coded anew. A tensor that two
    /// stages need comes twice, one that holds several matrices once for each.
    pub coded: &'a [CodedTensor],
}

/// Why no shard set was written. Nothing is left behind in any of these cases.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The source cannot be read as GGUF: unreadable, truncated, a missing or wrong key.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The source cannot be read as a Hugging Face folder.
    #[error(transparent)]
    HuggingFace(#[from] HfError),
    /// The tokenizer cannot be converted.
    #[error("the tokenizer cannot be converted")]
    Text(#[from] TextError),
    /// The shard set that the tokenizer is taken from cannot be used.
    #[error("the tokenizer cannot be taken from another shard set")]
    TokenizerFrom(#[source] ShardSetError),
    /// The tokenizer has more tokens than the model.
    #[error("the tokenizer has {n_tokens} tokens, the model's vocabulary {vocab_size}")]
    Vocabulary {
        /// Tokens of the tokenizer.
        n_tokens: usize,
        /// Rows of the embedding table.
        vocab_size: usize,
    },
    /// The head cannot be cut: the source does not rank its tokens.
    #[error("{} has no token rank: only a folder can have one", path.display())]
    NoTokenRank {
        /// The source.
        path: PathBuf,
    },
    /// The file is of an architecture that has no graph here.
    #[error("architecture {found:?} is not supported, supported: {}", known.join(", "))]
    UnknownArchitecture {
        /// `general.architecture` of the file, or `model_type` of `config.json`.
        found: String,
        /// Those that have one, as files of this format name them.
        known: Vec<&'static str>,
    },
    /// A metadata value that no graph is written for.
    #[error("{key} is {found}, expected {expected}")]
    Unsupported {
        /// The metadata key.
        key: String,
        /// Its value.
        found: String,
        /// What is supported.
        expected: &'static str,
    },
    /// A tensor that the architecture needs is not in the file.
    #[error("tensor {tensor} is missing")]
    MissingTensor {
        /// Its name.
        tensor: String,
    },
    /// A tensor has another shape than the metadata says.
    #[error("tensor {tensor} has dimensions {found:?}, expected {expected:?} (columns first)")]
    TensorShape {
        /// Its name.
        tensor: String,
        /// Dimensions in the order of the file, columns first.
        expected: Vec<u64>,
        /// Dimensions found.
        found: Vec<u64>,
    },
    /// A pattern of [`FloatPlan::exceptions`] fits no matrix of the model.
    #[error("no matrix of the model has a name like {pattern}")]
    NoSuchTensor {
        /// The pattern.
        pattern: String,
    },
    /// The experts of a layer are stored in different types, or should be.
    #[error("tensor {tensor} has another type than the experts before it, all must have the same")]
    UnequalExperts {
        /// Name of the first that differs.
        tensor: String,
    },
    /// A matrix is stored in a type that is not mapped.
    #[error(
        "tensor {tensor} is stored as {found}, supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, \
         Q5_0, Q5_1, Q4_K, Q5_K, Q6_K"
    )]
    TensorType {
        /// Its name.
        tensor: String,
        /// Its type.
        found: GgmlType,
    },
    /// A norm, a bias or a frequency table is not stored in f32.
    #[error("tensor {tensor} is stored as {found}, supported for vectors: F32")]
    VectorType {
        /// Its name.
        tensor: String,
        /// Its type.
        found: GgmlType,
    },
    /// The stage count or the split does not fit the model.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// The chosen name is not legal.
    #[error(transparent)]
    ModelName(ManifestError),
    /// There is a shard set already.
    #[error("{} is a shard set already, and replacing it was not asked for", path.display())]
    OutExists {
        /// The folder.
        path: PathBuf,
    },
    /// The folder holds something else, which is never replaced.
    #[error("{} is not empty and not a shard set", path.display())]
    OutNotShardSet {
        /// The folder.
        path: PathBuf,
    },
    /// A file or folder cannot be written.
    #[error("cannot write {}", path.display())]
    Io {
        /// What was being written.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

/// Writes the shard set of a model.
///
/// The set is written to a temporary folder beside `out_dir` and renamed at the end, so `out_dir`
/// is either complete or untouched. Weights are streamed from a memory map: peak memory follows
/// the largest tensor, not the model.
///
/// # Errors
/// [`ShardError`]; nothing is left behind.
pub fn shard(
    request: &ShardRequest,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Manifest, ShardError> {
    let name = model_name(request)?;
    let source = Source::open(&request.source)?;
    let config = DecoderConfig::read(&source)?;
    let mut tensors = DecoderTensors::find(&source, &config)?;
    tensors.check_plan(&request.floats)?;
    let head_tokens = head_tokens(request, &source, &config)?;
    if let Some(tokens) = &head_tokens {
        tensors.cut_head(tokens);
    }
    let ranges = ranges(request, &config, &tensors)?;
    let output = OutputDir::create(&request.out_dir, request.force)?;

    let text = write_text(request, &source, &config, output.path())?;
    let text_files = text
        .files
        .iter()
        .map(|name| file_entry(output.path(), name))
        .collect::<Result<Vec<_>, _>>()?;
    let head_tokens = write_head_tokens(head_tokens.as_deref(), output.path())?;
    let model = Model {
        source: &source,
        config: &config,
        tensors: &tensors,
        weights: request.weights,
        floats: &request.floats,
    };
    let bytes_total = tensors.bytes_of(&ranges);
    let mut bytes_done = 0;
    let costs = tensors.costs();
    let mut stages = Vec::with_capacity(ranges.len());
    for (index, range) in ranges.iter().enumerate() {
        let n_stages = ranges.len();
        let (xml, bin) = write_stage(model, index, range, output.path(), &mut |bytes, coded| {
            bytes_done += bytes;
            progress(Progress { stage: index, n_stages, bytes_done, bytes_total, coded });
        })?;
        let cost_share = costs.share(range);
        let (first_layer, end_layer) = (range.start, range.end);
        stages.push(StageEntry { index, first_layer, end_layer, cost_share, xml, bin });
    }
    let source = request.source.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut manifest = Manifest {
        format_version: FORMAT_VERSION,
        model: name,
        architecture: config.family.name.to_owned(),
        fingerprint: String::new(),
        source,
        weights: request.weights,
        floats: Some(request.floats.layers).filter(|coding| *coding != FloatCoding::Keep),
        dims: config.dims.clone(),
        bos_id: text.bos_id,
        eos_ids: text.eos_ids,
        stages,
        text_files,
        head_tokens,
    };
    manifest.fingerprint = manifest.content_fingerprint();
    write_manifest(&manifest, output.path())?;
    output.publish()?;
    Ok(manifest)
}

fn model_name(request: &ShardRequest) -> Result<String, ShardError> {
    match &request.model_name {
        Some(name) => {
            manifest::check_model_name(name).map_err(ShardError::ModelName)?;
            Ok(name.clone())
        }
        None => {
            let stem = request.source.file_stem().unwrap_or_default();
            Ok(manifest::model_name_from(&stem.to_string_lossy()))
        }
    }
}

/// The tokens that a cut head keeps.
fn head_tokens(
    request: &ShardRequest,
    source: &Source,
    config: &DecoderConfig,
) -> Result<Option<Vec<u32>>, ShardError> {
    let Some(n) = request.head_tokens else { return Ok(None) };
    match source {
        Source::Gguf(_) => Err(ShardError::NoTokenRank { path: request.source.clone() }),
        Source::HuggingFace(_) => {
            let vocab_size = config.dims.vocab_size;
            Ok(Some(hugging_face::most_frequent(&request.source, n, vocab_size)?))
        }
    }
}

fn write_head_tokens(tokens: Option<&[u32]>, dir: &Path) -> Result<Option<FileEntry>, ShardError> {
    let Some(tokens) = tokens else { return Ok(None) };
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    write_durably(&dir.join(HEAD_TOKENS_FILE), &bytes)?;
    file_entry(dir, HEAD_TOKENS_FILE).map(Some)
}

/// Writes the tokenizer and the chat template.
fn write_text(
    request: &ShardRequest,
    source: &Source,
    config: &DecoderConfig,
    dir: &Path,
) -> Result<TextFiles, ShardError> {
    let text = match (&request.tokenizer_from, source) {
        (Some(from), _) => {
            let set = ShardSet::open(from).map_err(ShardError::TokenizerFrom)?;
            set.verify_text().map_err(ShardError::TokenizerFrom)?;
            let mut text = text::copy_text_files(&set.dir, dir)?;
            text.bos_id = set.manifest.bos_id;
            text.eos_ids.clone_from(&set.manifest.eos_ids);
            text
        }
        (None, Source::Gguf(gguf)) => text::write_text_files(gguf, dir)?,
        (None, Source::HuggingFace(model)) => {
            let mut text = text::copy_text_files(&request.source, dir)?;
            text.bos_id = model.bos_token()?;
            text.eos_ids = model.eos_tokens()?;
            text
        }
    };
    let vocab_size = config.dims.vocab_size;
    match text.n_tokens {
        n_tokens if n_tokens > vocab_size => Err(ShardError::Vocabulary { n_tokens, vocab_size }),
        _ => Ok(text),
    }
}

fn ranges(
    request: &ShardRequest,
    config: &DecoderConfig,
    tensors: &DecoderTensors<'_>,
) -> Result<Vec<Range<usize>>, SplitError> {
    match &request.split {
        Some(split) => split::by_hand(split, request.n_stages, config.dims.n_layers),
        None => split::by_cost(&tensors.costs(), request.n_stages),
    }
}

fn write_stage<'a>(
    model: Model<'a>,
    index: usize,
    layers: &Range<usize>,
    dir: &Path,
    on_converted: &'a mut OnConverted<'a>,
) -> Result<(FileEntry, FileEntry), ShardError> {
    let bin_name = format!("stage-{index}.bin");
    let bin_path = dir.join(&bin_name);
    let bin_error = |source| io_error(&bin_path, source);
    let bin = BinWriter::create(&bin_path).map_err(bin_error)?;
    let graph = build_stage(model, layers.clone(), bin, on_converted).map_err(bin_error)?;
    let mut xml = Vec::new();
    let xml_name = format!("stage-{index}.xml");
    let xml_path = dir.join(&xml_name);
    graph.write_xml(&format!("stage-{index}"), &mut xml).map_err(|e| io_error(&xml_path, e))?;
    let (bytes, sha256) = graph.bin.close().map_err(bin_error)?;
    let bin = FileEntry { name: bin_name, bytes, sha256 };
    write_durably(&xml_path, &xml)?;
    let sha256 = manifest::hex(&Sha256::digest(&xml));
    Ok((FileEntry { name: xml_name, bytes: xml.len() as u64, sha256 }, bin))
}

/// The entry of a file that has been written by someone else.
fn file_entry(dir: &Path, name: &str) -> Result<FileEntry, ShardError> {
    let path = dir.join(name);
    let (bytes, sha256) = hash_file(&path).map_err(|source| io_error(&path, source))?;
    Ok(FileEntry { name: name.to_owned(), bytes, sha256 })
}

fn write_manifest(manifest: &Manifest, dir: &Path) -> Result<(), ShardError> {
    let path = dir.join(MANIFEST_FILE);
    let mut json =
        serde_json::to_vec_pretty(manifest).map_err(|source| io_error(&path, source.into()))?;
    json.push(b'\n');
    write_durably(&path, &json)
}

fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), ShardError> {
    let write = || {
        let mut out = BufWriter::new(File::create_new(path)?);
        out.write_all(bytes)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    };
    write().map_err(|source| io_error(path, source))
}

impl DecoderTensors<'_> {
    /// What the layers and the head cost, for the split.
    fn costs(&self) -> split::Costs {
        let layer = |layer: &LayerTensors<'_>| split::Part {
            n_bytes: layer.n_bytes(),
            n_weights: layer.matrices().map(|projection| projection.n_weights()).sum(),
        };
        let layers: Vec<split::Part> = self.layers.iter().map(layer).collect();
        let head =
            split::Part { n_bytes: self.head.n_bytes() as u64, n_weights: self.head.n_weights() };
        split::Costs::new(&layers, head)
    }

    /// Source bytes that all stages convert together.
    fn bytes_of(&self, ranges: &[Range<usize>]) -> u64 {
        let layers: u64 = self.layers.iter().map(|layer| layer.n_bytes()).sum();
        let once = (self.embedding.n_bytes() + self.output_norm.n_bytes()) as u64;
        let is_shared = self.head_is_embedding() && ranges.len() == 1;
        layers + once + if is_shared { 0 } else { self.head.n_bytes() as u64 }
    }
}
