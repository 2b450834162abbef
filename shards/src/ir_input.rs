//! Reads model folders in OpenVINO's format, as optimum-intel writes them, and cuts them into
//! stages.
//!
//! Any decoder will do that keeps its cache as state, whatever its architecture: the layers are
//! found in the graph, and operations and weights are copied as they are. The configuration beside
//! the graph says what a graph does not: the context length, the first and the last tokens.
//!
//! **Source**: OpenVINO documentation, "OpenVINO IR format"; the inputs and states that
//! optimum-intel gives to a model exported as `text-generation-with-past`.

mod build;
mod cut;
mod element;
mod error;
mod layers;
mod net;
mod operations;
mod pack;
mod parts;
mod shapes;

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use error::{IrError, IrErrorKind};

use crate::bounded;
use crate::floats::FloatPlan;
use crate::form::Form;
use crate::hugging_face::{ConfigJson, FolderConfig};
use crate::ir::bin::BinWriter;
use crate::ir::graph::Graph;
use crate::manifest::{ModelDims, WeightMode};
use crate::map::Map;
use crate::shard::{OnConverted, ShardError};
use crate::split::Costs;

use build::Material;
use cut::{Cutter, Stage};
use element::Element;
use layers::Layers;
use net::{Net, Value};
use shapes::{Basis, Shapes};

/// The file with the graph.
pub const MODEL_FILE: &str = "openvino_model.xml";

/// Largest graph, in bytes of XML: several times that of a model with a hundred layers.
const MAX_XML_BYTES: u64 = 256 << 20;

/// Names of the longest sequence in `config.json`, the usual one first.
const CONTEXT_FIELDS: [&str; 4] =
    ["max_position_embeddings", "n_positions", "max_seq_len", "seq_length"];

/// An opened model.
#[derive(Debug)]
pub(crate) struct IrModel {
    pub(crate) architecture: String,
    /// The width is that of the residual stream where the head takes it.
    pub(crate) dims: ModelDims,
    pub(crate) config: FolderConfig,
    /// The file with the graph.
    xml: PathBuf,
    net: Net,
    layers: Layers,
    shapes: Shapes,
    weights: Map,
}

/// The stages of a model.
#[derive(Debug)]
pub(crate) struct Stages {
    stages: Vec<Stage>,
    /// Width of what travels between them, at the widest cut.
    pub(crate) width: usize,
}

impl IrModel {
    /// Opens a model, a folder or the file with its graph, and finds its layers.
    ///
    /// # Errors
    /// [`ShardError::Ir`], and [`ShardError::HuggingFace`] for the configuration.
    pub(crate) fn open(path: &Path) -> Result<Self, ShardError> {
        let xml = if path.is_dir() { path.join(MODEL_FILE) } else { path.to_owned() };
        let read = |xml: &Path| {
            let bytes = bounded::read(xml, MAX_XML_BYTES)?;
            String::from_utf8(bytes)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        };
        let failed = |kind| IrError::new(&xml, kind);
        let text = read(&xml).map_err(|source| failed(IrErrorKind::Io { source }))?;
        let mut net = Element::parse(&text).and_then(Net::read).map_err(failed)?;
        drop(text);
        let bin = xml.with_extension("bin");
        let weights =
            Map::open(&bin).map_err(|source| IrError::new(&bin, IrErrorKind::Io { source }))?;
        net.check_places(weights.bytes().len() as u64).map_err(failed)?;
        let layers = Layers::find(&net, weights.bytes()).map_err(failed)?;
        let caches = layers.caches.iter().map(|cache| (cache.read, cache.axes)).collect();
        let basis = Basis { net: &net, weights: weights.bytes(), caches: &caches };
        let shapes = Shapes::infer(&basis);

        let config = FolderConfig::read(folder_of(&xml))?;
        let context_length = context_length(&config.model)?;
        let architecture = config.model.text("model_type")?.unwrap_or("decoder").to_owned();
        let dims = dims(&net, &layers, context_length).map_err(failed)?;
        Ok(Self { architecture, dims, config, xml, net, layers, shapes, weights })
    }

    /// The folder with the files beside the graph.
    pub(crate) fn folder(&self) -> &Path {
        folder_of(&self.xml)
    }

    /// Checks that nothing else is asked for than copies of the weights.
    ///
    /// # Errors
    /// [`IrErrorKind::Weights`].
    pub(crate) fn check_weights(
        &self,
        mode: WeightMode,
        floats: &FloatPlan,
    ) -> Result<(), IrError> {
        if mode == WeightMode::Exact && *floats == FloatPlan::default() {
            return Ok(());
        }
        Err(IrError::new(&self.xml, IrErrorKind::Weights { mode, floats: floats.layers }))
    }

    /// Checks that the graph is to stay as it is.
    ///
    /// # Errors
    /// [`IrErrorKind::Form`].
    pub(crate) fn check_form(&self, form: Form) -> Result<(), IrError> {
        match form {
            Form::Stateful => Ok(()),
            Form::Static(_) => Err(IrError::new(&self.xml, IrErrorKind::Form)),
        }
    }

    /// Cuts the model.
    ///
    /// # Errors
    /// [`IrErrorKind::SharedCache`], [`IrErrorKind::Crossing`] or [`IrErrorKind::Shape`].
    pub(crate) fn stages(&self, ranges: &[Range<usize>]) -> Result<Stages, IrError> {
        let (net, weights) = (&self.net, self.weights.bytes());
        let cutter = Cutter { net, weights, layers: &self.layers, shapes: &self.shapes };
        let stages: Result<Vec<Stage>, IrErrorKind> =
            ranges.iter().map(|range| cutter.stage(range.clone())).collect();
        let stages = stages.map_err(|kind| IrError::new(&self.xml, kind))?;
        let widths = stages.iter().map(Stage::sent_width).filter(|width| *width > 0);
        // A single stage sends nothing.
        let width = widths.max().map_or(self.dims.hidden_dim, |width| width as usize);
        Ok(Stages { stages, width })
    }

    /// Bytes of weights that all stages copy together.
    pub(crate) fn bytes_of(&self, stages: &Stages) -> u64 {
        stages.stages.iter().map(|stage| parts::bytes_of(&self.net, stage)).sum()
    }

    /// What the layers and the head cost, for the split.
    pub(crate) fn costs(&self) -> Costs {
        parts::costs(&self.net, &self.layers)
    }

    /// Writes the weights of a stage and builds its graph.
    ///
    /// # Errors
    /// The weight file cannot be written.
    pub(crate) fn build(
        &self,
        stages: &Stages,
        index: usize,
        bin: BinWriter,
        on_copied: &mut OnConverted<'_>,
    ) -> io::Result<Graph> {
        let material = Material {
            net: &self.net,
            layers: &self.layers,
            weights: &self.weights,
            width: stages.width,
            head_width: self.dims.hidden_dim,
            vocab_size: self.dims.vocab_size,
        };
        let graph = build::build(material, &stages.stages[index], bin, on_copied)?;
        self.weights.release(0, self.weights.bytes().len());
        Ok(graph)
    }
}

fn folder_of(xml: &Path) -> &Path {
    xml.parent().unwrap_or(Path::new("."))
}

fn context_length(config: &ConfigJson) -> Result<usize, ShardError> {
    for field in CONTEXT_FIELDS {
        if let Some(length) = config.optional_size(field)? {
            return Ok(length);
        }
    }
    Ok(config.size(CONTEXT_FIELDS[0])?)
}

/// Reads the sizes off the graph.
fn dims(net: &Net, layers: &Layers, context_length: usize) -> Result<ModelDims, IrErrorKind> {
    let width = |value: Value, dimension: &'static str| match net.port(value).dims.last() {
        Some(Some(width @ 1..=0xffff_ffff)) => Ok(*width as usize),
        _ => Err(IrErrorKind::Dimension { dimension, name: net.name(value).to_owned() }),
    };
    let hidden_dim = width(layers.head, "the width of the residual stream")?;
    let vocab_size = width(layers.logits, "the size of the vocabulary")?;
    // Layers may differ; the first cache stands for all.
    let cache = Value { node: layers.caches[0].read, output: 0 };
    let head_dim = width(cache, "the width of a head")?;
    let fixed = net.port(cache).dims.iter().flatten().map(|dim| *dim as usize);
    let n_kv_heads = fixed.fold(1, usize::saturating_mul) / head_dim;
    let attention = net.nodes.iter().find(|node| node.is("ScaledDotProductAttention"));
    let queries = attention.and_then(|node| net.port(*node.inputs.first()?).dims.get(1).copied());
    let n_heads = queries.flatten().map_or(n_kv_heads, |n_heads| n_heads as usize);
    let n_layers = layers.len();
    Ok(ModelDims {
        n_layers,
        hidden_dim,
        n_heads,
        n_kv_heads,
        head_dim,
        vocab_size,
        context_length,
    })
}
