//! Input that is damaged, made up, or of another version: a typed error, never a panic.

use proptest::prelude::*;
use stagebus_schemas::codec::{self, CodecError, ContentType, MAX_MESSAGE_BYTES};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::control::{Control, ControlAction};
use stagebus_schemas::messages::forward::Forward;
use stagebus_schemas::messages::public::{Event, PromptRequest};
use stagebus_schemas::messages::sampling::Sampling;
use stagebus_schemas::tensor::{Dtype, TensorError};
use stagebus_schemas::version::MessageVersion;

use crate::{round_trip, samples};

#[test]
fn a_message_cut_anywhere_is_refused() {
    for sample in samples::all() {
        for len in 0..sample.bytes.len() {
            let error = (sample.recode)(&sample.bytes[..len]).expect_err("cut");
            assert!(matches!(error, CodecError::MessagePack(_)), "{} at {len}", sample.name);
        }
    }
}

#[test]
fn bytes_after_a_message_are_refused_and_counted() {
    for sample in samples::all() {
        for tail in [&[0xc0][..], &[0x91], &[0x01; 10], &[0xc1], &[0xcc], &sample.bytes] {
            let bytes = [&sample.bytes, tail].concat();
            let error = (sample.recode)(&bytes).expect_err("too long");
            assert!(
                matches!(error, CodecError::Trailing { bytes } if bytes == tail.len()),
                "{}: {error:?}",
                sample.name
            );
        }
    }
}

#[test]
fn any_flipped_bit_is_survived() {
    for sample in samples::all() {
        for bit in 0..sample.bytes.len() * 8 {
            let mut bytes = sample.bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            // A flip in a number or a text may give another valid message; that one is valid
            // through and through.
            if let Ok(again) = (sample.recode)(&bytes) {
                (sample.recode)(&again).expect("what was accepted is valid");
            }
        }
    }
}

#[test]
fn another_version_is_told_as_that_whatever_else_it_holds() {
    let next = MessageVersion::CURRENT.number() + 1;
    let messages = [
        serde_json::json!({"version": next}),
        serde_json::json!({"version": next, "shape": [1, {"a": null}], "steps": "none"}),
        serde_json::json!({"a_new_field": {"b": [1, 2.5, "c"]}, "version": next}),
    ];
    for message in &messages {
        let bytes = codec::encode_public(ContentType::MessagePack, message).expect("encodes");
        for sample in samples::all() {
            let error = (sample.recode)(&bytes).expect_err("another version");
            assert_eq!(error.class(), ErrorClass::VersionMismatch);
            assert!(
                matches!(
                    error,
                    CodecError::Version { found, expected: MessageVersion::CURRENT }
                        if found.number() == next
                ),
                "{}: {error:?}",
                sample.name
            );
        }
    }
    // The same fields with another number: not accepted either.
    for sample in samples::all() {
        let key = b"\xa7version";
        let at = sample.bytes.windows(key.len()).position(|window| window == key);
        let mut bytes = sample.bytes.clone();
        bytes[at.expect("every message has a version") + key.len()] =
            u8::try_from(next).expect("a small number");
        let error = (sample.recode)(&bytes).expect_err("another version");
        assert!(matches!(error, CodecError::Version { .. }), "{}: {error:?}", sample.name);
    }
}

#[test]
fn an_unknown_field_of_this_version_is_refused_by_name() {
    let message = serde_json::json!({"version": MessageVersion::CURRENT.number(), "action": "stats", "surprise": 1});
    let bytes = codec::encode_public(ContentType::MessagePack, &message).expect("encodes");
    let error = codec::decode::<Control>(&bytes).expect_err("unknown field");
    assert!(matches!(error, CodecError::MessagePack(_)));
    assert!(error.to_string().contains("surprise"), "{error}");
}

#[test]
fn a_message_without_field_names_is_refused() {
    let message = serde_json::json!([1, "drain"]);
    let bytes = codec::encode_public(ContentType::MessagePack, &message).expect("encodes");
    let error = codec::decode::<Control>(&bytes).expect_err("a list");
    assert!(matches!(error, CodecError::Positional), "{error}");
}

#[test]
fn a_tensor_that_is_an_array_of_numbers_is_refused() {
    let message = serde_json::json!({
        "version": MessageVersion::CURRENT.number(),
        "steps": [{
            "session": 1, "epoch": 0, "step": 0, "start_pos": 0, "phase": "decode",
            "tokens": [1], "wanted": [0], "trace": [],
        }],
        "hidden": {"dtype": "f16", "n_rows": 1, "hidden_dim": 1, "data": [0, 0]},
    });
    let bytes = codec::encode_public(ContentType::MessagePack, &message).expect("encodes");
    let error = codec::decode::<Forward>(&bytes).expect_err("an array");
    assert!(error.to_string().contains("bytes"), "{error}");
}

/// Changes a valid message and expects it to be refused for a field.
fn refused(change: impl FnOnce(&mut Forward)) -> CodecError {
    let mut message = samples::forward(Dtype::F16);
    change(&mut message);
    let bytes = codec::encode(&message).expect("encodes");
    codec::decode::<Forward>(&bytes).expect_err("breaks a rule")
}

#[test]
fn rules_beyond_types_are_checked() {
    let field = |error| match error {
        CodecError::Field { field, .. } => field,
        other => unreachable!("{other}"),
    };
    assert_eq!(field(refused(|m| m.steps.clear())), "steps");
    assert_eq!(field(refused(|m| m.steps = vec![m.steps[0].clone(); 257])), "steps");
    assert_eq!(field(refused(|m| m.steps[0].tokens.clear())), "tokens");
    assert_eq!(field(refused(|m| m.steps[0].tokens = vec![1; 8193])), "tokens");
    assert_eq!(
        field(refused(|m| m.steps.iter_mut().for_each(|step| step.tokens = vec![1; 5000]))),
        "rows"
    );
    assert_eq!(field(refused(|m| m.steps[0].wanted = vec![2])), "wanted");
    assert_eq!(field(refused(|m| m.steps[0].wanted = vec![1, 0])), "wanted");
    assert_eq!(field(refused(|m| m.steps[0].wanted = vec![0, 0])), "wanted");
    assert_eq!(field(refused(|m| m.steps[0].start_pos = u32::MAX)), "start_pos");
    assert_eq!(field(refused(|m| m.steps[0].tokens.push(1))), "hidden.n_rows");
    let tensor = |error| match error {
        CodecError::Tensor(error) => error,
        other => unreachable!("{other}"),
    };
    let with = |change: fn(&mut stagebus_schemas::tensor::Tensor)| {
        tensor(refused(|m| change(m.hidden.as_mut().expect("the sample has a tensor"))))
    };
    assert!(matches!(with(|t| t.n_rows = u32::MAX), TensorError::TooLarge { .. }));
    assert!(matches!(
        with(|t| (t.n_rows, t.hidden_dim) = (u32::MAX, u32::MAX)),
        TensorError::TooLarge { .. }
    ));
    assert!(matches!(with(|t| t.hidden_dim = 5), TensorError::Length { .. }));
    assert!(matches!(with(|t| t.dtype = Dtype::F32), TensorError::Length { .. }));
    assert!(matches!(with(|t| t.data = bytes::Bytes::new()), TensorError::Length { .. }));
}

#[test]
fn numbers_that_are_none_are_refused() {
    type Change = fn(&mut Sampling);
    let changes: [Change; 8] = [
        |sampling| sampling.temperature = f32::NAN,
        |sampling| sampling.temperature = -1.0,
        |sampling| sampling.top_p = f32::INFINITY,
        |sampling| sampling.min_p = f32::NAN,
        |sampling| sampling.repetition_penalty = 0.0,
        |sampling| sampling.presence_penalty = f32::NEG_INFINITY,
        |sampling| sampling.frequency_penalty = f32::NAN,
        |sampling| sampling.logit_bias = vec![(1, 0.0), (2, f32::NAN)],
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut open = samples::open();
        change(&mut open.sampling);
        let version = MessageVersion::CURRENT;
        let control = Control { version, action: ControlAction::Open(open) };
        let bytes = codec::encode(&control).expect("encodes");
        let error = codec::decode::<Control>(&bytes).expect_err("refused");
        assert!(matches!(error, CodecError::Number { .. }), "change {index}: {error}");
    }
}

#[test]
fn a_message_above_the_limit_is_not_looked_at() {
    let bytes = vec![0xc0; MAX_MESSAGE_BYTES + 1];
    let is_too_large = |error| matches!(error, CodecError::TooLarge { .. });
    assert!(is_too_large(codec::decode::<Control>(&bytes).expect_err("too large")));
    for content in [ContentType::Json, ContentType::MessagePack] {
        let error = codec::decode_public::<PromptRequest>(content, &bytes).expect_err("too large");
        assert!(is_too_large(error));
    }
}

#[test]
fn deep_nesting_ends_early() {
    // A map whose unknown field nests arrays without end; the version comes too late to be found.
    let mut bytes = vec![0x82, 0xa1, b'x'];
    bytes.extend(std::iter::repeat_n(0x91, 1 << 20));
    for sample in samples::all() {
        (sample.recode)(&bytes).expect_err("nested too deeply");
    }
    let json = format!("{{\"messages\": {}", "[".repeat(1 << 20));
    codec::decode_public::<PromptRequest>(ContentType::Json, json.as_bytes())
        .expect_err("nested too deeply");
}

proptest! {
    #[test]
    fn made_up_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        for sample in samples::all() {
            prop_assert!((sample.recode)(&bytes).is_err());
        }
        for content in [ContentType::Json, ContentType::MessagePack] {
            drop(codec::decode_public::<PromptRequest>(content, &bytes));
            drop(codec::decode_public::<Event>(content, &bytes));
        }
    }

    #[test]
    fn a_damaged_message_is_survived(
        message in round_trip::forward(),
        damage in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..8),
    ) {
        let mut bytes = codec::encode(&message).expect("encodes");
        for (at, value) in damage {
            let len = bytes.len();
            bytes[at.index(len)] = value;
        }
        if let Ok(read) = codec::decode::<Forward>(&bytes) {
            let n_rows: usize = read.steps.iter().map(|step| step.tokens.len()).sum();
            prop_assert!(read.hidden.is_none_or(|hidden| hidden.n_rows as usize == n_rows));
        }
    }
}
