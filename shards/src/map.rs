//! The memory map of a file, and the only unsafe code of the crate.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// A file mapped for reading.
#[derive(Debug)]
pub(crate) struct Map {
    map: Mmap,
}

impl Map {
    /// Maps the whole file.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        #[expect(unsafe_code, reason = "a model is larger than memory: it has to be mapped")]
        // SAFETY: the bytes are only read, as plain `u8`, and every length in them is checked
        // against the mapped length. Undefined behaviour would need another process to change
        // the model file while it is read; the documentation of `shard` rules that out.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self { map })
    }

    /// The bytes of the file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Drops the pages of this range from memory; a later access reads the file again.
    #[cfg(unix)]
    pub(crate) fn release(&self, start: usize, len: usize) {
        #[expect(unsafe_code, reason = "the only way to keep resident memory flat")]
        // SAFETY: the map is shared, file-backed and never written, so pages that are dropped
        // (those at the edges are shared with neighbours) come back with the same bytes.
        let advised = unsafe {
            self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len)
        };
        if let Err(error) = advised {
            tracing::debug!(%error, "cannot release mapped pages");
        }
    }

    /// Does nothing: the system drops clean pages by itself when memory gets scarce.
    #[cfg(not(unix))]
    pub(crate) fn release(&self, _start: usize, _len: usize) {}
}
