//! Models split into several files.
//!
//! **Source**: `gguf-split` of llama.cpp: every part carries `split.no` (from 0), `split.count`
//! and `split.tensors.count`, and is named `PREFIX-NNNNN-of-NNNNN.gguf` (from 1).

use std::path::{Path, PathBuf};

use super::error::{GgufError, GgufErrorKind};
use super::metadata::Metadata;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Where a file stands among the parts of its model.
#[derive(Debug)]
pub(super) struct Place {
    folder: PathBuf,
    prefix: String,
    pub(super) count: u16,
}

impl Place {
    /// The path of part `index`, from 0.
    pub(super) fn sibling(&self, index: u16) -> PathBuf {
        let number = u32::from(index) + 1;
        self.folder.join(format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count))
    }
}

/// The place of a file among its parts; none if the model is one file.
pub(super) fn place(path: &Path, metadata: Metadata<'_>) -> Result<Option<Place>, GgufError> {
    let count: u16 = metadata.get(COUNT)?.unwrap_or(1);
    if count < 2 {
        return Ok(None);
    }
    match prefix(path, count) {
        Some(prefix) => {
            let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
            Ok(Some(Place { folder, prefix: prefix.to_owned(), count }))
        }
        None => Err(GgufError::new(path, GgufErrorKind::SplitName { count })),
    }
}

/// What precedes `-NNNNN-of-NNNNN.gguf` in the file's name.
fn prefix(path: &Path, count: u16) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    let numbered = name.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (prefix, number) = numbered.rsplit_once('-')?;
    let is_number = number.len() == 5 && number.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then_some(prefix)
}

/// Checks that a part is the one that its name says.
pub(super) fn check_member(
    path: &Path,
    metadata: Metadata<'_>,
    expected: u16,
    count: u16,
) -> Result<(), GgufError> {
    let found: u16 = metadata.require(NUMBER)?;
    let found_count: u16 = metadata.require(COUNT)?;
    if (found, found_count) == (expected, count) {
        return Ok(());
    }
    Err(GgufError::new(path, GgufErrorKind::SplitPlace { found, found_count, expected, count }))
}

/// Checks that all tensors of the model were found.
pub(super) fn check_tensor_count(
    path: &Path,
    metadata: Metadata<'_>,
    found: usize,
) -> Result<(), GgufError> {
    let expected: Option<u64> = metadata.get(TENSORS)?;
    match expected {
        Some(expected) if expected != found as u64 => {
            Err(GgufError::new(path, GgufErrorKind::SplitTensors { found, expected }))
        }
        _ => Ok(()),
    }
}
