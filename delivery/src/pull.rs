//! From the broker into the cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use sha2::{Digest as _, Sha256};
use stagebus_bus::{ModelStore, ObjectReader, StoredObject};
use stagebus_shards::manifest::{FileEntry, MANIFEST_FILE, Manifest, hex};
use stagebus_shards::{ShardSet, ShardSetError};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use crate::Progress;
use crate::disk::{blocking, lock, write_at_once};
use crate::error::DeliveryError;
use crate::part_file::PartFile;
use crate::sets::StoredSet;

/// Largest manifest that is read, in bytes: what a shard set's folder may hold too.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;

/// Parts that wait for the disk, 2 MiB; more wait on their way.
const WAITING_PARTS: usize = 8;

/// What a process needs of a shard set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Everything.
    Whole,
    /// What a worker of this stage needs; the last one also compiles constraints, with the files of
    /// the tokenizer.
    Stage(usize),
    /// Tokenizer and chat template, and this stage if there is one to host.
    Text {
        /// The stage.
        hosted: Option<usize>,
    },
}

/// Files that are in their place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pulled {
    /// Bytes that came from the broker.
    pub fetched_bytes: u64,
    /// Parts that came from the broker.
    pub fetched_parts: u64,
    /// Bytes that were here before.
    pub kept_bytes: u64,
}

/// Fetches the manifest of a shard set into `dir` unless it is there, and checks it.
///
/// # Errors
/// [`DeliveryError::NotStored`], [`DeliveryError::Hash`], [`DeliveryError::Manifest`],
/// [`DeliveryError::ManifestSize`], [`DeliveryError::Shards`], [`DeliveryError::File`],
/// [`DeliveryError::Store`].
pub async fn open(
    store: &ModelStore,
    set: &StoredSet,
    dir: &Path,
) -> Result<ShardSet, DeliveryError> {
    let fingerprint = || set.fingerprint.clone();
    let Some(object) = &set.manifest else {
        let file = MANIFEST_FILE.to_owned();
        return Err(DeliveryError::NotStored { file, fingerprint: fingerprint() });
    };
    if object.bytes > MAX_MANIFEST_BYTES {
        return Err(DeliveryError::ManifestSize {
            fingerprint: fingerprint(),
            bytes: object.bytes,
            limit: MAX_MANIFEST_BYTES,
        });
    }
    let path = dir.join(MANIFEST_FILE);
    let is_here = fs::read(&path).is_ok_and(|text| hex(&Sha256::digest(&text)) == object.sha256);
    if !is_here {
        let text = read_whole(store, object).await?;
        write_at_once(dir, &path, &text).map_err(DeliveryError::file(&path))?;
    }
    let shards = ShardSet::open(dir)?;
    let differs = |field, found: &str, expected: &str| DeliveryError::Manifest {
        fingerprint: fingerprint(),
        field,
        found: found.to_owned(),
        expected: expected.to_owned(),
    };
    let Manifest { model, fingerprint: found, .. } = &shards.manifest;
    if *found != set.fingerprint {
        return Err(differs("fingerprint", found, &set.fingerprint));
    }
    if !store.is_of_drafts() && model.as_str() != store.model().as_str() {
        return Err(differs("model", model, store.model().as_str()));
    }
    Ok(shards)
}

/// Reads a small object into memory.
async fn read_whole(store: &ModelStore, object: &StoredObject) -> Result<Vec<u8>, DeliveryError> {
    let mut reader = store.reader(object, 0, 0);
    let mut text = Vec::new();
    while let Some(part) = reader.next().await? {
        text.extend_from_slice(&part.bytes);
    }
    let found = hex(&Sha256::digest(&text));
    if found != object.sha256 {
        let (file, expected) = (MANIFEST_FILE.to_owned(), object.sha256.clone());
        return Err(DeliveryError::Hash { file, expected, found });
    }
    Ok(text)
}

/// Fetches the files of a shard set that are wanted and not here, over breaks of the connection and
/// ends of the broker, and tells how far it is after every part. `shards` is what [`open`] returned.
///
/// Files that are here are hashed again; one that is damaged is fetched anew. When the future is
/// dropped, what has come stays for the next attempt.
///
/// # Errors
/// [`DeliveryError::NotStored`], [`DeliveryError::Differs`], [`DeliveryError::Hash`],
/// [`DeliveryError::File`], [`DeliveryError::Store`], [`DeliveryError::Shards`] for a stage that does
/// not exist.
pub async fn pull(
    store: &ModelStore,
    set: &StoredSet,
    shards: &ShardSet,
    wanted: &Wanted,
    mut progress: impl FnMut(&Progress),
) -> Result<Pulled, DeliveryError> {
    let mut jobs = Vec::new();
    for entry in wanted_files(shards, wanted)? {
        jobs.push((entry, stored_as(set, entry)?));
    }
    let mut pulled = Pulled::default();
    let bytes_total = jobs.iter().map(|(entry, _)| entry.bytes).sum();
    let mut done = 0;
    for (entry, object) in jobs {
        let file = &entry.name;
        let mut tell = |bytes_here: u64| {
            let bytes_done = done + bytes_here;
            progress(&Progress { file: file.clone(), bytes_done, bytes_total });
        };
        pull_file(store, object, &shards.dir, entry, (&mut pulled, &mut tell)).await?;
        tell(entry.bytes);
        done += entry.bytes;
    }
    Ok(pulled)
}

/// The entries of the files that are wanted.
pub(crate) fn wanted_files<'a>(
    shards: &'a ShardSet,
    wanted: &Wanted,
) -> Result<Vec<&'a FileEntry>, ShardSetError> {
    let manifest = &shards.manifest;
    let stage = |index: usize| shards.stage(index).map(|stage| [&stage.xml, &stage.bin]);
    let mut files = Vec::new();
    let with_text = match wanted {
        Wanted::Whole => {
            files.extend(manifest.stages.iter().flat_map(|stage| [&stage.xml, &stage.bin]));
            files.extend(&manifest.head_tokens);
            true
        }
        Wanted::Stage(index) => {
            files.extend(stage(*index)?);
            index + 1 == manifest.n_stages()
        }
        Wanted::Text { hosted } => {
            if let Some(index) = hosted {
                files.extend(stage(*index)?);
            }
            true
        }
    };
    files.extend(manifest.text_files.iter().filter(|_| with_text));
    Ok(files)
}

/// The object that holds a file, if it is the one that the manifest names.
fn stored_as<'a>(set: &'a StoredSet, entry: &FileEntry) -> Result<&'a StoredObject, DeliveryError> {
    let file = || entry.name.clone();
    let object = set.files.get(&entry.name).ok_or_else(|| DeliveryError::NotStored {
        file: file(),
        fingerprint: set.fingerprint.clone(),
    })?;
    let differs = |field, found: String, expected: String| {
        Err(DeliveryError::Differs { file: file(), field, found, expected })
    };
    if object.bytes != entry.bytes {
        return differs("size", object.bytes.to_string(), entry.bytes.to_string());
    }
    if object.sha256 != entry.sha256 {
        return differs("SHA-256", object.sha256.clone(), entry.sha256.clone());
    }
    Ok(object)
}

/// Brings one file to its place.
async fn pull_file(
    store: &ModelStore,
    object: &StoredObject,
    dir: &Path,
    entry: &FileEntry,
    (pulled, tell): (&mut Pulled, &mut impl FnMut(u64)),
) -> Result<(), DeliveryError> {
    let place = dir.join(&entry.name);
    let path = dir.join(format!("{}.part", entry.name));
    let lock_path = dir.join(format!(".{}.lock", entry.name));
    let (part_bytes, total) = (object.part_bytes, entry.bytes);
    // Of several processes that want the same file one fetches it, the others wait for it.
    let lock = Arc::new(blocking(move || lock(&lock_path)).await?);
    if blocking(is_whole(place.clone(), entry.clone())).await? {
        pulled.kept_bytes += total;
        return Ok(());
    }
    loop {
        let (at, lock) = (path.clone(), Arc::clone(&lock));
        let open = move || {
            let file = PartFile::open(at.clone(), &lock, (part_bytes, total));
            file.map_err(DeliveryError::file(&at))
        };
        let file = blocking(open).await?;
        let kept = file.bytes;
        tell(kept);
        let mut reader = store.reader(object, file.n_parts, file.sequence);
        let fetched = fetch(&mut reader, file, &path, (kept, &mut *tell)).await;
        pulled.fetched_parts += reader.n_fetched();
        let file = fetched?;
        pulled.fetched_bytes += file.bytes - kept;
        let (to, sha256) = (place.clone(), entry.sha256.clone());
        let finish = move || file.finish(&to, &sha256).map_err(DeliveryError::file(&to));
        match blocking(finish).await? {
            Ok(()) => {
                pulled.kept_bytes += kept;
                return Ok(());
            }
            // What came earlier may have been damaged on the disk; what came at once was not.
            Err(found) if kept > 0 => tracing::warn!(
                file = %place.display(), %found, expected = %entry.sha256,
                "what was here before does not fit, the file is fetched anew"
            ),
            Err(found) => {
                let (file, expected) = (entry.name.clone(), entry.sha256.clone());
                return Err(DeliveryError::Hash { file, expected, found });
            }
        }
    }
}

/// Writes what comes to the file until it is whole. What came before an error is written too.
async fn fetch(
    reader: &mut ObjectReader,
    mut file: PartFile,
    path: &Path,
    (mut here, tell): (u64, &mut impl FnMut(u64)),
) -> Result<PartFile, DeliveryError> {
    let (parts, mut to_write) = mpsc::channel(WAITING_PARTS);
    let writer = spawn_blocking(move || {
        while let Some(part) = to_write.blocking_recv() {
            file.append(&part)?;
        }
        Ok::<_, io::Error>(file)
    });
    let read = async {
        while let Some(part) = reader.next().await? {
            here += part.bytes.len() as u64;
            if parts.send(part).await.is_err() {
                // The writer says why.
                break;
            }
            tell(here);
        }
        drop(parts);
        Ok::<_, DeliveryError>(())
    };
    let read = read.await;
    let written = writer.await.map_err(|error| DeliveryError::Thread(error.into()))?;
    let file = written.map_err(DeliveryError::file(path))?;
    read.map(|()| file)
}

/// Whether a file is in its place; one that is damaged is removed.
fn is_whole(
    place: PathBuf,
    entry: FileEntry,
) -> impl FnOnce() -> Result<bool, DeliveryError> + Send + 'static {
    move || {
        let dir = place.parent().unwrap_or(&place);
        let error = match stagebus_shards::shard_set::verify_file(dir, &entry) {
            Ok(()) => return Ok(true),
            Err(ShardSetError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(false);
            }
            Err(error @ (ShardSetError::Size { .. } | ShardSetError::Hash { .. })) => error,
            Err(error) => return Err(error.into()),
        };
        tracing::warn!(%error, "a pulled file is damaged, it is fetched anew");
        fs::remove_file(&place).map_err(DeliveryError::file(&place))?;
        Ok(false)
    }
}
