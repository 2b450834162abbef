//! The token rank: all token ids by falling frequency.

use std::fs;
use std::io;
use std::path::Path;

use super::error::{HfError, HfErrorKind};
use crate::bounded;

/// The rank of a vocabulary of at most 65,536 tokens, u16 little-endian.
const RANK_U16: &str = "token_rank.u16";
/// The rank of a larger vocabulary, u32 little-endian.
const RANK_U32: &str = "token_rank.u32";

/// Number of tokens that a folder ranks; none without a rank.
pub(crate) fn n_ranked(dir: &Path) -> usize {
    let n = |name: &str, bytes: u64| {
        fs::metadata(dir.join(name)).ok().map(|file| (file.len() / bytes) as usize)
    };
    n(RANK_U32, 4).or_else(|| n(RANK_U16, 2)).unwrap_or(0)
}

/// The `n` most frequent tokens, ascending.
///
/// # Errors
/// [`HfError`] if the folder has no rank, or one that is too short or not a list of different
/// tokens of the vocabulary.
pub(crate) fn most_frequent(dir: &Path, n: usize, vocab_size: usize) -> Result<Vec<u32>, HfError> {
    let long = dir.join(RANK_U32);
    let (path, ranked) = match bounded::read(&long, bounded::MAX_TEXT_BYTES) {
        Ok(bytes) => {
            let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            (long, words.collect::<Vec<u32>>())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let path = dir.join(RANK_U16);
            let bytes = bounded::read(&path, bounded::MAX_TEXT_BYTES)
                .map_err(|source| HfError::new(&path, HfErrorKind::Io { source }))?;
            let pairs = bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]).into());
            (path, pairs.collect())
        }
        Err(source) => return Err(HfError::new(&long, HfErrorKind::Io { source })),
    };
    if n == 0 || n > ranked.len() {
        let kind = HfErrorKind::RankLength { expected: n, found: ranked.len() };
        return Err(HfError::new(&path, kind));
    }
    let mut is_taken = vec![false; vocab_size];
    for (entry, &token) in ranked[..n].iter().enumerate() {
        match is_taken.get_mut(token as usize) {
            Some(taken) if !*taken => *taken = true,
            _ => {
                let kind = HfErrorKind::Rank { entry, token, vocab_size };
                return Err(HfError::new(&path, kind));
            }
        }
    }
    Ok((0..).zip(is_taken).filter(|(_, taken)| *taken).map(|(token, _)| token).collect())
}
