//! Which slots of a session's physical KV cache hold its positions.
//!
//! A cache only grows. A rewind leaves its slots behind as masked ones and the next rows follow
//! at the end, so position `p` lives in the `p`-th slot that is not masked.

use std::ops::Range;

/// The slots of one session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Slots {
    /// Slots in use, ascending, not empty and not adjacent.
    live: Vec<Range<usize>>,
    /// Slots of the cache.
    physical: usize,
}

impl Slots {
    /// Positions of the session.
    pub(super) fn len(&self) -> usize {
        self.live.iter().map(Range::len).sum()
    }

    /// Slots of the cache, masked ones included.
    pub(super) fn physical(&self) -> usize {
        self.physical
    }

    /// Slots that are masked.
    pub(super) fn masked(&self) -> usize {
        self.physical - self.len()
    }

    /// Masks everything from position `len` on.
    pub(super) fn truncate(&mut self, len: usize) {
        let mut excess = self.len().saturating_sub(len);
        while excess > 0
            && let Some(last) = self.live.last_mut()
        {
            let cut = excess.min(last.len());
            last.end -= cut;
            excess -= cut;
            if last.start == last.end {
                self.live.pop();
            }
        }
    }

    /// Puts `n_rows` positions behind the last slot.
    pub(super) fn append(&mut self, n_rows: usize) {
        let end = self.physical + n_rows;
        match self.live.last_mut() {
            Some(last) if last.end == self.physical => last.end = end,
            _ => self.live.push(self.physical..end),
        }
        self.physical = end;
    }

    /// Writes the attention mask.
    ///
    /// **Shape**: `mask` has one number per slot; 1 in use, 0 masked.
    pub(super) fn write_mask(&self, mask: &mut [i64]) {
        let mut done = 0;
        for slots in &self.live {
            mask[done..slots.start].fill(0);
            mask[slots.clone()].fill(1);
            done = slots.end;
        }
        mask[done..].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(slots: &Slots) -> Vec<i64> {
        let mut mask = vec![7; slots.physical()];
        slots.write_mask(&mut mask);
        mask
    }

    #[test]
    fn rewinds_leave_holes() {
        let mut slots = Slots::default();
        slots.append(3);
        slots.append(2);
        assert_eq!(mask(&slots), [1; 5]);
        slots.truncate(4);
        slots.append(2);
        assert_eq!(mask(&slots), [1, 1, 1, 1, 0, 1, 1]);
        assert_eq!((slots.len(), slots.masked()), (6, 1));
        // Across the hole.
        slots.truncate(3);
        slots.append(1);
        assert_eq!(mask(&slots), [1, 1, 1, 0, 0, 0, 0, 1]);
        slots.truncate(9);
        assert_eq!(slots.len(), 4);
        slots.truncate(0);
        assert_eq!((slots.len(), slots.masked()), (0, 8));
    }

    #[test]
    fn any_sequence_keeps_the_counts() {
        let mut slots = Slots::default();
        let (mut len, mut physical, mut seed) = (0, 0, 1_usize);
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let to = if len == 0 { 0 } else { (seed >> 33) % (len + 1) };
            let n_rows = 1 + (seed >> 20) % 5;
            slots.truncate(to);
            slots.append(n_rows);
            (len, physical) = (to + n_rows, physical + n_rows);
            assert_eq!((slots.len(), slots.physical()), (len, physical));
            assert_eq!(mask(&slots).iter().sum::<i64>(), len as i64);
        }
    }
}
