//! Reads model folders in the format of Hugging Face: `config.json` and `model.safetensors`.
//!
//! Beyond plain floats, a matrix may be stored as int8 with one f32 scale per row in a second
//! tensor `NAME_scale`: `value = code * scale[row]`. A folder may also have a token rank, all
//! token ids by falling frequency, from which a shorter head is cut.
//!
//! **Source**: the safetensors format, README of huggingface/safetensors; tensor names of
//! `LlamaForCausalLM` in huggingface/transformers.

mod config;
mod error;
mod token_rank;

use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

pub use error::{HfError, HfErrorKind};

pub(crate) use config::ConfigJson;
pub(crate) use token_rank::{most_frequent, n_ranked};

use crate::gguf::GgmlType;
use crate::map::Map;
use crate::shard::ShardError;
use crate::tensor::{Encoding, Tensor};

/// The file with the sizes of the model.
pub const CONFIG_FILE: &str = "config.json";
/// The file with the weights.
pub const WEIGHTS_FILE: &str = "model.safetensors";

/// Bytes of the header's length.
const LENGTH_BYTES: usize = 8;

/// The longest header that is read.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// An opened model folder.
#[derive(Debug)]
pub(crate) struct HfModel {
    pub(crate) config: ConfigJson,
    path: PathBuf,
    map: Map,
    metadata: Metadata,
    /// Where the tensors begin.
    data_start: usize,
}

impl HfModel {
    /// Opens a folder and checks the header of its weights: types, sizes, offsets without gaps or
    /// overlaps, the length of the file.
    ///
    /// # Errors
    /// [`HfError`] names the file.
    pub(crate) fn open(dir: &Path) -> Result<Self, HfError> {
        let config = ConfigJson::read(&dir.join(CONFIG_FILE))?;
        let path = dir.join(WEIGHTS_FILE);
        let failed = |kind| HfError::new(&path, kind);
        let map = Map::open(&path).map_err(|source| failed(HfErrorKind::Io { source }))?;
        let (metadata, data_start) = read_header(map.bytes()).map_err(failed)?;
        Ok(Self { config, path, map, metadata, data_start })
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.metadata.info(name).is_some()
    }

    /// A matrix of floats, or of int8 with scales.
    ///
    /// # Errors
    /// [`ShardError::MissingTensor`], [`ShardError::TensorShape`], or [`ShardError::HuggingFace`]
    /// for another type.
    pub(crate) fn matrix(
        &self,
        name: &str,
        n_rows: usize,
        n_cols: usize,
    ) -> Result<Tensor<'_>, ShardError> {
        let info = self.info(name, &[n_rows, n_cols])?;
        if info.dtype != Dtype::I8 {
            return self.floats(name, info, (n_rows, n_cols));
        }
        let scale_name = format!("{name}_scale");
        let scale = self.info(&scale_name, &[n_rows])?;
        if scale.dtype != Dtype::F32 {
            return Err(self.type_error(&scale_name, scale.dtype, "F32").into());
        }
        let (start, end) = scale.data_offsets;
        let scales = &self.map.bytes()[self.data_start + start..self.data_start + end];
        let tensor = self.tensor(Encoding::RowScaledI8, info, (n_rows, n_cols));
        Ok(tensor.with_scales(scales))
    }

    /// A vector of floats.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<Tensor<'_>, ShardError> {
        let info = self.info(name, &[len])?;
        self.floats(name, info, (1, len))
    }

    pub(crate) fn release_all(&self) {
        self.map.release(0, self.map.bytes().len());
    }

    fn floats(
        &self,
        name: &str,
        info: &TensorInfo,
        size: (usize, usize),
    ) -> Result<Tensor<'_>, ShardError> {
        let ggml_type = match info.dtype {
            Dtype::F32 => GgmlType::F32,
            Dtype::F16 => GgmlType::F16,
            Dtype::BF16 => GgmlType::BF16,
            found => {
                let expected = "F32, F16, BF16, or for a matrix I8 with NAME_scale";
                return Err(self.type_error(name, found, expected).into());
            }
        };
        Ok(self.tensor(Encoding::Ggml(ggml_type), info, size))
    }

    fn tensor(&self, encoding: Encoding, info: &TensorInfo, size: (usize, usize)) -> Tensor<'_> {
        let (start, end) = info.data_offsets;
        let place = self.data_start + start..self.data_start + end;
        Tensor::new(encoding, size, (&self.map, place))
    }

    /// **Shape**: `expected` has rows first, as the file has.
    fn info(&self, name: &str, expected: &[usize]) -> Result<&TensorInfo, ShardError> {
        let Some(info) = self.metadata.info(name) else {
            return Err(ShardError::MissingTensor { tensor: name.to_owned() });
        };
        if info.shape == expected {
            return Ok(info);
        }
        let columns_first = |dims: &[usize]| dims.iter().rev().map(|dim| *dim as u64).collect();
        Err(ShardError::TensorShape {
            tensor: name.to_owned(),
            expected: columns_first(expected),
            found: columns_first(&info.shape),
        })
    }

    fn type_error(&self, name: &str, found: Dtype, expected: &'static str) -> HfError {
        let tensor = name.to_owned();
        HfError::new(&self.path, HfErrorKind::TensorType { tensor, found, expected })
    }
}

/// Reads and checks the header; returns it and where the tensors begin.
///
/// The library's own entry adds lengths that a file claims without a check, so its parts are used.
fn read_header(bytes: &[u8]) -> Result<(Metadata, usize), HfErrorKind> {
    let file_bytes = bytes.len();
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(HfErrorKind::HeaderLength { claimed: LENGTH_BYTES as u64, file_bytes });
    };
    let claimed = u64::from_le_bytes(*length);
    let too_long = HfErrorKind::HeaderLength { claimed, file_bytes };
    if claimed > MAX_HEADER_BYTES {
        return Err(too_long);
    }
    let Some(header) = rest.get(..claimed as usize) else { return Err(too_long) };
    let metadata: Metadata =
        serde_json::from_slice(header).map_err(|source| HfErrorKind::Header { source })?;
    let (expected, found) = (metadata.data_len(), rest.len() - header.len());
    if expected != found {
        return Err(HfErrorKind::DataLength { expected, found });
    }
    Ok((metadata, LENGTH_BYTES + header.len()))
}
