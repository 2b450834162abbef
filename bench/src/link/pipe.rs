//! One direction of one connection: bytes that wait for their release.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::lane::{Lane, MAX_CHUNK_BYTES};
use super::lock;

/// Most bytes of a connection that are on their way in one direction. Without a rate that bounds
/// what a long delay lets through: 80 MB/s at 100 ms.
const MAX_BYTES_ON_THE_WAY: usize = 8 << 20;

/// Bytes on their way.
#[derive(Debug, Default)]
pub(super) struct Pipe {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    pieces: VecDeque<Piece>,
    n_bytes: usize,
    /// When the last piece may leave: no later one leaves before it.
    last_release: Option<Instant>,
    /// Nothing passes for now.
    held: bool,
    /// Nothing is taken in or passes any more.
    cut: bool,
}

#[derive(Debug)]
struct Piece {
    release: Instant,
    /// Empty at the end of the stream.
    bytes: Vec<u8>,
}

impl Pipe {
    /// Holds everything, or lets it go on.
    pub(super) fn hold(&self, held: bool) {
        lock(&self.queue).held = held;
        self.changed.notify_all();
    }

    /// Ends both threads; what is on its way is lost.
    pub(super) fn cut(&self) {
        let mut queue = lock(&self.queue);
        queue.cut = true;
        queue.pieces.clear();
        self.changed.notify_all();
    }

    /// Reads until the stream ends, and puts what it reads on its way.
    pub(super) fn read(&self, mut from: impl Read, lane: &Mutex<Lane>) {
        let mut buffer = vec![0; MAX_CHUNK_BYTES];
        while self.wait_for_room(lane) {
            let chunk = lock(lane).chunk_bytes();
            let n_bytes = match from.read(&mut buffer[..chunk]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // A broken connection ends here as one that was closed.
                Err(_) => 0,
                Ok(n_bytes) => n_bytes,
            };
            let release = lock(lane).send(Instant::now(), n_bytes);
            self.push(release, buffer[..n_bytes].to_vec());
            if n_bytes == 0 {
                return;
            }
        }
    }

    /// Writes every piece when its time has come; returns whether the stream ended as its sender
    /// ended it.
    pub(super) fn write(&self, mut to: impl Write) -> bool {
        while let Some(piece) = self.next() {
            if piece.is_empty() {
                return true;
            }
            if to.write_all(&piece).is_err() {
                return false;
            }
        }
        false
    }

    fn push(&self, release: Instant, bytes: Vec<u8>) {
        let mut queue = lock(&self.queue);
        if queue.cut {
            return;
        }
        let release = queue.last_release.map_or(release, |last| last.max(release));
        queue.last_release = Some(release);
        queue.n_bytes += bytes.len();
        queue.pieces.push_back(Piece { release, bytes });
        self.changed.notify_all();
    }

    /// Waits for the next piece and its time; `None` after a cut.
    fn next(&self) -> Option<Vec<u8>> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.cut {
                return None;
            }
            let wait = match queue.pieces.front() {
                Some(piece) if !queue.held => {
                    Some(piece.release.saturating_duration_since(Instant::now()))
                }
                _ => None,
            };
            if wait == Some(Duration::ZERO) {
                let piece = queue.pieces.pop_front()?;
                queue.n_bytes -= piece.bytes.len();
                self.changed.notify_all();
                return Some(piece.bytes);
            }
            queue = self.wait(queue, wait);
        }
    }

    /// Waits until more may be taken in; returns false after a cut.
    fn wait_for_room(&self, lane: &Mutex<Lane>) -> bool {
        loop {
            let full_for = lock(lane).full_for(Instant::now());
            let queue = lock(&self.queue);
            if queue.cut {
                return false;
            }
            if full_for.is_none() && queue.n_bytes < MAX_BYTES_ON_THE_WAY {
                return true;
            }
            drop(self.wait(queue, full_for));
        }
    }

    fn wait<'a>(
        &self,
        queue: std::sync::MutexGuard<'a, Queue>,
        longest: Option<Duration>,
    ) -> std::sync::MutexGuard<'a, Queue> {
        match longest {
            None => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
            Some(longest) => {
                let woken = self.changed.wait_timeout(queue, longest);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}
