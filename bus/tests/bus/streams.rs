//! The client's side of a prompt.

use std::time::Duration;

use bytes::Bytes;
use stagebus_bus::{Bus, Delivery, StreamError};
use stagebus_schemas::codec::{self, ContentType};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::{Event, FinishReason, PromptRequest, Timings, Usage};

use crate::broker::Broker;
use crate::{PATIENCE, connect};

const SUBJECT: &str = "stagebus.v1.m.prompt";

fn accepted() -> Event {
    Event::Accepted {
        request_id: RequestId::new("r1").expect("an id"),
        prompt_tokens: 3,
        seed: None,
    }
}

fn token(i: u64) -> Event {
    Event::Token { i, text: "a".into(), tokens: vec![7], logprobs: vec![], steps: vec![] }
}

fn done() -> Event {
    Event::Done {
        finish_reason: FinishReason::Stop,
        usage: Usage::default(),
        timings: Timings::default(),
        text: None,
        tokens: None,
        logprobs: vec![],
    }
}

fn request() -> PromptRequest {
    PromptRequest { prompt: Some("hello".into()), ..PromptRequest::default() }
}

/// Answers one request with events, then, if `end`, the empty message.
async fn answer(bus: &Bus, request: &Delivery, events: &[Event], end: bool) {
    let reply = request.reply().expect("a reply subject");
    for event in events {
        let payload = codec::encode_public(ContentType::Json, event).expect("encodes");
        let content = Some(ContentType::Json);
        bus.publish_bytes(reply, content, payload.into()).await.expect("publishes");
    }
    if end {
        bus.publish_bytes(reply, None, Bytes::new()).await.expect("publishes");
    }
}

/// Runs one prompt against a coordinator that answers with `events`.
async fn run(events: &[Event], end: bool, idle: Duration) -> (Vec<Event>, Result<(), StreamError>) {
    let broker = Broker::start();
    let (client, server) = (connect(&broker).await, connect(&broker).await);
    let mut prompts = server.queue_subscribe(SUBJECT, "coordinator").await.expect("subscribes");
    // The broker has seen the subscription once it has answered something sent after it.
    drop(server.request_bytes("nobody", None, Bytes::new(), PATIENCE).await);
    let serve = async {
        let delivery = prompts.next().await.expect("a request");
        let read: PromptRequest =
            codec::decode_public(delivery.content(), &delivery.payload).expect("decodes");
        assert_eq!(read, request());
        answer(&server, &delivery, events, end).await;
    };
    let read = async {
        let mut stream = client.prompt(SUBJECT, &request(), idle).await.expect("sends");
        let mut seen = Vec::new();
        loop {
            match stream.next().await {
                Ok(Some(event)) => seen.push(event),
                Ok(None) => return (seen, Ok(())),
                Err(error) => return (seen, Err(error)),
            }
        }
    };
    let ((), outcome) = tokio::join!(serve, read);
    outcome
}

#[tokio::test]
async fn events_come_in_order_until_the_empty_message() {
    let events = [accepted(), token(0), token(1), done()];
    let (seen, end) = run(&events, true, PATIENCE).await;
    assert_eq!(seen, events);
    end.expect("a complete stream");
}

#[tokio::test]
async fn a_refusal_is_a_complete_stream() {
    let events = [Event::Error {
        class: ErrorClass::InvalidRequest,
        message: "no".into(),
        retry_after_ms: None,
    }];
    let (seen, end) = run(&events, true, PATIENCE).await;
    assert_eq!(seen, events);
    end.expect("a complete stream");
}

#[tokio::test]
async fn events_that_come_again_are_left_out() {
    let sent = [accepted(), token(0), token(1), accepted(), token(1), token(2), done(), done()];
    let (seen, end) = run(&sent, true, PATIENCE).await;
    assert_eq!(seen, [accepted(), token(0), token(1), token(2), done()]);
    end.expect("a complete stream");
}

#[tokio::test]
async fn a_missing_event_is_a_gap() {
    let (seen, end) = run(&[accepted(), token(0), token(2)], true, PATIENCE).await;
    assert_eq!(seen.len(), 2);
    assert!(matches!(end, Err(StreamError::Gap { expected: 1, found: 2 })));
}

#[tokio::test]
async fn an_end_without_a_final_event_is_told() {
    let (_, end) = run(&[accepted(), token(0)], true, PATIENCE).await;
    assert!(matches!(end, Err(StreamError::Unfinished { .. })));
}

#[tokio::test]
async fn silence_ends_by_the_idle_time() {
    let (seen, end) = run(&[accepted()], false, Duration::from_secs(1)).await;
    assert_eq!(seen.len(), 1);
    assert!(matches!(end, Err(StreamError::Idle { .. })));
}

#[tokio::test]
async fn without_a_coordinator_the_answer_comes_at_once() {
    let broker = Broker::start();
    let client = connect(&broker).await;
    let mut stream = client.prompt(SUBJECT, &request(), PATIENCE).await.expect("sends");
    let error = stream.next().await.expect_err("nobody there");
    assert!(matches!(error, StreamError::NoResponders { subject } if subject == SUBJECT));
}

#[tokio::test]
async fn bytes_that_are_no_event_are_refused() {
    let broker = Broker::start();
    let bus = connect(&broker).await;
    let mut prompts = bus.subscribe(SUBJECT).await.expect("subscribes");
    let mut stream =
        bus.event_stream(SUBJECT, ContentType::Json, "{}".into(), PATIENCE).await.expect("sends");
    let delivery = prompts.next().await.expect("a request");
    let reply = delivery.reply().expect("a reply subject");
    bus.publish_bytes(reply, None, "nonsense".into()).await.expect("publishes");
    assert!(matches!(stream.next().await, Err(StreamError::Decode(_))));
}
