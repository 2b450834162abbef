//! Writes a matrix into the weight file and builds the graph that gives its values back.

use std::io;

use half::f16;

use super::layout::{Coding, Grouped, Layout};
use super::rows::Rows;
use crate::ir::element::ElementType;
use crate::ir::graph::{Graph, Value};
use crate::quant::BlockFormat;

/// Bytes of a matrix that stay mapped while it is read.
const HELD_BYTES: usize = 64 << 20;

/// A matrix in the graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored {
    /// The weights, f32 `[n_rows, n_cols]`; without the correction's part if there is one.
    pub(crate) weights: Value,
    /// What is added per group of columns.
    pub(crate) correction: Option<Correction>,
}

/// The constant part of each group: `weights[r][c] += values[r][c / group_len]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Correction {
    /// f32 `[n_rows, n_cols / group_len]`.
    pub(crate) values: Value,
    pub(crate) group_len: usize,
}

/// Writes a matrix in the given layout.
///
/// # Errors
/// The weight file cannot be written.
pub(crate) fn store(graph: &mut Graph, rows: &Rows<'_>, layout: Layout) -> io::Result<Stored> {
    match layout {
        Layout::Plain(element) => store_plain(graph, rows, element),
        Layout::Grouped(grouped) => store_grouped(graph, rows, grouped),
        Layout::RowScaled => store_row_scaled(graph, rows),
    }
}

fn store_plain(graph: &mut Graph, rows: &Rows<'_>, element: ElementType) -> io::Result<Stored> {
    let dims = [rows.n_rows() as u64, rows.n_cols() as u64];
    let offset = graph.bin.start()?;
    copy_rows(graph, rows)?;
    let span = graph.bin.finish(offset);
    let constant = graph.constant_at(element, &dims, span);
    let weights = match element {
        ElementType::F32 => constant,
        _ => graph.convert(constant, ElementType::F32),
    };
    Ok(Stored { weights, correction: None })
}

fn store_row_scaled(graph: &mut Graph, rows: &Rows<'_>) -> io::Result<Stored> {
    let (n_rows, n_cols) = (rows.n_rows() as u64, rows.n_cols() as u64);
    let offset = graph.bin.start()?;
    copy_rows(graph, rows)?;
    let codes = graph.bin.finish(offset);
    let codes = graph.constant_at(ElementType::I8, &[n_rows, n_cols], codes);
    let offset = graph.bin.start()?;
    for scale in rows.row_scales() {
        graph.bin.write(scale)?;
    }
    let scales = graph.bin.finish(offset);
    let scales = graph.constant_at(ElementType::F32, &[n_rows, 1], scales);
    let values = graph.convert(codes, ElementType::F32);
    Ok(Stored { weights: graph.multiply(values, scales), correction: None })
}

/// Writes the bytes of all rows as they are.
fn copy_rows(graph: &mut Graph, rows: &Rows<'_>) -> io::Result<()> {
    read_rows(rows, |row| graph.bin.write(row))
}

/// Reads all rows, and gives their pages back on the way: whoever reads them again finds them in the
/// system's cache, if there is room.
fn read_rows<'a, E>(
    rows: &Rows<'a>,
    mut read: impl FnMut(&'a [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut held = 0;
    for row in rows.iter() {
        read(row)?;
        held += row.len();
        if held >= HELD_BYTES {
            rows.release();
            held = 0;
        }
    }
    Ok(())
}

fn store_grouped(graph: &mut Graph, rows: &Rows<'_>, grouped: Grouped) -> io::Result<Stored> {
    let Grouped { format, coding, code, scale } = without_rounding(rows, grouped);
    let group_len = format.group_len();
    let (n_rows, n_cols) = (rows.n_rows() as u64, rows.n_cols() as u64);
    let n_groups = n_cols / group_len as u64;
    let by_group = [n_rows, n_groups, 1];

    let mut coder = RowCoder::new(format, rows.n_cols());
    let (mut encoded, mut behind) = (Vec::new(), Behind::default());
    let offset = graph.bin.start()?;
    read_rows(rows, |row| {
        encoded.clear();
        coder.codes(row, coding, code, &mut encoded);
        coder.scales(row, coding, scale, &mut behind.scales);
        match coding {
            Coding::ZeroPoint => coder.zeros(row, code, &mut behind.zeros),
            Coding::Centred { shift } => coder.corrections(row, shift, &mut behind.corrections),
            Coding::Same | Coding::Recoded => {}
        }
        graph.bin.write(&encoded)
    })?;
    let codes = graph.bin.finish(offset);
    let codes = graph.constant_at(code, &[n_rows, n_groups, group_len as u64], codes);
    let mut zeros = None;
    if coding == Coding::ZeroPoint {
        let span = graph.bin.put(&behind.zeros)?;
        zeros = Some(graph.constant_at(code, &by_group, span));
    }
    let scales = graph.bin.put(&behind.scales)?;
    let scales = graph.constant_at(scale, &by_group, scales);
    let weights = decoded(graph, Packed { codes, zeros, scales }, (n_rows, n_cols))?;
    let correction = match coding {
        Coding::Centred { .. } => {
            let values = graph.bin.put(&behind.corrections)?;
            let values = graph.constant_at(ElementType::F32, &[n_rows, n_groups], values);
            Some(Correction { values, group_len })
        }
        Coding::Same | Coding::ZeroPoint | Coding::Recoded => None,
    };
    Ok(Stored { weights, correction })
}

/// What is written behind the codes of a matrix, a fraction of their size.
#[derive(Debug, Default)]
struct Behind {
    zeros: Vec<u8>,
    scales: Vec<u8>,
    corrections: Vec<u8>,
}

/// The constants of a matrix in groups of columns: codes `[n_rows, n_groups, group_len]`, zero points
/// (of the codes' type) and scales `[n_rows, n_groups, 1]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    pub(super) codes: Value,
    pub(super) zeros: Option<Value>,
    pub(super) scales: Value,
}

/// The graph of `scale * (code - zero)`, f32 `[n_rows, n_cols]`, in the form that OpenVINO takes for
/// compressed weights.
pub(super) fn decoded(
    graph: &mut Graph,
    Packed { codes, zeros, scales }: Packed,
    (n_rows, n_cols): (u64, u64),
) -> io::Result<Value> {
    let element = scales.element();
    let mut weights = graph.convert(codes, element);
    if let Some(zeros) = zeros {
        let zeros = graph.convert(zeros, element);
        weights = graph.subtract(weights, zeros);
    }
    weights = graph.multiply(weights, scales);
    weights = graph.reshape(weights, &[n_rows as i64, n_cols as i64])?;
    if element != ElementType::F32 {
        weights = graph.convert(weights, ElementType::F32);
    }
    Ok(weights)
}

/// A row has a correction that f32 would round.
struct Rounded;

/// Leaves codes as they are where centring them would round a correction.
///
/// `offset + shift * scale` is exact in f32 unless the two differ by many powers of two, which
/// real models rarely do; the offset alone is always exact.
fn without_rounding(rows: &Rows<'_>, grouped: Grouped) -> Grouped {
    let Coding::Centred { shift } = grouped.coding else { return grouped };
    let mut coder = RowCoder::new(grouped.format, rows.n_cols());
    let check = |row: &[u8]| match coder.corrections_are_exact(row, shift) {
        true => Ok(()),
        false => Err(Rounded),
    };
    if read_rows(rows, check).is_ok() {
        return grouped;
    }
    let code = if grouped.code == ElementType::I4 { ElementType::U4 } else { grouped.code };
    Grouped { coding: Coding::Centred { shift: 0 }, code, ..grouped }
}

/// Encodes rows of one format; keeps its buffers from row to row.
#[derive(Debug)]
pub(crate) struct RowCoder {
    format: BlockFormat,
    codes: Vec<i8>,
    scales: Vec<f32>,
    offsets: Vec<f32>,
    values: Vec<f32>,
}

impl RowCoder {
    pub(crate) fn new(format: BlockFormat, n_cols: usize) -> Self {
        let n_groups = n_cols / format.group_len();
        Self {
            format,
            codes: vec![0; n_cols],
            scales: vec![0.0; n_groups],
            offsets: vec![0.0; n_groups],
            values: vec![0.0; n_cols],
        }
    }

    fn decode_scales(&mut self, row: &[u8]) {
        self.format.scales(row, &mut self.scales, &mut self.offsets);
    }

    /// The codes of a row, packed.
    pub(crate) fn codes(
        &mut self,
        row: &[u8],
        coding: Coding,
        element: ElementType,
        out: &mut Vec<u8>,
    ) {
        let is_signed = !self.format.has_offset();
        let in_four_bits = match (element, coding) {
            (ElementType::I4, Coding::Same) => Some(is_signed),
            (ElementType::I4, Coding::Centred { shift: 8 }) => Some(true),
            (ElementType::U4, Coding::Centred { shift: 0 } | Coding::ZeroPoint) => Some(false),
            _ => None,
        };
        if let Some(less_eight) = in_four_bits
            && self.format.packed_codes(row, less_eight, out)
        {
            return;
        }
        match coding {
            Coding::Same | Coding::ZeroPoint => self.format.codes(row, &mut self.codes),
            Coding::Centred { shift } => {
                self.format.codes(row, &mut self.codes);
                for code in &mut self.codes {
                    *code -= shift;
                }
            }
            Coding::Recoded => self.recode(row),
        }
        match element {
            ElementType::I4 | ElementType::U4 => pack_nibbles(&self.codes, out),
            _ => out.extend(self.codes.iter().map(|code| *code as u8)),
        }
    }

    /// Fills `codes` with the symmetric eight-bit codes of the row's values, and `scales`.
    fn recode(&mut self, row: &[u8]) {
        self.format.values(row, &mut self.values);
        let group_len = self.format.group_len();
        let groups =
            self.values.chunks_exact(group_len).zip(self.codes.chunks_exact_mut(group_len));
        for ((values, codes), scale) in groups.zip(&mut self.scales) {
            let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            *scale = f16::from_f32(largest / 127.0).to_f32();
            let inverse = if *scale > 0.0 { 1.0 / *scale } else { 0.0 };
            for (code, value) in codes.iter_mut().zip(values) {
                *code = (value * inverse).round().clamp(-127.0, 127.0) as i8;
            }
        }
    }

    /// The scales of a row.
    pub(crate) fn scales(
        &mut self,
        row: &[u8],
        coding: Coding,
        element: ElementType,
        out: &mut Vec<u8>,
    ) {
        match coding {
            Coding::Recoded => self.recode(row),
            Coding::Same | Coding::Centred { .. } | Coding::ZeroPoint => self.decode_scales(row),
        }
        for scale in &self.scales {
            match element {
                ElementType::F16 => out.extend(f16::from_f32(*scale).to_le_bytes()),
                _ => out.extend(scale.to_le_bytes()),
            }
        }
    }

    /// The integer zero points of a row, packed: `-offset / scale`, rounded to what fits.
    pub(crate) fn zeros(&mut self, row: &[u8], element: ElementType, out: &mut Vec<u8>) {
        self.decode_scales(row);
        let largest = if element == ElementType::U4 { 15.0 } else { 127.0 };
        let zeros: Vec<i8> = self
            .scales
            .iter()
            .zip(&self.offsets)
            .map(|(scale, offset)| {
                let zero = if *scale == 0.0 { 0.0 } else { -offset / scale };
                zero.round().clamp(0.0, largest) as i8
            })
            .collect();
        match element {
            ElementType::U4 => pack_nibbles(&zeros, out),
            _ => out.extend(zeros.iter().map(|zero| *zero as u8)),
        }
    }

    /// Whether no correction of a row is rounded in f32.
    fn corrections_are_exact(&mut self, row: &[u8], shift: i8) -> bool {
        self.decode_scales(row);
        self.scales.iter().zip(&self.offsets).all(|(scale, offset)| {
            let rounded = offset + f32::from(shift) * scale;
            let exact = f64::from(*offset) + f64::from(shift) * f64::from(*scale);
            f64::from(rounded).to_bits() == exact.to_bits()
        })
    }

    /// The corrections of a row, f32: what is left of the offsets when codes are centred.
    pub(crate) fn corrections(&mut self, row: &[u8], shift: i8, out: &mut Vec<u8>) {
        self.decode_scales(row);
        for (scale, offset) in self.scales.iter().zip(&self.offsets) {
            out.extend((offset + f32::from(shift) * scale).to_le_bytes());
        }
    }
}

/// Two codes per byte, the first in the low nibble.
pub(super) fn pack_nibbles(codes: &[i8], out: &mut Vec<u8>) {
    let (pairs, rest) = codes.as_chunks::<2>();
    out.extend(pairs.iter().map(|[low, high]| (*low as u8 & 0x0f) | ((*high as u8) << 4)));
    out.extend(rest.iter().map(|low| *low as u8 & 0x0f));
}

#[cfg(test)]
mod tests;
