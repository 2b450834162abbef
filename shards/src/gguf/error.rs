//! What can be wrong with a GGUF file.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::metadata::ValueType;

/// A GGUF file that cannot be used, and why.
#[derive(Debug)]
pub struct GgufError {
    file: PathBuf,
    kind: Box<GgufErrorKind>,
}

impl GgufError {
    pub(super) fn new(file: &Path, kind: GgufErrorKind) -> Self {
        Self { file: file.to_path_buf(), kind: Box::new(kind) }
    }

    /// Says that a part of a split model is missing, if that is why it cannot be opened.
    pub(super) fn or_missing_part(self, index: u16, count: u16) -> Self {
        match *self.kind {
            GgufErrorKind::Io { source } if source.kind() == io::ErrorKind::NotFound => {
                let kind = GgufErrorKind::MissingPart { part: u32::from(index) + 1, count };
                Self::new(&self.file, kind)
            }
            kind => Self::new(&self.file, kind),
        }
    }

    /// The file (the part, for a split model) that the error is about.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// What is wrong.
    pub fn kind(&self) -> &GgufErrorKind {
        &self.kind
    }
}

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file.display(), self.kind)
    }
}

impl Error for GgufError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.kind.source()
    }
}

/// What is wrong with a GGUF file.
#[derive(Debug, thiserror::Error)]
pub enum GgufErrorKind {
    /// The file cannot be opened or mapped.
    #[error("cannot be opened")]
    Io {
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The file does not begin with `GGUF`.
    #[error("not a GGUF file: begins with bytes {found:02x?}, expected \"GGUF\"")]
    NotGguf {
        /// The first bytes of the file, up to four.
        found: Vec<u8>,
    },
    /// The file was written for big-endian machines.
    #[error("a big-endian GGUF file (version {version}), only little-endian files can be read")]
    BigEndian {
        /// Its version, in the right byte order.
        version: u32,
    },
    /// A version that is not read.
    #[error("GGUF version {found}, expected 2 or 3")]
    Version {
        /// The version of the file.
        found: u32,
    },
    /// The file ends inside its header.
    #[error("truncated: ends {missing} bytes too early, in {reading} at byte {offset}")]
    Truncated {
        /// What was being read.
        reading: &'static str,
        /// Where it begins.
        offset: u64,
        /// How many bytes are missing at least.
        missing: u64,
    },
    /// The file ends inside a tensor.
    #[error("truncated: ends {missing} bytes before the end of tensor {tensor:?}")]
    TruncatedTensor {
        /// The tensor.
        tensor: String,
        /// How many bytes are missing.
        missing: u64,
    },
    /// A metadata key or a tensor name is not UTF-8.
    #[error("the name at byte {offset} is not UTF-8")]
    NameNotUtf8 {
        /// Where the name begins.
        offset: u64,
    },
    /// Two metadata entries have the same key.
    #[error("metadata key {key:?} appears twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// A metadata value has a type that does not exist.
    #[error("metadata key {key:?} has the unknown value type {found}, expected 0 to 12")]
    UnknownValueType {
        /// The key.
        key: String,
        /// The type's number.
        found: u32,
    },
    /// Arrays inside arrays, too deep.
    #[error("metadata key {key:?} nests arrays more than {limit} deep")]
    NestedTooDeep {
        /// The key.
        key: String,
        /// The deepest nesting that is read.
        limit: u32,
    },
    /// A metadata key that is needed is not there.
    #[error("metadata key {key:?} is missing, expected {expected}")]
    MissingKey {
        /// The key.
        key: String,
        /// The type that was asked for.
        expected: &'static str,
    },
    /// A metadata value has another type than the one asked for.
    #[error("metadata key {key:?} is {found}, expected {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// The type that was asked for.
        expected: &'static str,
        /// The type in the file.
        found: ValueType,
    },
    /// A metadata number does not fit the type asked for.
    #[error("metadata key {key:?} has the value {found}, which does not fit {expected}")]
    OutOfRange {
        /// The key.
        key: String,
        /// The type that was asked for.
        expected: &'static str,
        /// The number in the file.
        found: i128,
    },
    /// A metadata string is not UTF-8.
    #[error("metadata key {key:?} holds a string that is not UTF-8 (element {index})")]
    StringNotUtf8 {
        /// The key.
        key: String,
        /// Its place in the array; 0 for a single string.
        index: usize,
    },
    /// `general.alignment` is not a power of two.
    #[error("metadata key \"general.alignment\" is {found}, expected a power of two")]
    Alignment {
        /// The alignment in the file.
        found: u64,
    },
    /// Two tensors have the same name.
    #[error("tensor {tensor:?} appears twice")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
    },
    /// A tensor has more dimensions than ggml allows.
    #[error("tensor {tensor:?} has {found} dimensions, expected at most 4")]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// Their number.
        found: u32,
    },
    /// A tensor has a type that is not known.
    #[error("tensor {tensor:?} has the unknown ggml type {found}")]
    UnknownTensorType {
        /// The tensor.
        tensor: String,
        /// The type's number.
        found: u32,
    },
    /// A row of a tensor is not a whole number of blocks.
    #[error("tensor {tensor:?} has rows of {found} elements, expected a multiple of {block}")]
    PartialBlock {
        /// The tensor.
        tensor: String,
        /// Elements of a row.
        found: u64,
        /// Elements of a block of its type.
        block: u64,
    },
    /// The size of a tensor does not fit 64 bits.
    #[error("tensor {tensor:?} has dimensions {dims:?}, which overflow")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// Its dimensions.
        dims: Vec<u64>,
    },
    /// A tensor begins at an offset that is not aligned.
    #[error("tensor {tensor:?} begins at offset {offset}, expected a multiple of {alignment}")]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Its offset in the data section.
        offset: u64,
        /// The alignment of the file.
        alignment: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors {first:?} and {second:?} overlap")]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The one that begins inside it.
        second: String,
    },
    /// A part of a split model has a name that does not tell its place.
    #[error(
        "part of a model split into {count} files, but its name does not end in \
             \"-NNNNN-of-{count:05}.gguf\""
    )]
    SplitName {
        /// How many parts the file says there are.
        count: u16,
    },
    /// A part of a split model says that it belongs elsewhere.
    #[error("says it is part {found} of {found_count}, expected part {expected} of {count}")]
    SplitPlace {
        /// Its own number, from 0.
        found: u16,
        /// Its own count.
        found_count: u16,
        /// The number by its name, from 0.
        expected: u16,
        /// The count by its name.
        count: u16,
    },
    /// A split model has another number of tensors than its first part says.
    #[error("the parts of the split model hold {found} tensors, expected {expected}")]
    SplitTensors {
        /// Tensors found.
        found: usize,
        /// Tensors promised by `split.tensors.count`.
        expected: u64,
    },
    /// A part of a split model is not there.
    #[error("missing: the model is split into {count} files and this is part {part}")]
    MissingPart {
        /// Its number, from 1 as in the file name.
        part: u32,
        /// How many parts there are.
        count: u16,
    },
}
