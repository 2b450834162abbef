//! Time and memory of the sharder.

use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_shards::WeightMode;

use super::{Context, SHARD_PEAK, SHARD_PEAK_GROWTH, SHARD_SECONDS};
use crate::harness::claims::Claim;
use crate::harness::output;
use crate::harness::stats::median;
use crate::random_gguf::{Fill, RandomModel};
use crate::shard_once::{self, ShardOnceArgs, Sharding};

/// Layers of the two generated models.
const BIG_LAYERS: [u64; 2] = [4, 32];

/// Bytes of a megabyte.
const MEGABYTE: f64 = 1e6;

/// One shard set that was made.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sharded {
    /// Stages.
    pub n_stages: usize,
    /// How weights were mapped.
    pub weights: WeightMode,
    /// What it took.
    #[serde(flatten)]
    pub sharding: Sharding,
}

/// A generated model and what sharding it took.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BigSharded {
    /// Size of the file, in bytes.
    pub file_bytes: u64,
    /// Layers.
    pub n_layers: u64,
    /// What it took.
    #[serde(flatten)]
    pub sharding: Sharding,
}

/// Makes every shard set of the scenario and adds it to the context.
///
/// # Errors
/// What the sharder says.
pub(super) async fn all(
    context: &mut Context,
    stages: &[usize],
    folder: &Path,
) -> anyhow::Result<Vec<Sharded>> {
    let exact = stages.iter().map(|&n_stages| (n_stages, WeightMode::Exact));
    let others = [WeightMode::Compact, WeightMode::NearLossless].map(|weights| (1, weights));
    let mut all = Vec::new();
    for (n_stages, weights) in exact.chain(others) {
        let out = folder.join(format!("set-{n_stages}-{weights}"));
        let model = context.model.clone();
        let args =
            ShardOnceArgs { model, stages: n_stages, weights, split: None, out: out.clone() };
        let sharding = shard_once::in_child(&args).await?;
        context.sets.insert((n_stages, weights.as_str()), out);
        all.push(Sharded { n_stages, weights, sharding });
    }
    Ok(all)
}

/// Generates two models that differ in their number of layers only, and shards each.
///
/// # Errors
/// A full disk, what the sharder says.
pub(super) async fn big(folder: &Path, quiet: bool) -> anyhow::Result<Vec<BigSharded>> {
    let mut all = Vec::new();
    for n_layers in BIG_LAYERS {
        output::note(quiet, &format!("a generated model of {n_layers} layers"));
        let path = folder.join(format!("random-{n_layers}.gguf"));
        let out = folder.join(format!("random-{n_layers}"));
        let file = path.clone();
        let write = tokio::task::spawn_blocking(move || {
            RandomModel::large(n_layers).write(&file, Fill::Whole)
        });
        let written = write.await.context("the generator failed")?;
        let file_bytes = written.with_context(|| format!("cannot write {}", path.display()))?;
        let args = ShardOnceArgs {
            model: path.clone(),
            stages: 2,
            weights: WeightMode::Exact,
            split: None,
            out: out.clone(),
        };
        let sharding = shard_once::in_child(&args).await?;
        all.push(BigSharded { file_bytes, n_layers, sharding });
        std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        std::fs::remove_dir_all(&out)
            .with_context(|| format!("cannot remove {}", out.display()))?;
    }
    Ok(all)
}

/// The claim on time: exact weights, median over stage counts.
pub(super) fn seconds_claim(all: &[Sharded]) -> Claim {
    let exact = all.iter().filter(|sharded| sharded.weights == WeightMode::Exact);
    match median(exact.map(|sharded| sharded.sharding.seconds)) {
        None => SHARD_SECONDS.missing("nothing was sharded"),
        Some(seconds) => {
            SHARD_SECONDS.measured(seconds, "median over stage counts, no core chosen")
        }
    }
}

/// The claim on memory: the largest of all.
pub(super) fn peak_claim(all: &[Sharded]) -> Claim {
    match all.iter().filter_map(|sharded| sharded.sharding.peak_rss_bytes).max() {
        None => SHARD_PEAK.missing("this platform does not tell peak memory"),
        Some(peak) => SHARD_PEAK.measured(
            peak as f64 / MEGABYTE,
            "peak resident memory of the process, mapped file pages included",
        ),
    }
}

/// The claim that memory does not follow the model's size.
pub(super) fn growth_claim(all: Option<&Vec<BigSharded>>) -> Claim {
    let Some(all) = all else {
        return SHARD_PEAK_GROWTH.missing("not asked for: give --big-gguf");
    };
    let peaks: Option<Vec<f64>> =
        all.iter().map(|big| Some(big.sharding.peak_rss_bytes? as f64)).collect();
    match peaks.as_deref() {
        Some([small, large]) => {
            let sizes: Vec<String> = all
                .iter()
                .zip([small, large])
                .map(|(big, peak)| {
                    format!("{:.2} GB: {:.0} MB", big.file_bytes as f64 / 1e9, peak / MEGABYTE)
                })
                .collect();
            let how = format!("peak resident memory, file: {}", sizes.join(", "));
            SHARD_PEAK_GROWTH.measured(large / small, how)
        }
        _ => SHARD_PEAK_GROWTH.missing("this platform does not tell peak memory"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sharding(seconds: f64, peak_rss_bytes: Option<u64>) -> Sharding {
        Sharding { seconds, peak_rss_bytes, weight_bytes: 1 }
    }

    #[test]
    fn time_is_that_of_exact_weights_and_memory_the_largest() {
        let sharded = |weights, seconds, peak| Sharded {
            n_stages: 1,
            weights,
            sharding: sharding(seconds, Some(peak)),
        };
        let all = [
            sharded(WeightMode::Exact, 1.0, 100_000_000),
            sharded(WeightMode::Compact, 9.0, 310_000_000),
        ];
        assert_eq!(seconds_claim(&all).value, Some(1.0));
        let claim = peak_claim(&all);
        assert_eq!((claim.value, claim.holds), (Some(310.0), Some(false)));
    }

    #[test]
    fn growth_compares_the_two_models() {
        let big = |file_bytes, peak| BigSharded {
            file_bytes,
            n_layers: 1,
            sharding: sharding(1.0, Some(peak)),
        };
        let claim = growth_claim(Some(&vec![big(700_000_000, 200), big(4_200_000_000, 210)]));
        assert_eq!((claim.value, claim.holds), (Some(1.05), Some(true)));
        assert!(claim.how.contains("4.20 GB"), "{}", claim.how);
        assert_eq!(growth_claim(None).value, None);
    }
}
