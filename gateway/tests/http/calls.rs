//! Answers that call functions, and answers in a form that was asked for.

use serde_json::{Value, json};
use stagebus_draft::constraint::{Grammars, Guide};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::public::{Constraint, FinishReason};

use crate::bed::{Bed, Gateway, MODEL};
use crate::client::{self, Connection};
use crate::scripted::Scripted;
use crate::shard_set::{END, VOCAB_SIZE};

const CHAT: &str = "/v1/chat/completions";

/// A request that draws tokens, with `more`.
fn request(more: &[(&str, Value)]) -> Value {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let mut request = json!({"model": MODEL, "messages": messages, "max_tokens": 200, "seed": 3});
    for (name, value) in more {
        request[name] = value.clone();
    }
    request
}

/// A schema of which every text is short.
fn place() -> Value {
    json!({
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Rome"]},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city", "n"],
        "additionalProperties": false,
    })
}

fn check_place(text: &str) {
    let place: Value = serde_json::from_str(text).unwrap();
    assert!(place["city"] == "Oslo" || place["city"] == "Rome", "{text}");
    assert!(place["n"].as_u64().is_some_and(|n| n < 100), "{text}");
    assert_eq!(place.as_object().unwrap().len(), 2, "{text}");
}

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "weather", "parameters": place()}},
    ])
}

/// What a stream tells: the text, name and arguments of its calls in order, and the reason.
async fn streamed(gateway: &Gateway, mut request: Value) -> (String, Vec<[String; 2]>, String) {
    request["stream"] = json!(true);
    let response = client::post(gateway.address, CHAT, &request).await;
    read_stream(response.events())
}

fn read_stream(mut events: Vec<&str>) -> (String, Vec<[String; 2]>, String) {
    assert_eq!(events.pop(), Some("[DONE]"), "{events:?}");
    let (mut text, mut calls, mut reason) = (String::new(), Vec::<[String; 2]>::new(), None);
    let mut ids = Vec::new();
    for event in events {
        let chunk: Value = serde_json::from_str(event).unwrap();
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        text.push_str(delta["content"].as_str().unwrap_or(""));
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            if index == calls.len() {
                assert_eq!(call["type"], "function");
                ids.push(call["id"].as_str().unwrap().to_owned());
                calls.push([call["function"]["name"].as_str().unwrap().to_owned(), String::new()]);
            } else {
                assert!(call.get("id").is_none() && call["function"].get("name").is_none());
            }
            calls[index][1].push_str(call["function"]["arguments"].as_str().unwrap());
        }
        reason = choice["finish_reason"].as_str().map(str::to_owned).or(reason);
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), calls.len(), "every call has a name of its own");
    (text, calls, reason.unwrap())
}

#[tokio::test]
async fn functions_are_called_with_arguments_that_fit() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let gateway = bed.gateway_with_model(|_| {}).await;
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for (choice, seeds) in [(named, 0..3), (json!("required"), 0..6)] {
        let mut names = Vec::new();
        for seed in seeds {
            let more = [
                ("tools", tools()),
                ("tool_choice", choice.clone()),
                ("parallel_tool_calls", json!(false)),
                ("seed", json!(seed)),
            ];
            let response = client::post(gateway.address, CHAT, &request(&more)).await;
            assert_eq!(response.status, 200, "{response:?}");
            let whole = response.json();
            let answer = &whole["choices"][0];
            assert_eq!(answer["finish_reason"], "tool_calls", "{answer}");
            let [call] = answer["message"]["tool_calls"].as_array().unwrap().as_slice() else {
                panic!("{answer}");
            };
            assert!(answer["message"]["content"].is_null() && call["type"] == "function");
            let function = ["name", "arguments"]
                .map(|field| call["function"][field].as_str().unwrap().to_owned());
            match function[0].as_str() {
                "weather" => check_place(&function[1]),
                _ => assert_eq!(function[1], "{}"),
            }
            names.push(function[0].clone());
            let expected = (String::new(), vec![function], "tool_calls".to_owned());
            assert_eq!(streamed(&gateway, request(&more)).await, expected);
        }
        names.sort();
        names.dedup();
        assert_eq!(names.len(), if choice == "required" { 2 } else { 1 }, "{names:?}");
    }
    gateway.end().await;
    fleet.end().await;
}

#[tokio::test]
async fn answers_have_the_form_that_was_asked_for() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let gateway = bed.gateway_with_model(|_| {}).await;
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "place", "schema": schema}});
    for more in [
        vec![("response_format", schema(place()))],
        vec![
            ("response_format", schema(place())),
            ("tools", tools()),
            ("tool_choice", json!("none")),
        ],
    ] {
        let whole = client::post(gateway.address, CHAT, &request(&more)).await.json();
        let answer = &whole["choices"][0];
        let text = answer["message"]["content"].as_str().unwrap().to_owned();
        check_place(&text);
        let expected = (text, vec![], "stop".to_owned());
        assert_eq!(streamed(&gateway, request(&more)).await, expected);
    }
    // Whoever may call or answer does either.
    let more = [("response_format", schema(place())), ("tools", tools()), ("n", json!(6))];
    let whole = client::post(gateway.address, CHAT, &request(&more)).await.json();
    for answer in whole["choices"].as_array().unwrap() {
        match answer["message"]["content"].as_str() {
            Some(text) => check_place(text),
            None => assert!(!answer["message"]["tool_calls"].as_array().unwrap().is_empty()),
        }
    }
    let text = client::post(gateway.address, CHAT, &request(&[("tools", tools())])).await;
    assert_eq!(text.status, 200, "{text:?}");

    // What the grammar's compiler does not take is named by it.
    let unique =
        json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}});
    let called = json!([{"type": "function", "function": {"name": "f", "parameters": unique}}]);
    for more in [("response_format", schema(unique.clone())), ("tools", called)] {
        let response = client::post(gateway.address, CHAT, &request(&[more])).await;
        assert_eq!(response.status, 400, "{response:?}");
        let message = response.error()["message"].to_string();
        assert!(message.contains("uniqueItems"), "{message}");
    }
    gateway.end().await;
    fleet.end().await;
}

#[tokio::test]
async fn calls_in_an_answer_are_told_as_they_come() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    let mut connection = Connection::open(gateway.address).await;
    let body = request(&[
        ("tools", tools()),
        ("stream", json!(true)),
        (
            "messages",
            json!([
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
                    "function": {"name": "now", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "noon"},
            ]),
        ),
    ]);
    connection.write(&client::json_request(CHAT, &body)).await;
    let asked = coordinator.accepted().await;
    assert!(matches!(&asked.request.constraint, Some(Constraint::Lark { .. })), "{asked:?}");
    let names: Vec<_> = asked.request.tools.iter().map(|tool| &tool.function.name).collect();
    assert_eq!(names, ["now", "weather"]);
    let messages = asked.request.messages.as_ref().unwrap();
    assert_eq!(messages[1].tool_calls[0].function.arguments, json!({}));
    assert_eq!((messages[2].role.as_str(), &*messages[2].content), ("tool", "noon"));
    let pieces = [
        "Let me",
        " see.<tool",
        "_call>\n{\"name\": \"weather\", \"arguments\": {\"city\"",
        ": \"Oslo\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"argu",
        "ments\": {}}\n</tool_call>",
    ];
    for (i, piece) in (0..).zip(pieces) {
        coordinator.token(&asked, i, piece).await;
    }
    coordinator.done(&asked, FinishReason::Stop).await;
    let response = connection.response().await;
    let calls =
        [["weather", "{\"city\": \"Oslo\"}"], ["now", "{}"]].map(|call| call.map(str::to_owned));
    let expected = ("Let me see.".to_owned(), calls.to_vec(), "tool_calls".to_owned());
    assert_eq!(read_stream(response.events()), expected);
    gateway.end().await;
}

/// Whether an answer may be this text, which is written byte by byte.
fn may_be(guide: &mut Guide, text: &str) -> bool {
    let tokens: Vec<u32> = text.bytes().map(u32::from).chain([END]).collect();
    guide.n_fitting(&[], &tokens).unwrap() == tokens.len()
}

#[tokio::test]
async fn whatever_begins_as_a_call_is_one() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    let grammars = Grammars::of_shards(bed.folder.path().to_owned(), VOCAB_SIZE, &[END]);
    let answer = r#"{"city": "Oslo", "n": 7}"#;
    let call = |name: &str, arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let (now, weather) = (call("now", "{}"), call("weather", answer));
    let both = format!("{weather}\n{now}");
    let wrong = [
        "<tool_call>".to_owned(),
        "<tool_call>x".to_owned(),
        weather[..60].to_owned(),
        call("other", "{}"),
        call("now", answer),
        call("weather", "{}"),
        call("weather", r#"{"n": 7, "city": "Oslo"}"#),
        call("weather", r#"{"city":"Oslo","n":7}"#),
        format!("{now}!"),
        format!("{now}{now}"),
    ];
    let texts = ["", "hello", "a <tool_calls> \u{e9}", "{\"city\": 1}"].map(str::to_owned);
    let calls = [now.clone(), weather.clone()];
    let mixed = [format!("Well.\n{now}"), format!("<tool_cal{both}")];
    let schema = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": place()}});
    let one = ("parallel_tool_calls", json!(false));
    let (texts, calls, mixed, wrong) = (&texts[..], &calls[..], &mixed[..], &wrong[..]);
    let (both, answer) = (&[both][..], &[answer.to_owned()][..]);
    type Case<'a> = (Vec<(&'a str, Value)>, Vec<&'a [String]>, Vec<&'a [String]>);
    let cases: [Case<'_>; 4] = [
        (vec![], vec![texts, calls, mixed, both], vec![wrong]),
        (vec![one.clone()], vec![texts, calls, &mixed[..1]], vec![wrong, both, &mixed[1..]]),
        (vec![("tool_choice", json!("required"))], vec![calls, both], vec![texts, mixed, wrong]),
        (
            vec![("response_format", schema), one],
            vec![calls, answer],
            vec![texts, mixed, wrong, both],
        ),
    ];
    for (more, good, bad) in cases {
        let mut connection = Connection::open(gateway.address).await;
        let body = request(&[&more[..], &[("tools", tools())]].concat());
        connection.write(&client::json_request(CHAT, &body)).await;
        let asked = coordinator.asked().await;
        let mut guide = grammars.compile(asked.request.constraint.as_ref().unwrap()).unwrap();
        for text in good.concat() {
            assert!(may_be(&mut guide, &text), "{text:?} with {more:?}");
        }
        for text in bad.concat() {
            assert!(!may_be(&mut guide, &text), "{text:?} with {more:?}");
        }
        coordinator.fail(&asked, ErrorClass::Overloaded, None).await;
        assert_eq!(connection.response().await.status, 429);
    }
    gateway.end().await;
}
