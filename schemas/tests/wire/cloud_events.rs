//! CloudEvents: both modes, what is refused and by which name, and the exact form of events.

use serde_json::json;
use stagebus_schemas::cloud_events::{
    Attributes, EnvelopeError, EventOrigin, PROMPT_TYPE, Packing, PublicHeaders, PublicMessage,
    STRUCTURED, decode_event, decode_request, encode, encode_event,
};
use stagebus_schemas::codec::{CodecError, ContentType};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::{CoordinatorId, ModelName, RequestId};
use stagebus_schemas::messages::public::{Event, PromptRequest};
use stagebus_schemas::subjects::Subjects;

type Headers<'a> = &'a [(&'a str, &'a str)];

const BINARY: Headers<'_> = &[
    ("ce-specversion", "1.0"),
    ("ce-id", "7"),
    ("ce-source", "/shop"),
    ("ce-type", "io.stagebus.prompt.v1"),
];

fn request(headers: Headers<'_>, payload: &[u8]) -> Result<PromptRequest, CodecError> {
    decode_request(&PublicHeaders::read(headers.iter().copied()), payload)
}

fn prompt() -> PromptRequest {
    PromptRequest {
        prompt: Some("a".to_owned()),
        seed: Some(u64::MAX),
        temperature: Some(0.1),
        ..PromptRequest::default()
    }
}

/// A good structured request with some fields replaced; `null` takes one away.
fn envelope(change: &serde_json::Value) -> Vec<u8> {
    let mut all = json!({
        "specversion": "1.0", "id": "7", "source": "/shop", "type": PROMPT_TYPE,
        "time": "2026-11-30T12:00:00Z", "traceparent": "00-1-1-00", "data": {"prompt": "a"},
    });
    for (field, value) in change.as_object().expect("fields") {
        all[field] = value.clone();
    }
    all.to_string().into_bytes()
}

fn headers(message: &PublicMessage) -> Vec<(&str, &str)> {
    let attributes = message.attributes.iter().map(|(name, value)| (*name, value.as_str()));
    std::iter::once(("Content-Type", message.content_type)).chain(attributes).collect()
}

#[test]
fn a_request_passes_in_every_packing_and_encoding() {
    let attributes =
        Attributes { id: "1 %\u{e9}\"", source: "/a b", kind: PROMPT_TYPE, subject: None };
    for packing in [Packing::Plain, Packing::Structured, Packing::Binary] {
        for content in [ContentType::Json, ContentType::MessagePack] {
            let message = encode(&prompt(), content, packing, &attributes).expect("encodes");
            let all = headers(&message);
            let ascii =
                |(_, value): &(&str, &str)| value.bytes().all(|byte| byte.is_ascii_graphic());
            assert!(all.iter().all(ascii), "{all:?}");
            let read = PublicHeaders::read(all);
            assert_eq!(read.packing(), packing);
            assert_eq!(read.answer().expect("no header asks for another"), packing);
            assert_eq!(decode_request(&read, &message.payload).expect("decodes"), prompt());
            assert_eq!(PublicHeaders::into_owned(read.clone()), read);
        }
    }
}

#[test]
fn data_may_stand_in_base64_and_headers_in_any_case() {
    let json = json!({"data": null, "data_base64": "eyJwcm9tcHQiOiAiYSJ9"});
    // {"prompt": "a"} as MessagePack.
    let packed = json!({"data": null, "data_base64": "gaZwcm9tcHShYQ==",
        "datacontenttype": "application/msgpack"});
    for change in [json!({}), json, packed, json!({"datacontenttype": "application/x+json"})] {
        let headers = [("content-TYPE", "Application/CloudEvents+JSON; charset=utf-8")];
        let found = request(&headers, &envelope(&change)).expect("a request");
        assert_eq!(found.prompt.as_deref(), Some("a"), "{change}");
    }
    let headers = [
        ("CE-SpecVersion", "1.0"),
        ("Ce-Id", "7"),
        ("ce-source", "/shop"),
        ("ce-type", "\"io.stagebus%2Eprompt.v1\""),
        ("ce-datacontenttype", "application/msgpack"),
    ];
    assert_eq!(
        request(&headers, b"\x81\xa6prompt\xa1a").expect("a request").prompt,
        Some("a".into())
    );
}

#[test]
fn a_structured_request_that_is_wrong_is_refused_by_the_name_of_the_field() {
    for (change, expected) in [
        (json!({"specversion": null}), "no specversion"),
        (json!({"id": null}), "no id"),
        (json!({"id": ""}), "no id"),
        (json!({"source": null}), "no source"),
        (json!({"type": null}), "no type"),
        (json!({"data": null}), "no data"),
        (json!({"specversion": "0.3"}), "specversion is \"0.3\", expected 1.0"),
        (json!({"type": "x".repeat(100)}), "expected io.stagebus.prompt.v1"),
        (json!({"id": 5}), "at id: invalid type"),
        (json!({"datacontenttype": "text/plain"}), "datacontenttype is \"text/plain\""),
        (json!({"datacontenttype": "application/msgpack"}), "datacontenttype is"),
        (json!({"data_base64": "AA=="}), "both data and data_base64"),
        (json!({"data": null, "data_base64": "%%"}), "data_base64 is not base64"),
        (json!({"data": null, "data_base64": "AA=="}), "not a valid JSON message"),
        (json!({"data": null, "data_base64": 5}), "at data_base64: invalid type"),
        (json!({"data": {"max_token": 5}}), "max_token"),
        (json!({"data": {"prompt": 5}}), "at data.prompt: invalid type"),
        (json!({"data": ["a"]}), "at data: invalid type: sequence, expected a map"),
        (json!({"data": "a"}), "at data: invalid type"),
    ] {
        let error = request(&[("Content-Type", STRUCTURED)], &envelope(&change))
            .expect_err("not a request");
        assert_eq!(error.class(), ErrorClass::InvalidRequest);
        let text = error.to_string();
        assert!(text.contains(expected) && text.len() < 1000, "{change}: {text}");
    }
    for payload in [&b"{"[..], b"", b"[]", b"5", b"{} {}", b"\xff"] {
        let error = request(&[("Content-Type", STRUCTURED)], payload).expect_err("no envelope");
        assert_eq!(error.class(), ErrorClass::InvalidRequest);
    }
    for format in ["application/cloudevents-batch+json", "application/cloudevents+avro"] {
        let error = request(&[("Content-Type", format)], &envelope(&json!({})));
        let error = error.expect_err("another format");
        assert!(matches!(error, CodecError::CloudEvent(EnvelopeError::Format { .. })), "{error}");
    }
}

#[test]
fn a_binary_request_that_is_wrong_is_refused_by_the_name_of_the_attribute() {
    for (name, value, expected) in [
        ("ce-specversion", "", "no specversion"),
        ("ce-id", "", "no id"),
        ("ce-source", "", "no source"),
        ("ce-type", "", "no type"),
        ("ce-specversion", "1.1", "specversion is \"1.1\""),
        ("ce-type", "com.example.order", "type is \"com.example.order\""),
        ("ce-id", "%ff", "ce-id is not percent-encoded"),
        ("ce-datacontenttype", "text/plain", "datacontenttype is \"text/plain\""),
        ("Stagebus-Answer", "loud", "Stagebus-Answer is \"loud\", expected plain"),
    ] {
        let headers: Vec<_> = BINARY.iter().copied().chain([(name, value)]).collect();
        let error = request(&headers, br#"{"prompt":"a"}"#).expect_err("not a request");
        assert_eq!(error.class(), ErrorClass::InvalidRequest);
        assert!(error.to_string().contains(expected), "{name} {value}: {error}");
    }
    for left_out in BINARY {
        let headers: Vec<_> = BINARY.iter().copied().filter(|header| header != left_out).collect();
        let error = request(&headers, br#"{"prompt":"a"}"#).expect_err("an attribute is missing");
        assert!(matches!(error, CodecError::CloudEvent(EnvelopeError::Missing { .. })), "{error}");
    }
}

#[test]
fn the_answer_is_packed_as_the_request_unless_the_header_asks_otherwise() {
    for (answer, packing) in [
        ("plain", Packing::Plain),
        ("structured", Packing::Structured),
        ("binary", Packing::Binary),
    ] {
        for first in [("ce-id", "1"), ("Content-Type", STRUCTURED), ("x", "y")] {
            let headers = PublicHeaders::read([first, ("stagebus-answer", answer)]);
            assert_eq!(headers.answer().expect("known"), packing);
        }
    }
}

/// An event of an answer and where it comes from.
fn event(packing: Packing, request: Option<&RequestId>, answer: Option<u64>) -> PublicMessage {
    let subjects = Subjects::new(&ModelName::new("m-1").expect("a name"));
    let coordinator = CoordinatorId::new("c1").expect("an id");
    let (subjects, coordinator) = (&subjects, &coordinator);
    let origin = EventOrigin { subjects, coordinator, request, answer, index: 3 };
    let token = Event::Token {
        i: 2,
        text: "b".into(),
        tokens: vec![7],
        logprobs: Vec::new(),
        steps: Vec::new(),
    };
    encode_event(&token, ContentType::Json, packing, &origin).expect("encodes")
}

#[test]
fn events_have_the_documented_form() {
    let name = RequestId::new("r-1").expect("an id");
    let data = r#"{"event":"token","i":2,"text":"b","tokens":[7]}"#;
    let plain = event(Packing::Plain, Some(&name), Some(5));
    assert_eq!(headers(&plain), [("Content-Type", "application/json")]);
    assert_eq!(plain.payload, data);

    let structured = event(Packing::Structured, Some(&name), Some(5));
    assert_eq!(headers(&structured), [("Content-Type", STRUCTURED)]);
    let expected = format!(
        r#"{{"specversion":"1.0","id":"r-1.5.3","source":"/stagebus/v1/m-1/coordinator/c1","type":"io.stagebus.token.v1","subject":"r-1","datacontenttype":"application/json","data":{data}}}"#
    );
    assert_eq!(structured.payload, expected);

    let binary = event(Packing::Binary, Some(&name), Some(5));
    let attributes = [
        ("Content-Type", "application/json"),
        ("ce-specversion", "1.0"),
        ("ce-id", "r-1.5.3"),
        ("ce-source", "/stagebus/v1/m-1/coordinator/c1"),
        ("ce-type", "io.stagebus.token.v1"),
        ("ce-subject", "r-1"),
        ("ce-datacontenttype", "application/json"),
    ];
    assert_eq!(headers(&binary), attributes);
    assert_eq!(binary.payload, data);
    let lines = attributes[1..].iter().map(|(name, value)| format!("{name}: {value}\r\n").len());
    assert_eq!(binary.attribute_bytes(), lines.sum::<usize>());

    for message in [plain, structured, binary] {
        let read = PublicHeaders::read(headers(&message));
        let event = decode_event(&read, &message.payload).expect("decodes");
        assert!(matches!(event, Event::Token { i: 2, .. }), "{event:?}");
    }
    // A request that cannot be read has no name, the answer to a job no number.
    let unread = event(Packing::Binary, None, Some(5));
    assert_eq!(headers(&unread)[2], ("ce-id", "5.3"));
    assert!(headers(&unread).iter().all(|(name, _)| *name != "ce-subject"));
    assert_eq!(headers(&event(Packing::Binary, Some(&name), None))[2], ("ce-id", "r-1.3"));
}
