//! Checks that the constants of a stored matrix give its values back, by evaluating the graph.

use half::f16;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::gguf::{GgmlType, Gguf};
use crate::ir::bin::BinWriter;
use crate::manifest::WeightMode;
use crate::tensor::{Encoding, Tensor};
use crate::weights::layout::layout;
use crate::weights::rows::RowOrder;

/// A GGUF file with the single tensor `w`.
fn gguf_with(ggml_type: GgmlType, n_cols: u64, n_rows: u64, data: &[u8], dir: &TempDir) -> Gguf {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    bytes.extend(1_u64.to_le_bytes());
    bytes.push(b'w');
    bytes.extend(2_u32.to_le_bytes());
    bytes.extend(n_cols.to_le_bytes());
    bytes.extend(n_rows.to_le_bytes());
    bytes.extend((ggml_type as u32).to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(data);
    let path = dir.path().join("w.gguf");
    std::fs::write(&path, bytes).unwrap();
    Gguf::open(path).unwrap()
}

/// What a stored matrix evaluates to, in f64: weights plus correction.
fn evaluate(graph: Graph, stored: Stored, n_cols: usize, bin: &std::path::Path) -> Vec<f64> {
    let nodes = graph.evaluate_on_close(
        &[Some(stored.weights), stored.correction.map(|correction| correction.values)],
        bin,
    );
    let mut weights = nodes[0].clone().unwrap();
    if let (Some(correction), Some(values)) = (stored.correction, &nodes[1]) {
        let n_groups = n_cols / correction.group_len;
        for (index, weight) in weights.iter_mut().enumerate() {
            let (row, col) = (index / n_cols, index % n_cols);
            *weight += values[row * n_groups + col / correction.group_len];
        }
    }
    weights
}

fn store_and_evaluate(
    ggml_type: GgmlType,
    mode: WeightMode,
    n_cols: usize,
    data: &[u8],
    order: RowOrder<'_>,
) -> (Vec<f64>, Vec<f32>) {
    let dir = TempDir::new().unwrap();
    let row_bytes = n_cols / ggml_type.block_len() as usize * ggml_type.block_bytes() as usize;
    let n_rows = data.len() / row_bytes;
    let gguf = gguf_with(ggml_type, n_cols as u64, n_rows as u64, data, &dir);
    let size = (n_rows, n_cols);
    let place = gguf.place(gguf.tensor("w").unwrap());
    let encoding = Encoding::Ggml(ggml_type);
    let tensor = Tensor::new("w", encoding, size, place);
    let rows = Rows::stack(&[(tensor, order, n_rows)]);
    let path = dir.path().join("w.bin");
    let mut graph = Graph::new(BinWriter::create(&path).unwrap());
    let stored = store(&mut graph, &rows, layout(encoding, mode).unwrap()).unwrap();
    let found = evaluate(graph, stored, n_cols, &path);
    let mut expected = vec![0.0; n_rows * n_cols];
    for (row, values) in expected.chunks_exact_mut(n_cols).enumerate() {
        let bytes = &data[order.source_row(row) * row_bytes..][..row_bytes];
        decode(ggml_type, bytes, values);
    }
    (found, expected)
}

/// The values of a row as the format defines them.
fn decode(ggml_type: GgmlType, row: &[u8], values: &mut [f32]) {
    match ggml_type {
        GgmlType::F32 => {
            for (value, b) in values.iter_mut().zip(row.chunks_exact(4)) {
                *value = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        GgmlType::F16 => {
            for (value, b) in values.iter_mut().zip(row.chunks_exact(2)) {
                *value = f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        GgmlType::BF16 => {
            for (value, b) in values.iter_mut().zip(row.chunks_exact(2)) {
                *value = half::bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        _ => BlockFormat::from_ggml(ggml_type).unwrap().values(row, values),
    }
}

const TYPES: [GgmlType; 11] = [
    GgmlType::F32,
    GgmlType::F16,
    GgmlType::BF16,
    GgmlType::Q8_0,
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q4_K,
    GgmlType::Q5_K,
    GgmlType::Q6_K,
];

/// Rows of random blocks whose floats are finite: `small` keeps exponents near each other, as in
/// real models; otherwise every finite f16 occurs.
fn rows(ggml_type: GgmlType, n_rows: usize, small: bool) -> impl Strategy<Value = Vec<u8>> {
    let block_bytes = ggml_type.block_bytes() as usize;
    let n_bytes = 256 / ggml_type.block_len() as usize * block_bytes * n_rows;
    let floats: &[usize] = match ggml_type {
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => &[],
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4_K | GgmlType::Q5_K => &[0, 2],
        GgmlType::Q6_K => &[208],
        _ => &[0],
    };
    proptest::collection::vec(any::<u8>(), n_bytes).prop_map(move |mut bytes| {
        match ggml_type {
            GgmlType::F32 => bytes.chunks_exact_mut(4).for_each(|b| b[3] &= 0b1011_1111),
            GgmlType::F16 | GgmlType::BF16 => {
                bytes.chunks_exact_mut(2).for_each(|b| b[1] &= 0b1011_1111);
            }
            _ => {}
        }
        for block in bytes.chunks_exact_mut(block_bytes) {
            for field in floats {
                block[field + 1] &= 0b1011_1111;
                if small {
                    // Exponents 8 to 11 of 31.
                    block[field + 1] = block[field + 1] & 0b1000_1111 | 0b0010_0000;
                }
            }
        }
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Codes, scales and corrections are summed in f64, where nothing is lost, and rounded once:
    /// that is the f32 weight.
    #[test]
    fn exact_mode_gives_every_weight_back_bit_for_bit(
        (ggml_type, data) in (proptest::sample::select(&TYPES), any::<bool>())
            .prop_flat_map(|(ggml_type, small)| (Just(ggml_type), rows(ggml_type, 3, small)))
    ) {
        let (found, expected) =
            store_and_evaluate(ggml_type, WeightMode::Exact, 256, &data, RowOrder::Plain);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let found = *found as f32 + 0.0;
            prop_assert_eq!(found.to_bits(), (expected + 0.0).to_bits(), "{} {}", ggml_type, index);
        }
    }

    #[test]
    fn near_lossless_mode_stays_within_half_a_step_of_eight_bits(
        (ggml_type, data) in proptest::sample::select(&TYPES)
            .prop_flat_map(|ggml_type| (Just(ggml_type), rows(ggml_type, 2, true)))
    ) {
        let mode = WeightMode::NearLossless;
        let (found, expected) = store_and_evaluate(ggml_type, mode, 256, &data, RowOrder::Plain);
        for (found, expected) in found.chunks(32).zip(expected.chunks(32)) {
            let largest = expected.iter().fold(0.0_f32, |l, w| l.max(w.abs()));
            // Half a step, and the step itself is rounded to f16.
            let bound = f64::from(largest) * (0.5 / 127.0 + 0.001) + 1e-30;
            for (found, expected) in found.iter().zip(expected) {
                prop_assert!((found - f64::from(*expected)).abs() <= bound, "{}", ggml_type);
            }
        }
    }
}

#[test]
fn compact_mode_rounds_zero_points() {
    // d = 1, m = -7.25: the zero point becomes 7, so every weight moves by a quarter of a step.
    let mut block = f16::from_f32(1.0).to_le_bytes().to_vec();
    block.extend(f16::from_f32(-7.25).to_le_bytes());
    block.extend((0..16_u8).map(|i| i | i << 4));
    let (found, expected) =
        store_and_evaluate(GgmlType::Q4_1, WeightMode::Compact, 32, &block, RowOrder::Plain);
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - f64::from(expected) - 0.25).abs() < 1e-12);
    }
}

#[test]
fn interleaved_rows_come_out_as_halves() {
    let data: Vec<u8> = (0..8_u8).flat_map(|row| f32::from(row).to_le_bytes()).collect();
    // Two heads of four rows, of which two rotate in the first case and all in the second.
    for (rotary_dim, expected) in
        [(2, [0., 1., 2., 3., 4., 5., 6., 7.]), (4, [0., 2., 1., 3., 4., 6., 5., 7.])]
    {
        let order = RowOrder::InterleavedPairs { head_dim: 4, rotary_dim };
        let (found, _) = store_and_evaluate(GgmlType::F32, WeightMode::Exact, 1, &data, order);
        assert_eq!(found, expected);
    }
}

#[test]
fn row_scaled_matrices_give_code_times_scale_in_the_order_asked_for() {
    let dir = TempDir::new().unwrap();
    let (n_rows, n_cols) = (5, 6);
    let codes: Vec<i8> = (0..n_rows * n_cols).map(|idx| (idx * 37 % 256) as u8 as i8).collect();
    let scales: Vec<f32> = (0..n_rows).map(|row| 0.01 * (row + 1) as f32).collect();
    let source = dir.path().join("codes");
    std::fs::write(&source, codes.iter().map(|code| *code as u8).collect::<Vec<u8>>()).unwrap();
    let map = crate::map::Map::open(&source).unwrap();
    let scale_bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let tensor = Tensor::new("w", Encoding::RowScaledI8, (n_rows, n_cols), (&map, 0..codes.len()));
    let tensor = tensor.with_scales(&scale_bytes);
    for order in [RowOrder::Plain, RowOrder::Picked(&[0, 2, 3])] {
        let n_taken = if order == RowOrder::Plain { n_rows } else { 3 };
        let rows = Rows::stack(&[(tensor, order, n_taken)]);
        let path = dir.path().join("w.bin");
        let mut graph = Graph::new(BinWriter::create(&path).unwrap());
        let layout = layout(rows.encoding(), WeightMode::Compact).unwrap();
        let stored = store(&mut graph, &rows, layout).unwrap();
        let found = evaluate(graph, stored, n_cols, &path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(found.len(), n_taken * n_cols);
        for (idx, value) in found.into_iter().enumerate() {
            let row = order.source_row(idx / n_cols);
            let code = codes[row * n_cols + idx % n_cols];
            let expected = f64::from(code) * f64::from(scales[row]);
            assert!((value - expected).abs() < 1e-12, "row {row}: {value} against {expected}");
        }
    }
}
