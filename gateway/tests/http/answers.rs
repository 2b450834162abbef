//! Chats and completions of a real fleet with the toy model.

use serde_json::{Value, json};
use stagebus_schemas::messages::public::ChatMessage;

use crate::bed::{Bed, MODEL};
use crate::client::{self, Response};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// A greedy request for a chat, with `more`.
fn chat(more: &Value) -> Value {
    let messages = json!([{"role": "user", "content": "hi"}]);
    with(json!({"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 30}), more)
}

/// A greedy request for a completion, with `more`.
fn completion(more: &Value) -> Value {
    with(json!({"model": MODEL, "prompt": "once", "temperature": 0, "max_tokens": 20}), more)
}

fn with(mut request: Value, more: &Value) -> Value {
    for (name, value) in more.as_object().into_iter().flatten() {
        request[name] = value.clone();
    }
    request
}

/// The prompt and the greedy answer of [`chat`].
fn expected_chat(bed: &Bed) -> (Vec<u32>, Vec<u32>) {
    let message = ChatMessage::new("user", "hi");
    let prompt = bed.text.encode_chat(&[message]).unwrap();
    let tokens = bed.expected(&prompt, 30);
    (prompt, tokens)
}

/// The chunks of a stream that ends as it should.
fn chunks(response: &Response) -> Vec<Value> {
    assert_eq!(response.status, 200, "{response:?}");
    let mut events = response.events();
    assert_eq!(events.pop(), Some("[DONE]"), "{response:?}");
    events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

#[tokio::test]
async fn a_chat_is_answered_whole_and_as_a_stream() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let gateway = bed.gateway_with_model(|_| {}).await;
    let (prompt, tokens) = expected_chat(&bed);
    let text = bed.text.decode(&tokens);

    let response = client::post(gateway.address, CHAT, &chat(&json!({}))).await;
    assert_eq!(response.status, 200, "{response:?}");
    let whole = response.json();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], MODEL);
    assert_eq!(response.header("x-request-id"), whole["id"].as_str());
    assert!(whole["id"].as_str().unwrap().starts_with("chatcmpl-r-"), "{whole}");
    let fingerprint = format!("fp_{}", &bed.manifest.fingerprint[..12]);
    assert_eq!(whole["system_fingerprint"], fingerprint);
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], text);
    let reason = if tokens.len() < 30 { "stop" } else { "length" };
    assert_eq!(choice["finish_reason"], reason);
    assert_eq!(whole["usage"]["prompt_tokens"], prompt.len());
    assert_eq!(whole["usage"]["completion_tokens"], tokens.len());
    assert_eq!(whole["usage"]["total_tokens"], prompt.len() + tokens.len());

    let more = json!({"stream": true, "stream_options": {"include_usage": true}});
    let chunks = chunks(&client::post(gateway.address, CHAT, &chat(&more)).await);
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["total_tokens"], prompt.len() + tokens.len());
    let first = json!({"role": "assistant", "content": ""});
    assert_eq!(chunks[0]["choices"][0]["delta"], first);
    let content =
        |chunk: &Value| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    assert_eq!(chunks.iter().filter_map(content).collect::<String>(), text);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], reason);
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["usage"].is_null()));
    gateway.end().await;
    fleet.end().await;
}

#[tokio::test]
async fn a_connection_is_used_again_and_http_1_0_is_answered() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let gateway = bed.gateway_with_model(|_| {}).await;
    let mut connection = client::Connection::open(gateway.address).await;
    for stream in [true, false, true] {
        connection.write(&client::json_request(CHAT, &chat(&json!({"stream": stream})))).await;
        assert_eq!(connection.response().await.status, 200);
    }
    let mut old = client::Connection::open(gateway.address).await;
    old.write(b"GET /health HTTP/1.0\r\n\r\n").await;
    assert!(String::from_utf8(old.rest().await).unwrap().starts_with("HTTP/1.0 200 "));
    gateway.end().await;
    fleet.end().await;
}

#[tokio::test]
async fn completions_take_texts_and_tokens_and_give_choices_in_order() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let gateway = bed.gateway_with_model(|_| {}).await;
    let text = |prompt: &[u32], n| bed.text.decode(&bed.expected(prompt, n));
    let once = bed.text.encode("once", true).unwrap();

    let whole = client::post(gateway.address, TEXT, &completion(&json!({}))).await.json();
    assert_eq!(whole["object"], "text_completion");
    assert_eq!(whole["choices"][0]["text"], text(&once, 20));
    let whole =
        client::post(gateway.address, TEXT, &completion(&json!({"max_tokens": null}))).await;
    assert_eq!(whole.json()["choices"][0]["text"], text(&once, 16), "16 unless asked");

    let more = json!({"prompt": [[1, 2, 3], [4]], "n": 2});
    let whole = client::post(gateway.address, TEXT, &completion(&more)).await.json();
    let found: Vec<_> = whole["choices"].as_array().unwrap().iter().map(|c| &c["text"]).collect();
    let (first, second) = (text(&[1, 2, 3], 20), text(&[4], 20));
    assert_eq!(found, [&first, &first, &second, &second]);
    assert_eq!(whole["usage"]["prompt_tokens"], 4, "each prompt counts once");

    let more = json!({"prompt": [[1, 2, 3], [4]], "n": 2, "stream": true});
    let mut texts = [const { String::new() }; 4];
    let mut reasons = [const { None }; 4];
    for chunk in chunks(&client::post(gateway.address, TEXT, &completion(&more)).await) {
        let choice = &chunk["choices"][0];
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        assert!(reasons[index].is_none(), "text after the end: {chunk}");
        texts[index].push_str(choice["text"].as_str().unwrap());
        reasons[index] = choice["finish_reason"].as_str().map(str::to_owned);
    }
    assert_eq!(texts, [first.clone(), first, second.clone(), second]);
    assert!(reasons.iter().all(Option::is_some), "{reasons:?}");
    gateway.end().await;
    fleet.end().await;
}

#[tokio::test]
async fn several_answers_with_a_seed_are_those_of_the_seeds_that_follow() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let gateway = bed.gateway_with_model(|_| {}).await;
    // Temperature 1 is what a request without one has.
    let drawn = |more: Value| chat(&with(json!({"temperature": null, "seed": -1}), &more));
    let texts = async |request: Value| -> Vec<Value> {
        let whole = client::post(gateway.address, CHAT, &request).await.json();
        let choices = whole["choices"].as_array().unwrap().iter();
        choices.map(|choice| choice["message"]["content"].clone()).collect()
    };
    let three = texts(drawn(json!({"n": 3}))).await;
    assert_eq!(three.len(), 3);
    for (seed, text) in [json!(-1), json!(0), json!(1)].into_iter().zip(&three) {
        assert_eq!(
            texts(drawn(json!({"seed": seed}))).await,
            std::slice::from_ref(text),
            "seed {seed}"
        );
    }
    assert!(three[0] != three[1] && three[1] != three[2], "they are drawn: {three:?}");
    let explicit = texts(drawn(json!({"temperature": 1.0}))).await;
    assert_eq!(explicit[0], three[0]);
    gateway.end().await;
    fleet.end().await;
}

#[tokio::test]
async fn parameters_reach_the_fleet() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let gateway = bed.gateway_with_model(|_| {}).await;
    let once = bed.text.encode("once", true).unwrap();
    let tokens = bed.expected(&once, 20);
    let whole = bed.text.decode(&tokens);
    let (from, _) = whole.char_indices().nth(6).unwrap();
    let stop: String = whole[from..].chars().take(2).collect();
    let until = &whole[..whole.find(&stop).unwrap()];
    for stop in [json!(stop), json!(["\u{1}\u{2}\u{3}", stop])] {
        let found = client::post(gateway.address, TEXT, &completion(&json!({"stop": stop}))).await;
        assert_eq!(found.json()["choices"][0]["text"], until);
        assert_eq!(found.json()["choices"][0]["finish_reason"], "stop");
    }
    let first = tokens[0];
    let more = json!({"logit_bias": {first.to_string(): -100}, "logprobs": 2, "max_tokens": 3});
    let found = client::post(gateway.address, TEXT, &completion(&more)).await.json();
    let logprobs = &found["choices"][0]["logprobs"];
    assert_ne!(logprobs["tokens"][0], bed.text.decode(&[first]), "it is ruled out: {found}");
    // Tokens that are parts of characters look alike, and have one place together.
    assert!(!logprobs["top_logprobs"][0].as_object().unwrap().is_empty(), "{found}");

    let more = json!({"logprobs": true, "top_logprobs": 2, "max_completion_tokens": 4,
        "max_tokens": null, "stream": true});
    let chunks = chunks(&client::post(gateway.address, CHAT, &chat(&more)).await);
    let entries: Vec<&Value> = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .collect();
    assert_eq!(entries.len(), 4, "{chunks:?}");
    let (_, tokens) = expected_chat(&bed);
    for (entry, token) in entries.iter().zip(tokens) {
        assert_eq!(entry["bytes"], json!(bed.text.token_bytes(token)), "{entry}");
        assert_eq!(entry["top_logprobs"][0]["logprob"], entry["logprob"], "greedy: {entry}");
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
    }
    gateway.end().await;
    fleet.end().await;
}

#[tokio::test]
async fn what_only_the_coordinator_knows_is_refused_with_its_words() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let gateway = bed.gateway_with_model(|_| {}).await;
    for (more, part) in [
        (json!({"prompt": [300]}), "ids below 258"),
        (json!({"prompt": vec![1; 600]}), "context"),
        (json!({"logit_bias": {"258": 1}}), "logit_bias"),
    ] {
        for stream in [true, false] {
            let request = with(completion(&more), &json!({"stream": stream}));
            let response = client::post(gateway.address, TEXT, &request).await;
            assert_eq!(response.status, 400, "{response:?}");
            assert!(response.error()["message"].as_str().unwrap().contains(part), "{response:?}");
        }
    }
    gateway.end().await;
    fleet.end().await;
}
