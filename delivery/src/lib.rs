//! Brings shard sets to the processes that need them, through the broker.
//!
//! [`push()`] stores a shard set in the bucket of its model, [`pull()`] fetches what a process needs of
//! one into a cache folder, file by file. Both go on where they were after whatever ended them, and
//! neither trusts what it did not hash: a file appears, on the broker as in the cache, when all of it
//! is there and has the SHA-256 of the manifest.
//!
//! # Tasks
//! Files are read, written and hashed on blocking threads, one at a time, each fed by or feeding a
//! short channel; they end with it.

mod cache;
mod disk;
mod error;
mod part_file;
mod pull;
mod push;
mod sets;

use std::time::{Duration, Instant};

use stagebus_bus::BusOptions;

pub use cache::{Cache, CachedSet};
pub use error::DeliveryError;
pub use pull::{Pulled, Wanted, open, pull};
pub use push::{Pushed, push};
pub use sets::{StoredSet, choose, find_model, list, remove};

/// How often a process that has no terminal says how far it is.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Interval of pings on a connection for shards: a ping may wait behind several megabytes on a slow
/// link, and three that are not answered end the connection.
const PING_INTERVAL: Duration = Duration::from_secs(30);

/// The options of a connection that carries shards, which should carry nothing urgent.
#[must_use]
pub fn connection(options: BusOptions) -> BusOptions {
    BusOptions { ping_interval: PING_INTERVAL, ..options }
}

/// Says in the log how far a push or pull is, every few seconds.
pub fn log_progress() -> impl FnMut(&Progress) {
    let mut said = Instant::now();
    move |progress| {
        if said.elapsed() >= LOG_INTERVAL {
            said = Instant::now();
            let Progress { file, bytes_done, bytes_total } = progress;
            tracing::info!(%file, bytes_done, bytes_total, "under way");
        }
    }
}

/// How far a push or pull is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// The file under way.
    pub file: String,
    /// Bytes that are where they should be, of all files.
    pub bytes_done: u64,
    /// Bytes of all files.
    pub bytes_total: u64,
}
