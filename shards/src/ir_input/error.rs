//! What can be wrong with a folder in OpenVINO's format.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::floats::FloatCoding;
use crate::manifest::WeightMode;

/// A file of a model folder that cannot be used, and why.
#[derive(Debug)]
pub struct IrError {
    file: PathBuf,
    kind: Box<IrErrorKind>,
}

impl IrError {
    pub(crate) fn new(file: &Path, kind: IrErrorKind) -> Self {
        Self { file: file.to_path_buf(), kind: Box::new(kind) }
    }

    /// The file that the error is about.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// What is wrong.
    #[must_use]
    pub fn kind(&self) -> &IrErrorKind {
        &self.kind
    }
}

impl fmt::Display for IrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file.display(), self.kind)
    }
}

impl Error for IrError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.kind.source()
    }
}

/// What is wrong with a file of a model folder. Operations and values are named as in the file.
#[derive(Debug, thiserror::Error)]
pub enum IrErrorKind {
    /// The file cannot be opened, mapped or read.
    #[error("cannot be read")]
    Io {
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The graph is not XML.
    #[error("is not XML")]
    Xml {
        /// Where and what.
        #[source]
        source: roxmltree::Error,
    },
    /// Not the version of the format that is read.
    #[error("is IR of version {found:?}, expected 10 or 11")]
    Version {
        /// What the file says.
        found: String,
    },
    /// The XML is no graph: an attribute or an end of an edge is missing, or there is a circle.
    #[error("{place} {problem}")]
    Malformed {
        /// The layer or edge.
        place: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// An operation that OpenVINO does not define.
    #[error("operation {name:?} is {kind} of {opset:?}, which OpenVINO does not define")]
    UnknownOperation {
        /// The operation's name.
        name: String,
        /// Its type.
        kind: String,
        /// The operation set that it claims.
        opset: String,
    },
    /// An element type that is not known, or another one than is needed.
    #[error("{name:?} has elements of type {found:?}, expected {expected}")]
    ElementType {
        /// The operation.
        name: String,
        /// Its type.
        found: String,
        /// What is supported.
        expected: &'static str,
    },
    /// A constant that is not within the weight file.
    #[error(
        "constant {name:?} is bytes {offset} to {offset} + {bytes}, the weight file has {file_bytes}"
    )]
    ConstantRange {
        /// The constant.
        name: String,
        /// Where it begins.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// Bytes of the weight file.
        file_bytes: u64,
    },
    /// A constant whose length contradicts its shape.
    #[error("constant {name:?} has {found} bytes, its shape and type need {expected}")]
    ConstantSize {
        /// The constant.
        name: String,
        /// Bytes of the shape.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// An input of the model is missing.
    #[error("input {name} is missing: export the model for text generation with its past")]
    MissingInput {
        /// Its name.
        name: &'static str,
    },
    /// The model has an input that no stage can be given.
    #[error(
        "input {name:?} is unknown, expected input_ids, attention_mask, position_ids and beam_idx"
    )]
    UnknownInput {
        /// Its name.
        name: String,
    },
    /// An input has another shape than all models of text have.
    #[error("input {name} has {found} dimensions or a fixed one, expected {expected} open ones")]
    InputShape {
        /// Its name.
        name: &'static str,
        /// Number of dimensions expected.
        expected: usize,
        /// Number of dimensions found.
        found: usize,
    },
    /// There is not exactly one output.
    #[error("the model has {found} outputs, expected one, the logits")]
    Outputs {
        /// How many there are.
        found: usize,
    },
    /// The model keeps no state.
    #[error("the model has no state (ReadValue): export it for text generation with its past")]
    NoState,
    /// A state that is not a cache of keys or values in the usual form.
    #[error(
        "state {variable:?} {problem}, expected a cache that beam_idx gathers, that grows by a \
         Concat and is kept by an Assign"
    )]
    State {
        /// The state's `variable_id`.
        variable: String,
        /// What is unusual.
        problem: &'static str,
    },
    /// The model has no attention in one operation.
    #[error(
        "the model has no ScaledDotProductAttention behind its input_ids: export it with SDPA \
         attention"
    )]
    NoAttention,
    /// No product with a matrix makes the logits.
    #[error("the logits do not come from a MatMul of rows that have no other input")]
    Head,
    /// A cut between a cache and a layer that reads it, where its rows cannot travel.
    #[error(
        "a cut in front of layer {layer} separates layer {reader} from the cache of layer \
         {owner} that it reads, and its rows {value:?} cannot travel ({dims}): cut in front of \
         layer {owner} or behind the last layer that reads it"
    )]
    SharedCache {
        /// The layer behind the cut.
        layer: usize,
        /// The layer that the cache belongs to.
        owner: usize,
        /// A layer behind the cut that reads the cache.
        reader: usize,
        /// What the cache grows by.
        value: String,
        /// Type and dimensions of that.
        dims: String,
    },
    /// What is needed behind a cut cannot travel.
    #[error(
        "behind a cut in front of layer {layer} {value:?} is needed, which cannot travel \
         ({dims}): only f32 rows with one dimension of sequences and one of rows can"
    )]
    Crossing {
        /// The layer behind the cut.
        layer: usize,
        /// The value that crosses.
        value: String,
        /// Its type and dimensions.
        dims: String,
    },
    /// A shape of an earlier stage that cannot be told from what a later one has.
    #[error("{name:?} takes the shape of a value of an earlier stage, which cannot be told here")]
    Shape {
        /// The operation.
        name: String,
    },
    /// A dimension of the model that the graph does not fix.
    #[error("{dimension} cannot be told from {name:?}")]
    Dimension {
        /// Which one.
        dimension: &'static str,
        /// The value that should have it.
        name: String,
    },
    /// The graph keeps its state and its open shapes; the static form was asked for.
    #[error(
        "an OpenVINO model keeps the form that it was exported in: the static form is made from a \
         GGUF file or a Hugging Face folder"
    )]
    Form,
    /// Weights are copied; something else was asked for.
    #[error(
        "weights of an OpenVINO model are copied as they are, which is exact for integers and keep \
         for floats; asked for were {mode} and {floats}, or other choices for floats: code the \
         weights when the model is exported"
    )]
    Weights {
        /// What was asked for integers.
        mode: WeightMode,
        /// What was asked for floats of layers.
        floats: FloatCoding,
    },
}
