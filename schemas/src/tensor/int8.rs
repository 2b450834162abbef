//! Rows of hidden states as whole numbers of 8 bits: a quarter of the traffic, rounded.
//!
//! A few elements of a hidden state are hundreds of times as large as the others. A scale that
//! covers them would round everything beside them to nothing, so they travel whole, and the others
//! share a scale in small groups.
//!
//! **Source**: Dettmers et al., *LLM.int8(): 8-bit Matrix Multiplication for Transformers at
//! Scale*, NeurIPS 2022, for keeping outliers apart.
//!
//! **Layout** of a row, little-endian: the elements as `i8`; the scale of every
//! [`INT8_GROUP`] of them as bfloat16; the places of the outliers as `u32`, ascending; the outliers
//! as `f32`.

use super::{INT8_GROUP, int8_outliers};
use half::bf16;

/// Largest whole number used; with -128 left out, both signs round alike.
const LARGEST: f32 = 127.0;

/// Appends a row.
pub(super) fn encode(row: &[f32], bytes: &mut Vec<u8>) {
    let outliers = outliers(row);
    let mut rest = row.to_vec();
    for place in &outliers {
        rest[*place] = 0.0;
    }
    let mut scales = Vec::with_capacity(row.len().div_ceil(INT8_GROUP));
    for group in rest.chunks(INT8_GROUP) {
        let largest = group.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
        let scale = bf16::from_f32(largest / LARGEST);
        // The reader has the rounded scale.
        let step = f32::from(scale);
        bytes.extend(group.iter().map(|x| whole(*x, step).cast_unsigned()));
        scales.push(scale);
    }
    scales.iter().for_each(|scale| bytes.extend_from_slice(&scale.to_le_bytes()));
    for place in &outliers {
        let place = u32::try_from(*place).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&place.to_le_bytes());
    }
    outliers.iter().for_each(|place| bytes.extend_from_slice(&row[*place].to_le_bytes()));
}

/// Appends the elements of a row of `hidden_dim`; places beyond it are ignored.
pub(super) fn decode(bytes: &[u8], hidden_dim: usize, rows: &mut Vec<f32>) {
    let (n_scales, n_outliers) = (hidden_dim.div_ceil(INT8_GROUP), int8_outliers(hidden_dim));
    let Some((elements, bytes)) = bytes.split_at_checked(hidden_dim) else { return };
    let Some((scales, bytes)) = bytes.split_at_checked(2 * n_scales) else { return };
    let Some((places, values)) = bytes.split_at_checked(4 * n_outliers) else { return };
    let first = rows.len();
    for (group, scale) in elements.chunks(INT8_GROUP).zip(scales.as_chunks().0) {
        let step = f32::from(bf16::from_le_bytes(*scale));
        rows.extend(group.iter().map(|x| f32::from(x.cast_signed()) * step));
    }
    for (place, value) in places.as_chunks().0.iter().zip(values.as_chunks().0) {
        let place = u32::from_le_bytes(*place) as usize;
        if let Some(x) = rows.get_mut(first + place).filter(|_| place < hidden_dim) {
            *x = f32::from_le_bytes(*value);
        }
    }
}

/// Places of the largest elements, ascending; what is not a number counts as the largest.
fn outliers(row: &[f32]) -> Vec<usize> {
    let mut places: Vec<usize> = (0..row.len()).collect();
    let n = int8_outliers(row.len());
    if n < places.len() {
        let larger_first =
            |a: &usize, b: &usize| row[*b].abs().total_cmp(&row[*a].abs()).then(a.cmp(b));
        places.select_nth_unstable_by(n, larger_first);
        places.truncate(n);
    }
    places.sort_unstable();
    places
}

fn whole(x: f32, step: f32) -> i8 {
    if step <= 0.0 {
        return 0;
    }
    let whole = (x / step).round().clamp(-LARGEST, LARGEST);
    #[expect(clippy::cast_possible_truncation, reason = "a whole number within 127, or no number")]
    let whole = whole as i8;
    whole
}

#[cfg(test)]
mod tests {
    use super::super::Dtype;
    use super::*;

    /// A row like those of a real model: small elements and a few huge ones.
    fn row(hidden_dim: usize) -> Vec<f32> {
        let small = |i: usize| ((i * 7919) % 2001) as f32 / 1000.0 - 1.0;
        let huge = |i: usize| if i % 190 == 3 { 900.0 } else { 1.0 };
        (0..hidden_dim).map(|i| small(i) * huge(i)).collect()
    }

    fn there_and_back(row: &[f32]) -> Vec<f32> {
        let mut bytes = Vec::new();
        encode(row, &mut bytes);
        assert_eq!(bytes.len(), Dtype::Int8.row_bytes(row.len()));
        let mut back = Vec::new();
        decode(&bytes, row.len(), &mut back);
        back
    }

    #[test]
    fn small_elements_are_rounded_by_their_group_and_outliers_are_kept() {
        for hidden_dim in [1, 31, 32, 33, 576, 4096] {
            let row = row(hidden_dim);
            let kept = outliers(&row);
            for (i, (x, back)) in row.iter().zip(there_and_back(&row)).enumerate() {
                if kept.contains(&i) {
                    assert_eq!(x.to_bits(), back.to_bits(), "element {i}");
                } else {
                    let group = i / INT8_GROUP * INT8_GROUP;
                    let group = group..(group + INT8_GROUP).min(hidden_dim);
                    let left = group.filter(|i| !kept.contains(i)).map(|i| row[i].abs());
                    let largest = left.fold(0.0, f32::max);
                    assert!((x - back).abs() <= largest / 126.0, "element {i}: {x} became {back}");
                }
            }
        }
    }

    #[test]
    fn a_row_of_zeros_and_what_is_no_number_pass() {
        assert_eq!(there_and_back(&[0.0; 40]), [0.0; 40]);
        let mut row = vec![0.5; 300];
        row[7] = f32::NAN;
        row[8] = f32::INFINITY;
        let back = there_and_back(&row);
        assert!(back[7].is_nan() && back[8] == f32::INFINITY, "{back:?}");
        assert!((back[9] - 0.5).abs() < 0.01, "{}", back[9]);
    }

    #[test]
    fn places_beyond_the_row_change_nothing() {
        let mut bytes = Vec::new();
        encode(&row(64), &mut bytes);
        let at = 64 + 2 * 2;
        bytes[at..at + 4].copy_from_slice(&64_u32.to_le_bytes());
        let mut rows = vec![7.0; 3];
        decode(&bytes, 64, &mut rows);
        assert_eq!(rows.len(), 67);
        decode(&bytes[..10], 64, &mut rows);
        assert_eq!(rows.len(), 67, "a row that is cut off");
    }
}
