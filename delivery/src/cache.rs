//! Where pulled files lie: `<cache>/<model>/<fingerprint>/`, so that nothing is ever written over, and
//! which of them go when the cache is full.
//!
//! A process that uses a shard set holds its file `.in-use`, whose time says when it was used last.
//! Sets are taken and removed one at a time, under the lock of the whole cache, so none goes that
//! somebody has just found.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use fs4::{FileExt, TryLockError};
use stagebus_bus::ModelStore;
use stagebus_settings::StoreSettings;
use stagebus_shards::ShardSet;

use crate::Progress;
use crate::disk::{blocking, lock, openable};
use crate::error::DeliveryError;
use crate::pull::{Pulled, Wanted, open, pull, wanted_files};
use crate::sets::StoredSet;

/// Name of the cache inside the runtime folder or the user's cache folder.
const FOLDER: &str = "pulled";

/// File of the cache that is locked while sets are taken or removed.
const LOCK: &str = ".lock";

/// File of a set that is locked by everybody who uses it. A folder without it is not ours to remove.
const IN_USE: &str = ".in-use";

/// The folder for pulled files.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: PathBuf,
    /// Bytes that all sets may take together; as many as they need when absent.
    limit: Option<u64>,
}

/// A shard set in the cache, which stays there while this is held.
#[derive(Debug, Clone)]
pub struct CachedSet {
    /// The set; files that nobody wanted may be missing.
    pub shards: ShardSet,
    _in_use: Arc<File>,
}

/// A set that may have to go.
#[derive(Debug)]
struct Candidate {
    dir: PathBuf,
    used: SystemTime,
    bytes: u64,
}

impl Cache {
    /// The cache that the settings name, else one inside the runtime folder if there is one, else one
    /// in the user's cache folder.
    ///
    /// # Errors
    /// [`DeliveryError::NoCache`].
    pub fn new(settings: &StoreSettings) -> Result<Self, DeliveryError> {
        let user = || dirs::cache_dir().map(|user| user.join("stagebus").join(FOLDER));
        let runtime = || stagebus_settings::runtime_dir().map(|runtime| runtime.join(FOLDER));
        let dir = settings.cache_dir.clone().or_else(runtime).or_else(user);
        let limit = Some(settings.cache_mib).filter(|&mib| mib > 0);
        Ok(Self {
            dir: dir.ok_or(DeliveryError::NoCache)?,
            limit: limit.map(|mib| mib.saturating_mul(1 << 20)),
        })
    }

    /// Fetches the manifest of a shard set unless it is here, and holds the set's place.
    ///
    /// # Errors
    /// As [`open`].
    pub async fn open(
        &self,
        store: &ModelStore,
        set: &StoredSet,
    ) -> Result<CachedSet, DeliveryError> {
        let dir = self.dir.join(store.model().as_str()).join(&set.fingerprint);
        let (cache, place) = (self.dir.clone(), dir.clone());
        let in_use = blocking(move || hold(&cache, &place)).await?;
        Ok(CachedSet { shards: open(store, set, &dir).await?, _in_use: Arc::new(in_use) })
    }

    /// Fetches the files of a set that are wanted and not here. Where the cache has no room for them,
    /// the sets that were used longest ago and that nobody uses are removed first.
    ///
    /// # Errors
    /// As [`pull`].
    pub async fn pull(
        &self,
        (store, set): (&ModelStore, &StoredSet),
        cached: &CachedSet,
        wanted: &Wanted,
        progress: impl FnMut(&Progress),
    ) -> Result<Pulled, DeliveryError> {
        if let Some(limit) = self.limit {
            let files = wanted_files(&cached.shards, wanted)?;
            let bytes: u64 = files.iter().map(|file| file.bytes).sum();
            let (cache, keep) = (self.dir.clone(), cached.shards.dir.clone());
            blocking(move || make_room(&cache, &keep, limit.saturating_sub(bytes))).await?;
        }
        pull(store, set, &cached.shards, wanted, progress).await
    }
}

/// Makes the folder of a set if need be, and keeps others from removing it.
fn hold(cache: &Path, dir: &Path) -> Result<File, DeliveryError> {
    let path = dir.join(IN_USE);
    fs::create_dir_all(cache).map_err(DeliveryError::file(cache))?;
    let _alone = lock(&cache.join(LOCK))?;
    let held = || {
        fs::create_dir_all(dir)?;
        let file = openable().open(&path)?;
        file.set_modified(SystemTime::now())?;
        FileExt::lock_shared(&file)?;
        Ok::<_, io::Error>(file)
    };
    held().map_err(DeliveryError::file(&path))
}

/// Removes sets, the one that was used longest ago first, until all but `keep` take `limit` bytes at
/// most or somebody uses those that are left.
fn make_room(cache: &Path, keep: &Path, limit: u64) -> Result<(), DeliveryError> {
    let _alone = lock(&cache.join(LOCK))?;
    let mut others = candidates(cache, keep).map_err(DeliveryError::file(cache))?;
    others.sort_by_key(|set| set.used);
    let mut taken: u64 = others.iter().map(|set| set.bytes).sum();
    for Candidate { dir, bytes, .. } in others {
        if taken <= limit {
            break;
        }
        match remove(&dir) {
            Ok(true) => {
                taken -= bytes;
                tracing::info!(dir = %dir.display(), bytes, "removed from the cache");
            }
            Ok(false) => {}
            // What cannot be removed does not keep anybody from pulling.
            Err(error) => {
                tracing::warn!(dir = %dir.display(), %error, "cannot be removed from the cache");
            }
        }
    }
    Ok(())
}

/// The sets of the cache but one.
fn candidates(cache: &Path, keep: &Path) -> io::Result<Vec<Candidate>> {
    let mut found = Vec::new();
    for model in folders(cache)? {
        for dir in folders(&model)?.into_iter().filter(|dir| dir != keep) {
            let Ok(in_use) = fs::metadata(dir.join(IN_USE)) else { continue };
            let mut bytes = 0;
            for entry in fs::read_dir(&dir)? {
                // Whoever pulls it gives a file its name meanwhile.
                bytes += entry?.metadata().map_or(0, |file| file.len());
            }
            found.push(Candidate { used: in_use.modified()?, dir, bytes });
        }
    }
    Ok(found)
}

fn folders(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            folders.push(entry.path());
        }
    }
    Ok(folders)
}

/// Removes a set that nobody uses; says whether it did.
fn remove(dir: &Path) -> io::Result<bool> {
    let in_use = File::options().write(true).open(dir.join(IN_USE))?;
    match FileExt::try_lock(&in_use) {
        Ok(()) => fs::remove_dir_all(dir).map(|()| true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Makes a set of so many bytes that was used at a second of its own; nobody uses it.
    fn set(cache: &Path, name: &str, bytes: usize, used: u64) -> PathBuf {
        let dir = cache.join(name);
        let file = hold(cache, &dir).expect("it is made");
        fs::write(dir.join("weights"), vec![0; bytes]).expect("it is written");
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(used)).expect("a time");
        dir
    }

    #[test]
    fn what_was_used_longest_ago_goes_unless_somebody_uses_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = folder.path();
        let (new, old) = (set(cache, "m/new", 10, 30), set(cache, "n/old", 10, 10));
        let (middle, own) = (set(cache, "m/middle", 10, 20), set(cache, "m/own", 99, 1));
        // A folder that nobody of ours has made.
        let foreign = cache.join("m").join("foreign");
        fs::create_dir(&foreign).expect("it is made");
        fs::write(foreign.join("weights"), [0; 99]).expect("it is written");
        let left = |limit| {
            make_room(cache, &own, limit).expect("it can be read");
            [&new, &middle, &old, &own, &foreign].map(|dir| dir.is_dir())
        };
        assert_eq!(left(30), [true, true, true, true, true]);
        assert_eq!(left(29), [true, true, false, true, true]);
        let used = hold(cache, &middle).expect("it is there");
        assert_eq!(left(0), [false, true, false, true, true], "the one in use stays");
        drop(used);
        assert_eq!(left(0), [false, false, false, true, true]);
        // Using a set makes it the last one to go.
        let (a, b) = (set(cache, "m/a", 10, 1), set(cache, "m/b", 10, 2));
        drop(hold(cache, &a).expect("it is there"));
        make_room(cache, &own, 10).expect("it can be read");
        assert!(a.is_dir() && !b.is_dir());
    }
}
