//! Checks every block format against formulas written element by element, straight from the
//! description of the format.

use half::f16;
use proptest::prelude::*;

use super::BlockFormat;

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_bits(u16::from(block[at]) | u16::from(block[at + 1]) << 8).to_f32()
}

/// Bits `low..low + n` of a little-endian bit string.
fn bits(bytes: &[u8], low: usize, n: usize) -> u32 {
    (0..n).map(|i| u32::from(bytes[(low + i) / 8] >> ((low + i) % 8) & 1) << i).sum()
}

/// Element `i` of a block of 32: the first 16 are low nibbles, the others high nibbles.
fn nibble(quants: &[u8], i: usize) -> f32 {
    bits(quants, (i % 16) * 8 + (i / 16) * 4, 4) as f32
}

/// Scale and minimum of group `g` of a K super-block: 6-bit numbers, of which groups 4 to 7 keep
/// their upper two bits in the upper bits of the bytes of groups 0 to 3.
fn k_scale_min(packed: &[u8], g: usize) -> (f32, f32) {
    let (scale, min) = if g < 4 {
        (bits(packed, g * 8, 6), bits(packed, (g + 4) * 8, 6))
    } else {
        let low = (g + 4) * 8;
        (
            bits(packed, low, 4) + 16 * bits(packed, (g - 4) * 8 + 6, 2),
            bits(packed, low + 4, 4) + 16 * bits(packed, g * 8 + 6, 2),
        )
    };
    (scale as f32, min as f32)
}

/// Element `i` of a block.
fn reference(format: BlockFormat, block: &[u8], i: usize) -> f32 {
    match format {
        BlockFormat::Q4_0 => half_at(block, 0) * (nibble(&block[2..], i) - 8.0),
        BlockFormat::Q4_1 => half_at(block, 0) * nibble(&block[4..], i) + half_at(block, 2),
        BlockFormat::Q5_0 => {
            let high = bits(&block[2..6], i, 1) as f32;
            half_at(block, 0) * (nibble(&block[6..], i) + 16.0 * high - 16.0)
        }
        BlockFormat::Q5_1 => {
            let high = bits(&block[4..8], i, 1) as f32;
            half_at(block, 0) * (nibble(&block[8..], i) + 16.0 * high) + half_at(block, 2)
        }
        BlockFormat::Q8_0 => half_at(block, 0) * f32::from(i8::from_ne_bytes([block[2 + i]])),
        BlockFormat::Q4K => {
            let (scale, min) = k_scale_min(&block[4..16], i / 32);
            // 64 elements share 32 bytes: low nibbles first.
            let byte = block[16 + (i / 64) * 32 + i % 32];
            let quant = if i % 64 < 32 { byte & 15 } else { byte >> 4 };
            half_at(block, 0) * scale * f32::from(quant) - half_at(block, 2) * min
        }
        BlockFormat::Q5K => {
            let (scale, min) = k_scale_min(&block[4..16], i / 32);
            let byte = block[48 + (i / 64) * 32 + i % 32];
            let low = if i % 64 < 32 { byte & 15 } else { byte >> 4 };
            let high = block[16 + i % 32] >> (i / 32) & 1;
            half_at(block, 0) * scale * f32::from(low + 16 * high) - half_at(block, 2) * min
        }
        BlockFormat::Q6K => {
            let (half, within) = (i / 128, i % 128);
            let byte = block[half * 64 + within % 64];
            let low = if within < 64 { byte & 15 } else { byte >> 4 };
            let high = block[128 + half * 32 + within % 32] >> (2 * (within / 32)) & 3;
            let quant = f32::from(low + 16 * high) - 32.0;
            let scale = f32::from(i8::from_ne_bytes([block[192 + i / 16]]));
            half_at(block, 208) * scale * quant
        }
    }
}

const ALL: [BlockFormat; 8] = [
    BlockFormat::Q4_0,
    BlockFormat::Q4_1,
    BlockFormat::Q5_0,
    BlockFormat::Q5_1,
    BlockFormat::Q8_0,
    BlockFormat::Q4K,
    BlockFormat::Q5K,
    BlockFormat::Q6K,
];

/// Where a block keeps its f16 fields, which have to be finite.
fn f16_fields(format: BlockFormat) -> &'static [usize] {
    match format {
        BlockFormat::Q4_0 | BlockFormat::Q5_0 | BlockFormat::Q8_0 => &[0],
        BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4K | BlockFormat::Q5K => &[0, 2],
        BlockFormat::Q6K => &[208],
    }
}

fn blocks(format: BlockFormat) -> impl Strategy<Value = Vec<u8>> {
    let block_bytes = format.block_bytes();
    proptest::collection::vec(any::<u8>(), block_bytes..=3 * block_bytes).prop_map(move |bytes| {
        let mut bytes = bytes[..bytes.len() / block_bytes * block_bytes].to_vec();
        for block in bytes.chunks_exact_mut(block_bytes) {
            for field in f16_fields(format) {
                // An exponent of all ones would be an infinity or not a number.
                block[field + 1] &= 0b1011_1111;
            }
        }
        bytes
    })
}

proptest! {
    #[test]
    fn values_equal_the_formulas_of_the_format(
        (format, row) in proptest::sample::select(&ALL)
            .prop_flat_map(|format| (Just(format), blocks(format)))
    ) {
        let block_len = format.block_len();
        let mut values = vec![0.0; row.len() / format.block_bytes() * block_len];
        format.values(&row, &mut values);
        for (index, value) in values.iter().enumerate() {
            let block = &row[index / block_len * format.block_bytes()..][..format.block_bytes()];
            let expected = reference(format, block, index % block_len);
            // -0.0 and 0.0 are the same weight.
            let (value, expected) = ((value + 0.0).to_bits(), (expected + 0.0).to_bits());
            prop_assert_eq!(value, expected, "{:?} element {}", format, index);
        }
    }

    #[test]
    fn codes_fit_their_bits(
        (format, row) in proptest::sample::select(&ALL)
            .prop_flat_map(|format| (Just(format), blocks(format)))
    ) {
        let mut codes = vec![0; row.len() / format.block_bytes() * format.block_len()];
        format.codes(&row, &mut codes);
        let bits = format.code_bits();
        let (low, high) = if format.has_offset() {
            (0, (1 << bits) - 1)
        } else {
            (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        };
        for code in codes {
            prop_assert!((low..=high).contains(&i32::from(code)), "{:?}: {}", format, code);
        }
    }
}

#[test]
fn a_block_written_by_hand_decodes_to_its_numbers() {
    // d = 0.5, m = -2, quants 0, 1, 2, .. 15 in the low nibbles and 15, 14, .. 0 in the high ones.
    let mut block = vec![0x00, 0x38, 0x00, 0xc0];
    block.extend((0..16_u8).map(|i| i | (15 - i) << 4));
    let mut values = [0.0; 32];
    BlockFormat::Q4_1.values(&block, &mut values);
    let expected: Vec<f32> = (0..16).chain((0..16).rev()).map(|q| 0.5 * q as f32 - 2.0).collect();
    assert_eq!(values.to_vec(), expected);
}
