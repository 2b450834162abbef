//! `model.safetensors.index.json`: which file has which tensors.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::error::{HfError, HfErrorKind};
use crate::bounded;

/// The tensors of every file that the index names, by the file's name.
///
/// # Errors
/// [`HfError`] if the index cannot be read or has another form.
pub(super) fn read(path: &Path) -> Result<BTreeMap<String, Vec<String>>, HfError> {
    let failed = |kind| HfError::new(path, kind);
    let json = bounded::read(path, bounded::MAX_TEXT_BYTES)
        .map_err(|source| failed(HfErrorKind::Io { source }))?;
    let index: Value =
        serde_json::from_slice(&json).map_err(|source| failed(HfErrorKind::Json { source }))?;
    let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
        return Err(failed(HfErrorKind::Index));
    };
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, file) in map {
        let Some(file) = file.as_str() else { return Err(failed(HfErrorKind::Index)) };
        // A folder is not left, wherever its files come from.
        if Path::new(file).file_name().is_none_or(|name| name != file) {
            return Err(failed(HfErrorKind::IndexFileName { file: file.to_owned() }));
        }
        files.entry(file.to_owned()).or_default().push(tensor.clone());
    }
    if files.is_empty() {
        return Err(failed(HfErrorKind::Index));
    }
    Ok(files)
}
