//! Block formats of ggml in one common form: `value = scale * code + offset` per group.
//!
//! The scale and the offset of a group are exact in f32: they are an f16, or an f16 times an
//! integer of at most eight bits (11 + 8 significant bits). The offset is zero for formats that
//! have none.
//!
//! **Source**: the block structs and `dequantize_row_*` of ggml-org/ggml, `ggml-quants.c`.

use half::f16;
use half::slice::HalfFloatSliceExt as _;

use crate::gguf::GgmlType;

/// Elements of a super-block of the K formats.
const SUPER: usize = 256;

/// A block format that the sharder maps to integer codes with group scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockFormat {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl BlockFormat {
    pub(crate) fn from_ggml(ggml_type: GgmlType) -> Option<Self> {
        match ggml_type {
            GgmlType::Q4_0 => Some(Self::Q4_0),
            GgmlType::Q4_1 => Some(Self::Q4_1),
            GgmlType::Q5_0 => Some(Self::Q5_0),
            GgmlType::Q5_1 => Some(Self::Q5_1),
            GgmlType::Q8_0 => Some(Self::Q8_0),
            GgmlType::Q4_K => Some(Self::Q4K),
            GgmlType::Q5_K => Some(Self::Q5K),
            GgmlType::Q6_K => Some(Self::Q6K),
            _ => None,
        }
    }

    /// Elements that share a scale and an offset.
    pub(crate) fn group_len(self) -> usize {
        match self {
            Self::Q6K => 16,
            Self::Q4_0
            | Self::Q4_1
            | Self::Q5_0
            | Self::Q5_1
            | Self::Q8_0
            | Self::Q4K
            | Self::Q5K => 32,
        }
    }

    /// Bits of a code.
    pub(crate) fn code_bits(self) -> u32 {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q4K => 4,
            Self::Q5_0 | Self::Q5_1 | Self::Q5K => 5,
            Self::Q6K => 6,
            Self::Q8_0 => 8,
        }
    }

    /// Whether groups have an offset; then codes count from 0, else they are signed.
    pub(crate) fn has_offset(self) -> bool {
        matches!(self, Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K)
    }

    /// Whether every scale is an f16.
    pub(crate) fn scales_are_f16(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0)
    }

    fn block_bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    fn block_len(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => SUPER,
        }
    }

    /// Decodes the codes of a row.
    ///
    /// **Shape**: `row` is whole blocks; `codes` has one entry per element.
    pub(crate) fn codes(self, row: &[u8], codes: &mut [i8]) {
        let blocks = row.chunks_exact(self.block_bytes());
        for (block, codes) in blocks.zip(codes.chunks_exact_mut(self.block_len())) {
            match self {
                Self::Q4_0 => nibbles(&block[2..], codes, 8),
                Self::Q4_1 => nibbles(&block[4..], codes, 0),
                Self::Q5_0 => codes_q5(&block[2..], codes, 16),
                Self::Q5_1 => codes_q5(&block[4..], codes, 0),
                Self::Q8_0 => {
                    for (code, byte) in codes.iter_mut().zip(&block[2..]) {
                        *code = *byte as i8;
                    }
                }
                Self::Q4K => {
                    for (bytes, codes) in
                        block[16..].chunks_exact(32).zip(codes.chunks_exact_mut(64))
                    {
                        nibbles(bytes, codes, 0);
                    }
                }
                Self::Q5K => codes_q5k(block, codes),
                Self::Q6K => codes_q6k(block, codes),
            }
        }
    }

    /// Appends the codes of a row in four bits each, two per byte and the first in the low nibble: as
    /// they are, or `less_eight` than in the block, in two's complement.
    ///
    /// Returns whether the format has codes of four bits; nothing is appended otherwise.
    pub(crate) fn packed_codes(self, row: &[u8], less_eight: bool, out: &mut Vec<u8>) -> bool {
        // Four bits less eight are the same four bits with the highest one flipped.
        let flip = if less_eight { 0x88 } else { 0 };
        for block in row.chunks_exact(self.block_bytes()) {
            match self {
                Self::Q4_0 => pack_block::<16>(&block[2..], flip, out),
                Self::Q4_1 => pack_block::<16>(&block[4..], flip, out),
                Self::Q4K => {
                    for bytes in block[16..].chunks_exact(32) {
                        pack_block::<32>(bytes, flip, out);
                    }
                }
                Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Q5K | Self::Q6K => return false,
            }
        }
        true
    }

    /// Decodes the scales and the offsets of a row.
    ///
    /// **Shape**: `scales` and `offsets` have one entry per group.
    pub(crate) fn scales(self, row: &[u8], scales: &mut [f32], offsets: &mut [f32]) {
        let blocks = row.chunks_exact(self.block_bytes());
        let n_groups = self.block_len() / self.group_len();
        let groups = scales.chunks_exact_mut(n_groups).zip(offsets.chunks_exact_mut(n_groups));
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => {
                halves(row, (self.block_bytes(), 0), scales);
                offsets.fill(0.0);
            }
            Self::Q4_1 | Self::Q5_1 => {
                halves(row, (self.block_bytes(), 0), scales);
                halves(row, (self.block_bytes(), 2), offsets);
            }
            Self::Q4K | Self::Q5K => {
                for (block, (scales, offsets)) in blocks.zip(groups) {
                    let (d, d_min) = (f16_at(block, 0), f16_at(block, 2));
                    for (group, (scale, offset)) in scales.iter_mut().zip(offsets).enumerate() {
                        let (sub_scale, sub_min) = sub_scale_and_min(&block[4..16], group);
                        *scale = d * f32::from(sub_scale);
                        *offset = -(d_min * f32::from(sub_min));
                    }
                }
            }
            Self::Q6K => {
                for (block, (scales, offsets)) in blocks.zip(groups) {
                    let d = f16_at(block, 208);
                    for (scale, sub_scale) in scales.iter_mut().zip(&block[192..208]) {
                        *scale = d * f32::from(*sub_scale as i8);
                    }
                    offsets.fill(0.0);
                }
            }
        }
    }

    /// Decodes the values of a row, as ggml does in f32.
    pub(crate) fn values(self, row: &[u8], values: &mut [f32]) {
        let group_len = self.group_len();
        let n_groups = values.len() / group_len;
        let mut codes = vec![0; values.len()];
        let mut scales = vec![0.0; n_groups];
        let mut offsets = vec![0.0; n_groups];
        self.codes(row, &mut codes);
        self.scales(row, &mut scales, &mut offsets);
        for (index, (value, code)) in values.iter_mut().zip(codes).enumerate() {
            let group = index / group_len;
            *value = scales[group] * f32::from(code) + offsets[group];
        }
    }
}

/// Halves that are converted in one call, which is much quicker than one by one.
const HALVES: usize = 64;

/// The half at byte `at` of every block of `block_bytes`, exact in f32.
fn halves(row: &[u8], (block_bytes, at): (usize, usize), values: &mut [f32]) {
    let mut found = [f16::ZERO; HALVES];
    for (blocks, values) in row.chunks(HALVES * block_bytes).zip(values.chunks_mut(HALVES)) {
        for (half, block) in found.iter_mut().zip(blocks.chunks_exact(block_bytes)) {
            *half = f16::from_le_bytes([block[at], block[at + 1]]);
        }
        found[..values.len()].convert_to_f32_slice(values);
    }
}

fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Low nibbles are the first half of the codes, high nibbles the second.
fn nibbles(bytes: &[u8], codes: &mut [i8], shift: i8) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = (byte & 0x0f) as i8 - shift;
        *high = (byte >> 4) as i8 - shift;
    }
}

/// Packs the nibbles of `N` bytes, low ones before high ones, in their order.
fn pack_block<const N: usize>(bytes: &[u8], flip: u8, out: &mut Vec<u8>) {
    let Some(bytes) = bytes.first_chunk::<N>() else { return };
    let (pairs, _) = bytes.as_chunks::<2>();
    let mut packed = [0; N];
    let (low, high) = packed.split_at_mut(N / 2);
    for ((pair, low), high) in pairs.iter().zip(low).zip(high) {
        let pair = u16::from_le_bytes(*pair);
        *low = ((pair & 0x0f) | (pair >> 4 & 0xf0)) as u8 ^ flip;
        *high = ((pair >> 4 & 0x0f) | (pair >> 8 & 0xf0)) as u8 ^ flip;
    }
    out.extend_from_slice(&packed);
}

/// The 6-bit scale and minimum of one of the eight groups of a Q4_K or Q5_K super-block.
fn sub_scale_and_min(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let scale = (packed[group + 4] & 0x0f) | ((packed[group - 4] >> 6) << 4);
        let min = (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4);
        (scale, min)
    }
}

/// Nibbles after one more bit of each code, the first code's lowest.
fn codes_q5(bits: &[u8], codes: &mut [i8], shift: i8) {
    let (high_bits, low_bits) = bits.split_at(4);
    nibbles(low_bits, codes, shift);
    for (index, code) in codes.iter_mut().enumerate() {
        *code += (((high_bits[index / 8] >> (index % 8)) & 1) << 4) as i8;
    }
}

fn codes_q5k(block: &[u8], codes: &mut [i8]) {
    let (high_bits, low_bits) = (&block[16..48], &block[48..176]);
    for (pair, codes) in codes.chunks_exact_mut(64).enumerate() {
        nibbles(&low_bits[32 * pair..][..32], codes, 0);
        for (index, code) in codes.iter_mut().enumerate() {
            let bit = 2 * pair + index / 32;
            *code |= (((high_bits[index % 32] >> bit) & 1) << 4) as i8;
        }
    }
}

fn codes_q6k(block: &[u8], codes: &mut [i8]) {
    let (low_bits, high_bits) = (&block[..128], &block[128..192]);
    for (half, codes) in codes.chunks_exact_mut(128).enumerate() {
        for (index, code) in codes.iter_mut().enumerate() {
            let low = low_bits[64 * half + index % 64] >> (4 * (index / 64)) & 0x0f;
            let high = high_bits[32 * half + index % 32] >> (2 * (index / 32)) & 3;
            *code = (low | high << 4) as i8 - 32;
        }
    }
}

#[cfg(test)]
mod tests;
