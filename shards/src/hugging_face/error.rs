//! What can be wrong with a Hugging Face folder.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use safetensors::Dtype;

/// A file of a model folder that cannot be used, and why.
#[derive(Debug)]
pub struct HfError {
    file: PathBuf,
    kind: Box<HfErrorKind>,
}

impl HfError {
    pub(crate) fn new(file: &Path, kind: HfErrorKind) -> Self {
        Self { file: file.to_path_buf(), kind: Box::new(kind) }
    }

    /// The file that the error is about.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// What is wrong, by value.
    #[must_use]
    pub fn into_kind(self) -> HfErrorKind {
        *self.kind
    }

    /// What is wrong.
    #[must_use]
    pub fn kind(&self) -> &HfErrorKind {
        &self.kind
    }
}

impl fmt::Display for HfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file.display(), self.kind)
    }
}

impl Error for HfError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.kind.source()
    }
}

/// What is wrong with a file of a model folder.
#[derive(Debug, thiserror::Error)]
pub enum HfErrorKind {
    /// The file cannot be opened, mapped or read.
    #[error("cannot be read")]
    Io {
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A JSON file is not JSON.
    #[error("is not JSON")]
    Json {
        /// Where and what.
        #[source]
        source: serde_json::Error,
    },
    /// A field of `config.json` is missing, of another type, or has a value that no graph is
    /// written for.
    #[error("field {field:?} is {found}, expected {expected}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        found: String,
        /// What is supported.
        expected: &'static str,
    },
    /// The index is not a list of tensors and their files.
    #[error("is no index of weights: it has no map \"weight_map\" of tensors to files")]
    Index,
    /// The index names a file that is not in the folder.
    #[error("names the file {file:?}, which is not in the folder: it has to be fetched too")]
    IndexFile {
        /// The file.
        file: String,
    },
    /// The index names something that is no file of the folder.
    #[error("names the file {file:?}, expected a plain file name")]
    IndexFileName {
        /// The name.
        file: String,
    },
    /// The index gives a tensor to a file that does not have it.
    #[error("gives tensor {tensor} to the file {file:?}, which does not have it")]
    IndexTensor {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
    /// Two files have a tensor of the same name.
    #[error("has tensor {tensor}, which another file of the folder has too")]
    TwoTensors {
        /// The tensor.
        tensor: String,
    },
    /// The header does not fit into the file.
    #[error("the header claims {claimed} bytes, the file has {file_bytes}")]
    HeaderLength {
        /// Bytes that the header claims.
        claimed: u64,
        /// Bytes of the file.
        file_bytes: usize,
    },
    /// The header is not a list of tensors whose sizes and offsets fit together.
    #[error("the header is not valid")]
    Header {
        /// Where and what.
        #[source]
        source: serde_json::Error,
    },
    /// The tensors and the file end at different places.
    #[error("the tensors take {expected} bytes, the file has {found} for them")]
    DataLength {
        /// Bytes of the tensors.
        expected: usize,
        /// Bytes behind the header.
        found: usize,
    },
    /// A tensor is stored in a type that is not mapped.
    #[error("tensor {tensor} is stored as {found:?}, expected {expected}")]
    TensorType {
        /// Its name.
        tensor: String,
        /// Its type.
        found: Dtype,
        /// What is supported.
        expected: &'static str,
    },
    /// A token rank is not a list of different token ids.
    #[error("entry {entry} of the token rank is {token}, expected a token below {vocab_size} once")]
    Rank {
        /// Place in the list.
        entry: usize,
        /// What is there.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A token rank has fewer tokens than the head is to have.
    #[error("the token rank has {found} tokens, a head of {expected} was asked for")]
    RankLength {
        /// Tokens asked for.
        expected: usize,
        /// Tokens found.
        found: usize,
    },
}
