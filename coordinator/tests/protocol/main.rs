//! A coordinator on a real broker: the public contract, routing, faults and shutdown.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

#[path = "../support/shard_set.rs"]
mod shard_set;

mod cloud_events;
mod constrained;
mod fake_stage;
mod harness;
mod jobs;
mod metrics;
mod sampling;
mod workers;

use std::time::Duration;

use stagebus_coordinator::{CoordinatorError, CoordinatorSettings};
use stagebus_schemas::codec::{ContentType, decode_public, encode_public};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::{CoordinatorId, RequestId};
use stagebus_schemas::messages::fleet::CoordinatorAnnouncement;
use stagebus_schemas::messages::public::{ChatMessage, Event, FinishReason, PromptRequest};

use fake_stage::Behaviour;
use harness::{Answer, Bed, tokens};

fn defaults() -> CoordinatorSettings {
    CoordinatorSettings::default()
}

#[tokio::test]
async fn text_and_chat_prompts_give_text() {
    let bed = Bed::new(2).await;
    let _stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(defaults()).await;
    let raw = PromptRequest {
        prompt: Some("once".to_owned()),
        max_tokens: Some(30),
        ..PromptRequest::default()
    };
    let message = ChatMessage::new("user", "hi");
    let chat = PromptRequest {
        prompt: None,
        messages: Some(vec![message.clone()]),
        stream: Some(false),
        ..raw.clone()
    };
    for (request, prompt) in [
        (raw, bed.text.encode("once", true).unwrap()),
        (chat, bed.text.encode_chat(&[message]).unwrap()),
    ] {
        let answer = bed.ask(&request).await;
        assert_eq!(answer.tokens, bed.expected(&prompt, 30));
        assert_eq!(answer.text, bed.text.decode(&answer.tokens));
        assert_eq!(answer.n_token_events == 0, request.stream == Some(false));
    }
}

#[tokio::test]
async fn a_stop_string_ends_the_text_before_it() {
    let bed = Bed::new(2).await;
    let mut stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(defaults()).await;
    let prompt = [1, 2, 3];
    let whole = bed.text.decode(&bed.expected(&prompt, 60));
    let from = whole.char_indices().nth(10).unwrap().0;
    let to = whole.char_indices().nth(13).unwrap().0;
    let request = PromptRequest { stop: vec![whole[from..to].to_owned()], ..tokens(&prompt, 60) };
    let answer = bed.ask(&request).await;
    assert_eq!(answer.text, whole[..whole.find(&whole[from..to]).unwrap()]);
    assert_eq!(answer.finish_reason(), Some(FinishReason::Stop));
    for stage in &mut stages {
        stage.idle().await;
    }
}

#[tokio::test]
async fn both_encodings_and_malformed_requests_are_answered() {
    let bed = Bed::new(1).await;
    let _stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(defaults()).await;
    let packed = encode_public(ContentType::MessagePack, &tokens(&[5], 3)).unwrap();
    let json = br#"{"tokens":[5],"max_tokens":3}"#.to_vec();
    for (content, payload) in [(ContentType::MessagePack, packed), (ContentType::Json, json)] {
        let subject = bed.subjects.prompt();
        let mut stream = bed
            .bus
            .event_stream(&subject, content, payload.into(), Duration::from_secs(20))
            .await
            .unwrap();
        let mut answer = Answer::default();
        while let Some(delivery) = stream.next_raw().await.unwrap() {
            assert_eq!(delivery.content_type(), Some(content.header()));
            answer.add(decode_public(content, &delivery.payload).unwrap());
        }
        assert_eq!(answer.tokens, bed.expected(&[5], 3));
    }
    for malformed in [&b"{"[..], b"", b"\x81\xff", b"[1]", b"{\"prompt\":3}"] {
        let subject = bed.subjects.prompt();
        let stream = bed
            .bus
            .event_stream(&subject, ContentType::Json, malformed.into(), Duration::from_secs(20))
            .await
            .unwrap();
        let answer = Answer::read(stream).await;
        assert_eq!(answer.class(), Some(ErrorClass::InvalidRequest), "{malformed:?}");
    }
}

#[tokio::test]
async fn events_never_go_to_internal_subjects() {
    let bed = Bed::new(1).await;
    let _stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(defaults()).await;
    let internal = bed.subjects.head(&CoordinatorId::random());
    let mut listener = bed.bus.subscribe(&internal).await.unwrap();
    let request = br#"{"tokens":[5],"max_tokens":3}"#[..].into();
    bed.bus.publish_with_reply(&bed.subjects.prompt(), &internal, request).await.unwrap();
    // The same coordinator answers this one later, on the same connection.
    assert_eq!(bed.ask(&tokens(&[5], 3)).await.tokens, bed.expected(&[5], 3));
    assert!(listener.try_next().is_none());
}

#[tokio::test]
async fn cancel_ends_the_stream_and_frees_every_stage() {
    let bed = Bed::new(2).await;
    let mut stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(defaults()).await;
    let request_id = RequestId::new("mine").unwrap();
    let prompt = bed.prompt_with_long_answer(400);
    let request = PromptRequest { request_id: Some(request_id.clone()), ..tokens(&prompt, 400) };
    let mut stream = bed.send(&request).await;
    let mut answer = Answer::default();
    while answer.n_token_events == 0 {
        answer.add(stream.next().await.unwrap().unwrap());
    }
    for request in ["unknown", "mine"] {
        let subject = bed.subjects.cancel(&RequestId::new(request).unwrap());
        bed.bus.publish_bytes(&subject, None, "".into()).await.unwrap();
    }
    while let Some(event) = stream.next().await.unwrap() {
        answer.add(event);
    }
    assert_eq!(answer.finish_reason(), Some(FinishReason::Cancelled));
    let expected = bed.expected(&prompt, 400);
    assert!(answer.tokens.len() < 400 && expected.starts_with(&answer.tokens));
    for stage in &mut stages {
        stage.idle().await;
    }
}

#[tokio::test]
async fn a_late_worker_is_used_and_without_one_the_client_hears_why() {
    let bed = Bed::new(2).await;
    let _first = bed.stage(0, Behaviour::Good).await;
    let coordinator =
        bed.coordinator(CoordinatorSettings { route_wait_ms: 100, ..defaults() }).await;
    let answer = bed.ask(&tokens(&[1], 3)).await;
    assert_eq!(answer.class(), Some(ErrorClass::StageUnavailable));
    coordinator.end().await.unwrap();

    let _coordinator = bed.coordinator(defaults()).await;
    let stream = bed.send(&tokens(&[1], 3)).await;
    let _second = bed.stage(1, Behaviour::Good).await;
    assert_eq!(Answer::read(stream).await.tokens, bed.expected(&[1], 3));
}

#[tokio::test]
async fn a_coordinator_may_wait_for_workers_before_it_is_ready() {
    let bed = Bed::new(2).await;
    let mut fleet = bed.bus.subscribe(&bed.subjects.fleet_all()).await.unwrap();
    let mut starting = bed.coordinator_that_waits(defaults(), true);
    // One announcement at the start and one after its own probe.
    for _ in 0..2 {
        fleet.next().await.unwrap().decode::<CoordinatorAnnouncement>().unwrap();
    }
    let _first = bed.stage(0, Behaviour::Good).await;
    assert!(starting.ready.try_recv().is_err());
    let _second = bed.stage(1, Behaviour::Good).await;
    starting.ready().await.end().await.unwrap();
}

#[tokio::test]
async fn workers_without_room_are_passed_over() {
    let bed = Bed::new(2).await;
    let _full = bed.stage(0, Behaviour::Full).await;
    let _second = bed.stage(1, Behaviour::Good).await;
    let _coordinator = bed.coordinator(defaults()).await;
    let answer = bed.ask(&tokens(&[1], 3)).await;
    assert_eq!(answer.error, Some((ErrorClass::Overloaded, "no room".to_owned(), Some(50))));
    let mut good = bed.stage(0, Behaviour::Good).await;
    // The full worker may be tried first; the other one must serve every request.
    for _ in 0..3 {
        assert_eq!(bed.ask(&tokens(&[1], 3)).await.tokens, bed.expected(&[1], 3));
    }
    good.idle().await;
    assert!(good.n_steps() >= 9);
}

#[tokio::test]
async fn a_dead_worker_of_any_stage_is_noticed_at_its_next_step() {
    for dead in 0..2 {
        let bed = Bed::new(2).await;
        let mut stages = bed.stages(1).await;
        let settings = CoordinatorSettings { recovery_wait_ms: 200, ..defaults() };
        let _coordinator = bed.coordinator(settings).await;
        let prompt = bed.prompt_with_long_answer(400);
        let mut stream = bed.send(&tokens(&prompt, 400)).await;
        let mut answer = Answer::default();
        while answer.n_token_events == 0 {
            answer.add(stream.next().await.unwrap().unwrap());
        }
        stages.remove(dead).vanish().await;
        while let Some(event) = stream.next().await.unwrap() {
            answer.add(event);
        }
        assert_eq!(answer.class(), Some(ErrorClass::StageUnavailable), "{:?}", answer.error);
        stages[0].idle().await;
        // Another worker takes over for new requests.
        let _other = bed.stage(dead, Behaviour::Good).await;
        assert_eq!(bed.ask(&tokens(&[1], 3)).await.tokens, bed.expected(&[1], 3));
    }
}

#[tokio::test]
async fn a_broken_and_a_mute_stage_end_the_session_with_an_error() {
    for (behaviour, class) in
        [(Behaviour::Broken, ErrorClass::Internal), (Behaviour::Mute, ErrorClass::StageUnavailable)]
    {
        let bed = Bed::new(2).await;
        let mut first = bed.stage(0, Behaviour::Good).await;
        let mut second = bed.stage(1, behaviour).await;
        let _coordinator =
            bed.coordinator(CoordinatorSettings { step_timeout_ms: 200, ..defaults() }).await;
        let answer = bed.ask(&tokens(&[1, 2], 3)).await;
        assert_eq!(answer.class(), Some(class), "{:?}", answer.error);
        first.idle().await;
        second.idle().await;
    }
}

#[tokio::test]
async fn steps_that_a_busy_stage_does_not_hear_are_sent_again() {
    for stage in 0..2 {
        let bed = Bed::new(2).await;
        let _other = bed.stage(1 - stage, Behaviour::Good).await;
        let _deaf = bed.stage(stage, Behaviour::Deaf).await;
        // No step is ever late by the clock.
        let settings = CoordinatorSettings { step_timeout_ms: 3_600_000, ..defaults() };
        let _coordinator = bed.coordinator(settings).await;
        let prompt = bed.prompt_with_long_answer(400);
        let long = tokens(&prompt, 400);
        let (first, second) = tokio::join!(bed.ask(&long), bed.ask(&long));
        assert_eq!(first.tokens, bed.expected(&prompt, 400), "stage {stage}");
        assert_eq!(second.tokens, first.tokens, "stage {stage}");
    }
}

#[tokio::test]
async fn beyond_the_limits_requests_are_refused_at_once() {
    let bed = Bed::new(1).await;
    let mut mute = bed.stage(0, Behaviour::Mute).await;
    let settings = CoordinatorSettings { max_sessions: 1, max_queued: 1, ..defaults() };
    let _coordinator = bed.coordinator(settings).await;
    let _running = bed.send(&tokens(&[1], 3)).await;
    mute.holds(1).await;
    let _waiting = bed.send(&tokens(&[1], 3)).await;
    let refused = bed.ask(&tokens(&[1], 3)).await;
    assert_eq!(refused.class(), Some(ErrorClass::Overloaded));
    assert!(matches!(refused.error, Some((_, _, Some(1..)))));
}

#[tokio::test]
async fn at_shutdown_running_requests_finish_and_new_ones_go_elsewhere() {
    let bed = Bed::new(1).await;
    let _stages = bed.stages(1).await;
    let first = bed.coordinator(defaults()).await;
    let mut fleet = bed.bus.subscribe(&bed.subjects.fleet_all()).await.unwrap();
    let prompt = bed.prompt_with_long_answer(400);
    let mut stream = bed.send(&tokens(&prompt, 400)).await;
    assert!(matches!(stream.next().await.unwrap(), Some(Event::Accepted { .. })));
    let _second = bed.coordinator(defaults()).await;
    first.shutdown.cancel();
    loop {
        let announcement = fleet.next().await.unwrap().decode::<CoordinatorAnnouncement>();
        if announcement.is_ok_and(|announcement| !announcement.accepting) {
            break;
        }
    }
    for _ in 0..5 {
        assert_eq!(bed.ask(&tokens(&[1], 3)).await.tokens, bed.expected(&[1], 3));
    }
    assert_eq!(Answer::read(stream).await.tokens, bed.expected(&prompt, 400));
    first.end().await.unwrap();
}

#[tokio::test]
async fn requests_that_do_not_end_in_time_are_cut_off_at_shutdown() {
    let bed = Bed::new(1).await;
    let mut mute = bed.stage(0, Behaviour::Mute).await;
    let coordinator = bed.coordinator(CoordinatorSettings { drain_ms: 50, ..defaults() }).await;
    let stream = bed.send(&tokens(&[1], 3)).await;
    mute.has_run(1).await;
    let outcome = coordinator.end().await;
    assert!(matches!(outcome, Err(CoordinatorError::DrainDeadline { n_sessions: 1 })));
    assert_eq!(Answer::read(stream).await.class(), Some(ErrorClass::StageUnavailable));
    mute.idle().await;
}
