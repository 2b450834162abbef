//! The way to one receiver: how much may be on it. Pure: no I/O, no clock of its own.
//!
//! A link is full when as many bytes are on their way as it carries in the time that a lone part
//! takes to be acknowledged, and what is more waits in front of it. So the window is what keeps that
//! wait at [`TARGET`]: a window that was acknowledged in `time` instead of the shortest time `base`
//! becomes `window * (base + TARGET) / time`. Of a few acknowledgements the fastest counts, since a
//! busy processor delays some. Parts leave at even distances, so that they do not wait for each other.
//!
//! Until a wait is first seen the window grows by half each time, so a way is filled within some
//! round trips, and the wait in front of it is then half a round trip once.
//!
//! **Source**: the rule is that of FAST TCP (Wei, Jin, Low, Hegde 2006, *FAST TCP: Motivation,
//! Architecture, Algorithms, Performance*), the aim of short queues that of LEDBAT (RFC 6817).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use stagebus_schemas::messages::bulk::MAX_PARTS;

/// Bytes of a part: 6.5 ms of a link of 20 Mbit/s.
const PART_BYTES: usize = 16 << 10;

/// Time to an acknowledgement below which a way is not controlled: it is on one machine, or in one
/// network that carries a part in a fraction of a millisecond.
const FAST: Duration = Duration::from_millis(2);

/// The wait that bulk may cause in front of a link; steps of some ten milliseconds stand in it too.
const TARGET: Duration = Duration::from_millis(8);

/// Parts in flight at first (nothing is known of the way), later at least, and at most.
const WINDOW: (f64, f64, f64) = (4.0, 2.0, 1024.0);

/// How much a window grows at a time.
const GROWTH: f64 = 1.5;

/// Of how many acknowledgements the fastest counts: a share of the window, and at least.
const SAMPLES: (f64, f64) = (0.25, 3.0);

/// For how long the shortest time counts, at least: ways change.
const BASE_AGE: Duration = Duration::from_secs(60);

/// Time after which a part without an acknowledgement is lost, in smoothed round trips and at least.
const LOST: (u32, Duration) = (8, Duration::from_secs(10));

/// A message on its way.
#[derive(Debug, Clone)]
pub(super) struct Transfer {
    /// Its number.
    pub(super) id: u64,
    /// Reply subject of the whole message.
    pub(super) reply: Option<String>,
    /// The message.
    pub(super) payload: Bytes,
}

/// A part that may leave.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NextPart {
    pub(super) transfer: u64,
    pub(super) index: u32,
    pub(super) n_parts: u32,
    pub(super) reply: Option<String>,
    pub(super) data: Bytes,
}

/// The way to one receiver.
#[derive(Debug)]
pub(super) struct Lane {
    queue: VecDeque<Transfer>,
    /// Parts of the first message in `queue` that have left.
    n_begun: u32,
    in_flight: VecDeque<InFlight>,
    window: f64,
    is_starting: bool,
    /// How often the window has changed.
    round: u64,
    /// Acknowledgements that tell of the present window, and the shortest time among them.
    samples: Option<(f64, Duration)>,
    base: Shortest,
    round_trip: Option<Duration>,
    /// Before then no part leaves.
    next_at: Option<Instant>,
}

#[derive(Debug)]
struct InFlight {
    transfer: u64,
    index: u32,
    is_last: bool,
    /// Smaller ones are faster and tell nothing.
    is_full: bool,
    /// The number of the window that it filled; nothing if the window was not full.
    filled: Option<u64>,
    sent: Instant,
}

/// The shortest of the times of the last one to two [`BASE_AGE`].
#[derive(Debug, Default)]
struct Shortest {
    since: Option<Instant>,
    current: Option<Duration>,
    before: Option<Duration>,
}

impl Shortest {
    fn add(&mut self, time: Duration, now: Instant) {
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) >= BASE_AGE {
            self.before = self.current.take();
            self.since = Some(now);
        }
        self.current = Some(self.current.map_or(time, |current| current.min(time)));
    }

    fn get(&self) -> Option<Duration> {
        self.current.into_iter().chain(self.before).min()
    }
}

impl Lane {
    pub(super) fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            n_begun: 0,
            in_flight: VecDeque::new(),
            window: WINDOW.0,
            is_starting: true,
            round: 0,
            samples: None,
            base: Shortest::default(),
            round_trip: None,
            next_at: None,
        }
    }

    /// Adds a message.
    pub(super) fn push(&mut self, transfer: Transfer) {
        self.queue.push_back(transfer);
    }

    /// Whether nothing waits and nothing is on its way.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.in_flight.is_empty()
    }

    /// The next part, if one may leave now.
    pub(super) fn next(&mut self, now: Instant) -> Option<NextPart> {
        if !self.has_room() || self.next_at.is_some_and(|at| now < at) {
            return None;
        }
        let transfer = self.queue.front()?;
        let (index, len) = (self.n_begun, transfer.payload.len());
        // However large the message is, its parts can be counted.
        let part_bytes = PART_BYTES.max(len.div_ceil(MAX_PARTS as usize));
        let n_parts = u32::try_from(len.div_ceil(part_bytes).max(1)).unwrap_or(u32::MAX);
        let start = index as usize * part_bytes;
        let part = NextPart {
            transfer: transfer.id,
            index,
            n_parts,
            reply: transfer.reply.clone().filter(|_| index == 0),
            data: transfer.payload.slice(start.min(len)..(start + part_bytes).min(len)),
        };
        let is_last = index + 1 >= n_parts;
        let is_window_full = self.in_flight.len() as f64 + 2.0 > self.window;
        self.in_flight.push_back(InFlight {
            transfer: part.transfer,
            index,
            is_last,
            is_full: part.data.len() >= PART_BYTES,
            filled: is_window_full.then_some(self.round),
            sent: now,
        });
        self.next_at = self.interval().map(|interval| now + interval);
        if is_last {
            self.n_begun = 0;
            self.queue.pop_front();
        } else {
            self.n_begun += 1;
        }
        Some(part)
    }

    /// Takes an acknowledgement (those of the parts before it may have been lost), and returns the
    /// messages that have arrived.
    pub(super) fn acknowledged(&mut self, transfer: u64, index: u32, now: Instant) -> Vec<u64> {
        let is_it = |part: &InFlight| part.transfer == transfer && part.index == index;
        let Some(at) = self.in_flight.iter().position(is_it) else { return Vec::new() };
        let parts: Vec<InFlight> = self.in_flight.drain(..=at).collect();
        if let Some(part) = parts.last().filter(|part| part.is_full) {
            self.learn(now.saturating_duration_since(part.sent), part.filled, now);
        }
        parts.iter().filter(|part| part.is_last).map(|part| part.transfer).collect()
    }

    /// Gives everything up, and returns the messages that did not arrive.
    pub(super) fn give_up(&mut self) -> Vec<u64> {
        self.n_begun = 0;
        let on_way = self.in_flight.drain(..).map(|part| part.transfer);
        let mut lost: Vec<u64> = on_way.chain(self.queue.drain(..).map(|waits| waits.id)).collect();
        lost.dedup();
        lost
    }

    /// When the next part may leave, if only its distance from the one before keeps it.
    pub(super) fn next_part_at(&self) -> Option<Instant> {
        self.next_at.filter(|_| self.has_room() && !self.queue.is_empty())
    }

    /// When the oldest part in flight counts as lost.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let patience = self.round_trip.map_or(LOST.1, |time| (time * LOST.0).max(LOST.1));
        self.in_flight.front().map(|part| part.sent + patience)
    }

    fn has_room(&self) -> bool {
        (self.in_flight.len() as f64) < self.window.floor()
    }

    /// Time between two parts; none on ways that are not controlled, or not known.
    fn interval(&self) -> Option<Duration> {
        let base = self.base.get().filter(|base| *base >= FAST)?;
        let pace = if self.is_starting { GROWTH } else { 1.0 };
        Some(base.div_f64(self.window * pace))
    }

    /// Takes the time of a part that filled the window of this number.
    fn learn(&mut self, time: Duration, filled: Option<u64>, now: Instant) {
        self.base.add(time, now);
        self.round_trip = Some(self.round_trip.map_or(time, |old| (old * 7 + time) / 8));
        let base = self.base.get().unwrap_or(time);
        if base < FAST {
            self.window = WINDOW.2;
            return;
        }
        if filled != Some(self.round) {
            return;
        }
        let (n, shortest) = self.samples.map_or((1.0, time), |(n, t)| (n + 1.0, t.min(time)));
        self.samples = Some((n, shortest));
        if n < (self.window * SAMPLES.0).max(SAMPLES.1) {
            return;
        }
        self.is_starting &= shortest < base + TARGET / 2;
        let fits = (base + TARGET).as_secs_f64() / shortest.as_secs_f64();
        let factor = if self.is_starting { GROWTH } else { fits.min(GROWTH) };
        self.window = (self.window * factor).clamp(WINDOW.1, WINDOW.2);
        self.round += 1;
        self.samples = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(id: u64, len: usize) -> Transfer {
        let payload: Vec<u8> = (0..=250).cycle().take(len).collect();
        Transfer { id, reply: Some(format!("lost.{id}")), payload: payload.into() }
    }

    /// A link with a delay each way and a rate, fed by a lane from `start` until everything is
    /// acknowledged. Returns the time it took and the longest queue before the link's door.
    fn carry(
        lane: &mut Lane,
        delay: Duration,
        bytes_s: f64,
        start: Instant,
    ) -> (Duration, Duration) {
        let (mut now, mut free_at, mut longest) = (start, start, Duration::ZERO);
        let mut acks: VecDeque<(Instant, u64, u32)> = VecDeque::new();
        loop {
            while let Some(part) = lane.next(now) {
                let begins = free_at.max(now);
                longest = longest.max(begins - now);
                free_at = begins + Duration::from_secs_f64(part.data.len() as f64 / bytes_s);
                acks.push_back((free_at + 2 * delay, part.transfer, part.index));
            }
            let arrives = acks.front().map(|(at, ..)| *at);
            match (arrives, lane.next_part_at()) {
                (Some(arrives), Some(leaves)) if leaves < arrives => now = leaves,
                (Some(arrives), _) => {
                    now = arrives;
                    if let Some((_, transfer, index)) = acks.pop_front() {
                        lane.acknowledged(transfer, index, now);
                    }
                }
                (None, Some(leaves)) => now = leaves,
                (None, None) => break,
            }
        }
        assert!(lane.is_idle(), "{lane:?}");
        (now - start, longest)
    }

    #[test]
    fn parts_are_the_message_in_order() {
        let mut lane = Lane { window: WINDOW.2, ..Lane::new() };
        let whole = transfer(7, 2 * PART_BYTES + 5);
        lane.push(whole.clone());
        lane.push(transfer(8, 0));
        let now = Instant::now();
        let parts: Vec<NextPart> = std::iter::from_fn(|| lane.next(now)).collect();
        let shape: Vec<_> = parts.iter().map(|p| (p.transfer, p.index, p.n_parts)).collect();
        assert_eq!(shape, [(7, 0, 3), (7, 1, 3), (7, 2, 3), (8, 0, 1)]);
        let data: Vec<u8> = parts[..3].iter().flat_map(|part| part.data.to_vec()).collect();
        assert_eq!(data, whole.payload);
        assert_eq!(parts[0].reply.as_deref(), Some("lost.7"));
        assert_eq!((&parts[1].reply, parts[3].data.len()), (&None, 0));
    }

    #[test]
    fn a_narrow_link_is_filled_and_its_queue_stays_short() {
        let rate = 2.5e6;
        for delay_ms in [1, 5, 20, 50, 100] {
            let mut lane = Lane::new();
            let delay = Duration::from_millis(delay_ms);
            lane.push(transfer(1, 8 << 20));
            let start = Instant::now();
            let (first, longest) = carry(&mut lane, delay, rate, start);
            let least = f64::from(8 << 20) / rate + 2.0 * delay.as_secs_f64();
            assert!(first.as_secs_f64() < 1.5 * least, "{delay_ms} ms at first: {first:?}");
            let once = delay.mul_f64(2.0 * GROWTH) + Duration::from_millis(50);
            assert!(longest < once, "{delay_ms} ms at first: {longest:?}");
            // The way is known now.
            lane.push(transfer(2, 8 << 20));
            let (took, longest) = carry(&mut lane, delay, rate, start + first);
            assert!(took.as_secs_f64() < 1.1 * least, "{delay_ms} ms: {took:?}");
            assert!(longest < Duration::from_millis(30), "{delay_ms} ms: {longest:?}");
        }
    }

    #[test]
    fn a_fast_way_is_not_controlled() {
        let mut lane = Lane::new();
        lane.push(transfer(1, 4 * PART_BYTES));
        carry(&mut lane, Duration::from_micros(50), 1e9, Instant::now());
        lane.push(transfer(2, 4 << 20));
        let parts: Vec<NextPart> = std::iter::from_fn(|| lane.next(Instant::now())).collect();
        assert_eq!(parts.len(), (4 << 20) / PART_BYTES);
    }

    #[test]
    fn what_did_not_arrive_is_named() {
        let mut lane = Lane { window: WINDOW.2, ..Lane::new() };
        for id in 1..=3 {
            lane.push(transfer(id, 2 * PART_BYTES));
        }
        let now = Instant::now();
        while lane.next(now).is_some() {}
        assert!(lane.deadline().is_some_and(|deadline| deadline > now));
        // The acknowledgement of the first part was lost.
        assert_eq!(lane.acknowledged(1, 1, now + Duration::from_millis(20)), [1]);
        assert!(lane.acknowledged(2, 0, now + Duration::from_millis(20)).is_empty());
        assert_eq!(lane.give_up(), [2, 3]);
        assert!(lane.is_idle() && lane.deadline().is_none());
        // An acknowledgement that comes later changes nothing.
        assert!(lane.acknowledged(2, 1, now).is_empty());
        assert!(lane.is_idle());
    }

    #[test]
    fn a_way_that_got_longer_is_learnt_anew() {
        let mut shortest = Shortest::default();
        let start = Instant::now();
        shortest.add(Duration::from_millis(20), start);
        for minute in 1..=3 {
            shortest.add(Duration::from_millis(90), start + BASE_AGE * minute);
        }
        assert_eq!(shortest.get(), Some(Duration::from_millis(90)));
    }
}
