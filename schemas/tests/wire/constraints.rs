//! Constraints on their way: a map outside, one text inside, and never more than the limit.

use std::sync::Arc;

use serde_json::{Value, json};
use stagebus_schemas::codec::{self, CodecError, ContentType};
use stagebus_schemas::messages::constraint::{Constraint, MAX_CONSTRAINT_BYTES};
use stagebus_schemas::messages::control::{Control, ControlAction};
use stagebus_schemas::messages::public::{Limits, PromptRequest, RequestError};
use stagebus_schemas::version::MessageVersion;

use crate::samples;

/// One of every kind, in its public form.
fn kinds() -> Vec<Value> {
    let schema = json!({ "type": "object", "properties": { "z": {}, "a": { "minimum": 0.1 } } });
    vec![
        json!({ "type": "json_object" }),
        json!({ "type": "json_schema", "schema": schema }),
        json!({ "type": "json_schema", "schema": true }),
        json!({ "type": "regex", "pattern": "a\"\n|\u{e9}" }),
        json!({ "type": "choice", "options": ["yes", "no"] }),
        json!({ "type": "lark", "grammar": "start: \"a\"" }),
    ]
}

fn read(json: &Value) -> Constraint {
    serde_json::from_value(json.clone()).expect("a constraint")
}

fn control(constraint: Constraint) -> Control {
    let mut open = samples::open();
    open.sampling.constraint = Some(Arc::new(constraint));
    Control { version: MessageVersion::CURRENT, action: ControlAction::Open(open) }
}

#[test]
fn every_kind_comes_back_as_it_was_and_in_its_order() {
    for json in kinds() {
        let constraint = read(&json);
        let request =
            PromptRequest { constraint: Some(constraint.clone()), ..PromptRequest::default() };
        for content in [ContentType::Json, ContentType::MessagePack] {
            let bytes = codec::encode_public(content, &request).expect("encodes");
            let again: PromptRequest = codec::decode_public(content, &bytes).expect("decodes");
            assert_eq!(again, request, "{content:?}");
            let again = serde_json::to_string(&again.constraint).expect("encodes");
            assert_eq!(again, json.to_string(), "{content:?}");
        }
        let control = control(constraint);
        let bytes = codec::encode(&control).expect("encodes");
        assert_eq!(codec::decode::<Control>(&bytes).expect("decodes"), control);
    }
}

#[test]
fn a_schema_that_nests_deeper_than_messages_do_passes_between_processes() {
    let schema = (0..60).fold(json!(true), |inner, _| json!({ "items": inner }));
    let control = control(Constraint::JsonSchema { schema });
    let bytes = codec::encode(&control).expect("encodes");
    assert_eq!(codec::decode::<Control>(&bytes).expect("decodes"), control);
}

#[test]
fn what_is_no_constraint_is_refused() {
    for json in [
        json!({}),
        json!({ "type": "xml" }),
        json!({ "type": "json_object", "schema": {} }),
        json!({ "type": "json_schema" }),
        json!({ "type": "regex", "pattern": 3 }),
        json!({ "type": "choice", "options": "yes" }),
        json!("json_object"),
        json!(["regex", "a"]),
    ] {
        let request = json!({ "prompt": "a", "constraint": json });
        for content in [ContentType::Json, ContentType::MessagePack] {
            let bytes = codec::encode_public(content, &request).expect("encodes");
            let read = codec::decode_public::<PromptRequest>(content, &bytes);
            assert!(read.is_err(), "{json} as {content:?}");
        }
    }
}

#[test]
fn empty_and_overlong_constraints_are_refused_by_name() {
    let check = |constraint| {
        let request = PromptRequest {
            prompt: Some("a".into()),
            constraint: Some(constraint),
            ..PromptRequest::default()
        };
        request.validate(&Limits::new(8, 100)).map(|valid| valid.sampling.constraint.is_some())
    };
    let choice = |options: &[&str]| Constraint::Choice {
        options: options.iter().map(|option| (*option).to_owned()).collect(),
    };
    let regex = |pattern: String| Constraint::Regex { pattern };
    for (constraint, name) in [
        (choice(&[]), "constraint.options"),
        (choice(&["a", ""]), "constraint.options"),
        (regex(String::new()), "constraint.pattern"),
        (Constraint::Lark { grammar: String::new() }, "constraint.grammar"),
    ] {
        let error = check(constraint).expect_err("it is empty");
        assert!(error.to_string().starts_with(name), "{error}");
    }
    let frame = r#"{"type":"regex","pattern":""}"#.len();
    assert_eq!(check(regex("a".repeat(MAX_CONSTRAINT_BYTES - frame))), Ok(true));
    let error = check(regex("a".repeat(MAX_CONSTRAINT_BYTES - frame + 1))).expect_err("too long");
    assert!(matches!(error, RequestError::TooLong { field: "constraint", .. }), "{error}");
}

#[test]
fn an_overlong_text_between_processes_is_refused_before_it_is_read() {
    let grammar = "a".repeat(MAX_CONSTRAINT_BYTES);
    let bytes = codec::encode(&control(Constraint::Lark { grammar })).expect("encodes");
    let error = codec::decode::<Control>(&bytes).expect_err("too long");
    assert!(matches!(error, CodecError::MessagePack(_)), "{error}");
    assert!(error.to_string().contains("invalid length"), "{error}");
}
