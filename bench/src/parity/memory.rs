//! What memory alone allows: every weight is read once for a token.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_shards::WeightMode;

/// Times that the buffer is read; the fastest one counts.
const N_READS: usize = 12;

/// Numbers of eight bytes that are added up side by side, so that the sum does not wait for itself.
const LANES: usize = 16;

/// The least time of a token that reads all weights from memory, on one core.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Memory {
    /// How the weights are mapped.
    pub weights: WeightMode,
    /// Bytes of the weights of the set with one stage.
    pub weight_bytes: u64,
    /// Bytes per second, in units of 1e9, at which one core reads so many bytes: the best of several
    /// times. Caches that hold a part of them help, as they help the model.
    pub read_gb_s: f64,
    /// The weights read once, in milliseconds.
    pub token_ms: f64,
}

/// Measures it for weights of so many bytes.
///
/// # Errors
/// More bytes than this process can hold.
pub(super) fn bound(weights: WeightMode, weight_bytes: u64) -> anyhow::Result<Memory> {
    let n = usize::try_from(weight_bytes / 8).context("the weights are too large")?;
    let buffer = vec![1_u64; n];
    let best = (0..N_READS).map(|_| read_s(&buffer)).fold(f64::INFINITY, f64::min);
    let read_gb_s = weight_bytes as f64 / best / 1e9;
    Ok(Memory { weights, weight_bytes, read_gb_s, token_ms: best * 1e3 })
}

/// Reads a buffer once, in seconds.
fn read_s(buffer: &[u64]) -> f64 {
    let started = Instant::now();
    let mut sums = [0_u64; LANES];
    for lanes in black_box(buffer).as_chunks::<LANES>().0 {
        for (sum, number) in sums.iter_mut().zip(lanes) {
            *sum = sum.wrapping_add(*number);
        }
    }
    black_box(sums);
    started.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_the_time_of_one_reading() {
        let memory = bound(WeightMode::Compact, 1 << 20).expect("it fits");
        let expected = memory.weight_bytes as f64 / memory.read_gb_s / 1e6;
        assert!(memory.token_ms > 0.0 && (memory.token_ms / expected - 1.0).abs() < 1e-9);
    }
}
