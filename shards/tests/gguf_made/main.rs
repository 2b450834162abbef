//! GGUF files made for the purpose, right ones and wrong ones, through the reader and the
//! tokenizer conversion.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a test ends at the first surprise, and its numbers are small"
)]

mod allocation;
mod hostile;
mod reading;
mod splitting;
mod tokenizers_made;
mod writer;

use std::path::PathBuf;

use stagebus_shards::gguf::{Gguf, GgufError};
use tempfile::TempDir;

/// Writes a file and opens it; the folder lives as long as its handle.
fn open(bytes: &[u8]) -> (TempDir, Result<Gguf, GgufError>) {
    let (dir, path) = write(bytes);
    (dir, Gguf::open(path))
}

fn write(bytes: &[u8]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}
