//! Where a model comes from: the formats, and the tensors of a GGUF file or of a folder in the
//! format of Hugging Face.

use std::path::Path;

use crate::gguf::{GgmlType, Gguf};
use crate::hugging_face::HfModel;
use crate::ir_input::MODEL_FILE;
use crate::manifest::WeightMode;
use crate::shard::ShardError;
use crate::tensor::{Encoding, Tensor};
use crate::weights::layout;

/// The format of a model, as its path tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFormat {
    /// A GGUF file.
    Gguf,
    /// A folder with `config.json` and safetensors.
    HuggingFace,
    /// A folder with `openvino_model.xml`, whatever else it has, or an XML file.
    OpenVino,
}

impl SourceFormat {
    /// The format of what is at a path.
    #[must_use]
    pub fn of(path: &Path) -> Self {
        let is_xml = path.extension().is_some_and(|extension| extension == "xml");
        match path.is_dir() {
            true if path.join(MODEL_FILE).is_file() => Self::OpenVino,
            true => Self::HuggingFace,
            false if is_xml => Self::OpenVino,
            false => Self::Gguf,
        }
    }
}

/// An opened model whose tensors are found by name.
#[derive(Debug)]
pub(crate) enum Source {
    Gguf(Gguf),
    HuggingFace(HfModel),
}

impl Source {
    /// Opens a folder as Hugging Face's and anything else as GGUF.
    ///
    /// # Errors
    /// [`ShardError::Gguf`] or [`ShardError::HuggingFace`].
    pub(crate) fn open(path: &Path) -> Result<Self, ShardError> {
        if path.is_dir() {
            Ok(Self::HuggingFace(HfModel::open(path)?))
        } else {
            Ok(Self::Gguf(Gguf::open(path)?))
        }
    }

    /// Whether the model has a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        match self {
            Self::Gguf(gguf) => gguf.tensor(name).is_some(),
            Self::HuggingFace(model) => model.has(name),
        }
    }

    /// A matrix that inputs are multiplied with, or that rows are looked up in.
    ///
    /// # Errors
    /// [`ShardError::MissingTensor`], [`ShardError::TensorShape`], [`ShardError::TensorType`] or
    /// [`ShardError::HuggingFace`].
    pub(crate) fn matrix(
        &self,
        name: &str,
        n_rows: usize,
        n_cols: usize,
    ) -> Result<Tensor<'_>, ShardError> {
        match self {
            Self::Gguf(gguf) => {
                let dims = [n_cols as u64, n_rows as u64];
                gguf_matrix(gguf, name, (n_rows, n_cols), &dims)
            }
            Self::HuggingFace(model) => model.matrix(name, n_rows, n_cols),
        }
    }

    /// Matrices of the same size that a tensor holds one behind the other, as one of all rows.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub(crate) fn matrices(
        &self,
        name: &str,
        n_matrices: usize,
        (n_rows, n_cols): (usize, usize),
    ) -> Result<Tensor<'_>, ShardError> {
        match self {
            Self::Gguf(gguf) => {
                let dims = [n_cols as u64, n_rows as u64, n_matrices as u64];
                gguf_matrix(gguf, name, (n_matrices * n_rows, n_cols), &dims)
            }
            Self::HuggingFace(model) => model.matrix(name, n_matrices * n_rows, n_cols),
        }
    }

    /// A norm, a bias or a frequency table.
    ///
    /// # Errors
    /// As [`Self::matrix`]; [`ShardError::VectorType`] if it is not stored as floats.
    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<Tensor<'_>, ShardError> {
        match self {
            Self::Gguf(gguf) => {
                let tensor = gguf_tensor(gguf, name, (1, len), &[len as u64])?;
                // Converters never quantise vectors.
                if tensor.encoding == Encoding::Ggml(GgmlType::F32) {
                    return Ok(tensor);
                }
                let found = gguf.tensor(name).map_or(GgmlType::F32, |info| info.ggml_type);
                Err(ShardError::VectorType { tensor: name.to_owned(), found })
            }
            Self::HuggingFace(model) => model.vector(name, len),
        }
    }

    /// Tells the operating system that no page of the model will be needed soon.
    pub(crate) fn release_all(&self) {
        match self {
            Self::Gguf(gguf) => gguf.release_all(),
            Self::HuggingFace(model) => model.release_all(),
        }
    }
}

/// **Shape**: `dims` has columns first, as the file has.
fn gguf_matrix<'a>(
    gguf: &'a Gguf,
    name: &str,
    size: (usize, usize),
    dims: &[u64],
) -> Result<Tensor<'a>, ShardError> {
    let tensor = gguf_tensor(gguf, name, size, dims)?;
    // Every mode supports the same types.
    if layout::layout(tensor.encoding, WeightMode::Exact).is_some() {
        return Ok(tensor);
    }
    let found = gguf.tensor(name).map_or(GgmlType::F32, |info| info.ggml_type);
    Err(ShardError::TensorType { tensor: name.to_owned(), found })
}

fn gguf_tensor<'a>(
    gguf: &'a Gguf,
    name: &str,
    (n_rows, n_cols): (usize, usize),
    dims: &[u64],
) -> Result<Tensor<'a>, ShardError> {
    let Some(info) = gguf.tensor(name) else {
        return Err(ShardError::MissingTensor { tensor: name.to_owned() });
    };
    if info.dims != dims {
        return Err(ShardError::TensorShape {
            tensor: name.to_owned(),
            expected: dims.to_vec(),
            found: info.dims.clone(),
        });
    }
    let encoding = Encoding::Ggml(info.ggml_type);
    Ok(Tensor::new(&info.name, encoding, (n_rows, n_cols), gguf.place(info)))
}
