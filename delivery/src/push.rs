//! From a folder to the broker.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use stagebus_bus::{ModelStore, NewObject, PART_BYTES, StoredObject};
use stagebus_schemas::store::{content_name, object_name};
use stagebus_shards::manifest::{FileEntry, MANIFEST_FILE, hex};
use stagebus_shards::{ShardSet, ShardSetError};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use crate::Progress;
use crate::error::DeliveryError;
use crate::sets::list;

/// Parts that are read ahead, 2 MiB.
const WAITING_PARTS: usize = 8;

/// A shard set that is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pushed {
    /// Bytes that were sent.
    pub sent_bytes: u64,
    /// Bytes that the broker had.
    pub kept_bytes: u64,
}

/// Stores a shard set in the bucket of its model: first all files, then the manifest, which makes it
/// the one that is pulled. What the broker has already is not sent again.
///
/// # Errors
/// [`DeliveryError::Shards`] if a file is not the one of the manifest: it is not stored then.
/// [`DeliveryError::File`], [`DeliveryError::Store`].
pub async fn push(
    store: &ModelStore,
    shards: &ShardSet,
    mut progress: impl FnMut(&Progress),
) -> Result<Pushed, DeliveryError> {
    store.create().await?;
    let manifest = &shards.manifest;
    let stored = list(store).await?.into_iter();
    let stored = stored.filter(|set| set.fingerprint == manifest.fingerprint);
    let stored: Vec<StoredObject> = stored.flat_map(|set| set.files.into_values()).collect();
    let contents = store.contents().await?;
    let stages = manifest.stages.iter().flat_map(|stage| [&stage.xml, &stage.bin]);
    let mut files: Vec<FileEntry> =
        stages.chain(&manifest.text_files).chain(&manifest.head_tokens).cloned().collect();
    files.push(manifest_entry(&shards.dir)?);
    let bytes_total = files.iter().map(|entry| entry.bytes).sum();
    let mut pushed = Pushed { sent_bytes: 0, kept_bytes: 0 };
    for entry in &files {
        let object = NewObject {
            name: object_name(&manifest.fingerprint, &entry.name),
            content: content_name(&manifest.fingerprint, &entry.sha256),
            bytes: entry.bytes,
            sha256: entry.sha256.clone(),
            description: format!("{} of {} ({})", entry.name, manifest.model, manifest.source),
        };
        let is_there = |known: &StoredObject| {
            let n_parts = entry.bytes.div_ceil(known.part_bytes);
            (&known.name, &known.content, known.bytes)
                == (&object.name, &object.content, entry.bytes)
                && contents.get(&known.content).copied().unwrap_or(0) == n_parts
        };
        let before = pushed.sent_bytes + pushed.kept_bytes;
        let mut tell = |bytes_here: u64| {
            let bytes_done = before + bytes_here;
            progress(&Progress { file: entry.name.clone(), bytes_done, bytes_total });
        };
        if stored.iter().any(is_there) {
            pushed.kept_bytes += entry.bytes;
        } else {
            let kept = push_file(store, object, shards.dir.join(&entry.name), &mut tell).await?;
            pushed.kept_bytes += kept;
            pushed.sent_bytes += entry.bytes - kept;
        }
        tell(entry.bytes);
    }
    Ok(pushed)
}

/// The manifest as a file among the others. It has no entry of its own in itself.
fn manifest_entry(dir: &Path) -> Result<FileEntry, DeliveryError> {
    let path = dir.join(MANIFEST_FILE);
    let text = fs::read(&path).map_err(DeliveryError::file(&path))?;
    let (bytes, sha256) = (text.len() as u64, hex(&Sha256::digest(&text)));
    Ok(FileEntry { name: MANIFEST_FILE.to_owned(), bytes, sha256 })
}

/// Stores one file; returns how many bytes of it the broker had.
async fn push_file(
    store: &ModelStore,
    object: NewObject,
    path: PathBuf,
    tell: &mut impl FnMut(u64),
) -> Result<u64, DeliveryError> {
    let (total, sha256, content) = (object.bytes, object.sha256.clone(), object.content.clone());
    let mut writer = store.writer(object).await?;
    let bytes_of = |n_parts: u64| n_parts.saturating_mul(PART_BYTES as u64).min(total);
    let first = writer.position();
    let kept = bytes_of(first);
    tell(kept);
    let (parts, mut to_send) = mpsc::channel(WAITING_PARTS);
    let from = path.clone();
    let reader = spawn_blocking(move || {
        read_parts(&from, first, |part| parts.blocking_send(part.into()).is_ok())
    });
    while let Some(part) = to_send.recv().await {
        writer.write(part).await?;
        tell(bytes_of(writer.n_stored()));
    }
    let read = reader.await.map_err(|error| DeliveryError::Thread(error.into()))?;
    let (bytes, found) = read.map_err(DeliveryError::file(&path))?;
    let error = if bytes != total {
        ShardSetError::Size { path, expected: total, found: bytes }
    } else if found != sha256 {
        ShardSetError::Hash { path, expected: sha256, found }
    } else {
        writer.finish().await?;
        return Ok(kept);
    };
    store.remove_content(&content).await?;
    Err(error.into())
}

/// Reads a file to its end and gives on its parts from the `first` one on, until nobody takes them;
/// returns its size and its hash.
fn read_parts(
    path: &Path,
    first: u64,
    mut take: impl FnMut(Vec<u8>) -> bool,
) -> io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let (mut hash, mut bytes, mut index) = (Sha256::new(), 0, 0);
    loop {
        let mut part = Vec::with_capacity(PART_BYTES);
        file.by_ref().take(PART_BYTES as u64).read_to_end(&mut part)?;
        if part.is_empty() {
            break;
        }
        bytes += part.len() as u64;
        hash.update(&part);
        if index >= first && !take(part) {
            break;
        }
        index += 1;
    }
    Ok((bytes, hex(&hash.finalize())))
}
