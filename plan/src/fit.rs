//! From the times of a few stages to the costs of the model's parts.
//!
//! The probe is the model itself, cut so that each unknown shows in a difference:
//!
//! ```text
//! first    embedding + 1 layer     call + embedding + layer
//! single               1 layer     call + layer
//! blocks               n layers    call + n layers          as many as the node has room for
//! last     1 layer + head          call + layer + head
//! ```
//! They run in turn, pass by pass, as in the pipeline. What is timed is then as cold as it will be:
//! the weights of a small block alone would stay in the processor's caches. A stage that waits for
//! others between its passes is slower still, so one row is timed after a rest, too.

use std::ops::Range;

use crate::facts::RowCost;

/// Most blocks of a probe: enough steps for nodes of any size, few enough graphs to load.
const MAX_BLOCKS: usize = 6;

/// Fewest layers of a block, or the differences would be lost in noise.
const MIN_BLOCK_LAYERS: usize = 2;

/// Layers of a model too small to be cut into a probe.
const MIN_LAYERS: usize = 3;

/// Why costs cannot be told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// The model has too few layers to tell its parts apart.
    #[error("the model has {found} layers, a plan needs at least {MIN_LAYERS}")]
    TooFewLayers {
        /// Layers found.
        found: usize,
    },
    /// A stage that every difference needs was not measured.
    #[error("the {missing} stage of the probe was not measured")]
    Missing {
        /// Which.
        missing: &'static str,
    },
}

/// What a stage of the probe is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeStage {
    /// Embedding table and one layer.
    First,
    /// One layer.
    Single,
    /// Several layers.
    Block,
    /// One layer and the head.
    Last,
}

/// Times of one stage of the probe.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTimes {
    /// Its layers.
    pub layers: Range<usize>,
    /// What a pass takes.
    pub pass: RowCost,
}

/// Costs of the parts of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fitted {
    /// A call.
    pub call: RowCost,
    /// A layer.
    pub layer: RowCost,
    /// The embedding table.
    pub embedding: RowCost,
    /// The head.
    pub head: RowCost,
}

/// The layers of each stage of the probe.
///
/// # Errors
/// [`FitError::TooFewLayers`].
pub fn probe_split(n_layers: usize) -> Result<Vec<usize>, FitError> {
    if n_layers < MIN_LAYERS {
        return Err(FitError::TooFewLayers { found: n_layers });
    }
    let inner = n_layers - MIN_LAYERS;
    let n_blocks = (inner / MIN_BLOCK_LAYERS).min(MAX_BLOCKS);
    let mut split = vec![1, 1];
    match n_blocks {
        // One layer that is left over is no block.
        0 => split.extend(vec![1; inner]),
        _ => split.extend((0..n_blocks).map(|block| (inner + block) / n_blocks)),
    }
    split.push(1);
    Ok(split)
}

impl ProbeStage {
    /// What the stage with these layers is.
    #[must_use]
    pub fn of(layers: &Range<usize>, n_layers: usize) -> Self {
        match layers {
            layers if layers.start == 0 => Self::First,
            layers if layers.end == n_layers => Self::Last,
            layers if layers.len() == 1 => Self::Single,
            _ => Self::Block,
        }
    }
}

/// Tells the costs apart. Without a block a layer is taken to be all of its stage.
///
/// # Errors
/// [`FitError::Missing`].
pub fn fit(stages: &[StageTimes], n_layers: usize) -> Result<Fitted, FitError> {
    let of = |kind: ProbeStage| {
        let of_kind = move |stage: &&StageTimes| ProbeStage::of(&stage.layers, n_layers) == kind;
        stages.iter().filter(of_kind)
    };
    let first_of = |kind, missing| of(kind).next().ok_or(FitError::Missing { missing });
    let first = first_of(ProbeStage::First, "first")?.pass;
    let single = first_of(ProbeStage::Single, "single")?.pass;
    let last = first_of(ProbeStage::Last, "last")?.pass;
    let layer = each(|rows| {
        let single = rows(single);
        let (ms, n) = of(ProbeStage::Block).fold((0.0, 0), |(ms, n), block| {
            (ms + rows(block.pass) - single, n + block.layers.len() - 1)
        });
        // A block that is no slower than a layer is noise.
        if n > 0 && ms > 0.0 { (ms / n as f64).min(single) } else { single }
    });
    let beyond = |whole: RowCost, part: RowCost| each(|rows| (rows(whole) - rows(part)).max(0.0));
    Ok(Fitted {
        call: beyond(single, layer),
        layer,
        embedding: beyond(first, single),
        head: beyond(last, single),
    })
}

/// The same for one row, for many, and for one after a rest.
fn each(of: impl Fn(&dyn Fn(RowCost) -> f64) -> f64) -> RowCost {
    RowCost {
        one_ms: of(&|cost| cost.one_ms),
        many_ms: of(&|cost| cost.many_ms),
        rested_ms: of(&|cost| cost.rested_ms),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges(split: &[usize]) -> Vec<Range<usize>> {
        let end = |start: &mut usize, layers: &usize| {
            let range = *start..*start + layers;
            *start = range.end;
            Some(range)
        };
        split.iter().scan(0, end).collect()
    }

    #[test]
    fn a_probe_has_both_ends_a_layer_alone_and_blocks() {
        assert_eq!(probe_split(3), Ok(vec![1, 1, 1]));
        assert_eq!(probe_split(4), Ok(vec![1, 1, 1, 1]));
        assert_eq!(probe_split(5), Ok(vec![1, 1, 2, 1]));
        assert_eq!(probe_split(30), Ok(vec![1, 1, 4, 4, 4, 5, 5, 5, 1]));
        assert_eq!(probe_split(2), Err(FitError::TooFewLayers { found: 2 }));
    }

    #[test]
    fn a_missing_stage_is_named() {
        let pass = RowCost { one_ms: 1.0, many_ms: 2.0, rested_ms: 1.5 };
        let stages = [0..1, 1..2].map(|layers| StageTimes { layers, pass });
        assert_eq!(fit(&stages, 3), Err(FitError::Missing { missing: "last" }));
        assert_eq!(fit(&stages[..1], 3), Err(FitError::Missing { missing: "single" }));
        assert_eq!(fit(&[], 3), Err(FitError::Missing { missing: "first" }));
    }

    proptest! {
        #[test]
        fn a_probe_covers_every_layer(n_layers in 3_usize..200) {
            let split = probe_split(n_layers).expect("enough layers");
            prop_assert_eq!(split.iter().sum::<usize>(), n_layers);
            prop_assert!(split.iter().all(|&layers| layers > 0));
            prop_assert!(split.len() <= MIN_LAYERS + MAX_BLOCKS);
        }

        #[test]
        fn what_a_model_costs_is_found_again(
            n_layers in 5_usize..100,
            costs in [0.0_f64..1.0, 0.01..5.0, 0.0..1.0, 0.0..20.0],
            n_left_out in 0_usize..6,
        ) {
            let [call, layer, embedding, head] = costs;
            let split = probe_split(n_layers).expect("enough layers");
            let pass = |layers: &Range<usize>| {
                let mut ms = call + layer * layers.len() as f64;
                ms += if layers.start == 0 { embedding } else { 0.0 };
                ms += if layers.end == n_layers { head } else { 0.0 };
                RowCost { one_ms: ms, many_ms: 3.0 * ms, rested_ms: 1.5 * ms }
            };
            let mut stages: Vec<StageTimes> = ranges(&split)
                .into_iter()
                .map(|layers| StageTimes { pass: pass(&layers), layers })
                .collect();
            // A small node measures some blocks only.
            let n_blocks = split.len() - MIN_LAYERS;
            stages.drain(2..2 + n_left_out.min(n_blocks - 1));
            let fitted = fit(&stages, n_layers).expect("all kinds are there");
            let found = [fitted.call, fitted.layer, fitted.embedding, fitted.head];
            for (found, expected) in found.into_iter().zip(costs) {
                prop_assert!((found.one_ms - expected).abs() < 1e-9, "{fitted:?}");
                prop_assert!((found.many_ms - 3.0 * expected).abs() < 1e-8, "{fitted:?}");
                prop_assert!((found.rested_ms - 1.5 * expected).abs() < 1e-8, "{fitted:?}");
            }
        }
    }
}
