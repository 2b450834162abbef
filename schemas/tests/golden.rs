//! The bytes of every internal message, as they go over the wire.
//!
//! A change here is a change of the protocol: it needs a new `MessageVersion`.

#[path = "wire/samples.rs"]
mod samples;

use stagebus_schemas::codec::{ContentType, encode_public};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::version::MessageVersion;

/// Version that the fixtures belong to.
const VERSION: u16 = 9;

/// Name and bytes of each sample: one line `name hex` per message.
const FIXTURES: &str = include_str!("fixtures/golden.txt");

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("a hex fixture");
    (0..text.len()).step_by(2).map(digit).collect()
}

#[test]
fn messages_have_the_bytes_of_the_fixtures() {
    assert_eq!(MessageVersion::CURRENT.number(), VERSION, "renew the fixtures with the version");
    let found: String = samples::all()
        .iter()
        .map(|sample| format!("{} {}\n", sample.name, hex(&sample.bytes)))
        .collect();
    assert!(
        found == FIXTURES,
        "the wire changed: raise the version and renew tests/fixtures/golden.txt with\n{found}"
    );
}

#[test]
fn the_fixtures_decode_to_what_they_encode() {
    let samples = samples::all();
    assert_eq!(FIXTURES.lines().count(), samples.len());
    for (sample, line) in samples.iter().zip(FIXTURES.lines()) {
        let (name, text) = line.split_once(' ').expect("a name and bytes");
        assert_eq!(name, sample.name);
        let bytes = unhex(text);
        assert_eq!((sample.recode)(&bytes).expect("decodes"), bytes, "{name}");
    }
}

#[test]
fn tensors_are_bin_and_not_arrays() {
    let mut n_tensors = 0;
    for sample in samples::all() {
        let key = b"\xa4data";
        let found = sample.bytes.windows(key.len()).position(|window| window == key);
        if let Some(at) = found {
            let marker = sample.bytes[at + key.len()];
            assert!((0xc4..=0xc6).contains(&marker), "{}: {marker:#x}", sample.name);
            n_tensors += 1;
        }
    }
    assert_eq!(n_tensors, 6);
}

#[test]
fn error_classes_keep_their_names() {
    let classes = [
        (ErrorClass::InvalidRequest, "invalid_request"),
        (ErrorClass::Overloaded, "overloaded"),
        (ErrorClass::StageUnavailable, "stage_unavailable"),
        (ErrorClass::UnknownSession, "unknown_session"),
        (ErrorClass::StaleEpoch, "stale_epoch"),
        (ErrorClass::StepGap, "step_gap"),
        (ErrorClass::Preempted, "preempted"),
        (ErrorClass::VersionMismatch, "version_mismatch"),
        (ErrorClass::Cancelled, "cancelled"),
        (ErrorClass::Internal, "internal"),
    ];
    for (class, name) in classes {
        let json = encode_public(ContentType::Json, &class).expect("encodes");
        assert_eq!(json, format!("\"{name}\"").into_bytes());
    }
}
