//! Cuts a prompt into chunks.
//!
//! A prompt row always runs in a multi-token sequence, so no chunk has one row unless the prompt
//! has one; and the chunks are of even size, so that the stages stay busy at the same time.

/// Smallest limit for which an even cut leaves no chunk of one row.
pub const MIN_CHUNK_ROWS: usize = 3;

/// Room in a message for everything but the rows: names, ids and the times of the stages.
const ENVELOPE_BYTES: usize = 4096;

/// Bytes of a row besides its hidden state: the token id, at most five bytes of MessagePack.
const ROW_BYTES: usize = 8;

/// Bytes of one element of a hidden state in the widest wire format (f32).
const ELEMENT_BYTES: usize = 4;

/// Returns the rows that fit one message between stages.
///
/// **Units**: `max_payload` in bytes, `hidden_dim` in elements.
#[must_use]
pub fn rows_per_message(max_payload: usize, hidden_dim: usize) -> usize {
    max_payload.saturating_sub(ENVELOPE_BYTES) / (hidden_dim * ELEMENT_BYTES + ROW_BYTES)
}

/// Returns the rows whose logits fit one message from the last stage.
///
/// **Units**: `max_payload` in bytes, `vocab_size` in elements.
pub(crate) fn logits_rows_per_message(max_payload: usize, vocab_size: usize) -> usize {
    max_payload.saturating_sub(ENVELOPE_BYTES) / (vocab_size * ELEMENT_BYTES)
}

/// Returns the sizes of the chunks for `n_rows` rows, none above `max_rows`, differing by at most
/// one row, the larger ones first.
///
/// `max_rows` below [`MIN_CHUNK_ROWS`] counts as that.
pub(crate) fn plan_chunks(n_rows: usize, max_rows: usize) -> Vec<usize> {
    let n_chunks = n_rows.div_ceil(max_rows.max(MIN_CHUNK_ROWS));
    (0..n_chunks).map(|chunk| n_rows / n_chunks + usize::from(chunk < n_rows % n_chunks)).collect()
}

/// Returns how many cached positions of a prompt are used: at least two rows (or the whole prompt)
/// are left, because the last row must run and must not run alone.
pub(crate) fn usable_prefix(cached_len: usize, prompt_len: usize) -> usize {
    cached_len.min(prompt_len.saturating_sub(2))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn chunks_are_even() {
        assert_eq!(plan_chunks(300, 128), [100, 100, 100]);
        assert_eq!(plan_chunks(129, 128), [65, 64]);
        assert_eq!(plan_chunks(128, 128), [128]);
        assert_eq!(plan_chunks(7, 3), [3, 2, 2]);
        assert_eq!(plan_chunks(1, 128), [1]);
    }

    #[test]
    fn chunks_fit_the_broker() {
        // 1 MiB, f32, 4,096 elements: 63 rows of 16 KiB and the envelope.
        assert_eq!(rows_per_message(1 << 20, 4096), 63);
        assert_eq!(rows_per_message(1024, 4096), 0);
        // 1 MiB, 49,152 logits: five rows of 192 KiB and the envelope.
        assert_eq!(logits_rows_per_message(1 << 20, 49_152), 5);
    }

    #[test]
    fn a_cached_prefix_leaves_two_rows() {
        assert_eq!(usable_prefix(64, 64), 62);
        assert_eq!(usable_prefix(32, 64), 32);
        assert_eq!(usable_prefix(1, 1), 0);
    }

    proptest! {
        #[test]
        fn no_chunk_has_one_row_or_too_many(n_rows in 2_usize..5000, max_rows in 3_usize..300) {
            let chunks = plan_chunks(n_rows, max_rows);
            prop_assert_eq!(chunks.iter().sum::<usize>(), n_rows);
            prop_assert!(chunks.iter().all(|rows| (2..=max_rows).contains(rows)));
            prop_assert_eq!(chunks.len(), n_rows.div_ceil(max_rows));
        }
    }
}
