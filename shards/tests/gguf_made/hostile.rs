//! Broken and hostile files end in an error: no panic, and no allocation beyond the file's size.

use proptest::prelude::*;
use stagebus_shards::gguf::{Gguf, GgufErrorKind};

use crate::allocation::largest_during;
use crate::writer::{GgufWriter, MetaValue};
use crate::{open, write};

/// Room for paths, messages and hash tables; far below what a false count would ask for.
const ALLOWANCE: usize = 16 * 1024;

fn sample() -> GgufWriter {
    GgufWriter::default()
        .meta("general.name", MetaValue::str("sample"))
        .meta("count", MetaValue::U32(7))
        .meta("scores", MetaValue::Array(vec![MetaValue::F32(0.5); 5]))
        .meta("tokens", MetaValue::strs(["a", "bc", ""]))
        .meta("nested", MetaValue::Array(vec![MetaValue::strs(["x"]), MetaValue::strs(["y"])]))
        .tensor("norm", 0, &[4], vec![1; 16])
        .tensor("weight", 2, &[32, 2], vec![2; 36])
}

/// Reads everything that an opened file offers.
fn walk(gguf: &Gguf) -> usize {
    let metadata = gguf.metadata();
    let mut seen = 0;
    for key in metadata.keys() {
        seen += usize::from(metadata.u64(key).is_ok());
        seen += usize::from(metadata.str(key).is_ok());
        seen += metadata.strs(key).map_or(0, |texts| texts.len());
        seen += metadata.f32s(key).map_or(0, |numbers| numbers.len());
        seen += metadata.i32s(key).map_or(0, |numbers| numbers.len());
    }
    for tensor in gguf.tensors() {
        seen += gguf.data(tensor).len();
        gguf.release(tensor);
    }
    seen
}

/// Opens and walks the file, and checks what it allocates.
fn survive(bytes: &[u8]) {
    let (_dir, path) = write(bytes);
    let largest = largest_during(|| {
        if let Ok(gguf) = Gguf::open(&path) {
            walk(&gguf);
        }
    });
    let limit = ALLOWANCE + 64 * bytes.len();
    assert!(largest <= limit, "{largest} bytes for a file of {}", bytes.len());
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let bytes = sample().bytes();
    assert!(walk(&open(&bytes).1.unwrap()) > 50);
    for len in 0..bytes.len() {
        let (_dir, opened) = open(&bytes[..len]);
        let error = opened.expect_err("the file is cut");
        // The last tensor takes 36 bytes, and 16 of padding lie between it and the other.
        let in_last = len >= bytes.len() - 36 - 16;
        match error.kind() {
            GgufErrorKind::TruncatedTensor { tensor, missing } if in_last => {
                assert_eq!((tensor.as_str(), *missing), ("weight", (bytes.len() - len) as u64));
            }
            GgufErrorKind::TruncatedTensor { tensor, .. } => assert_eq!(tensor, "norm"),
            GgufErrorKind::Truncated { missing, .. } => assert!(*missing > 0),
            GgufErrorKind::NotGguf { .. } => assert!(len < 4),
            other => panic!("cut at {len}: {other:?}"),
        }
    }
}

#[test]
fn no_flipped_bit_does_harm() {
    let bytes = sample().bytes();
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        survive(&flipped);
    }
}

#[test]
fn false_counts_allocate_nothing() {
    let bytes = sample().bytes();
    // The counts of tensors and entries, and the length of the first key.
    for at in [8, 16, 24] {
        for count in [u64::MAX, u64::MAX / 2, 1 << 60, 1 << 40, 1 << 32, u64::from(u32::MAX)] {
            let mut false_count = bytes.clone();
            false_count[at..at + 8].copy_from_slice(&count.to_le_bytes());
            let (_dir, path) = write(&false_count);
            let largest = largest_during(|| assert!(Gguf::open(&path).is_err()));
            assert!(largest <= ALLOWANCE, "{largest} bytes for count {count} at {at}");
        }
    }
}

#[test]
fn a_folder_and_a_missing_file_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    for path in [dir.path().to_path_buf(), dir.path().join("none.gguf")] {
        let error = Gguf::open(&path).unwrap_err();
        assert!(matches!(error.kind(), GgufErrorKind::Io { .. }), "{error}");
        assert!(std::error::Error::source(&error).is_some());
    }
}

proptest! {
    #[test]
    fn random_headers_do_no_harm(tail in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tail);
        survive(&bytes);
    }

    #[test]
    fn overwritten_stretches_do_no_harm(
        at in 0usize..400,
        patch in prop::collection::vec(prop::sample::select(vec![0u8, 1, 8, 9, 0x7f, 0xff]), 1..12),
    ) {
        let mut bytes = sample().bytes();
        let at = at % bytes.len();
        let end = (at + patch.len()).min(bytes.len());
        bytes[at..end].copy_from_slice(&patch[..end - at]);
        survive(&bytes);
    }
}
