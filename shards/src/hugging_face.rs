//! Reads model folders in the format of Hugging Face: `config.json` and the weights, which are
//! `model.safetensors` or several files that `model.safetensors.index.json` lists.
//!
//! Beyond plain floats, a matrix may be stored as int8 with one f32 scale per row in a second
//! tensor `NAME_scale`: `value = code * scale[row]`. A folder may also have a token rank, all
//! token ids by falling frequency, from which a shorter head is cut.
//!
//! **Source**: the safetensors format, README of huggingface/safetensors; tensor names of
//! the models in huggingface/transformers.

mod config;
mod error;
mod index;
mod token_rank;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

pub use error::{HfError, HfErrorKind};

pub(crate) use config::{ConfigJson, FolderConfig};
pub(crate) use token_rank::{most_frequent, n_ranked};

use crate::gguf::GgmlType;
use crate::map::Map;
use crate::shard::ShardError;
use crate::tensor::{Encoding, Tensor};

/// The file with the sizes of the model.
pub const CONFIG_FILE: &str = "config.json";
/// The file with how to generate; a model may have none.
pub const GENERATION_CONFIG_FILE: &str = "generation_config.json";
/// The file with the weights, if one file has them all.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// The file that tells which file has which weights, if they are several.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Bytes of the header's length.
const LENGTH_BYTES: usize = 8;

/// The longest header that is read.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// An opened model folder.
#[derive(Debug)]
pub(crate) struct HfModel {
    pub(crate) config: FolderConfig,
    files: Vec<WeightsFile>,
    tensors: HashMap<String, Place>,
}

/// One file of weights.
#[derive(Debug)]
struct WeightsFile {
    path: PathBuf,
    map: Map,
    /// Where the tensors begin.
    data_start: usize,
}

/// Where a tensor is.
#[derive(Debug)]
struct Place {
    /// Its file's number.
    file: usize,
    info: TensorInfo,
}

impl WeightsFile {
    /// Opens a file and checks its header: types, sizes, offsets without gaps or overlaps, the
    /// length of the file.
    fn open(path: PathBuf) -> Result<(Self, Metadata), HfError> {
        let map =
            Map::open(&path).map_err(|source| HfError::new(&path, HfErrorKind::Io { source }))?;
        let (metadata, data_start) =
            read_header(map.bytes()).map_err(|kind| HfError::new(&path, kind))?;
        Ok((Self { path, map, data_start }, metadata))
    }
}

impl HfModel {
    /// Opens a folder and checks the headers of its weights.
    ///
    /// # Errors
    /// [`HfError`] names the file.
    pub(crate) fn open(dir: &Path) -> Result<Self, HfError> {
        let config = FolderConfig::read(dir)?;
        let mut model = Self { config, files: Vec::new(), tensors: HashMap::new() };
        let index = dir.join(INDEX_FILE);
        // Of both, the one file is what other programs read.
        if !dir.join(WEIGHTS_FILE).is_file() && index.is_file() {
            for (name, tensors) in index::read(&index)? {
                let path = dir.join(&name);
                if !path.is_file() {
                    return Err(HfError::new(&index, HfErrorKind::IndexFile { file: name }));
                }
                let metadata = model.add(path)?;
                let lost = tensors.into_iter().find(|tensor| metadata.info(tensor).is_none());
                if let Some(tensor) = lost {
                    return Err(HfError::new(
                        &index,
                        HfErrorKind::IndexTensor { tensor, file: name },
                    ));
                }
            }
        } else {
            model.add(dir.join(WEIGHTS_FILE))?;
        }
        Ok(model)
    }

    /// Opens one file of weights.
    fn add(&mut self, path: PathBuf) -> Result<Metadata, HfError> {
        let (file, metadata) = WeightsFile::open(path)?;
        let number = self.files.len();
        for (name, info) in metadata.tensors() {
            let place = Place { file: number, info: info.clone() };
            if self.tensors.insert(name.clone(), place).is_some() {
                return Err(HfError::new(&file.path, HfErrorKind::TwoTensors { tensor: name }));
            }
        }
        self.files.push(file);
        Ok(metadata)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
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
        let (name, place) = self.place(name, &[n_rows, n_cols])?;
        if place.info.dtype != Dtype::I8 {
            return self.floats(name, place, (n_rows, n_cols));
        }
        let (scale_name, scale) = self.place(&format!("{name}_scale"), &[n_rows])?;
        if scale.info.dtype != Dtype::F32 {
            return Err(self.type_error(scale_name, scale, "F32").into());
        }
        let (map, range) = self.bytes(scale);
        let size = (n_rows, n_cols);
        let tensor = Tensor::new(name, Encoding::RowScaledI8, size, self.bytes(place));
        Ok(tensor.with_scales(&map.bytes()[range]))
    }

    /// A vector of floats.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<Tensor<'_>, ShardError> {
        let (name, place) = self.place(name, &[len])?;
        self.floats(name, place, (1, len))
    }

    pub(crate) fn release_all(&self) {
        for file in &self.files {
            file.map.release(0, file.map.bytes().len());
        }
    }

    fn floats<'a>(
        &'a self,
        name: &'a str,
        place: &'a Place,
        size: (usize, usize),
    ) -> Result<Tensor<'a>, ShardError> {
        let ggml_type = match place.info.dtype {
            Dtype::F32 => GgmlType::F32,
            Dtype::F16 => GgmlType::F16,
            Dtype::BF16 => GgmlType::BF16,
            _ => {
                let expected = "F32, F16, BF16, or for a matrix I8 with NAME_scale";
                return Err(self.type_error(name, place, expected).into());
            }
        };
        Ok(Tensor::new(name, Encoding::Ggml(ggml_type), size, self.bytes(place)))
    }

    /// The map of a tensor's file, and where in it the bytes are.
    fn bytes(&self, place: &Place) -> (&Map, std::ops::Range<usize>) {
        let file = &self.files[place.file];
        let (start, end) = place.info.data_offsets;
        (&file.map, file.data_start + start..file.data_start + end)
    }

    /// A tensor's own name and its place.
    ///
    /// **Shape**: `expected` has rows first, as the file has.
    fn place(&self, name: &str, expected: &[usize]) -> Result<(&str, &Place), ShardError> {
        let Some((name, place)) = self.tensors.get_key_value(name) else {
            return Err(ShardError::MissingTensor { tensor: name.to_owned() });
        };
        if place.info.shape == expected {
            return Ok((name, place));
        }
        let columns_first = |dims: &[usize]| dims.iter().rev().map(|dim| *dim as u64).collect();
        Err(ShardError::TensorShape {
            tensor: name.clone(),
            expected: columns_first(expected),
            found: columns_first(&place.info.shape),
        })
    }

    fn type_error(&self, name: &str, place: &Place, expected: &'static str) -> HfError {
        let (tensor, found) = (name.to_owned(), place.info.dtype);
        let file = &self.files[place.file].path;
        HfError::new(file, HfErrorKind::TensorType { tensor, found, expected })
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
