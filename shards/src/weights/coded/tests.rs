//! Codings: what the graph gives back, what is reported, and what a search is worth.

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::gguf::GgmlType;
use crate::ir::bin::BinWriter;
use crate::map::Map;
use crate::tensor::{Encoding, Tensor};
use crate::weights::rows::RowOrder;

/// Codes a matrix of f32; returns what the graph makes of it, and the report.
fn coded(values: &[f32], n_cols: usize, code: Code) -> (Vec<f64>, CodedTensor) {
    let dir = TempDir::new().unwrap();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let path = dir.path().join("w");
    std::fs::write(&path, &bytes).unwrap();
    let map = Map::open(&path).unwrap();
    let n_rows = values.len() / n_cols;
    let encoding = Encoding::Ggml(GgmlType::F32);
    let tensor = Tensor::new("w", encoding, (n_rows, n_cols), (&map, 0..bytes.len()));
    let rows = Rows::stack(&[(tensor, RowOrder::Plain, n_rows)]);
    let bin = dir.path().join("w.bin");
    let mut graph = Graph::new(BinWriter::create(&bin).unwrap());
    let (stored, mut report) = store_coded(&mut graph, &rows, code).unwrap();
    assert!(stored.correction.is_none());
    let found = graph.evaluate_on_close(&[Some(stored.weights)], &bin).remove(0).unwrap();
    assert_eq!(report.len(), 1);
    (found, report.remove(0))
}

fn plain(coding: FloatCoding) -> Code {
    Code { coding, search_scales: false }
}

/// The report by definition, from what the graph gives back.
fn errors(values: &[f32], found: &[f64]) -> (f64, f64) {
    let pairs = || values.iter().map(|value| f64::from(*value)).zip(found);
    let squares: f64 = pairs().map(|(a, b)| (a - b).powi(2)).sum();
    let all: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    let largest = pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    (if all > 0.0 { (squares / all).sqrt() } else { 0.0 }, largest)
}

fn check(values: &[f32], n_cols: usize, code: Code) -> CodedTensor {
    let (found, report) = coded(values, n_cols, code);
    let (relative, largest) = errors(values, &found);
    // The graph's values are taken in f64 here and in f32 for the report.
    assert!((report.relative_error - relative).abs() < 1e-6, "{report:?}, {relative}");
    assert!((f64::from(report.largest_error) - largest).abs() < 1e-6, "{report:?}, {largest}");
    assert_eq!((&*report.name, report.n_cols), ("w", n_cols));
    assert_eq!(report.n_rows * n_cols, values.len());
    report
}

/// Numbers like those of a trained matrix: most are small, a few are large.
fn bell(n: usize) -> Vec<f32> {
    let mut state = 7_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n).map(|_| (0..8).map(|_| next()).sum::<f32>() * 0.05).collect()
}

#[test]
fn fewer_bits_make_larger_errors_and_a_search_smaller_ones() {
    let values = bell(64 * 256);
    let error = |coding| check(&values, 256, plain(coding)).relative_error;
    let (f16, int8) = (error(FloatCoding::F16), error(FloatCoding::Int8));
    let (asym, int4) = (error(FloatCoding::Int4Asym), error(FloatCoding::Int4));
    assert!(f16 < 1e-3 && f16 < int8 && int8 < 0.02 && int8 < asym, "{f16} {int8} {asym}");
    assert!((0.05..0.15).contains(&asym) && asym <= int4 && int4 < 0.15, "{asym} {int4}");
    for coding in [FloatCoding::Int4, FloatCoding::Int4Asym] {
        let searched = check(&values, 256, Code { coding, search_scales: true });
        let before = error(coding);
        assert!(searched.relative_error < 0.97 * before, "{searched:?}, {before} without");
    }
}

#[test]
fn what_a_coding_can_express_is_exact() {
    let steps: Vec<f32> = (0..256).map(|idx| (idx % 16) as f32 * 0.25 - 2.0).collect();
    for coding in [FloatCoding::F16, FloatCoding::Int4] {
        assert!(check(&steps, 128, plain(coding)).largest_error <= 0.0, "{coding}");
    }
    let upwards: Vec<f32> = steps.iter().map(|value| value + 2.0).collect();
    assert!(check(&upwards, 128, plain(FloatCoding::Int4Asym)).largest_error <= 0.0);
    let zeros = [0.0; 64];
    for coding in [FloatCoding::F16, FloatCoding::Int8, FloatCoding::Int4, FloatCoding::Int4Asym] {
        assert!(check(&zeros, 32, plain(coding)).largest_error <= 0.0, "{coding}");
    }
}

#[test]
fn rows_that_no_group_divides_have_eight_bits() {
    let values = bell(5 * 24);
    assert_eq!(check(&values, 24, plain(FloatCoding::Int4)).coding, FloatCoding::Int8);
    assert_eq!(check(&values, 60, plain(FloatCoding::Int4Asym)).coding, FloatCoding::Int8);
    assert_eq!(check(&bell(5 * 48), 48, plain(FloatCoding::Int4)).coding, FloatCoding::Int4);
}

#[test]
fn what_half_precision_cannot_hold_is_cut_off() {
    let (found, report) = coded(&[1e6, -1e6, 1.0, 0.0], 4, plain(FloatCoding::F16));
    assert_eq!(found, [65504.0, -65504.0, 1.0, 0.0]);
    assert!(report.largest_error > 9e5);
}

proptest! {
    #[test]
    fn no_weight_moves_by_more_than_a_step(values in prop::collection::vec(-3.0_f32..3.0, 64)) {
        let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        let four = check(&values, 64, plain(FloatCoding::Int4));
        // The side without the largest weight ends a step early.
        prop_assert!(four.largest_error <= largest / 8.0 * 1.01);
        let eight = check(&values, 64, plain(FloatCoding::Int8));
        prop_assert!(eight.largest_error <= largest / 127.0 * 0.501);
        let asymmetric = check(&values, 64, plain(FloatCoding::Int4Asym));
        prop_assert!(asymmetric.largest_error <= 2.0 * largest / 15.0 * 1.01);
        let code = Code { coding: FloatCoding::Int4, search_scales: true };
        let searched = check(&values, 64, code);
        prop_assert!(searched.relative_error <= four.relative_error * 1.000_001);
    }
}
