//! Spoiling a GGUF file at a chosen place.
//!
//! **Source**: the GGUF specification, version 3: strings have an 8-byte length before them, a
//! metadata value a 4-byte type; a tensor's entry is name, number of dimensions (4 bytes),
//! dimensions (8 bytes each), type (4 bytes), offset.

use anyhow::{Context, Result, ensure};

/// The value type of a string.
const STRING: u32 = 8;

/// Replaces the string value of the metadata key `key` by one of the same length.
pub(crate) fn set_string(file: &mut [u8], key: &str, value: &str) -> Result<()> {
    let at = after_name(file, key)?;
    let n = value.len() as u64;
    let head = [STRING.to_le_bytes().as_slice(), &n.to_le_bytes()].concat();
    ensure!(file[at..].starts_with(&head), "{key} is no string of {n} bytes");
    let start = at + head.len();
    file[start..start + value.len()].copy_from_slice(value.as_bytes());
    Ok(())
}

/// Replaces the ggml type of the tensor `name`.
pub(crate) fn set_tensor_type(file: &mut [u8], name: &str, ggml_type: u32) -> Result<()> {
    let at = after_name(file, name)?;
    let n_dims = file[at] as usize;
    ensure!((1..=4).contains(&n_dims), "{name} is no tensor");
    let start = at + 4 + 8 * n_dims;
    file[start..start + 4].copy_from_slice(&ggml_type.to_le_bytes());
    Ok(())
}

/// The byte after the first string `name` with its length before it.
fn after_name(file: &[u8], name: &str) -> Result<usize> {
    let needle = [(name.len() as u64).to_le_bytes().as_slice(), name.as_bytes()].concat();
    let found = file.windows(needle.len()).position(|window| window == needle);
    Ok(found.with_context(|| format!("{name} is not in the file"))? + needle.len())
}
