//! One direction of a link: when bytes reach its far end.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::conditions::{Conditions, MAX_LOSS};
use crate::faults::Dice;

/// Bytes of a segment: an Ethernet frame less the headers of IP and TCP.
const SEGMENT_BYTES: usize = 1448;

/// Most bytes that are taken in at once.
pub(super) const MAX_CHUNK_BYTES: usize = 16 * 1024;

/// With a rate, a piece takes no longer than this to be sent, so that connections mix finely.
const CHUNK_TIME: Duration = Duration::from_millis(2);

/// What passed one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Passed {
    /// Bytes.
    pub n_bytes: u64,
    /// Segments that were lost.
    pub n_lost: u64,
}

/// The state of one direction.
#[derive(Debug)]
pub(super) struct Lane {
    conditions: Conditions,
    /// When the last byte taken in has left.
    free_at: Option<Instant>,
    dice: Dice,
    passed: Passed,
}

impl Lane {
    /// A lane that nothing has passed; `seed` decides what is lost.
    pub(super) fn new(conditions: Conditions, seed: u64) -> Self {
        Self { conditions, free_at: None, dice: Dice::new(seed), passed: Passed::default() }
    }

    /// Changes what happens to what comes from now on.
    pub(super) fn set(&mut self, conditions: Conditions) {
        self.conditions = conditions;
        if conditions.bytes_per_s.is_none() {
            self.free_at = None;
        }
    }

    /// What passed.
    pub(super) fn passed(&self) -> Passed {
        self.passed
    }

    /// Most bytes to take in at once.
    pub(super) fn chunk_bytes(&self) -> usize {
        let Some(rate) = self.conditions.bytes_per_s else { return MAX_CHUNK_BYTES };
        let bytes = rate as f64 * CHUNK_TIME.as_secs_f64();
        (bytes as usize).clamp(SEGMENT_BYTES, MAX_CHUNK_BYTES)
    }

    /// How long the queue must shrink before more may be taken in.
    pub(super) fn full_for(&self, now: Instant) -> Option<Duration> {
        let waits = self.free_at?.saturating_duration_since(now);
        waits.checked_sub(self.conditions.queue).filter(|wait| !wait.is_zero())
    }

    /// Takes in `n_bytes` at `now`; returns when the last of them reaches the far end.
    pub(super) fn send(&mut self, now: Instant, n_bytes: usize) -> Instant {
        self.passed.n_bytes += n_bytes as u64;
        let mut left_at = now;
        if let Some(rate) = self.conditions.bytes_per_s {
            let starts = self.free_at.map_or(now, |free| free.max(now));
            left_at = starts + Duration::from_secs_f64(n_bytes as f64 / rate.max(1) as f64);
            self.free_at = Some(left_at);
        }
        let jitter = self.conditions.jitter.mul_f64(share(&mut self.dice));
        left_at + self.conditions.delay + jitter + self.stall(n_bytes)
    }

    /// How much later a piece of this size comes because segments of it were lost. They are sent
    /// again side by side: the unluckiest one counts.
    fn stall(&mut self, n_bytes: usize) -> Duration {
        let loss = self.conditions.loss.clamp(0.0, MAX_LOSS);
        if loss == 0.0 {
            return Duration::ZERO;
        }
        let mut longest = Duration::ZERO;
        for _ in 0..n_bytes.div_ceil(SEGMENT_BYTES) {
            let (mut stall, mut wait) = (Duration::ZERO, self.conditions.retransmit);
            while share(&mut self.dice) < loss {
                self.passed.n_lost += 1;
                stall = stall.saturating_add(wait);
                wait = wait.saturating_mul(2);
            }
            longest = longest.max(stall);
        }
        longest
    }
}

/// A random number from 0 to below 1.
fn share(dice: &mut Dice) -> f64 {
    const STEPS: u32 = 1 << 30;
    dice.below(STEPS as usize) as f64 / f64::from(STEPS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_delay_holds_nothing_up() {
        let mut lane = Lane::new(Conditions::delay(50 * MS), 1);
        let now = Instant::now();
        assert_eq!(lane.send(now, 1_000_000), now + 50 * MS);
        assert_eq!(lane.send(now + MS, 10), now + 51 * MS);
        assert_eq!(lane.full_for(now), None);
        assert_eq!(lane.passed(), Passed { n_bytes: 1_000_010, n_lost: 0 });
    }

    #[test]
    fn bytes_leave_one_after_the_other() {
        let mut lane = Lane::new(Conditions::queued(10 * MS, 1_000_000), 1);
        let now = Instant::now();
        assert_eq!(lane.send(now, 100_000), now + 110 * MS);
        assert_eq!(lane.send(now, 50_000), now + 160 * MS);
        assert_eq!(lane.full_for(now), Some(50 * MS), "150 ms wait, 100 may");
        assert_eq!(lane.full_for(now + 60 * MS), None);
        assert_eq!(lane.send(now + 300 * MS, 1_000), now + 311 * MS, "the link was idle");
        lane.set(Conditions::CLEAR);
        assert_eq!(lane.send(now + 300 * MS, 1_000_000), now + 300 * MS);
    }

    #[test]
    fn jitter_is_between_nothing_and_all_of_it() {
        let mut lane = Lane::new(Conditions { jitter: 20 * MS, ..Conditions::CLEAR }, 1);
        let now = Instant::now();
        let extra: Vec<Duration> = (0..1000).map(|_| lane.send(now, 1) - now).collect();
        assert!(extra.iter().all(|extra| *extra <= 20 * MS));
        assert!(extra.iter().any(|extra| *extra < 5 * MS));
        assert!(extra.iter().any(|extra| *extra > 15 * MS));
    }

    #[test]
    fn lost_segments_come_a_retransmission_later() {
        let conditions = Conditions { loss: 0.1, retransmit: 200 * MS, ..Conditions::CLEAR };
        let mut lane = Lane::new(conditions, 7);
        let now = Instant::now();
        let late: Vec<Duration> = (0..10_000).map(|_| lane.send(now, 100) - now).collect();
        let n_late = late.iter().filter(|late| !late.is_zero()).count();
        assert!((800..1200).contains(&n_late), "{n_late} of 10,000 at 10 %");
        // 200, 200 + 400, 200 + 400 + 800, ...
        assert!(late.contains(&(200 * MS)) && late.contains(&(600 * MS)));
        assert!(lane.passed().n_lost >= n_late as u64);
    }

    #[test]
    fn narrow_links_take_small_pieces() {
        let chunk = |rate| Lane::new(Conditions::queued(MS, rate), 1).chunk_bytes();
        assert_eq!(chunk(2_500_000), 5_000);
        assert_eq!(chunk(10_000), SEGMENT_BYTES);
        assert_eq!(Lane::new(Conditions::CLEAR, 1).chunk_bytes(), MAX_CHUNK_BYTES);
    }
}
