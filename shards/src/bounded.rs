//! Reading files whole, up to a limit: a file that is not what its name says must not take all
//! memory before anybody has looked into it.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// Largest manifest, in bytes: far above one of the most stages that can be served.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 64 << 20;

/// Largest file of a tokenizer, in bytes: several times those of the largest vocabularies.
pub(crate) const MAX_TEXT_BYTES: u64 = 256 << 20;

/// Reads a file of at most `limit` bytes.
///
/// # Errors
/// What the system says, and [`io::ErrorKind::FileTooLarge`].
pub(crate) fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    // Nothing is read in vain, and a buffer of the right size need not grow. What has no size (a
    // pipe) or grows meanwhile is held to the limit too.
    let claimed = file.metadata()?.len().min(limit);
    let mut bytes = Vec::with_capacity(usize::try_from(claimed).unwrap_or(0));
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        let message = format!("the file has more than {limit} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_at_the_limit_is_read_and_one_above_it_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "12345").unwrap();
        assert_eq!(read(file.path(), 5).unwrap(), b"12345");
        assert_eq!(read(file.path(), 4).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        let missing = read(Path::new("no/such/file"), 4).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
