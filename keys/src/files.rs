//! Writing files: secrets are for their owner only, and a file is there in full or not at all.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use crate::error::KeyError;

/// Writes a new file that only its owner can read.
///
/// # Errors
/// [`KeyError::File`], also if it exists.
pub(crate) fn write_secret(path: &Path, text: &str) -> Result<(), KeyError> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path).and_then(|mut file| file.write_all(text.as_bytes())).map_err(failed(path))
}

/// Writes a new file without secrets.
///
/// # Errors
/// [`KeyError::File`].
pub(crate) fn write(path: &Path, text: &str) -> Result<(), KeyError> {
    fs::write(path, text).map_err(failed(path))
}

/// Puts a file in the place of an older one; readers see one of the two.
///
/// # Errors
/// [`KeyError::File`].
pub(crate) fn replace(path: &Path, text: &str) -> Result<(), KeyError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(failed(path))?;
    file.write_all(text.as_bytes()).map_err(failed(path))?;
    file.persist(path).map_err(|error| failed(path)(error.error))?;
    Ok(())
}

/// Makes a folder that only its owner can enter.
///
/// # Errors
/// [`KeyError::File`], also if it exists.
pub(crate) fn create_folder(path: &Path) -> Result<(), KeyError> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path).map_err(failed(path))
}

/// The error for what the system says about a file.
pub(crate) fn failed(path: &Path) -> impl Fn(std::io::Error) -> KeyError + '_ {
    |source| KeyError::File { path: path.to_owned(), source }
}
