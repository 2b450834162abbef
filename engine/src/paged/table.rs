//! One session's tokens and the blocks that hold their keys and values.

use sha2::{Digest, Sha256};

use super::blocks::{BlockHash, BlockId, BlockPool};
use crate::backend::{RowPath, common_len};

/// What content hashes depend on beside the tokens.
#[derive(Debug, Clone)]
pub(super) struct HashSalt(pub(super) BlockHash);

impl HashSalt {
    /// Salts with everything that changes the numbers in a block.
    pub(super) fn new(parts: &[&str]) -> Self {
        let mut hasher = Sha256::new();
        for part in parts {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        Self(first_16(&hasher.finalize()))
    }
}

/// Hash of a block given the hash of all before it.
pub(super) fn chain(before: BlockHash, tokens: &[u32]) -> BlockHash {
    let mut hasher = Sha256::new();
    hasher.update(before.to_le_bytes());
    for token in tokens {
        hasher.update(token.to_le_bytes());
    }
    first_16(&hasher.finalize())
}

fn first_16(digest: &[u8]) -> BlockHash {
    digest.iter().take(16).fold(0, |hash, byte| (hash << 8) | BlockHash::from(*byte))
}

/// Rows of a cached prefix are never the whole prompt: two rows stay, since a prompt row must run
/// in a chunk of at least two to take the path that it would have taken without the cache.
const ROWS_LEFT: usize = 2;

/// A block that must be copied before it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockCopy {
    pub(super) from: BlockId,
    pub(super) to: BlockId,
}

/// The tokens of a session and their blocks.
#[derive(Debug, Default)]
pub(super) struct BlockTable {
    pub(super) blocks: Vec<BlockId>,
    tokens: Vec<u32>,
    /// Leading rows that ran as prompt rows.
    prefill_len: usize,
    /// Chained hashes of the leading full blocks, as far as they are known.
    hashes: Vec<BlockHash>,
    /// Blocks that the session was promised at its start, those that it holds included.
    promised: usize,
}

impl BlockTable {
    /// Number of rows.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// How many of the first rows are those of `prompt`.
    pub(super) fn common_len(&self, prompt: &[u32]) -> usize {
        common_len(&self.tokens, prompt)
    }

    /// Promises that the session will hold this many blocks.
    pub(super) fn promise(&mut self, n_blocks: usize) {
        self.promised = n_blocks;
    }

    /// Blocks that it was promised and does not hold yet.
    pub(super) fn n_promised(&self) -> usize {
        self.promised.saturating_sub(self.blocks.len())
    }

    /// Takes over the blocks of the longest cached prefix of `prompt`.
    pub(super) fn with_prefix(
        prompt: &[u32],
        block_tokens: usize,
        salt: &HashSalt,
        pool: &mut BlockPool,
    ) -> Self {
        let mut table = Self::default();
        let n_full = prompt.len().saturating_sub(ROWS_LEFT) / block_tokens;
        let mut before = salt.0;
        for tokens in prompt.chunks_exact(block_tokens).take(n_full) {
            let hash = chain(before, tokens);
            let Some(id) = pool.find(hash) else { break };
            pool.hold(id);
            table.blocks.push(id);
            table.tokens.extend_from_slice(tokens);
            table.hashes.push(hash);
            before = hash;
        }
        table.prefill_len = table.tokens.len();
        table
    }

    /// Forgets the rows from `len` on and releases blocks that hold none of the rest.
    pub(super) fn truncate(&mut self, len: usize, block_tokens: usize, pool: &mut BlockPool) {
        if len >= self.tokens.len() {
            return;
        }
        self.tokens.truncate(len);
        self.prefill_len = self.prefill_len.min(len);
        self.hashes.truncate(len / block_tokens);
        for id in self.blocks.split_off(len.div_ceil(block_tokens)) {
            pool.release(id);
        }
    }

    /// Blocks that appending `n_rows` takes from the pool, a copy of a shared last block included.
    pub(super) fn blocks_needed(
        &self,
        n_rows: usize,
        block_tokens: usize,
        pool: &BlockPool,
    ) -> usize {
        let total = (self.len() + n_rows).div_ceil(block_tokens);
        let copies = self.partial_block(block_tokens).is_some_and(|id| !pool.has_one_holder(id));
        total.saturating_sub(self.blocks.len()) + usize::from(copies)
    }

    fn partial_block(&self, block_tokens: usize) -> Option<BlockId> {
        (!self.len().is_multiple_of(block_tokens)).then(|| self.blocks.last().copied()).flatten()
    }

    /// Appends rows; the caller has checked [`Self::blocks_needed`] against the pool.
    ///
    /// Returns the copy that must be made before the rows are written, and `None` for the whole if
    /// the pool ran out, in which case nothing has changed but blocks that stay in the table.
    pub(super) fn append(
        &mut self,
        tokens: &[u32],
        path: RowPath,
        block_tokens: usize,
        pool: &mut BlockPool,
    ) -> Option<Option<BlockCopy>> {
        let mut copy = None;
        if let Some(from) = self.partial_block(block_tokens) {
            if pool.has_one_holder(from) {
                pool.forget(from);
            } else {
                let to = pool.allocate()?;
                pool.release(from);
                if let Some(last) = self.blocks.last_mut() {
                    *last = to;
                }
                copy = Some(BlockCopy { from, to });
            }
        }
        while self.blocks.len() < (self.len() + tokens.len()).div_ceil(block_tokens) {
            self.blocks.push(pool.allocate()?);
        }
        if path == RowPath::Prefill && self.prefill_len == self.len() {
            self.prefill_len += tokens.len();
        }
        self.tokens.extend_from_slice(tokens);
        if path == RowPath::Decode {
            // The prompt is in: a later rewind gives its blocks to whoever needs them.
            self.promised = 0;
        }
        Some(copy)
    }

    /// Names the full blocks whose rows have been written and may be shared: those of prompt rows,
    /// or all if every row takes the same path.
    pub(super) fn name_full_blocks(
        &mut self,
        every_row: bool,
        block_tokens: usize,
        salt: &HashSalt,
        pool: &mut BlockPool,
    ) {
        let len = if every_row { self.len() } else { self.prefill_len };
        while self.hashes.len() < len / block_tokens {
            let idx = self.hashes.len();
            let before = self.hashes.last().copied().unwrap_or(salt.0);
            let hash = chain(before, &self.tokens[idx * block_tokens..(idx + 1) * block_tokens]);
            self.hashes.push(hash);
            pool.name(self.blocks[idx], hash);
        }
    }

    /// Releases everything.
    pub(super) fn release(self, pool: &mut BlockPool) {
        for id in self.blocks {
            pool.release(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 4;

    fn salt() -> HashSalt {
        HashSalt::new(&["model", "u8"])
    }

    fn filled(tokens: &[u32], pool: &mut BlockPool) -> BlockTable {
        let mut table = BlockTable::default();
        table.append(tokens, RowPath::Prefill, BLOCK, pool).unwrap();
        table.name_full_blocks(false, BLOCK, &salt(), pool);
        table
    }

    #[test]
    fn a_prompt_finds_the_blocks_of_an_equal_prefix() {
        let mut pool = BlockPool::new(8);
        let first = filled(&[1, 2, 3, 4, 5, 6, 7, 8, 9], &mut pool);
        let hit = BlockTable::with_prefix(&[1, 2, 3, 4, 5, 6, 7, 8, 9], BLOCK, &salt(), &mut pool);
        assert_eq!(hit.len(), 4, "two rows are left to run, so only one block can be used");
        assert_eq!(hit.blocks, first.blocks[..1]);
        let long = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
        assert_eq!(BlockTable::with_prefix(&long, BLOCK, &salt(), &mut pool).len(), 8);
        let other = [1, 2, 3, 5, 5, 6, 7, 8, 9, 10];
        assert_eq!(BlockTable::with_prefix(&other, BLOCK, &salt(), &mut pool).len(), 0);
    }

    #[test]
    fn blocks_of_generated_rows_are_not_shared() {
        let mut pool = BlockPool::new(8);
        let mut table = filled(&[1, 2, 3], &mut pool);
        table.append(&[4, 5, 6, 7, 8], RowPath::Decode, BLOCK, &mut pool).unwrap();
        table.name_full_blocks(false, BLOCK, &salt(), &mut pool);
        let prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
        assert_eq!(BlockTable::with_prefix(&prompt, BLOCK, &salt(), &mut pool).len(), 0);
        table.name_full_blocks(true, BLOCK, &salt(), &mut pool);
        assert_eq!(BlockTable::with_prefix(&prompt, BLOCK, &salt(), &mut pool).len(), 8);
    }

    #[test]
    fn writing_into_a_shared_block_copies_it_first() {
        let mut pool = BlockPool::new(8);
        let first = filled(&[1, 2, 3, 4, 5, 6], &mut pool);
        let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
        let mut second = BlockTable::with_prefix(&prompt, BLOCK, &salt(), &mut pool);
        second.truncate(2, BLOCK, &mut pool);
        assert_eq!(second.blocks_needed(1, BLOCK, &pool), 1);
        let copy = second.append(&[9], RowPath::Prefill, BLOCK, &mut pool).unwrap();
        assert_eq!(copy, Some(BlockCopy { from: first.blocks[0], to: second.blocks[0] }));
        assert_ne!(first.blocks[0], second.blocks[0]);
    }

    #[test]
    fn rewriting_ones_own_named_block_makes_it_unknown() {
        let mut pool = BlockPool::new(8);
        let mut table = filled(&[1, 2, 3, 4], &mut pool);
        table.truncate(3, BLOCK, &mut pool);
        assert_eq!(table.append(&[9], RowPath::Prefill, BLOCK, &mut pool), Some(None));
        let old = [1, 2, 3, 4, 5, 6];
        assert_eq!(BlockTable::with_prefix(&old, BLOCK, &salt(), &mut pool).len(), 0);
        table.name_full_blocks(false, BLOCK, &salt(), &mut pool);
        let new = [1, 2, 3, 9, 5, 6];
        assert_eq!(BlockTable::with_prefix(&new, BLOCK, &salt(), &mut pool).len(), 4);
    }

    #[test]
    fn a_released_table_leaves_the_pool_full() {
        let mut pool = BlockPool::new(4);
        let mut table = filled(&[1, 2, 3, 4, 5], &mut pool);
        table.append(&[6; 20], RowPath::Decode, BLOCK, &mut pool);
        assert_eq!(pool.n_available(), 0);
        table.release(&mut pool);
        assert_eq!(pool.n_available(), 4);
    }
}
