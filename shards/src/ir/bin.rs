//! Writes the weight file of one stage: aligned constants, hashed on the way.
//!
//! ```text
//! whoever encodes ── full buffers ──▶ thread "weights" ── now and then ──▶ thread "disk"
//!                 ◀── empty ones ──── hashes and writes                    waits for the disk
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};

use sha2::{Digest as _, Sha256};

use crate::manifest::hex;

/// Constants start at multiples of this, so that a mapped file can be used in place by any
/// vector unit.
const ALIGN: u64 = 64;

/// Bytes gathered before they are hashed and written.
const BUFFER_BYTES: usize = 1 << 20;

/// Full buffers that may wait: the codes of a matrix are encoded quicker than they are written, and
/// before the next ones its scales are looked at.
const WAITING: usize = 24;

/// Constants up to this size are stored once per content (axes, shapes, scalars).
const SHARED_BYTES: usize = 64;

/// Bytes after which the disk is told to take what was written, so that little is left to wait for at
/// the end.
const SYNC_BYTES: usize = 256 << 20;

/// Where a constant lies in the weight file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// A weight file being written.
#[derive(Debug)]
pub(crate) struct BinWriter {
    buffer: Vec<u8>,
    sink: Sink,
    written: u64,
    shared: HashMap<Vec<u8>, Span>,
}

/// The thread that hashes and writes; waited for when dropped.
#[derive(Debug)]
struct Sink {
    /// Where full buffers go; nothing once there are no more.
    full: Option<SyncSender<Vec<u8>>>,
    empty: Receiver<Vec<u8>>,
    thread: Option<JoinHandle<io::Result<(File, Sha256)>>>,
}

impl Sink {
    fn start(file: File) -> io::Result<Self> {
        let (full, waiting) = sync_channel(WAITING);
        let (give_back, empty) = channel();
        let work = move || hash_and_write(file, &waiting, &give_back);
        let thread = thread::Builder::new().name("weights".to_owned()).spawn(work)?;
        Ok(Self { full: Some(full), empty, thread: Some(thread) })
    }

    /// Hands a full buffer over; returns an empty one.
    fn give(&mut self, buffer: Vec<u8>) -> io::Result<Vec<u8>> {
        if self.full.as_ref().is_none_or(|full| full.send(buffer).is_err()) {
            // The thread has ended before its time.
            return self.end().and(Err(io::ErrorKind::BrokenPipe.into()));
        }
        Ok(self.empty.try_recv().unwrap_or_else(|_none| Vec::with_capacity(BUFFER_BYTES)))
    }

    /// Waits until everything is written.
    fn end(&mut self) -> io::Result<(File, Sha256)> {
        self.full = None;
        let thread = self.thread.take().ok_or(io::ErrorKind::BrokenPipe)?;
        thread.join().unwrap_or_else(|_panic| Err(io::Error::other("the writing thread panicked")))
    }
}

impl Drop for Sink {
    /// Whoever drops it without [`Sink::end`] has an error of its own to tell.
    fn drop(&mut self) {
        drop(self.end());
    }
}

fn hash_and_write(
    mut file: File,
    waiting: &Receiver<Vec<u8>>,
    give_back: &Sender<Vec<u8>>,
) -> io::Result<(File, Sha256)> {
    let mut hash = Sha256::new();
    let on_disk = file.try_clone()?;
    let (tell, told) = sync_channel::<()>(0);
    thread::scope(|scope| {
        let wait_for_disk = move || told.iter().try_for_each(|()| on_disk.sync_data());
        let disk =
            thread::Builder::new().name("disk".to_owned()).spawn_scoped(scope, wait_for_disk)?;
        let mut unsynced = 0;
        for mut buffer in waiting {
            file.write_all(&buffer)?;
            hash.update(&buffer);
            unsynced += buffer.len();
            buffer.clear();
            // Nobody needs it any more once the last one is on its way.
            drop(give_back.send(buffer));
            // The disk may still be busy with what it was told before.
            if unsynced >= SYNC_BYTES && tell.try_send(()).is_ok() {
                unsynced = 0;
            }
        }
        drop(tell);
        // An error of the disk is told once, so it is not left to the last sync.
        disk.join()
            .unwrap_or_else(|_panic| Err(io::Error::other("the waiting thread panicked")))?;
        Ok((file, hash))
    })
}

impl BinWriter {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let sink = Sink::start(File::create_new(path)?)?;
        let buffer = Vec::with_capacity(BUFFER_BYTES);
        Ok(Self { buffer, sink, written: 0, shared: HashMap::new() })
    }

    /// Starts a constant; returns its offset. Everything until the next start belongs to it.
    pub(crate) fn start(&mut self) -> io::Result<u64> {
        let padding = self.written.next_multiple_of(ALIGN) - self.written;
        self.write(&[0; ALIGN as usize][..padding as usize])?;
        Ok(self.written)
    }

    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BUFFER_BYTES - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
            if self.buffer.len() == BUFFER_BYTES {
                self.pass_on()?;
            }
        }
        Ok(())
    }

    fn pass_on(&mut self) -> io::Result<()> {
        self.buffer = self.sink.give(std::mem::take(&mut self.buffer))?;
        Ok(())
    }

    /// The constant that began at `offset` and ends here.
    pub(crate) fn finish(&self, offset: u64) -> Span {
        Span { offset, bytes: self.written - offset }
    }

    /// Writes a whole constant.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> io::Result<Span> {
        let offset = self.start()?;
        self.write(bytes)?;
        Ok(self.finish(offset))
    }

    /// Stores a whole constant; small ones are stored once per content.
    pub(crate) fn store(&mut self, bytes: &[u8]) -> io::Result<Span> {
        if let Some(span) = self.shared.get(bytes) {
            return Ok(*span);
        }
        let span = self.put(bytes)?;
        if bytes.len() <= SHARED_BYTES {
            self.shared.insert(bytes.to_vec(), span);
        }
        Ok(span)
    }

    /// Makes the file durable; returns its size and SHA-256.
    pub(crate) fn close(mut self) -> io::Result<(u64, String)> {
        self.pass_on()?;
        let (file, hash) = self.sink.end()?;
        file.sync_all()?;
        Ok((self.written, hex(&hash.finalize())))
    }
}
