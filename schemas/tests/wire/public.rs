//! The public contract: the JSON that users write and read, as files.

use serde_json::Value;
use stagebus_schemas::codec::{self, CodecError, ContentType};
use stagebus_schemas::messages::public::{Constraint, Event, PromptRequest};

const REQUESTS: &str = include_str!("../fixtures/requests.json");
const EVENTS: &str = include_str!("../fixtures/events.json");

/// Checks that every entry of a file reads as `T` and is written as it stands in the file.
fn check<T: serde::de::DeserializeOwned + serde::Serialize>(file: &str) -> Vec<T> {
    let entries: Vec<Value> = serde_json::from_str(file).expect("a JSON list");
    let read = |entry: &Value| {
        let bytes = codec::encode_public(ContentType::Json, entry).expect("encodes");
        let value: T = codec::decode_public(ContentType::Json, &bytes)
            .unwrap_or_else(|error| unreachable!("{entry}: {error}"));
        let again = codec::encode_public(ContentType::Json, &value).expect("encodes");
        let again: Value = codec::decode_public(ContentType::Json, &again).expect("decodes");
        assert_eq!(&again, entry);
        value
    };
    entries.iter().map(read).collect()
}

#[test]
fn the_documented_requests_are_read() {
    let requests = check::<PromptRequest>(REQUESTS);
    assert_eq!(requests.len(), 8);
    assert!(requests[0].messages.is_some());
    assert!(requests[1].prompt.is_some());
    assert!(requests[2].tokens.is_some());
    assert_eq!(requests[3].request_id.as_ref().expect("a name").as_str(), "order-17");
    assert_eq!(requests[3].top_k, Some(1));
    assert_eq!(requests[4].stream, Some(false));
    assert_eq!(requests[5].logit_bias.get(&905), Some(&1.5));
    assert!(matches!(requests[6].constraint, Some(Constraint::JsonSchema { .. })));
    assert_eq!(requests[7].tools[0].function.name, "weather");
}

#[test]
fn the_documented_events_are_written() {
    let events = check::<Event>(EVENTS);
    assert!(matches!(events[0], Event::Accepted { prompt_tokens: 9, .. }));
    assert!(matches!(events[1], Event::Accepted { seed: Some(9_007_199_254_740_991), .. }));
    assert!(matches!(&events[2], Event::Token { i: 0, logprobs, .. } if logprobs.len() == 1));
    assert_eq!(events.len(), 14);
}

#[test]
fn an_unknown_field_or_a_wrong_type_is_named() {
    let cases = [
        (r#"{"prompt": "a", "max_token": 3}"#, "max_token"),
        (r#"{"prompt": "a", "n": 2}"#, "`n`"),
        (r#"{"prompt": 3}"#, "expected a string"),
        (r#"{"tokens": [-1]}"#, "-1"),
        (r#"{"tokens": [4294967296]}"#, "4294967296"),
        (r#"{"messages": [{"role": "user"}]}"#, "content"),
        (r#"{"messages": [{"role": "user", "content": "a", "name": "b"}]}"#, "name"),
        (r#"{"tools": [{"type": "custom", "function": {"name": "f"}}]}"#, "custom"),
        (r#"{"tools": [{"type": "function", "function": {"nam": "f"}}]}"#, "nam"),
        (r#"{"prompt": "a", "request_id": "a.b"}"#, "request id"),
        (r#"{"prompt": "a", "prompt": "b"}"#, "duplicate"),
        (r#"{"prompt": "a"} {}"#, "trailing"),
        (r#"{"prompt": "a""#, "EOF"),
        ("7", "expected"),
        ("", "EOF"),
    ];
    for (json, part) in cases {
        let error = codec::decode_public::<PromptRequest>(ContentType::Json, json.as_bytes())
            .expect_err("not valid");
        assert!(matches!(error, CodecError::Json(_)), "{json}: {error}");
        assert!(error.to_string().contains(part), "{json}: {error}");
    }
}

#[test]
fn a_list_of_unnamed_fields_is_refused() {
    let list = serde_json::json!(["r1", null, "hello"]);
    for content in [ContentType::Json, ContentType::MessagePack] {
        let bytes = codec::encode_public(content, &list).expect("encodes");
        let error = codec::decode_public::<PromptRequest>(content, &bytes).expect_err("a list");
        assert!(matches!(error, CodecError::Positional), "{error}");
    }
    let spaced = b" \n[\"r1\"]";
    let error = codec::decode_public::<PromptRequest>(ContentType::Json, spaced);
    assert!(matches!(error, Err(CodecError::Positional)));
}

#[test]
fn the_encoding_is_told_by_header_then_by_first_byte() {
    let detect = ContentType::detect;
    assert_eq!(detect(Some("Application/JSON; charset=utf-8"), &[0x81]), ContentType::Json);
    assert_eq!(detect(Some("application/x-msgpack"), b"{}"), ContentType::MessagePack);
    assert_eq!(detect(Some("text/plain"), &[0x81]), ContentType::MessagePack);
    assert_eq!(detect(None, b" {}"), ContentType::Json);
    assert_eq!(detect(None, &[0xde, 0, 1]), ContentType::MessagePack);
    assert_eq!(detect(None, b""), ContentType::Json);
}
