//! Checks splits against brute force.

use proptest::prelude::*;

use super::*;

fn part(n_bytes: u64) -> Part {
    Part { n_bytes, n_weights: 2 * n_bytes }
}

fn costs_of(layers: &[u64], head: u64) -> Costs {
    let layers: Vec<Part> = layers.iter().copied().map(part).collect();
    Costs::new(&layers, part(head))
}

/// The smallest possible largest cost, by trying every cut.
fn best_largest(costs: &Costs, start: usize, n_stages: usize) -> u64 {
    let n_layers = costs.layers.len();
    if n_stages == 1 {
        return costs.of(&(start..n_layers));
    }
    (start + 1..=n_layers - (n_stages - 1))
        .map(|end| costs.of(&(start..end)).max(best_largest(costs, end, n_stages - 1)))
        .min()
        .unwrap()
}

proptest! {
    #[test]
    fn split_by_cost_is_contiguous_complete_and_best(
        layers in proptest::collection::vec(0_u64..50_000_000, 1..9),
        head in 0_u64..200_000_000,
        n_stages in 1_usize..9,
    ) {
        let costs = costs_of(&layers, head);
        let n_layers = layers.len();
        let split = by_cost(&costs, n_stages);
        if n_stages > n_layers {
            prop_assert_eq!(split, Err(SplitError::StageCount { n_stages, n_layers }));
            return Ok(());
        }
        let split = split.unwrap();
        prop_assert_eq!(split.len(), n_stages);
        let mut end = 0;
        for range in &split {
            prop_assert_eq!(range.start, end);
            prop_assert!(range.end > range.start);
            end = range.end;
        }
        prop_assert_eq!(end, n_layers);
        let largest = split.iter().map(|range| costs.of(range)).max().unwrap();
        prop_assert_eq!(largest, best_largest(&costs, 0, n_stages));
        let shares: f64 = split.iter().map(|range| costs.share(range)).sum();
        prop_assert!((shares - 1.0).abs() < 1e-9);
    }
}

#[test]
fn equal_layers_without_a_head_split_evenly() {
    let costs = costs_of(&[1_000_000; 12], 0);
    let lengths: Vec<_> = by_cost(&costs, 5).unwrap().iter().map(ExactSizeIterator::len).collect();
    assert_eq!(lengths.iter().max(), Some(&3));
    assert_eq!(lengths.iter().min(), Some(&2));
}

#[test]
fn the_head_makes_the_last_stage_short() {
    // Ten equal layers and a head as expensive as four: 14 parts, at most five to a stage.
    let layer = Costs::new(&[part(1_000_000)], part(0)).layers[0];
    let head = Part { n_bytes: 4 * layer, n_weights: 0 };
    let costs = Costs::new(&[part(1_000_000); 10], head);
    let lengths: Vec<_> = by_cost(&costs, 3).unwrap().iter().map(ExactSizeIterator::len).collect();
    assert_eq!(lengths.iter().max(), Some(&5));
    assert_eq!(lengths.last(), Some(&1));
}

#[test]
fn a_model_of_small_layers_is_balanced_for_many_sessions() {
    // SmolLM2-135M with 4-bit layers and an 8-bit head.
    let layer = Part { n_bytes: 2_200_000, n_weights: 3_540_000 };
    let head = Part { n_bytes: 30_000_000, n_weights: 28_300_000 };
    let split = by_cost(&Costs::new(&[layer; 30], head), 2).unwrap();
    assert_eq!(split, [0..18, 18..30]);
}

#[test]
fn splits_by_hand_are_checked() {
    let check = |split: &[usize], n_stages, expected| {
        assert_eq!(by_hand(split, n_stages, 30), expected);
    };
    check(&[16, 14], 2, Ok(vec![0..16, 16..30]));
    check(&[30], 1, Ok(std::iter::once(0..30).collect()));
    check(&[], 0, Err(SplitError::StageCount { n_stages: 0, n_layers: 30 }));
    check(&[1; 31], 31, Err(SplitError::StageCount { n_stages: 31, n_layers: 30 }));
    check(&[16, 14], 3, Err(SplitError::Length { found: 2, n_stages: 3 }));
    check(&[30, 0], 2, Err(SplitError::EmptyStage { stage: 1 }));
    check(&[16, 15], 2, Err(SplitError::Sum { found: 31, n_layers: 30 }));
    check(&[usize::MAX, 31], 2, Err(SplitError::Sum { found: usize::MAX, n_layers: 30 }));
}
