//! Chooses which layers each stage gets.
//!
//! Stages work at the same time only for several sessions, so what is balanced is a micro-batch
//! of eight rows, one session each: a part costs what reading its weights takes, what
//! multiplying every row with them takes, and what the small operations of its layers take. The
//! embedding table costs nothing: one row of it is read per token. For a single session, whose
//! steps run through the stages one after the other, the split does not matter.

use std::ops::Range;

/// Rows of the micro-batch that is balanced: 16 sessions on two stages.
const BALANCED_ROWS: u64 = 8;

/// Costs are in bytes of weights that can be read in the same time. The constants are from
/// SmolLM2-135M on two cores with 16 users: a micro-batch of 8 rows takes 0.6 ms for a layer of
/// 2.2 MB and 3.5 million weights, and 3 ms for a head of 30 MB and 28.3 million weights; one row
/// takes 0.25 ms and 1.7 ms.
///
/// Small operations of a layer (norms, rotation, attention over a short cache), whatever the rows.
const LAYER_BYTES: u64 = 1_400_000;

/// The same for each row.
const LAYER_ROW_BYTES: u64 = 500_000;

/// Weights with which a row is multiplied in the time of reading a byte.
const WEIGHTS_PER_BYTE: u64 = 9;

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

/// A layer or the head: what decides on its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Stored bytes.
    pub(crate) n_bytes: u64,
    /// Weights of its matrices.
    pub(crate) n_weights: u64,
}

impl Part {
    /// Cost of reading it and of multiplying the rows with it.
    fn cost(self) -> u64 {
        self.n_bytes + BALANCED_ROWS * self.n_weights / WEIGHTS_PER_BYTE
    }
}

/// What the parts of a model cost, in bytes of weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Costs {
    layers: Vec<u64>,
    head: u64,
}

impl Costs {
    /// From the layers and the head.
    pub(crate) fn new(layers: &[Part], head: Part) -> Self {
        let small = LAYER_BYTES + BALANCED_ROWS * LAYER_ROW_BYTES;
        let layers = layers.iter().map(|layer| layer.cost() + small).collect();
        Self { layers, head: head.cost() }
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
