//! Reads GGUF model files (versions 2 and 3, little endian) by memory map.
//!
//! Everything a file claims is checked when it is opened: counts, lengths, offsets, alignment,
//! duplicates and overlaps. Nothing is allocated in proportion to a claimed number: metadata
//! stays in the map and is decoded when asked for, and a tensor's bytes are a slice of the map.
//! A model that was split into several files (`name-00001-of-00003.gguf`) is opened as one.
//!
//! **Source**: the GGUF specification in ggml-org/ggml, `docs/gguf.md`.

mod error;
mod ggml_type;
mod metadata;
mod parse;
mod split;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use error::{GgufError, GgufErrorKind};
pub use ggml_type::GgmlType;
pub use metadata::{FromMetadata, Metadata, Mismatch, Value, ValueType};

use crate::map::Map;
use metadata::Entries;

/// One tensor of a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, unique over all parts of the model.
    pub name: String,
    /// Storage type of the elements.
    pub ggml_type: GgmlType,
    /// Sizes in ggml order: `dims[0]` is the contiguous one (a matrix is `[columns, rows]`).
    pub dims: Vec<u64>,
    /// Number of elements.
    pub n_elements: u64,
    /// Which part of a split model holds the bytes.
    part: usize,
    /// First byte in that part, from the start of the file.
    start: usize,
    /// Length in bytes.
    len: usize,
}

impl TensorInfo {
    /// Bytes that the tensor takes in the file.
    pub fn n_bytes(&self) -> usize {
        self.len
    }
}

/// One file of the model.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    map: Map,
}

/// An opened GGUF model: one file, or all parts of a split one.
///
/// The files must not be changed while they are open: the bytes are read from a memory map.
#[derive(Debug)]
pub struct Gguf {
    parts: Vec<Part>,
    entries: Entries,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl Gguf {
    /// Opens and checks a GGUF file; for a part of a split model, all of its parts.
    ///
    /// # Errors
    /// [`GgufError`] names the file. Its kind tells an unreadable or truncated file, a wrong
    /// magic, version or byte order, a bad metadata entry or tensor, and a missing part apart.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let opened = open_part(path, 0)?;
        let Some(place) = split::place(path, opened.metadata())? else {
            return Self::join(vec![opened]);
        };
        let mut parts = Vec::with_capacity(usize::from(place.count));
        for index in 0..place.count {
            let sibling = place.sibling(index);
            let part = open_part(&sibling, usize::from(index))
                .map_err(|error| error.or_missing_part(index, place.count))?;
            split::check_member(&sibling, part.metadata(), index, place.count)?;
            parts.push(part);
        }
        let gguf = Self::join(parts)?;
        let first = &gguf.parts[0].path;
        split::check_tensor_count(first, gguf.metadata(), gguf.tensors.len())?;
        Ok(gguf)
    }

    /// The metadata of the model (of the first part of a split one).
    pub fn metadata(&self) -> Metadata<'_> {
        Metadata::new(&self.parts[0].path, self.parts[0].map.bytes(), &self.entries)
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// The tensor of this name, if the model has it.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// The bytes of a tensor, as they are in the file.
    ///
    /// # Panics
    /// If `tensor` comes from another file whose tensors lie beyond this one's end.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        &self.parts[tensor.part].map.bytes()[tensor.start..tensor.start + tensor.len]
    }

    /// Tells the operating system that the pages of a tensor will not be needed soon, so that
    /// the resident memory stays flat while a model is streamed.
    ///
    /// The bytes stay readable: a later access reads the file again. Does nothing where the
    /// system has no such call.
    ///
    /// # Panics
    /// If `tensor` comes from another, larger split model.
    pub fn release(&self, tensor: &TensorInfo) {
        self.parts[tensor.part].map.release(tensor.start, tensor.len);
    }

    /// A tensor's place: the map of its part, and where in it the bytes are.
    pub(crate) fn place(&self, tensor: &TensorInfo) -> (&Map, Range<usize>) {
        (&self.parts[tensor.part].map, tensor.start..tensor.start + tensor.len)
    }

    /// Tells the operating system that no page of the model will be needed soon.
    pub(crate) fn release_all(&self) {
        for part in &self.parts {
            part.map.release(0, part.map.bytes().len());
        }
    }

    /// The files that make up the model, in order.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.parts.iter().map(|part| part.path.as_path())
    }

    /// Puts the parts of a model together, checks that no name repeats, and builds the index.
    fn join(opened: Vec<OpenedPart>) -> Result<Self, GgufError> {
        let mut parts = Vec::with_capacity(opened.len());
        let mut entries = None;
        let mut tensors = Vec::new();
        for OpenedPart { part, header } in opened {
            parts.push(part);
            entries.get_or_insert(header.entries);
            tensors.extend(header.tensors);
        }
        let mut by_name = HashMap::with_capacity(tensors.len());
        for (index, tensor) in tensors.iter().enumerate() {
            if by_name.insert(tensor.name.clone(), index).is_some() {
                let tensor_name = tensor.name.clone();
                return Err(GgufError::new(
                    &parts[tensor.part].path,
                    GgufErrorKind::DuplicateTensor { tensor: tensor_name },
                ));
            }
        }
        Ok(Self { parts, entries: entries.unwrap_or_default(), tensors, by_name })
    }
}

/// One file with its checked header.
struct OpenedPart {
    part: Part,
    header: parse::Header,
}

impl OpenedPart {
    fn metadata(&self) -> Metadata<'_> {
        Metadata::new(&self.part.path, self.part.map.bytes(), &self.header.entries)
    }
}

/// Maps one file and checks its header and the place of its tensors.
fn open_part(path: &Path, index: usize) -> Result<OpenedPart, GgufError> {
    let map =
        Map::open(path).map_err(|source| GgufError::new(path, GgufErrorKind::Io { source }))?;
    let header = parse::header(map.bytes(), index).map_err(|kind| GgufError::new(path, kind))?;
    Ok(OpenedPart { part: Part { path: path.to_path_buf(), map }, header })
}
