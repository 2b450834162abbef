//! Requests of chats, as clients write them.

use super::*;
use serde_json::{Value, json};
use stagebus_schemas::messages::public::{ChatMessage, FunctionCall, ToolCall, ToolKind};

/// Reads a request that has `more` besides a model and a message.
fn read(more: &Value) -> Result<ChatRequest, String> {
    let mut request = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let fields = more.as_object().into_iter().flatten();
    fields.for_each(|(name, value)| request[name] = value.clone());
    serde_json::from_value(request).map_err(|error| error.to_string())
}

#[test]
fn what_is_not_done_here_is_refused_by_name() {
    for (name, value) in [
        ("functions", json!([])),
        ("function_call", json!("none")),
        ("audio", json!({})),
        ("reasoning_effort", json!("low")),
        ("verbosity", json!("low")),
        ("web_search_options", json!({})),
        ("moderation", json!({})),
        ("modalities", json!(["text", "audio"])),
    ] {
        let request = read(&json!({name: value})).expect("a known field");
        let error = request.refuse_unsupported().expect_err(name);
        assert_eq!(error.code(), "unsupported_parameter", "{name}");
        assert!(error.to_json().contains(&format!("\"param\":\"{name}\"")), "{error:?}");
    }
    let unknown = read(&json!({"temprature": 1})).expect_err("a misspelt field");
    assert!(unknown.contains("temprature"), "{unknown}");
}

#[test]
fn what_changes_nothing_is_passed_over() {
    let request = read(&json!({
        "metadata": {"a": "b"}, "prediction": null,
        "prompt_cache_key": "k", "prompt_cache_options": {}, "prompt_cache_retention": "24h", "safety_identifier": "s",
        "service_tier": "auto", "store": false, "user": "u", "tools": null,
        "response_format": {"type": "text"}, "modalities": ["text"],
        "stream_options": {"include_obfuscation": false},
    }))
    .expect("known fields");
    request.refuse_unsupported().expect("nothing to refuse");
}

#[test]
fn messages_become_those_that_templates_know() {
    let chat = |messages: Value| {
        let messages: Vec<Message> = serde_json::from_value(messages).expect("messages");
        to_chat(messages)
    };
    let found = chat(json!([
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"},
            {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": null, "annotations": [],
            "audio": null, "function_call": null, "tool_calls": null},
        {"role": "assistant", "refusal": "no"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": [1]}"}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}]},
    ]));
    let call = |id: &str, name: &str, arguments: Value| ToolCall {
        id: Some(id.to_owned()),
        kind: ToolKind::Function,
        function: FunctionCall { name: name.to_owned(), arguments },
    };
    let expected = vec![
        ChatMessage::new("system", "be brief"),
        ChatMessage::new("user", "a\nb"),
        ChatMessage::new("assistant", "c"),
        ChatMessage::new("assistant", "no"),
        ChatMessage {
            tool_calls: vec![call("1", "f", json!({"a": [1]})), call("2", "g", json!({}))],
            ..ChatMessage::new("assistant", "")
        },
        ChatMessage { tool_call_id: Some("1".to_owned()), ..ChatMessage::new("tool", "4") },
    ];
    assert_eq!(found, Ok(expected));
    let called = |arguments: &str| {
        json!([{"role": "assistant", "tool_calls":
            [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}])
    };
    for (wrong, param) in [
        (json!([]), "messages"),
        (json!([{"role": "function", "content": "x", "name": "f"}]), "messages[0].role"),
        (json!([{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
        (json!([{"role": "tool", "tool_call_id": "1"}]), "messages[0].content"),
        (
            json!([{"role": "user", "content": "x", "tool_call_id": "1"}]),
            "messages[0].tool_call_id",
        ),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": "assistant", "tool_calls": []}]), "messages[0].content"),
        (
            json!([{"role": "user", "content": "x", "tool_calls":
                [{"id": "1", "function": {"name": "f", "arguments": ""}}]}]),
            "messages[0].tool_calls",
        ),
        (called("{\"a\": "), "messages[0].tool_calls[0].function.arguments"),
        (called("[]"), "messages[0].tool_calls[0].function.arguments"),
    ] {
        let error = chat(wrong).expect_err(param);
        assert!(error.to_json().contains(&format!("\"param\":\"{param}\"")), "{error:?}");
    }
}

#[test]
fn images_and_other_roles_are_no_messages() {
    for wrong in [
        json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        json!([{"role": "king", "content": "x"}]),
        json!([{"role": "user", "content": 3}]),
        json!([{"content": "x"}]),
        json!([{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]),
        json!([{"role": "assistant", "tool_calls":
            [{"id": "1", "function": {"name": "f", "arguments": {}}}]}]),
        json!({"role": "user", "content": "x"}),
    ] {
        read(&json!({"messages": wrong.clone()})).expect_err(&wrong.to_string());
    }
}

#[test]
fn numbers_are_read_as_openai_writes_them() {
    let request =
        read(&json!({"seed": -1, "logit_bias": {"7": -100}, "stop": "x"})).expect("valid");
    assert_eq!(request.seed.map(Seed::bits), Some(u64::MAX));
    assert_eq!(request.logit_bias, Some([(7, -100.0)].into()));
    assert_eq!(request.stop.map(Stop::into_texts), Some(vec!["x".to_owned()]));
    for wrong in [
        json!({"seed": 1.5}),
        json!({"seed": 18_446_744_073_709_551_616.0}),
        json!({"logit_bias": {"a": 1}}),
        json!({"logit_bias": {"-1": 1}}),
        json!({"max_tokens": -1}),
        json!({"n": 1.5}),
        json!({"stop": [1]}),
        json!({"temperature": "hot"}),
    ] {
        read(&wrong).expect_err(&wrong.to_string());
    }
}
