//! Writes the weight file of one stage: aligned constants, hashed on the way.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::manifest::hex;

/// Constants start at multiples of this, so that a mapped file can be used in place by any
/// vector unit.
const ALIGN: u64 = 64;

/// Bytes gathered before they are hashed and written.
const BUFFER_BYTES: usize = 1 << 20;

/// Constants up to this size are stored once per content (axes, shapes, scalars).
const SHARED_BYTES: usize = 64;

/// Where a constant lies in the weight file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// A weight file being written.
#[derive(Debug)]
pub(crate) struct BinWriter {
    out: BufWriter<HashingFile>,
    written: u64,
    shared: HashMap<Vec<u8>, Span>,
}

/// A file whose content is hashed as it is written.
#[derive(Debug)]
struct HashingFile {
    file: File,
    hash: Sha256,
}

impl io::Write for HashingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.hash.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl BinWriter {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let file = HashingFile { file: File::create_new(path)?, hash: Sha256::new() };
        let out = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(Self { out, written: 0, shared: HashMap::new() })
    }

    /// Starts a constant; returns its offset. Everything until the next start belongs to it.
    pub(crate) fn start(&mut self) -> io::Result<u64> {
        let padding = self.written.next_multiple_of(ALIGN) - self.written;
        self.write(&[0; ALIGN as usize][..padding as usize])?;
        Ok(self.written)
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// The constant that began at `offset` and ends here.
    pub(crate) fn finish(&self, offset: u64) -> Span {
        Span { offset, bytes: self.written - offset }
    }

    /// Stores a whole constant; small ones are stored once per content.
    pub(crate) fn store(&mut self, bytes: &[u8]) -> io::Result<Span> {
        if let Some(span) = self.shared.get(bytes) {
            return Ok(*span);
        }
        let offset = self.start()?;
        self.write(bytes)?;
        let span = self.finish(offset);
        if bytes.len() <= SHARED_BYTES {
            self.shared.insert(bytes.to_vec(), span);
        }
        Ok(span)
    }

    /// Makes the file durable; returns its size and SHA-256.
    pub(crate) fn close(mut self) -> io::Result<(u64, String)> {
        self.out.flush()?;
        let HashingFile { file, hash } =
            self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok((self.written, hex(&hash.finalize())))
    }
}
