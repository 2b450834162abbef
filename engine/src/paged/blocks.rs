//! The block pool: who holds which block, and which freed blocks are worth keeping.
//!
//! A block is *held* (by one or several sessions), *cached* (held by nobody, but its content has a
//! hash by which a later session can find it) or *free*. Allocation takes free blocks first, then
//! the cached block that was used longest ago. Blocks are only numbers here; their memory belongs
//! to the runtime's tensors.

use std::collections::{BTreeMap, HashMap};

/// Number of a block in the cache tensors.
pub(super) type BlockId = u32;

/// Content of a full block: a chained hash over everything before and in it.
pub(super) type BlockHash = u128;

#[derive(Debug, Clone, Copy, Default)]
struct Block {
    holders: u32,
    hash: Option<BlockHash>,
    /// Key in [`BlockPool::cached`] while nobody holds the block.
    freed_at: u64,
}

/// The pool of one stage.
#[derive(Debug)]
pub(super) struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    cached: BTreeMap<u64, BlockId>,
    by_hash: HashMap<BlockHash, BlockId>,
    clock: u64,
}

impl BlockPool {
    pub(super) fn new(n_blocks: u32) -> Self {
        Self {
            blocks: vec![Block::default(); n_blocks as usize],
            free: (0..n_blocks).rev().collect(),
            cached: BTreeMap::new(),
            by_hash: HashMap::new(),
            clock: 0,
        }
    }

    /// Blocks that an allocation can take now.
    pub(super) fn n_available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// Blocks that sessions hold.
    pub(super) fn n_held(&self) -> usize {
        self.blocks.len() - self.n_available()
    }

    /// Takes a block for one holder; `None` when all are held.
    pub(super) fn allocate(&mut self) -> Option<BlockId> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let (_, id) = self.cached.pop_first()?;
                self.forget(id);
                id
            }
        };
        self.blocks[id as usize].holders = 1;
        Some(id)
    }

    /// Adds a holder.
    pub(super) fn hold(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        if block.holders == 0 {
            self.cached.remove(&block.freed_at);
        }
        block.holders += 1;
    }

    /// Removes a holder; the last one leaves the block cached if it has a hash, else free.
    pub(super) fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        block.holders -= 1;
        if block.holders > 0 {
            return;
        }
        if block.hash.is_some() {
            self.clock += 1;
            block.freed_at = self.clock;
            self.cached.insert(self.clock, id);
        } else {
            self.free.push(id);
        }
    }

    /// Names the content of a full block. A second block with the same content stays unnamed.
    pub(super) fn name(&mut self, id: BlockId, hash: BlockHash) {
        if let std::collections::hash_map::Entry::Vacant(entry) = self.by_hash.entry(hash) {
            entry.insert(id);
            self.blocks[id as usize].hash = Some(hash);
        }
    }

    /// Finds a block by content.
    pub(super) fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.by_hash.get(&hash).copied()
    }

    /// Makes the content of a block unknown, before its only holder writes into it.
    pub(super) fn forget(&mut self, id: BlockId) {
        if let Some(hash) = self.blocks[id as usize].hash.take() {
            self.by_hash.remove(&hash);
        }
    }

    /// Tells whether only one session holds the block.
    pub(super) fn has_one_holder(&self, id: BlockId) -> bool {
        self.blocks[id as usize].holders == 1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_named_block_survives_its_holder_and_is_taken_last() {
        let mut pool = BlockPool::new(3);
        let a = pool.allocate().unwrap();
        let b = pool.allocate().unwrap();
        pool.name(a, 7);
        pool.release(a);
        pool.release(b);
        assert_eq!(pool.n_available(), 3);
        assert_eq!(pool.find(7), Some(a));
        let first = pool.allocate().unwrap();
        let second = pool.allocate().unwrap();
        assert!(first != a && second != a, "free blocks go before cached ones");
        assert_eq!(pool.allocate(), Some(a), "the cached block is evicted at last");
        assert_eq!(pool.find(7), None, "an evicted block cannot be found");
        assert_eq!(pool.allocate(), None);
    }

    #[test]
    fn the_block_unused_for_longest_is_evicted_first() {
        let mut pool = BlockPool::new(2);
        let a = pool.allocate().unwrap();
        let b = pool.allocate().unwrap();
        pool.name(a, 1);
        pool.name(b, 2);
        pool.release(a);
        pool.release(b);
        pool.hold(a);
        pool.release(a);
        assert_eq!(pool.allocate(), Some(b));
    }

    proptest! {
        #[test]
        fn no_block_is_lost_or_doubled(ops in prop::collection::vec((0_u8..4, 0_usize..8), 0..200)) {
            let mut pool = BlockPool::new(6);
            let mut held: Vec<BlockId> = Vec::new();
            let mut hash = 0;
            for (op, pick) in ops {
                match (op, held.is_empty()) {
                    (0, _) => held.extend(pool.allocate()),
                    (1, false) => {
                        let id = held[pick % held.len()];
                        pool.hold(id);
                        held.push(id);
                    }
                    (2, false) => {
                        let id = held.swap_remove(pick % held.len());
                        pool.release(id);
                    }
                    (3, false) => {
                        hash += 1;
                        let id = held[pick % held.len()];
                        if pool.blocks[id as usize].hash.is_none() {
                            pool.name(id, hash);
                        }
                    }
                    _ => {}
                }
                let distinct: HashSet<BlockId> = held.iter().copied().collect();
                prop_assert_eq!(pool.n_held(), distinct.len());
                for id in &pool.free {
                    prop_assert!(!distinct.contains(id));
                    prop_assert!(!pool.cached.values().any(|c| c == id));
                }
                for id in pool.cached.values() {
                    prop_assert!(!distinct.contains(id));
                }
            }
            for id in held {
                pool.release(id);
            }
            prop_assert_eq!(pool.n_available(), 6);
        }
    }
}
