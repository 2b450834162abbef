//! Durable jobs: stored, resumed, given up, cancelled.

use std::time::Duration;

use stagebus_bus::Results;
use stagebus_coordinator::{CoordinatorSettings, JobSettings, JobsMode};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::public::{Event, FinishReason, PromptRequest};

use crate::fake_stage::Behaviour;
use crate::harness::{Answer, Bed, tokens};

/// Longest wait for an event; only a hang takes that long.
const PATIENCE: Duration = Duration::from_secs(20);

/// A coordinator without jobs does not start, and a dead one is noticed soon.
fn settings() -> CoordinatorSettings {
    with(JobSettings { ack_wait_ms: 300, ..JobSettings::default() })
}

fn with(jobs: JobSettings) -> CoordinatorSettings {
    let jobs = JobSettings { mode: JobsMode::On, ..jobs };
    CoordinatorSettings { jobs, ..CoordinatorSettings::default() }
}

fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

fn named(name: &str, request: PromptRequest) -> PromptRequest {
    PromptRequest { request_id: Some(id(name)), ..request }
}

async fn results(bed: &Bed, name: &str) -> Results {
    bed.bus.results(&bed.subjects, &id(name)).await.unwrap()
}

/// Follows the events of a job to the last one, and checks the contract on the way.
async fn follow(bed: &Bed, name: &str) -> Answer {
    let (mut answer, mut events) = (Answer::default(), results(bed, name).await);
    while answer.done.is_none() && answer.error.is_none() {
        add(&mut answer, events.next(PATIENCE).await.unwrap().event);
    }
    assert_eq!(events.next_stored().await.unwrap(), None, "events after the last one");
    answer
}

fn add(answer: &mut Answer, event: Event) {
    if let Event::Token { i, .. } = event {
        assert_eq!(i, answer.n_token_events as u64);
    }
    answer.add(event);
    assert_eq!(answer.n_accepted.max(1), 1, "accepted twice");
}

/// Waits for the first event of a job.
async fn begun(bed: &Bed, name: &str) -> Event {
    results(bed, name).await.next(PATIENCE).await.unwrap().event
}

#[tokio::test]
async fn a_job_is_answered_and_its_events_can_be_read_again() {
    let bed = Bed::new(2).await;
    let mut stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(settings()).await;
    let prompt = bed.prompt_with_long_answer(50);
    let request = named("a", tokens(&prompt, 50));
    bed.bus.submit(&bed.subjects, request.clone()).await.unwrap();
    let answer = follow(&bed, "a").await;
    assert_eq!(answer.tokens, bed.expected(&prompt, 50));
    assert_eq!(answer.text, bed.text.decode(&answer.tokens));
    assert_eq!((answer.n_accepted, answer.finish_reason()), (1, Some(FinishReason::Length)));
    // The same name is the same job, with or without the broker's help.
    assert!(bed.bus.submit(&bed.subjects, request).await.unwrap().duplicate);
    let raw = br#"{"request_id":"a","tokens":[9],"max_tokens":3}"#[..].into();
    bed.bus.publish_bytes(&bed.subjects.job(), None, raw).await.unwrap();
    bed.bus.submit(&bed.subjects, named("b", tokens(&[5], 3))).await.unwrap();
    assert_eq!(follow(&bed, "b").await.tokens, bed.expected(&[5], 3));
    assert_eq!(follow(&bed, "a").await.tokens, answer.tokens);
    for stage in &mut stages {
        stage.idle().await;
    }
}

#[tokio::test]
async fn a_job_that_does_not_stream_has_two_events() {
    let bed = Bed::new(1).await;
    let _stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(settings()).await;
    let request = PromptRequest { stream: Some(false), ..named("a", tokens(&[5], 9)) };
    bed.bus.submit(&bed.subjects, request).await.unwrap();
    let answer = follow(&bed, "a").await;
    assert_eq!((answer.tokens, answer.n_token_events), (bed.expected(&[5], 9), 0));
}

#[tokio::test]
async fn a_dead_coordinators_job_goes_on_with_its_seed() {
    let bed = Bed::new(1).await;
    let mute = bed.stage(0, Behaviour::Mute).await;
    let dead = bed.coordinator(settings()).await;
    let prompt = bed.prompt_with_long_answer(40);
    let request = PromptRequest { temperature: Some(1.0), ..tokens(&prompt, 40) };
    bed.bus.submit(&bed.subjects, named("a", request.clone())).await.unwrap();
    let Event::Accepted { seed: Some(seed), .. } = begun(&bed, "a").await else {
        panic!("a seed comes first");
    };
    drop(dead);
    mute.vanish().await;
    let _stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(settings()).await;
    let answer = follow(&bed, "a").await;
    assert_eq!((answer.n_accepted, answer.tokens.len()), (1, 40));
    let alone = bed.ask(&PromptRequest { seed: Some(seed), ..request }).await;
    assert_eq!((answer.tokens, answer.text), (alone.tokens, alone.text));
}

#[tokio::test]
async fn coordinators_that_die_while_they_generate_lose_and_repeat_nothing() {
    let bed = Bed::new(2).await;
    let _stages = bed.stages(1).await;
    let prompt = bed.prompt_with_long_answer(400);
    let stop = vec!["never in the text".to_owned()];
    let request = PromptRequest { stop, ..tokens(&prompt, 400) };
    bed.bus.submit(&bed.subjects, named("a", request)).await.unwrap_err();
    let mut coordinator = bed.coordinator(settings()).await;
    let stop = vec!["never in the text".to_owned()];
    let request = PromptRequest { stop, ..tokens(&prompt, 400) };
    bed.bus.submit(&bed.subjects, named("a", request)).await.unwrap();
    let (mut answer, mut events) = (Answer::default(), results(&bed, "a").await);
    let mut n_deaths = 0;
    while answer.done.is_none() {
        add(&mut answer, events.next(PATIENCE).await.unwrap().event);
        if n_deaths < 3 && answer.n_token_events == 1 + 2 * n_deaths {
            drop(coordinator);
            n_deaths += 1;
            coordinator = bed.coordinator(settings()).await;
        }
    }
    assert_eq!(answer.tokens, bed.expected(&prompt, 400));
    assert_eq!(answer.text, bed.text.decode(&answer.tokens));
    drop(coordinator);
}

#[tokio::test]
async fn a_coordinator_that_leaves_gives_its_jobs_back_at_once() {
    let bed = Bed::new(1).await;
    let mute = bed.stage(0, Behaviour::Mute).await;
    let patient = JobSettings { ack_wait_ms: 3_600_000, ..JobSettings::default() };
    let leaving = bed.coordinator(with(patient.clone())).await;
    bed.bus.submit(&bed.subjects, named("a", tokens(&[5], 9))).await.unwrap();
    begun(&bed, "a").await;
    leaving.end().await.unwrap();
    mute.vanish().await;
    let _stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(with(patient)).await;
    assert_eq!(follow(&bed, "a").await.tokens, bed.expected(&[5], 9));
}

#[tokio::test]
async fn a_job_that_fails_every_time_ends_with_its_failure() {
    let bed = Bed::new(1).await;
    let _full = bed.stage(0, Behaviour::Full).await;
    let jobs = JobSettings { max_deliveries: 2, ..JobSettings::default() };
    let _coordinator = bed.coordinator(with(jobs)).await;
    bed.bus.submit(&bed.subjects, named("a", tokens(&[5], 9))).await.unwrap();
    let (class, message, _) = follow(&bed, "a").await.error.unwrap();
    assert_eq!(class, ErrorClass::Overloaded);
    assert!(message.starts_with("given up after 2 tries"), "{message}");
    // It is out of the queue: its name is known, and the next job is taken.
    assert!(bed.bus.submit(&bed.subjects, named("a", tokens(&[5], 9))).await.unwrap().duplicate);
    bed.bus.submit(&bed.subjects, named("b", tokens(&[], 9))).await.unwrap();
    assert_eq!(follow(&bed, "b").await.class(), Some(ErrorClass::InvalidRequest));
}

#[tokio::test]
async fn a_job_that_outlives_its_coordinators_is_given_up() {
    let bed = Bed::new(1).await;
    let mut mute = bed.stage(0, Behaviour::Mute).await;
    let jobs = || JobSettings { max_deliveries: 1, ack_wait_ms: 1_000, ..JobSettings::default() };
    let first = bed.coordinator(with(jobs())).await;
    bed.bus.submit(&bed.subjects, named("a", tokens(&[5], 9))).await.unwrap();
    begun(&bed, "a").await;
    drop(first);
    // The first one made an event; the second one makes none.
    let second = bed.coordinator(with(jobs())).await;
    mute.holds(2).await;
    drop(second);
    let _third = bed.coordinator(with(jobs())).await;
    let (class, message, _) = follow(&bed, "a").await.error.unwrap();
    assert_eq!(class, ErrorClass::Internal);
    assert!(message.contains("given up: 1 coordinators"), "{message}");
}

#[tokio::test]
async fn running_and_waiting_jobs_can_be_cancelled() {
    let bed = Bed::new(1).await;
    let mute = bed.stage(0, Behaviour::Mute).await;
    let jobs = JobSettings { max_running: 1, ..JobSettings::default() };
    let coordinator = bed.coordinator(with(jobs.clone())).await;
    for name in ["a", "b"] {
        bed.bus.submit(&bed.subjects, named(name, tokens(&[5], 9))).await.unwrap();
    }
    begun(&bed, "a").await;
    for name in ["b", "a"] {
        let subject = bed.subjects.cancel(&id(name));
        bed.bus.publish_bytes(&subject, None, "".into()).await.unwrap();
    }
    for name in ["a", "b"] {
        let answer = follow(&bed, name).await;
        assert_eq!((answer.n_accepted, answer.tokens.len()), (1, 0), "{name}");
        assert_eq!(answer.finish_reason(), Some(FinishReason::Cancelled), "{name}");
    }
    drop((mute, coordinator));
}

#[tokio::test]
async fn unreadable_jobs_are_answered_under_their_number() {
    let bed = Bed::new(1).await;
    let _stages = bed.stages(1).await;
    let _coordinator = bed.coordinator(settings()).await;
    for payload in ["{", "{\"tokens\":[5],\"max_tokens\":3}"] {
        bed.bus.publish_bytes(&bed.subjects.job(), None, payload.into()).await.unwrap();
    }
    assert_eq!(follow(&bed, "job-1").await.class(), Some(ErrorClass::InvalidRequest));
    assert_eq!(follow(&bed, "job-2").await.tokens, bed.expected(&[5], 3));
}
