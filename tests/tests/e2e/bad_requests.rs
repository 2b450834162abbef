//! Requests that cannot be served: each gets a typed error and the empty message, and the fleet
//! goes on.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_bus::{PublishError, StreamError};
use stagebus_schemas::error::ErrorClass;
use stagebus_tests::answer::Answer;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::setup::{CONTEXT_LEN, VOCAB_SIZE};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::prompts;

/// Checks that a request gets an `invalid_request` whose message has `part`, and no acceptance.
async fn refused(fleet: &Fleet, payload: Vec<u8>, part: &str) -> Result<()> {
    let mut stream = fleet.send(payload).await?;
    let answer = Answer::default().rest(&mut stream).await?;
    let (class, message) = answer.failure()?;
    ensure!(class == ErrorClass::InvalidRequest, "{class:?}: {message}");
    ensure!(message.contains(part), "{part:?} is not in {message:?}");
    ensure!(answer.accepted.is_none(), "it was accepted first");
    Ok(())
}

/// Checks that the fleet answers rightly.
async fn serves(fleet: &Fleet) -> Result<()> {
    let case = &prompts::cases()?[0];
    let answer = fleet.ask(&prompts::of_case(case, 3)).await?;
    ensure!(answer.tokens == case.output_ids[..3], "{answer:?}");
    Ok(())
}

#[tokio::test]
async fn malformed_requests_are_refused() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let malformed: [(&str, &str); 10] = [
        ("{", "cannot be read"),
        ("", "cannot be read"),
        ("null", "cannot be read"),
        ("[1, 2]", "cannot be read"),
        ("\u{0}\u{1}", "cannot be read"),
        (r#"{"prompt": "a"} {"prompt": "b"}"#, "cannot be read"),
        (r#"{"prompt": 5}"#, "cannot be read"),
        (r#"{"prompt": "a", "max_token": 5}"#, "max_token"),
        (r#"{"tokens": [-1]}"#, "cannot be read"),
        (r#"{"prompt": "a", "request_id": "a b.*"}"#, "cannot be read"),
    ];
    for (text, part) in malformed {
        refused(&fleet, text.into(), part).await.with_context(|| format!("request {text:?}"))?;
    }
    let mut not_text = br#"{"prompt": "a"}"#.to_vec();
    not_text[12] = 0xff;
    refused(&fleet, not_text, "cannot be read").await?;
    serves(&fleet).await?;
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn requests_that_cannot_be_honoured_are_refused() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let with = |key: &str, value: Value| {
        let mut request = json!({ "prompt": "a" });
        request[key] = value;
        request
    };
    let every = |n_tokens: usize, bias: i32| {
        Value::Object((0..n_tokens).map(|token| (token.to_string(), json!(bias))).collect())
    };
    let words = "word ".repeat(CONTEXT_LEN + 100);
    let cases = [
        (json!({}), "0 of messages, prompt and tokens"),
        (json!({ "prompt": "a", "tokens": [1] }), "2 of messages, prompt and tokens"),
        (json!({ "messages": [] }), "messages is empty"),
        (json!({ "prompt": "" }), "prompt is empty"),
        (json!({ "tokens": [] }), "tokens is empty"),
        (json!({ "tokens": [1, VOCAB_SIZE] }), "tokens[1] is 49152"),
        (json!({ "tokens": vec![1; CONTEXT_LEN] }), "8192"),
        (json!({ "prompt": words }), "8192"),
        (json!({ "messages": [{ "role": "user", "content": words }] }), "8192"),
        (with("max_tokens", json!(0)), "max_tokens is 0"),
        (with("temperature", json!(-1)), "temperature is -1"),
        (with("top_p", json!(1.5)), "top_p is 1.5"),
        (with("top_p", json!(0)), "top_p is 0"),
        (with("repetition_penalty", json!(0)), "repetition_penalty is 0"),
        (with("frequency_penalty", json!(2.5)), "frequency_penalty is 2.5"),
        (with("logit_bias", json!({ "49152": 1 })), "token 49152"),
        (with("logit_bias", json!({ "1": -101 })), "-101"),
        (with("logit_bias", json!({ "one": 1 })), "cannot be read"),
        (with("logit_bias", every(4097, 1)), "logit_bias has 4097"),
        (with("logit_bias", every(VOCAB_SIZE, -100)), "forbids every one"),
        (with("top_logprobs", json!(2)), "top_logprobs is given without"),
        (json!({ "prompt": "a", "logprobs": true, "top_logprobs": 21 }), "top_logprobs is 21"),
        (with("stop", json!([""])), "stop is empty"),
        (with("stop", json!(vec!["x"; 17])), "stop has 17"),
        (with("prompt", json!("x".repeat(1 << 20))), "at most 1048576"),
    ];
    for (request, part) in cases {
        let name = request.to_string().chars().take(80).collect::<String>();
        let payload = serde_json::to_vec(&request)?;
        refused(&fleet, payload, part).await.with_context(|| format!("request {name}"))?;
    }
    serves(&fleet).await?;
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn huge_requests_are_refused_on_every_way_in() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let limit = fleet.bus.max_payload();
    ensure!(limit == 8 << 20, "the broker takes {limit} bytes");
    // As large as the broker lets through, with room for the header.
    let largest = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(limit - 200));
    refused(&fleet, largest.into(), "at most 1048576").await?;
    // Larger than that: our client refuses.
    for bytes in [limit + 1, 100 << 20] {
        let error = fleet.send(vec![b'x'; bytes]).await.err().context("it was sent")?;
        let refusal = error.downcast_ref::<StreamError>();
        let found = matches!(refusal,
            Some(StreamError::Publish(PublishError::PayloadTooLarge { bytes: found, .. }))
                if *found == bytes);
        ensure!(found, "{error:?}");
    }
    // A client that does not look: the broker refuses.
    let answer = publish_unchecked(&fleet, 100 << 20).await?;
    ensure!(answer.contains("-ERR 'Maximum Payload Violation'"), "{answer}");
    serves(&fleet).await?;
    fleet.idle().await?;
    fleet.end().await
}

/// Publishes a request of `bytes` bytes without a look at the broker's limit; returns what the
/// broker says until it closes the connection.
async fn publish_unchecked(fleet: &Fleet, bytes: usize) -> Result<String> {
    let address = fleet.processes.url().trim_start_matches("nats://").to_owned();
    let (mut from, mut to) = TcpStream::connect(address).await?.into_split();
    let head = format!(
        "CONNECT {{\"verbose\":false}}\r\nPUB {} reply {bytes}\r\n",
        fleet.subjects().prompt()
    );
    to.write_all(head.as_bytes()).await?;
    let send = async {
        let chunk = vec![b'x'; 1 << 20];
        for _ in 0..bytes >> 20 {
            if to.write_all(&chunk).await.is_err() {
                // The broker has closed the connection, as it should.
                return;
            }
        }
    };
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    let receive = async {
        // A reset is an end, too.
        while let Ok(n @ 1..) = from.read(&mut buffer).await {
            answer.extend_from_slice(&buffer[..n]);
        }
    };
    tokio::join!(send, receive);
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
