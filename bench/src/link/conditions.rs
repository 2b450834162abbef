//! What a link does.

use std::time::Duration;

use serde::Serialize;

/// Highest share of lost segments: with more, a segment may be lost again and again.
pub const MAX_LOSS: f64 = 0.5;

/// What one direction of a link does.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Conditions {
    /// Time that every byte is on its way.
    pub delay: Duration,
    /// Up to so much more, evenly spread; order is kept.
    pub jitter: Duration,
    /// Bytes per second, shared by all connections of the link; unlimited when absent.
    pub bytes_per_s: Option<u64>,
    /// How long bytes may wait for the link to be free before no more are taken in; matters with a
    /// rate only.
    pub queue: Duration,
    /// Share of the segments (1448 bytes) that are lost, up to [`MAX_LOSS`].
    pub loss: f64,
    /// How much later a lost segment comes; twice that if it is lost again, and so on.
    pub retransmit: Duration,
}

/// Both directions of a link, as seen from its clients.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LinkPlan {
    /// From clients to the server.
    pub up: Conditions,
    /// From the server to clients.
    pub down: Conditions,
}

impl Conditions {
    /// Nothing at all.
    pub const CLEAR: Self = Self {
        delay: Duration::ZERO,
        jitter: Duration::ZERO,
        bytes_per_s: None,
        // A router's usual one.
        queue: Duration::from_millis(100),
        loss: 0.0,
        // The least that Linux waits before it sends a segment again without being told.
        retransmit: Duration::from_millis(200),
    };

    /// A pure delay.
    #[must_use]
    pub const fn delay(delay: Duration) -> Self {
        Self { delay, ..Self::CLEAR }
    }

    /// A delay, and a queue whose bytes leave one after the other.
    #[must_use]
    pub const fn queued(delay: Duration, bytes_per_s: u64) -> Self {
        Self { delay, bytes_per_s: Some(bytes_per_s), ..Self::CLEAR }
    }
}

impl LinkPlan {
    /// The same in both directions.
    #[must_use]
    pub const fn both(conditions: Conditions) -> Self {
        Self { up: conditions, down: conditions }
    }
}

/// Bytes per second of a rate in Mbit/s.
#[must_use]
pub fn mbit_s(mbit_s: f64) -> u64 {
    (mbit_s * 1e6 / 8.0) as u64
}
