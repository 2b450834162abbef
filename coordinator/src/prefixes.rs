//! Where prompts have run lately, so that one that begins alike goes where its beginning is cached.
//!
//! The workers alone know what they hold; this is a guess that only chooses among workers, and
//! their answers to `open` say what it was worth.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use stagebus_schemas::ids::WorkerId;

/// Tokens of a block; the engines cache blocks of this size.
const BLOCK_TOKENS: usize = 32;

/// Blocks that are remembered: a million tokens of text.
const MAX_BLOCKS: usize = 1 << 15;

/// Beginnings of prompts and the workers that ran them.
#[derive(Debug, Default)]
pub(crate) struct PrefixIndex {
    blocks: HashMap<u64, Block>,
    clock: u64,
}

#[derive(Debug, Default)]
struct Block {
    workers: Vec<WorkerId>,
    used: u64,
}

/// Cached beginning of one prompt per worker, in tokens.
#[derive(Debug, Default)]
pub(crate) struct Matches(HashMap<WorkerId, usize>);

impl PrefixIndex {
    /// Notes that these workers run a prompt.
    pub(crate) fn note(&mut self, prompt: &[u32], route: &[WorkerId]) {
        self.clock += 1;
        for hash in chain(prompt) {
            let block = self.blocks.entry(hash).or_default();
            block.used = self.clock;
            for worker in route {
                if !block.workers.contains(worker) {
                    block.workers.push(worker.clone());
                }
            }
        }
        if self.blocks.len() > MAX_BLOCKS {
            self.forget_older_half();
        }
    }

    /// Forgets a worker that is gone.
    pub(crate) fn remove(&mut self, worker: &WorkerId) {
        self.blocks.retain(|_, block| {
            block.workers.retain(|held| held != worker);
            !block.workers.is_empty()
        });
    }

    /// Finds the workers that ran the beginning of a prompt.
    pub(crate) fn matches(&self, prompt: &[u32]) -> Matches {
        let mut matches = HashMap::new();
        for (idx, hash) in chain(prompt).enumerate() {
            let Some(block) = self.blocks.get(&hash) else { break };
            for worker in &block.workers {
                matches.insert(worker.clone(), (idx + 1) * BLOCK_TOKENS);
            }
        }
        Matches(matches)
    }

    fn forget_older_half(&mut self) {
        let mut ages: Vec<u64> = self.blocks.values().map(|block| block.used).collect();
        let middle = ages.len() / 2;
        let (_, median, _) = ages.select_nth_unstable(middle);
        let median = *median;
        self.blocks.retain(|_, block| block.used > median);
    }
}

impl Matches {
    /// Tokens that a worker has probably cached.
    pub(crate) fn of(&self, worker: &WorkerId) -> usize {
        self.0.get(worker).copied().unwrap_or(0)
    }
}

/// Hashes of the full blocks of a text, each over everything before and in it.
fn chain(tokens: &[u32]) -> impl Iterator<Item = u64> {
    tokens.chunks_exact(BLOCK_TOKENS).scan(0, |before, block| {
        let mut hasher = DefaultHasher::new();
        (*before, block).hash(&mut hasher);
        *before = hasher.finish();
        Some(*before)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(name: &str) -> WorkerId {
        WorkerId::new(name).unwrap()
    }

    fn text(len: u32, seed: u32) -> Vec<u32> {
        (0..len).map(|i| i * 7 + seed).collect()
    }

    #[test]
    fn a_common_beginning_is_found_in_whole_blocks() {
        let mut index = PrefixIndex::default();
        index.note(&text(100, 1), &[worker("a0"), worker("a1")]);
        let mut other = text(70, 1);
        other.extend(text(70, 2));
        index.note(&other, &[worker("b0"), worker("b1")]);
        let matches = index.matches(&text(100, 1));
        assert_eq!((matches.of(&worker("a0")), matches.of(&worker("a1"))), (96, 96));
        assert_eq!((matches.of(&worker("b0")), matches.of(&worker("c"))), (64, 0));
        assert_eq!(index.matches(&text(100, 3)).of(&worker("a0")), 0);
        assert_eq!(index.matches(&text(31, 1)).of(&worker("a0")), 0);
    }

    #[test]
    fn workers_that_are_gone_are_forgotten() {
        let mut index = PrefixIndex::default();
        index.note(&text(64, 1), &[worker("a"), worker("b")]);
        index.remove(&worker("a"));
        let matches = index.matches(&text(64, 1));
        assert_eq!((matches.of(&worker("a")), matches.of(&worker("b"))), (0, 64));
        index.remove(&worker("b"));
        assert!(index.blocks.is_empty());
    }

    #[test]
    fn the_memory_is_bounded_and_keeps_what_is_new() {
        let mut index = PrefixIndex::default();
        let n_blocks = 512;
        for seed in 0..100 {
            index.note(&text(n_blocks * 32, seed * 1_000_003), &[worker("a")]);
        }
        assert!(index.blocks.len() <= MAX_BLOCKS);
        let newest = index.matches(&text(n_blocks * 32, 99 * 1_000_003));
        assert_eq!(newest.of(&worker("a")), n_blocks as usize * 32);
        let oldest = index.matches(&text(n_blocks * 32, 0));
        assert_eq!(oldest.of(&worker("a")), 0);
    }
}
