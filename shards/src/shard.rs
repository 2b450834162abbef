//! The sharder: one model file in, one shard set out.

mod prepared;

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::decoder::config::DecoderConfig;
use crate::decoder::stage::{Model, build_stage};
use crate::decoder::tensors::{DecoderTensors, LayerTensors};
use crate::floats::{CodedTensor, FloatPlan};
use crate::form::{Form, FormError};
use crate::gguf::{GgmlType, GgufError};
use crate::hugging_face::{self, FolderConfig, HfError};
use crate::ir_input::{IrError, IrModel, MODEL_FILE};
use crate::manifest::{self, Manifest, ManifestError, ModelDims, WeightMode};
use crate::shard_set::ShardSetError;
use crate::source::{Source, SourceFormat};
use crate::split::{self, SplitError};
use crate::text::{self, TextError, TextFiles};

use prepared::Prepared;

/// What to shard, and how.
#[derive(Clone, Debug)]
pub struct ShardRequest {
    /// The model, in one of the formats of [`SourceFormat`]. Nobody may change it meanwhile.
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
    /// The form of the graphs. A static window is cut to the model's context length.
    pub form: Form,
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
    /// A request that leaves every choice at its default: exact weights, split by cost, graphs with
    /// states.
    #[must_use]
    pub fn new(source: PathBuf, out_dir: PathBuf, n_stages: usize) -> Self {
        Self {
            source,
            out_dir,
            n_stages,
            split: None,
            weights: WeightMode::Exact,
            floats: FloatPlan::default(),
            form: Form::Stateful,
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

/// Told the source bytes of every tensor that has been written, and what became of it if it was
/// coded anew.
pub(crate) type OnConverted<'a> = dyn FnMut(u64, &[CodedTensor]) + 'a;

/// Why no shard set was written. Nothing is left behind in any of these cases.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The source cannot be read as GGUF: unreadable, truncated, a missing or wrong key.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The source cannot be read as a Hugging Face folder.
    #[error(transparent)]
    HuggingFace(#[from] HfError),
    /// The source cannot be read as OpenVINO IR, or cannot be cut there.
    #[error(transparent)]
    Ir(#[from] IrError),
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
    /// The static form asked for cannot be built.
    #[error(transparent)]
    Form(#[from] FormError),
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
    match SourceFormat::of(&request.source) {
        SourceFormat::Gguf | SourceFormat::HuggingFace => shard_tensors(request, name, progress),
        SourceFormat::OpenVino => shard_graph(request, name, progress),
    }
}

/// Sizes of a model, from its metadata; nothing is written.
///
/// # Errors
/// [`ShardError`] for a model that cannot be read.
pub fn model_dims(source: &Path) -> Result<ModelDims, ShardError> {
    match SourceFormat::of(source) {
        SourceFormat::Gguf | SourceFormat::HuggingFace => {
            Ok(DecoderConfig::read(&Source::open(source)?)?.dims)
        }
        SourceFormat::OpenVino => Ok(IrModel::open(source)?.dims),
    }
}

/// Writes the shard set of a model whose file has tensors: its graph is built.
fn shard_tensors(
    request: &ShardRequest,
    name: String,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Manifest, ShardError> {
    let source = Source::open(&request.source)?;
    let mut config = DecoderConfig::read(&source)?;
    let form = form(request.form, &mut config.dims)?;
    let mut tensors = DecoderTensors::find(&source, &config)?;
    tensors.check_plan(&request.floats)?;
    let head_tokens = head_tokens(request, &source, &config)?;
    if let Some(tokens) = &head_tokens {
        tensors.cut_head(tokens);
    }
    let costs = tensors.costs();
    let ranges = ranges(request, &costs, config.dims.n_layers)?;
    let model = Model {
        source: &source,
        config: &config,
        tensors: &tensors,
        weights: request.weights,
        floats: &request.floats,
        form,
    };
    let prepared = Prepared {
        name,
        architecture: config.family.name,
        form,
        dims: &config.dims,
        ranges: &ranges,
        costs: &costs,
        bytes_total: tensors.bytes_of(&ranges),
        head_tokens: head_tokens.as_deref(),
        write_text: &|dir| match &source {
            Source::Gguf(gguf) => Ok(text::write_text_files(gguf, dir)?),
            Source::HuggingFace(model) => copy_text(&request.source, &model.config, dir),
        },
        build: &|stage, bin, on_converted| {
            build_stage(model, ranges[stage].clone(), bin, on_converted)
        },
    };
    prepared.write(request, progress)
}

/// Writes the shard set of a model in OpenVINO's format: its graph is cut.
fn shard_graph(
    request: &ShardRequest,
    name: String,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Manifest, ShardError> {
    if request.head_tokens.is_some() {
        return Err(ShardError::NoTokenRank { path: request.source.clone() });
    }
    let model = IrModel::open(&request.source)?;
    model.check_weights(request.weights, &request.floats)?;
    model.check_form(request.form)?;
    let costs = model.costs();
    let ranges = ranges(request, &costs, model.dims.n_layers)?;
    let stages = model.stages(&ranges)?;
    let dims = ModelDims { hidden_dim: stages.width, ..model.dims.clone() };
    let prepared = Prepared {
        name,
        architecture: &model.architecture,
        form: request.form,
        dims: &dims,
        ranges: &ranges,
        costs: &costs,
        bytes_total: model.bytes_of(&stages),
        head_tokens: None,
        write_text: &|dir| copy_text(model.folder(), &model.config, dir),
        build: &|stage, bin, on_copied| model.build(&stages, stage, bin, on_copied),
    };
    prepared.write(request, progress)
}

/// The form for a model, whose context shrinks to the window of a static one.
fn form(asked: Form, dims: &mut ModelDims) -> Result<Form, FormError> {
    let Form::Static(form) = asked else { return Ok(asked) };
    let form = form.fitted(dims.context_length)?;
    dims.context_length = form.window;
    Ok(Form::Static(form))
}

fn model_name(request: &ShardRequest) -> Result<String, ShardError> {
    if let Some(name) = &request.model_name {
        manifest::check_model_name(name).map_err(ShardError::ModelName)?;
        return Ok(name.clone());
    }
    let source = request.source.as_path();
    // A graph is called the same in every folder, and a folder's name has no ending.
    let folder = match source.parent() {
        Some(parent) if source.ends_with(MODEL_FILE) => Some(parent),
        _ => Some(source).filter(|source| source.is_dir()),
    };
    let name = folder.map_or(source.file_stem(), Path::file_name).unwrap_or_default();
    Ok(manifest::model_name_from(&name.to_string_lossy()))
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

/// Copies the tokenizer and the chat template of a model folder.
fn copy_text(from: &Path, config: &FolderConfig, dir: &Path) -> Result<TextFiles, ShardError> {
    let mut text = text::copy_text_files(from, dir)?;
    text.bos_id = config.bos_token()?;
    text.eos_ids = config.eos_tokens()?;
    Ok(text)
}

fn ranges(
    request: &ShardRequest,
    costs: &split::Costs,
    n_layers: usize,
) -> Result<Vec<Range<usize>>, SplitError> {
    match &request.split {
        Some(split) => split::by_hand(split, request.n_stages, n_layers),
        None => split::by_cost(costs, request.n_stages),
    }
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
