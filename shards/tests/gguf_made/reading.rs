//! What is written can be read back, and each wrong value has its own error.

use proptest::prelude::*;
use stagebus_shards::gguf::{GgmlType, Gguf, GgufErrorKind};

use crate::open;
use crate::writer::{GgufWriter, MetaValue};

/// The error of opening these bytes.
fn error(bytes: &[u8]) -> String {
    let (_dir, opened) = open(bytes);
    let error = opened.expect_err("the file is wrong");
    assert_eq!(error.file().file_name().unwrap(), "model.gguf");
    format!("{:?}", error.kind())
}

fn check_error(bytes: &[u8], expected: &str) {
    let found = error(bytes);
    assert!(found.contains(expected), "expected {expected}, found {found}");
}

fn one_f32() -> GgufWriter {
    GgufWriter::default().tensor("weight", 0, &[4], vec![7; 16])
}

#[test]
fn header_errors_have_their_kinds() {
    check_error(b"", "NotGguf { found: [] }");
    check_error(b"GG", "NotGguf");
    check_error(b"PK\x03\x04 and more", "NotGguf");
    check_error(&GgufWriter { version: 1, ..one_f32() }.bytes(), "Version { found: 1 }");
    check_error(&GgufWriter { version: 4, ..one_f32() }.bytes(), "Version { found: 4 }");
    let big = GgufWriter { version: 3u32.swap_bytes(), ..one_f32() };
    check_error(&big.bytes(), "BigEndian { version: 3 }");
    let twice = one_f32().meta("a", MetaValue::U8(1)).meta("a", MetaValue::U8(2));
    check_error(&twice.bytes(), "DuplicateKey { key: \"a\" }");
    let odd = one_f32().meta("general.alignment", MetaValue::U32(24));
    check_error(&odd.bytes(), "Alignment { found: 24 }");
    let zero = one_f32().meta("general.alignment", MetaValue::U32(0));
    check_error(&zero.bytes(), "Alignment { found: 0 }");
    let text = one_f32().meta("general.alignment", MetaValue::str("32"));
    check_error(&text.bytes(), "WrongType { key: \"general.alignment\"");
    let nested = (0..6).fold(MetaValue::U8(1), |inner, _| MetaValue::Array(vec![inner]));
    check_error(&one_f32().meta("deep", nested).bytes(), "NestedTooDeep { key: \"deep\"");
}

#[test]
fn tensor_errors_name_the_tensor() {
    let empty = GgufWriter::default();
    let made = |ggml_type, dims: &[u64], len| {
        empty.clone().tensor("first", 0, &[4], vec![0; 16]).tensor(
            "odd",
            ggml_type,
            dims,
            vec![0; len],
        )
    };
    check_error(&made(4, &[32], 18).bytes(), "UnknownTensorType { tensor: \"odd\", found: 4 }");
    check_error(
        &made(2, &[48], 27).bytes(),
        "PartialBlock { tensor: \"odd\", found: 48, block: 32",
    );
    check_error(&made(0, &[1, 1, 1, 1, 1], 4).bytes(), "Dimensions { tensor: \"odd\", found: 5 }");
    check_error(&made(0, &[1 << 40, 1 << 40], 4).bytes(), "TooLarge { tensor: \"odd\"");
    check_error(&made(0, &[1 << 62], 4).bytes(), "TooLarge { tensor: \"odd\"");
    check_error(&made(0, &[u64::MAX / 4], 4).bytes(), "TooLarge { tensor: \"odd\"");
    check_error(&made(0, &[8], 12).bytes(), "TruncatedTensor { tensor: \"odd\", missing: 20 }");
    let twice = empty.clone().tensor("x", 0, &[1], vec![0; 4]).tensor("x", 0, &[1], vec![0; 4]);
    check_error(&twice.bytes(), "DuplicateTensor { tensor: \"x\" }");
    // The first tensor claims more than lies before the second one.
    let over = empty.clone().tensor("a", 0, &[16], vec![0; 4]).tensor("b", 0, &[16], vec![0; 64]);
    check_error(&over.bytes(), "Overlap { first: \"a\", second: \"b\" }");
    let packed = GgufWriter { alignment: 4, ..empty }.tensor("a", 0, &[1], vec![0; 4]).tensor(
        "b",
        0,
        &[1],
        vec![0; 40],
    );
    check_error(&packed.bytes(), "Misaligned { tensor: \"b\", offset: 4, alignment: 32 }");
}

#[test]
fn integers_of_any_width_are_accepted_if_they_fit() {
    let written = one_f32()
        .meta("u8", MetaValue::U8(200))
        .meta("i8", MetaValue::I8(-3))
        .meta("u16", MetaValue::U16(60_000))
        .meta("i16", MetaValue::I16(-300))
        .meta("i32", MetaValue::I32(70_000))
        .meta("u64", MetaValue::U64(1 << 40))
        .meta("i64", MetaValue::I64(-1))
        .meta("f64", MetaValue::F64(0.5))
        .meta("bool", MetaValue::Bool(true))
        .meta("ints", MetaValue::Array(vec![MetaValue::U8(1), MetaValue::U8(255)]))
        .meta("text", MetaValue::str("é"));
    let (_dir, opened) = open(&written.bytes());
    let gguf = opened.unwrap();
    let metadata = gguf.metadata();
    assert_eq!(metadata.u32("u8").unwrap(), 200);
    assert_eq!(metadata.require::<i32>("i8").unwrap(), -3);
    assert_eq!(metadata.u64("u16").unwrap(), 60_000);
    assert_eq!(metadata.require::<i64>("i16").unwrap(), -300);
    assert_eq!(metadata.u32("i32").unwrap(), 70_000);
    assert_eq!(metadata.u64("u64").unwrap(), 1 << 40);
    assert!((metadata.f32("f64").unwrap() - 0.5).abs() < f32::EPSILON);
    assert!(metadata.bool("bool").unwrap());
    assert_eq!(metadata.u32s("ints").unwrap(), [1, 255]);
    assert_eq!(metadata.i32s("ints").unwrap(), [1, 255]);
    assert_eq!(metadata.str("text").unwrap(), "é");
    assert_eq!(metadata.get::<u32>("none").unwrap(), None);

    let kind = |result: Result<u32, stagebus_shards::gguf::GgufError>| {
        format!("{:?}", result.unwrap_err().kind())
    };
    assert!(kind(metadata.u32("none")).starts_with("MissingKey { key: \"none\""));
    assert!(kind(metadata.u32("u64")).contains("found: 1099511627776"));
    assert!(kind(metadata.u32("i64")).contains("found: -1"));
    assert!(kind(metadata.u32("bool")).contains("WrongType"));
    let message = metadata.u32("text").unwrap_err().to_string();
    assert!(message.ends_with("\"text\" is a string, expected an integer (u32)"), "{message}");
    assert!(matches!(metadata.strs("ints").unwrap_err().kind(), GgufErrorKind::WrongType { .. }));
}

#[test]
fn strings_that_are_not_utf8_are_reported_when_asked_for() {
    let mut bytes = one_f32().meta("texts", MetaValue::strs(["fine", "badly"])).bytes();
    let at = bytes.windows(5).position(|window| window == b"badly").unwrap();
    bytes[at] = 0xff;
    let (_dir, opened) = open(&bytes);
    let gguf = opened.unwrap();
    let error = gguf.metadata().strs("texts").unwrap_err();
    assert!(matches!(error.kind(), GgufErrorKind::StringNotUtf8 { index: 1, .. }), "{error}");
}

#[test]
fn an_empty_tensor_and_a_scalar_are_legal() {
    let written =
        GgufWriter::default().tensor("none", 0, &[0, 4], vec![]).tensor("one", 0, &[], vec![1; 4]);
    let (_dir, opened) = open(&written.bytes());
    let gguf = opened.unwrap();
    assert_eq!(gguf.data(gguf.tensor("none").unwrap()), b"");
    assert_eq!(gguf.data(gguf.tensor("one").unwrap()), [1; 4]);
    assert_eq!(gguf.tensor("one").unwrap().n_elements, 1);
}

#[test]
fn every_type_has_whole_blocks() {
    for &ggml_type in GgmlType::ALL {
        let len = usize::try_from(ggml_type.block_bytes() * 3).unwrap();
        let dims = [ggml_type.block_len(), 3];
        let data: Vec<u8> = (0..len).map(|byte| byte as u8).collect();
        let written = GgufWriter { version: 2, ..GgufWriter::default() }.tensor(
            "w",
            ggml_type as u32,
            &dims,
            data.clone(),
        );
        let (_dir, opened) = open(&written.bytes());
        let gguf = opened.unwrap();
        let tensor = gguf.tensor("w").unwrap();
        assert_eq!((tensor.ggml_type, tensor.n_bytes()), (ggml_type, len));
        assert_eq!(gguf.data(tensor), data);
    }
}

/// A metadata value of any kind.
fn any_value() -> impl Strategy<Value = MetaValue> {
    prop_oneof![
        any::<u32>().prop_map(MetaValue::U32),
        any::<i64>().prop_map(MetaValue::I64),
        any::<f32>().prop_map(MetaValue::F32),
        any::<bool>().prop_map(MetaValue::Bool),
        ".{0,12}".prop_map(MetaValue::Str),
        prop::collection::vec(any::<i32>().prop_map(MetaValue::I32), 0..9)
            .prop_map(MetaValue::Array),
        prop::collection::vec(".{0,9}".prop_map(MetaValue::Str), 1..9).prop_map(MetaValue::Array),
    ]
}

/// Checks that the file has this value.
fn check_value(gguf: &Gguf, key: &str, value: &MetaValue) {
    let metadata = gguf.metadata();
    match value {
        MetaValue::U32(value) => assert_eq!(metadata.u32(key).unwrap(), *value),
        MetaValue::I64(value) => assert_eq!(metadata.require::<i64>(key).unwrap(), *value),
        MetaValue::F32(value) => {
            assert_eq!(metadata.f32(key).unwrap().to_bits(), value.to_bits());
        }
        MetaValue::Bool(value) => assert_eq!(metadata.bool(key).unwrap(), *value),
        MetaValue::Str(value) => assert_eq!(metadata.str(key).unwrap(), value),
        MetaValue::Array(values) => match values.first() {
            Some(MetaValue::Str(_)) => {
                let found = metadata.strs(key).unwrap().into_iter().map(MetaValue::str);
                assert_eq!(&found.collect::<Vec<_>>(), values);
            }
            _ => {
                let found = metadata.i32s(key).unwrap().into_iter().map(MetaValue::I32);
                assert_eq!(&found.collect::<Vec<_>>(), values);
            }
        },
        other => panic!("{other:?} is not made by any_value"),
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(
        values in prop::collection::btree_map("[a-z.]{1,20}", any_value(), 0..12),
        rows in prop::collection::vec((0u64..5, any::<u8>()), 0..8),
        alignment in prop::sample::select(vec![1u64, 8, 32, 64, 4096]),
    ) {
        let mut written = GgufWriter { alignment, ..GgufWriter::default() }
            .meta("general.alignment", MetaValue::U64(alignment));
        for (key, value) in &values {
            written = written.meta(key, value.clone());
        }
        for (index, &(n_rows, fill)) in rows.iter().enumerate() {
            let data = vec![fill; usize::try_from(n_rows).unwrap() * 18];
            written = written.tensor(&format!("blk.{index}.weight"), 2, &[32, n_rows], data);
        }
        let (_dir, opened) = open(&written.bytes());
        let gguf = opened.unwrap();
        prop_assert_eq!(gguf.metadata().keys().len(), values.len() + 1);
        for (key, value) in &values {
            check_value(&gguf, key, value);
        }
        prop_assert_eq!(gguf.tensors().len(), rows.len());
        for (tensor, made) in gguf.tensors().zip(&written.tensors) {
            prop_assert_eq!(&tensor.name, &made.name);
            prop_assert_eq!(tensor.ggml_type, GgmlType::Q4_0);
            prop_assert_eq!(&tensor.dims, &made.dims);
            prop_assert_eq!(gguf.data(tensor), &made.data);
            gguf.release(tensor);
            prop_assert_eq!(gguf.data(tensor), &made.data);
        }
    }
}
