//! A folder that appears complete or not at all.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::manifest::MANIFEST_FILE;
use crate::shard::ShardError;

/// A folder under construction, beside the place where it will be. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct OutputDir {
    temporary: TempDir,
    target: PathBuf,
    force: bool,
}

impl OutputDir {
    /// Checks that `target` may be written and makes a temporary folder beside it, in a parent that is
    /// made unless it is there.
    ///
    /// # Errors
    /// [`ShardError::OutExists`], [`ShardError::OutNotShardSet`] or [`ShardError::Io`].
    pub(crate) fn create(target: &Path, force: bool) -> Result<Self, ShardError> {
        check_target(target, force)?;
        let target = std::path::absolute(target).map_err(|source| io_error(target, source))?;
        let parent = target.parent().unwrap_or(&target).to_owned();
        fs::create_dir_all(&parent).map_err(|source| io_error(&parent, source))?;
        let temporary = tempfile::Builder::new()
            .prefix(".stagebus-shard-")
            .tempdir_in(&parent)
            .map_err(|source| io_error(&parent, source))?;
        Ok(Self { temporary, target, force })
    }

    /// The temporary folder.
    pub(crate) fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// Makes the folder's entries durable and moves it to its place.
    ///
    /// # Errors
    /// As [`OutputDir::create`]: the target may have appeared in the meantime.
    pub(crate) fn publish(self) -> Result<(), ShardError> {
        let Self { temporary, target, force } = self;
        sync_dir(temporary.path()).map_err(|source| io_error(temporary.path(), source))?;
        make_readable(temporary.path()).map_err(|source| io_error(temporary.path(), source))?;
        let mut n_rivals = 0;
        let replaced = loop {
            check_target(&target, force)?;
            match put(temporary.path(), &target, force) {
                Ok(replaced) => break replaced,
                // Another process put its set there, or moved it away, since the check.
                Err(error) if n_rivals < MAX_RIVALS && lost_a_race(&error) => n_rivals += 1,
                Err(source) => return Err(io_error(&target, source)),
            }
        };
        if let Some(parent) = target.parent() {
            sync_dir(parent).map_err(|source| io_error(parent, source))?;
        }
        // The folder has moved: there is nothing left to remove under its temporary name.
        drop(temporary.keep());
        if let Some((aside, _)) = replaced {
            aside.close().map_err(|source| io_error(&target, source))?;
        }
        Ok(())
    }
}

/// Other processes that may be quicker before one gives up.
const MAX_RIVALS: usize = 16;

/// A set that was there before, under its new name, in a folder that goes away when dropped.
type Replaced = (TempDir, PathBuf);

/// Moves a folder to its place. A set that is there stays whole until the new one is in place.
fn put(folder: &Path, target: &Path, force: bool) -> io::Result<Option<Replaced>> {
    let mut replaced = None;
    if !force {
        // An empty folder makes room; anything else stays and is judged by the next check.
        drop(fs::remove_dir(target));
    } else if target.try_exists()? {
        let parent = target.parent().unwrap_or(target);
        let aside = tempfile::Builder::new().prefix(".stagebus-replaced-").tempdir_in(parent)?;
        let old = aside.path().join("set");
        fs::rename(target, &old)?;
        replaced = Some((aside, old));
    }
    if let Err(error) = fs::rename(folder, target) {
        if let (Some((_, old)), false) = (&replaced, target.try_exists()?) {
            fs::rename(old, target)?;
        }
        return Err(error);
    }
    Ok(replaced)
}

fn lost_a_race(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotFound
    )
}

/// Nothing may be there, unless it is a shard set (or an empty folder) and may be replaced.
fn check_target(target: &Path, force: bool) -> Result<(), ShardError> {
    let mut entries = match fs::read_dir(target) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(io_error(target, source)),
    };
    let manifest = target.join(MANIFEST_FILE);
    if manifest.try_exists().map_err(|source| io_error(&manifest, source))? {
        return if force { Ok(()) } else { Err(ShardError::OutExists { path: target.to_owned() }) };
    }
    if entries.next().is_none() {
        return Ok(());
    }
    Err(ShardError::OutNotShardSet { path: target.to_owned() })
}

/// Names the path that an input or output error is about.
pub(crate) fn io_error(path: &Path, source: io::Error) -> ShardError {
    ShardError::Io { path: path.to_owned(), source }
}

/// Makes a folder's entries durable.
#[cfg(unix)]
fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Folders cannot be opened as files here; the files themselves are durable already.
#[cfg(not(unix))]
fn sync_dir(_path: &Path) -> io::Result<()> {
    Ok(())
}

/// Temporary folders are private; a shard set is as readable as any other folder.
#[cfg(unix)]
fn make_readable(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn make_readable(_path: &Path) -> io::Result<()> {
    Ok(())
}
