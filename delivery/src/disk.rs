//! Work on files where it keeps nobody waiting, and files that one process holds at a time.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use tokio::task::spawn_blocking;

use crate::error::DeliveryError;

/// Runs work on files on a thread of its own.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DeliveryError> + Send + 'static,
) -> Result<T, DeliveryError> {
    spawn_blocking(work).await.map_err(|error| DeliveryError::Thread(error.into()))?
}

/// Waits until nobody else holds a file, which is made if need be.
pub(crate) fn lock(path: &Path) -> Result<File, DeliveryError> {
    let locked = || {
        let file = openable().open(path)?;
        fs4::FileExt::lock(&file)?;
        Ok::<_, io::Error>(file)
    };
    locked().map_err(DeliveryError::file(path))
}

/// How a file to lock is opened: what is in it stays.
pub(crate) fn openable() -> fs::OpenOptions {
    let mut options = File::options();
    options.create(true).truncate(false).write(true);
    options
}

/// Writes a file that appears complete or not at all.
pub(crate) fn write_at_once(dir: &Path, path: &Path, text: &[u8]) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let mut file = tempfile::Builder::new().prefix(".manifest-").tempfile_in(dir)?;
    file.write_all(text)?;
    file.as_file().sync_all()?;
    make_readable(file.path())?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Temporary files are private; what is pulled is as readable as any other file.
#[cfg(unix)]
fn make_readable(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn make_readable(_path: &Path) -> io::Result<()> {
    Ok(())
}
