//! Codes matrices of floats in fewer bits while they are written.
//!
//! One pass over the rows: codes go to the weight file; scales and zero points, a few hundredths of
//! the matrix, are kept until they are all there.

use std::io;

use half::f16;

use super::rows::Rows;
use super::store::{Packed, Stored, decoded, pack_nibbles};
use crate::floats::{CodedTensor, FloatCoding};
use crate::ir::element::ElementType;
use crate::ir::graph::{Graph, Value};

/// Columns that share a scale, the most that divides a row: the fewer, the smaller the error.
const GROUP_LENS: [usize; 4] = [128, 64, 32, 16];

/// Shares of the plain scale that a search tries: below 1 the largest weights are cut off, which
/// pays where the others get finer steps.
const SCALE_SHARES: [f32; 10] = [0.72, 0.75, 0.78, 0.81, 0.84, 0.87, 0.9, 0.93, 0.96, 1.03];

/// What floats are coded in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code {
    pub(crate) coding: FloatCoding,
    pub(crate) search_scales: bool,
}

/// Writes a matrix of floats; returns what became of each of the stacked tensors too.
///
/// # Errors
/// The weight file cannot be written.
pub(crate) fn store_coded(
    graph: &mut Graph,
    rows: &Rows<'_>,
    code: Code,
) -> io::Result<(Stored, Vec<CodedTensor>)> {
    let group_len = GROUP_LENS.into_iter().find(|len| rows.n_cols().is_multiple_of(*len));
    let (mut coder, element) = match (code.coding, group_len) {
        (FloatCoding::Int4, Some(len)) => (Coder::symmetric(len, code), ElementType::I4),
        (FloatCoding::Int4Asym, Some(len)) => (Coder::asymmetric(len, code), ElementType::U4),
        (FloatCoding::Keep | FloatCoding::F16, _) => (Coder::halves(), ElementType::F16),
        // Rows that no group divides have 8 bits.
        (FloatCoding::Int8 | FloatCoding::Int4 | FloatCoding::Int4Asym, _) => {
            (Coder::rows(rows.n_cols()), ElementType::I8)
        }
    };
    let (mut values, mut bytes, mut report) = (Vec::new(), Vec::new(), Vec::new());
    let offset = graph.bin.start()?;
    for (tensor, tensor_rows) in rows.by_tensor() {
        let mut sums = ErrorSums::default();
        for row in tensor_rows {
            tensor.encoding.decode_floats(row, &mut values);
            bytes.clear();
            coder.row(&values, &mut bytes, &mut sums);
            graph.bin.write(&bytes)?;
        }
        report.push(sums.of(tensor.name, rows.n_cols(), coder.coding));
    }
    let codes = graph.bin.finish(offset);
    let (n_rows, n_cols) = (rows.n_rows() as u64, rows.n_cols() as u64);
    let dims = match coder.group_len {
        Some(len) if coder.coding != FloatCoding::Int8 => {
            vec![n_rows, n_cols / len as u64, len as u64]
        }
        _ => vec![n_rows, n_cols],
    };
    let codes = graph.constant_at(element, &dims, codes);
    let weights = coder.weights(graph, codes, (n_rows, n_cols))?;
    Ok((Stored { weights, correction: None }, report))
}

/// Codes rows, and keeps what their codes have to be multiplied with.
#[derive(Debug)]
struct Coder {
    coding: FloatCoding,
    /// Columns that share a scale; none without scales.
    group_len: Option<usize>,
    search: bool,
    codes: Vec<i8>,
    scales: Vec<f32>,
    zeros: Vec<i8>,
}

impl Coder {
    fn new(coding: FloatCoding, group_len: Option<usize>, search: bool) -> Self {
        let (codes, scales, zeros) = (Vec::new(), Vec::new(), Vec::new());
        Self { coding, group_len, search, codes, scales, zeros }
    }

    fn symmetric(group_len: usize, code: Code) -> Self {
        Self::new(FloatCoding::Int4, Some(group_len), code.search_scales)
    }

    fn asymmetric(group_len: usize, code: Code) -> Self {
        Self::new(FloatCoding::Int4Asym, Some(group_len), code.search_scales)
    }

    fn rows(n_cols: usize) -> Self {
        Self::new(FloatCoding::Int8, Some(n_cols), false)
    }

    fn halves() -> Self {
        Self::new(FloatCoding::F16, None, false)
    }

    /// Codes a row into bytes.
    fn row(&mut self, values: &[f32], bytes: &mut Vec<u8>, sums: &mut ErrorSums) {
        sums.n_rows += 1;
        let Some(group_len) = self.group_len else {
            for value in values {
                // What half precision cannot hold is cut off: an infinity would spread.
                let half = f16::from_f32(value.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()));
                sums.add(*value, half.to_f32());
                bytes.extend(half.to_le_bytes());
            }
            return;
        };
        self.codes.clear();
        for group in values.chunks_exact(group_len) {
            let found = self.grid(group);
            self.codes.extend(group.iter().map(|value| found.code(*value)));
            let codes = &self.codes[self.codes.len() - group_len..];
            for (value, code) in group.iter().zip(codes) {
                sums.add(*value, found.value(*code));
            }
            self.scales.push(found.scale);
            self.zeros.push(found.zero);
        }
        match self.coding {
            FloatCoding::Int8 => bytes.extend(self.codes.iter().map(|code| *code as u8)),
            _ => pack_nibbles(&self.codes, bytes),
        }
    }

    /// The grid of a group.
    fn grid(&self, group: &[f32]) -> Grid {
        let low = group.iter().fold(0.0_f32, |low, value| low.min(*value));
        let high = group.iter().fold(0.0_f32, |high, value| high.max(*value));
        match self.coding {
            FloatCoding::Int4Asym => {
                self.best(group, |share| Grid::between(low * share, high * share))
            }
            FloatCoding::Int4 => {
                // -8 is the largest code: it stands for the largest weight, whatever its sign.
                let largest = if -low > high { low } else { high };
                self.best(group, |share| Grid::four_bits(-largest * share / 8.0))
            }
            FloatCoding::Int8 | FloatCoding::F16 | FloatCoding::Keep => {
                Grid { scale: high.max(-low) / 127.0, zero: 0, least: -127, most: 127 }
            }
        }
    }

    /// The grid with the least error of those that a search tries, or the plain one.
    fn best(&self, group: &[f32], grid: impl Fn(f32) -> Grid) -> Grid {
        let plain = grid(1.0);
        if !self.search {
            return plain;
        }
        let mut best = (plain.error(group), plain);
        for share in SCALE_SHARES {
            let tried = grid(share);
            let error = tried.error(group);
            if error < best.0 {
                best = (error, tried);
            }
        }
        best.1
    }

    /// The graph that makes weights of codes.
    fn weights(
        self,
        graph: &mut Graph,
        codes: Value,
        (n_rows, n_cols): (u64, u64),
    ) -> io::Result<Value> {
        let Some(group_len) = self.group_len else {
            return Ok(graph.convert(codes, ElementType::F32));
        };
        let n_groups = n_cols / group_len as u64;
        if self.coding == FloatCoding::Int8 {
            let values = graph.convert(codes, ElementType::F32);
            let scales = graph.f32s(&[n_rows, n_groups], &self.scales)?;
            return Ok(graph.multiply(values, scales));
        }
        let by_group = [n_rows, n_groups, 1];
        let zeros = match self.coding {
            FloatCoding::Int4Asym => {
                let mut packed = Vec::new();
                pack_nibbles(&self.zeros, &mut packed);
                let span = graph.bin.store(&packed)?;
                Some(graph.constant_at(ElementType::U4, &by_group, span))
            }
            _ => None,
        };
        let scales: Vec<u8> =
            self.scales.iter().flat_map(|scale| f16::from_f32(*scale).to_le_bytes()).collect();
        let scales = graph.bin.store(&scales)?;
        let scales = graph.constant_at(ElementType::F16, &by_group, scales);
        decoded(graph, Packed { codes, zeros, scales }, (n_rows, n_cols))
    }
}

/// The values that the codes of a group stand for: `scale * (code - zero)`.
#[derive(Clone, Copy, Debug)]
struct Grid {
    scale: f32,
    zero: i8,
    least: i8,
    most: i8,
}

impl Grid {
    /// Symmetric, in 4 bits.
    fn four_bits(scale: f32) -> Self {
        Self { scale: as_half(scale), zero: 0, least: -8, most: 7 }
    }

    /// From one number to another, in 4 bits; 0 lies between them and has a code of its own.
    fn between(low: f32, high: f32) -> Self {
        let scale = as_half((high - low) / 15.0);
        let zero = if scale > 0.0 { (-low / scale).round().clamp(0.0, 15.0) } else { 0.0 };
        Self { scale, zero: zero as i8, least: 0, most: 15 }
    }

    fn code(&self, value: f32) -> i8 {
        if self.scale.abs() > 0.0 {
            let code = (value / self.scale).round() + f32::from(self.zero);
            code.clamp(f32::from(self.least), f32::from(self.most)) as i8
        } else {
            self.zero
        }
    }

    fn value(&self, code: i8) -> f32 {
        self.scale * f32::from(code - self.zero)
    }

    /// Sum of the squares of what changes in a group.
    fn error(&self, group: &[f32]) -> f32 {
        group.iter().map(|value| (value - self.value(self.code(*value))).powi(2)).sum()
    }
}

/// The nearest half-precision number that is finite.
fn as_half(value: f32) -> f32 {
    f16::from_f32(value.clamp(f16::MIN.to_f32(), f16::MAX.to_f32())).to_f32()
}

/// What changes in a tensor.
#[derive(Debug, Default)]
struct ErrorSums {
    n_rows: usize,
    weights: f64,
    errors: f64,
    largest: f32,
}

impl ErrorSums {
    fn add(&mut self, before: f32, after: f32) {
        let error = (before - after).abs();
        self.weights += f64::from(before).powi(2);
        self.errors += f64::from(error).powi(2);
        self.largest = self.largest.max(error);
    }

    fn of(self, name: &str, n_cols: usize, coding: FloatCoding) -> CodedTensor {
        let relative_error =
            if self.weights > 0.0 { (self.errors / self.weights).sqrt() } else { 0.0 };
        CodedTensor {
            name: name.to_owned(),
            n_rows: self.n_rows,
            n_cols,
            coding,
            relative_error,
            largest_error: self.largest,
        }
    }
}

#[cfg(test)]
mod tests;
