//! Durable requests against a real broker with JetStream.

use std::time::Duration;

use bytes::Bytes;
use stagebus_bus::{Bus, JobDelivery, JobError, JobLimits, JobStore, NewEvent, Results};
use stagebus_schemas::cloud_events::{self, PublicMessage};
use stagebus_schemas::codec::{self, ContentType};
use stagebus_schemas::ids::{ModelName, RequestId};
use stagebus_schemas::messages::public::{Event, PromptRequest};
use stagebus_schemas::subjects::Subjects;
use stagebus_schemas::trace::TraceContext;

use crate::broker::Broker;
use crate::{PATIENCE, connect};

/// A broker that keeps things in its own folder.
const CONFIG: &str = "jetstream { store_dir: \"{}/store\" }";

fn subjects() -> Subjects {
    Subjects::new(&ModelName::new("m1").expect("a name"))
}

fn id(text: &str) -> RequestId {
    RequestId::new(text).expect("an id")
}

fn limits() -> JobLimits {
    JobLimits {
        ack_wait: Duration::from_secs(30),
        max_jobs: 3,
        max_job_bytes: 10_000,
        keep: Duration::from_secs(3600),
        keep_bytes: 1 << 20,
    }
}

fn request(name: &str) -> PromptRequest {
    PromptRequest {
        request_id: Some(id(name)),
        prompt: Some("hi".to_owned()),
        ..PromptRequest::default()
    }
}

fn token(i: u64) -> Event {
    Event::Token {
        i,
        text: format!("t{i}"),
        tokens: vec![7],
        logprobs: Vec::new(),
        steps: Vec::new(),
    }
}

fn event(event: &Event, after: u64, name: &str) -> NewEvent {
    let content = ContentType::Json;
    let payload = codec::encode_public(content, event).expect("it can be encoded");
    let message = PublicMessage::plain(content, payload.into());
    NewEvent { message, after, delivery: 1, name: name.to_owned() }
}

async fn take(store: &JobStore) -> JobDelivery {
    tokio::time::timeout(PATIENCE, async {
        loop {
            if let Some(job) = store.pull(Duration::from_secs(1)).await.expect("the queue is there")
            {
                return job;
            }
        }
    })
    .await
    .expect("a job comes")
}

async fn stored(mut results: Results) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(stored) = results.next_stored().await.expect("it can be read") {
        events.push(stored.event);
    }
    events
}

async fn open(bus: &Bus) -> JobStore {
    JobStore::open(bus, &subjects(), limits()).await.expect("JetStream is there")
}

#[tokio::test]
async fn a_job_is_taken_once_and_gone_when_done() {
    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let store = open(&bus).await;
    let submitted = bus.submit(&subjects(), request("a")).await.expect("stored");
    assert_eq!((submitted.sequence, submitted.duplicate), (1, false));
    let again = bus.submit(&subjects(), request("a")).await.expect("known");
    assert_eq!((again.sequence, again.duplicate), (1, true));

    let job = take(&store).await;
    assert_eq!((job.sequence, job.delivered, job.message_id()), (1, 1, Some("a")));
    let found = cloud_events::decode_request(&job.public_headers(), &job.payload).expect("ours");
    assert_eq!((found, job.trace()), (request("a"), None));
    assert!(store.pull(Duration::from_millis(200)).await.expect("it answers").is_none());
    job.progress().await.expect("sent");
    job.give_back(Duration::ZERO).await.expect("sent");
    let job = take(&store).await;
    assert_eq!((job.sequence, job.delivered), (1, 2));
    job.done().await.expect("confirmed");
    // The name is known although the job is gone.
    assert!(bus.submit(&subjects(), request("a")).await.expect("known").duplicate);
    assert!(store.pull(Duration::from_millis(200)).await.expect("it answers").is_none());

    let trace = TraceContext { trace_id: 7, span_id: 9, is_sampled: true };
    let (subject, traced) = (subjects().job(), request("b"));
    let sent = bus.prompt_in_trace(&subject, &traced, PATIENCE, Some(trace)).await;
    assert_eq!(take(&store).await.trace(), Some(trace));
    drop(sent.expect("sends"));
}

#[tokio::test]
async fn a_silent_coordinator_loses_its_job() {
    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let limits = JobLimits { ack_wait: Duration::from_millis(300), ..limits() };
    let store = JobStore::open(&bus, &subjects(), limits).await.expect("JetStream is there");
    bus.submit(&subjects(), request("a")).await.expect("stored");
    let first = take(&store).await;
    let second = take(&store).await;
    assert_eq!((first.sequence, second.sequence, second.delivered), (1, 1, 2));
}

#[tokio::test]
async fn a_full_queue_refuses_and_a_large_job_too() {
    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let _store = open(&bus).await;
    for name in ["a", "b", "c"] {
        bus.submit(&subjects(), request(name)).await.expect("stored");
    }
    let full = bus.submit(&subjects(), request("d")).await.expect_err("no room");
    assert!(matches!(full, JobError::QueueFull { .. }), "{full:?}");
    let large = PromptRequest { prompt: Some("x".repeat(20_000)), ..request("e") };
    let refused = bus.submit(&subjects(), large).await.expect_err("too large");
    assert!(matches!(refused, JobError::Refused { code: 10054, .. }), "{refused:?}");
}

#[tokio::test]
async fn events_are_read_again_in_order_and_as_they_come() {
    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let store = open(&bus).await;
    let mut after = 0;
    for i in 0..5 {
        let name = format!("w-{i}");
        after = store.append(&id("a"), event(&token(i), after, &name)).await.expect("stored");
        // Others' events are not among ours.
        store.append(&id(&format!("o{i}")), event(&token(9), 0, "")).await.expect("stored");
    }
    for _ in 0..2 {
        let results = bus.results(&subjects(), &id("a")).await.expect("there");
        assert_eq!(stored(results).await, (0..5).map(token).collect::<Vec<_>>());
    }
    let nothing = bus.results(&subjects(), &id("unknown")).await.expect("there");
    assert_eq!(stored(nothing).await, []);

    let mut live = bus.results(&subjects(), &id("a")).await.expect("there");
    for i in 0..5 {
        assert_eq!(live.next(PATIENCE).await.expect("stored").event, token(i));
    }
    assert_eq!(live.next_stored().await.expect("all read"), None);
    let sequence = store.append(&id("a"), event(&token(5), after, "w-5")).await.expect("stored");
    let next = live.next(PATIENCE).await.expect("it comes");
    assert_eq!((next.event, next.sequence, next.delivery), (token(5), sequence, 1));
    let idle = live.next(Duration::from_millis(50)).await.expect_err("nothing comes");
    assert!(matches!(idle, JobError::Idle { .. }), "{idle:?}");
}

#[tokio::test]
async fn of_two_writers_the_overtaken_one_is_fenced_and_a_repeat_is_stored_once() {
    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let store = open(&bus).await;
    let first = event(&token(0), 0, "w1-0");
    let after = store.append(&id("a"), first.clone()).await.expect("stored");
    // The word that it is stored was lost: storing it again is the same.
    assert_eq!(store.append(&id("a"), first).await.expect("known"), after);
    let other = event(&token(1), after, "w2-1");
    let last = store.append(&id("a"), other).await.expect("stored");
    let late = store.append(&id("a"), event(&token(1), after, "w1-1")).await;
    assert!(matches!(late, Err(JobError::Fenced { .. })), "{late:?}");
    let begun = store.append(&id("a"), event(&token(0), 0, "w3-0")).await;
    assert!(matches!(begun, Err(JobError::Fenced { .. })), "{begun:?}");
    store.append(&id("a"), event(&token(2), last, "w2-2")).await.expect("stored");
}

#[tokio::test]
async fn a_cancellation_counts_for_jobs_that_were_there() {
    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let store = open(&bus).await;
    bus.submit(&subjects(), request("a")).await.expect("stored");
    let before = take(&store).await;
    assert!(!store.is_cancelled(&id("a"), before.published).await.expect("it answers"));
    bus.publish_bytes(&subjects().cancel(&id("a")), None, Bytes::new()).await.expect("sent");
    // Nobody says when a message without a reply subject is stored.
    let noticed = async {
        while !store.is_cancelled(&id("a"), before.published).await.expect("it answers") {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, noticed).await.expect("it is stored");
    bus.submit(&subjects(), request("b")).await.expect("stored");
    let after = take(&store).await;
    assert!(!store.is_cancelled(&id("a"), after.published).await.expect("it answers"));
}

#[tokio::test]
async fn jobs_and_events_survive_the_broker() {
    let mut broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let store = open(&bus).await;
    bus.submit(&subjects(), request("a")).await.expect("stored");
    let held = take(&store).await;
    bus.submit(&subjects(), request("b")).await.expect("stored");
    let after = store.append(&id("a"), event(&token(0), 0, "w-0")).await.expect("stored");
    let mut reader = bus.results(&subjects(), &id("a")).await.expect("there");
    assert_eq!(reader.next(PATIENCE).await.expect("stored").event, token(0));
    broker.kill();
    broker.restart();
    let bus = connect(&broker).await;
    let store = open(&bus).await;
    let next = take(&store).await;
    assert_eq!(next.message_id(), Some("b"));
    assert!(bus.submit(&subjects(), request("a")).await.expect("known").duplicate);
    let results = bus.results(&subjects(), &id("a")).await.expect("there");
    assert_eq!(stored(results).await, [token(0)]);
    // Whoever reads goes on by itself.
    store.append(&id("a"), event(&token(1), after, "w-1")).await.expect("stored");
    assert_eq!(reader.next(PATIENCE).await.expect("it comes").event, token(1));
    drop(held);
}

#[tokio::test]
async fn limits_of_existing_streams_are_set_and_foreign_streams_refused() {
    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let _store = open(&bus).await;
    let more = JobLimits { max_jobs: 4, keep: Duration::from_secs(7200), ..limits() };
    let mut store = JobStore::open(&bus, &subjects(), more).await.expect("changed");
    for name in ["a", "b", "c", "d"] {
        bus.submit(&subjects(), request(name)).await.expect("room for four");
    }
    store.reopen().await.expect("it is ours");
    // A stream of the queue's name that somebody made for something else.
    let create = serde_json::json!({ "name": "STAGEBUS_JOBS_m2", "subjects": ["other"] });
    let body = Bytes::from(create.to_string());
    let subject = "$JS.API.STREAM.CREATE.STAGEBUS_JOBS_m2";
    bus.request_bytes(subject, None, body, PATIENCE).await.expect("made");
    let other = Subjects::new(&ModelName::new("m2").expect("a name"));
    let refused = JobStore::open(&bus, &other, limits()).await.expect_err("not ours");
    assert!(matches!(refused, JobError::Mismatch { field: "retention", .. }), "{refused:?}");
}

#[tokio::test]
async fn without_jetstream_or_a_queue_the_error_says_so() {
    let broker = Broker::start();
    let bus = connect(&broker).await;
    let opened = JobStore::open(&bus, &subjects(), limits()).await.expect_err("no JetStream");
    assert!(matches!(opened, JobError::NoJetStream), "{opened:?}");
    let submitted = bus.submit(&subjects(), request("a")).await.expect_err("no queue");
    assert!(matches!(submitted, JobError::NoStream { .. }), "{submitted:?}");
    let read = bus.results(&subjects(), &id("a")).await.expect_err("no JetStream");
    assert!(matches!(read, JobError::NoJetStream), "{read:?}");

    let broker = Broker::start_with(CONFIG, &[]);
    let bus = connect(&broker).await;
    let submitted = bus.submit(&subjects(), request("a")).await.expect_err("no queue");
    assert!(matches!(submitted, JobError::NoStream { .. }), "{submitted:?}");
    let read = bus.results(&subjects(), &id("a")).await.expect_err("no stream");
    assert!(matches!(read, JobError::NoStream { .. }), "{read:?}");
}
