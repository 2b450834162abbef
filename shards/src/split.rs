//! Chooses which layers each stage gets.
//!
//! The time of a decode step is the time to read the weights, so a part's cost is the bytes of
//! its weights. The embedding table costs nothing: one row of it is read per token. Every layer
//! also costs what its operations take besides reading weights, see `LAYER_OVERHEAD_BYTES`.

use std::ops::Range;

/// What the small operations of a layer (norms, rotation, attention over a short cache) cost, in
/// bytes of weights that could be read in that time.
///
/// From SmolLM2-135M on one core: 15 layers take 4.8 ms and 15 layers with a head of 30 MB take
/// 7.5 ms, so a layer of 2.2 MB costs as much as 3.6 MB of the head.
const LAYER_OVERHEAD_BYTES: u64 = 1_400_000;

/// Why a split by hand, or a stage count, does not fit the model.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// No stages, or more than layers.
    #[error("{n_stages} stages do not fit {n_layers} layers, choose 1 to {n_layers}")]
    StageCount {
        /// Stages asked for.
        n_stages: usize,
        /// Layers of the model.
        n_layers: usize,
    },
    /// The list has another length than there are stages.
    #[error("the split names {found} stages, {n_stages} were asked for")]
    Length {
        /// Entries in the list.
        found: usize,
        /// Stages asked for.
        n_stages: usize,
    },
    /// A stage without layers.
    #[error("stage {stage} of the split has no layers")]
    EmptyStage {
        /// Its position.
        stage: usize,
    },
    /// The layers do not add up.
    #[error("the split adds up to {found} layers, the model has {n_layers}")]
    Sum {
        /// Sum of the list.
        found: usize,
        /// Layers of the model.
        n_layers: usize,
    },
}

/// What the parts of a model cost, in bytes of weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Costs {
    layers: Vec<u64>,
    head: u64,
}

impl Costs {
    /// From the stored bytes of each layer and of the head.
    pub(crate) fn new(layer_bytes: &[u64], head_bytes: u64) -> Self {
        let layers = layer_bytes.iter().map(|bytes| bytes + LAYER_OVERHEAD_BYTES).collect();
        Self { layers, head: head_bytes }
    }

    /// The part of the whole model's cost that a layer range makes, 0 to 1.
    pub(crate) fn share(&self, range: &Range<usize>) -> f64 {
        let total = self.layers.iter().sum::<u64>() + self.head;
        self.of(range) as f64 / total as f64
    }

    fn of(&self, range: &Range<usize>) -> u64 {
        let layers: u64 = self.layers[range.clone()].iter().sum();
        if range.end == self.layers.len() { layers + self.head } else { layers }
    }
}

/// The layer ranges of a split by hand.
///
/// # Errors
/// See [`SplitError`].
pub(crate) fn by_hand(
    split: &[usize],
    n_stages: usize,
    n_layers: usize,
) -> Result<Vec<Range<usize>>, SplitError> {
    check_count(n_stages, n_layers)?;
    if split.len() != n_stages {
        return Err(SplitError::Length { found: split.len(), n_stages });
    }
    if let Some(stage) = split.iter().position(|layers| *layers == 0) {
        return Err(SplitError::EmptyStage { stage });
    }
    let found = split.iter().fold(0_usize, |sum, layers| sum.saturating_add(*layers));
    if found != n_layers {
        return Err(SplitError::Sum { found, n_layers });
    }
    let mut end = 0;
    Ok(split
        .iter()
        .map(|layers| {
            let start = end;
            end += layers;
            start..end
        })
        .collect())
}

/// The layer ranges whose most expensive stage is as cheap as possible; among those, the one
/// whose sum of squared costs is smallest, so that no stage is needlessly uneven.
///
/// # Errors
/// [`SplitError::StageCount`].
pub(crate) fn by_cost(costs: &Costs, n_stages: usize) -> Result<Vec<Range<usize>>, SplitError> {
    let n_layers = costs.layers.len();
    check_count(n_stages, n_layers)?;
    // best[k][end]: the best way to cut layers 0..end into k + 1 stages, as (largest cost, sum of
    // squares, start of the last stage).
    let mut best: Vec<Vec<Option<(u64, f64, usize)>>> = Vec::with_capacity(n_stages);
    for stage in 0..n_stages {
        let mut row = vec![None; n_layers + 1];
        for (end, entry) in row.iter_mut().enumerate().skip(stage + 1) {
            for start in stage..end {
                let (largest, squares) = match best.last() {
                    None if start == 0 => (0, 0.0),
                    None => continue,
                    Some(row) => match row[start] {
                        None => continue,
                        Some((largest, squares, _)) => (largest, squares),
                    },
                };
                let cost = costs.of(&(start..end));
                let candidate = (largest.max(cost), squares + (cost as f64).powi(2), start);
                if entry.is_none_or(|(l, s, _)| (candidate.0, candidate.1) < (l, s)) {
                    *entry = Some(candidate);
                }
            }
        }
        best.push(row);
    }
    let mut ranges = Vec::with_capacity(n_stages);
    let mut end = n_layers;
    for row in best.iter().rev() {
        let start = row[end].map_or(0, |(_, _, start)| start);
        ranges.push(start..end);
        end = start;
    }
    ranges.reverse();
    Ok(ranges)
}

fn check_count(n_stages: usize, n_layers: usize) -> Result<(), SplitError> {
    if n_stages == 0 || n_stages > n_layers {
        return Err(SplitError::StageCount { n_stages, n_layers });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
