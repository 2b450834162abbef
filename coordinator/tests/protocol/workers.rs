//! The coordinator with real workers, which run the toy model instead of OpenVINO.

use stagebus_bus::{Bus, BusOptions, StreamError, Switch};
use stagebus_coordinator::{CoordinatorError, CoordinatorSettings, Hosted};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::WorkerId;
use stagebus_schemas::messages::public::Event;
use stagebus_schemas::subjects::Subject;
use stagebus_settings::BrokerSettings;
use stagebus_telemetry::WorkerTelemetry;
use stagebus_worker::{EngineChoice, WorkerConfig, WorkerError, WorkerSettings};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::harness::{Answer, Bed, tokens};

/// A worker that is ready.
pub(crate) struct Worker {
    shutdown: stagebus_worker::Shutdown,
    tasks: JoinSet<Result<(), WorkerError>>,
}

impl Worker {
    async fn start(bed: &Bed, stage: usize, change: impl FnOnce(&mut WorkerSettings)) -> Self {
        Self::start_with(bed, stage, None, change).await.0
    }

    /// As [`Worker::start`], with a way past the broker; tells the worker's id as well.
    async fn start_with(
        bed: &Bed,
        stage: usize,
        switch: Option<Switch>,
        change: impl FnOnce(&mut WorkerSettings),
    ) -> (Self, WorkerId) {
        let mut settings = WorkerSettings {
            shards: bed.folder.path().to_owned(),
            stage: Some(u16::try_from(stage).unwrap()),
            engine: EngineChoice::Test,
            ..WorkerSettings::default()
        };
        change(&mut settings);
        let broker = BrokerSettings { url: bed.broker.url(), ..BrokerSettings::default() };
        let shutdown = stagebus_worker::Shutdown::new();
        let (tell, ready) = oneshot::channel();
        let mut tasks = JoinSet::new();
        let stop = shutdown.clone();
        tasks.spawn(async move {
            let telemetry = WorkerTelemetry::default();
            let config = WorkerConfig { broker, settings, switch, telemetry };
            stagebus_worker::run(config, stop, |ready| {
                tell.send(ready.id.clone()).unwrap();
            })
            .await
        });
        let id = ready.await.unwrap();
        (Self { shutdown, tasks }, id)
    }

    async fn end(mut self) {
        self.tasks.join_next().await.unwrap().unwrap().unwrap();
    }
}

pub(crate) async fn workers(bed: &Bed, per_stage: usize) -> Vec<Worker> {
    let mut workers = Vec::new();
    for stage in 0..bed.manifest.n_stages() {
        for _ in 0..per_stage {
            workers.push(Worker::start(bed, stage, |_| {}).await);
        }
    }
    workers
}

fn small_chunks() -> CoordinatorSettings {
    CoordinatorSettings { prefill_chunk: 16, ..CoordinatorSettings::default() }
}

#[tokio::test]
async fn a_hosted_worker_is_reached_past_the_broker_and_replaced_when_it_leaves() {
    let bed = Bed::new(2).await;
    let switch = Switch::new();
    let slow = |settings: &mut WorkerSettings| settings.test.run_us = 2000;
    let (hosted, worker) = Worker::start_with(&bed, 0, Some(switch.clone()), slow).await;
    let mut workers = vec![Worker::start(&bed, 1, slow).await];
    let mut steps = bed.bus.subscribe(&bed.subjects.step_all()).await.unwrap();
    let settings = CoordinatorSettings { host_stage0: true, ..small_chunks() };
    let coordinator = bed.hosting(settings, Hosted { worker, switch }).await;
    let prompt = bed.prompt_with_long_answer(60);
    let expected = bed.expected(&prompt, 60);
    assert_eq!(bed.ask(&tokens(&prompt, 60)).await.tokens, expected);
    let mut n_steps = [0; 2];
    while let Some(step) = steps.try_next() {
        match bed.subjects.parse(step.subject()) {
            Ok(Subject::Step(stage, _)) => n_steps[stage.index()] += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(n_steps[0] == 0 && n_steps[1] > 0, "{n_steps:?} steps crossed the broker");
    // It ends in the middle of an answer.
    workers.push(Worker::start(&bed, 0, slow).await);
    let mut stream = bed.send(&tokens(&prompt, 60)).await;
    let mut answer = Answer::default();
    while answer.tokens.len() < 5 {
        answer.add(stream.next().await.unwrap().unwrap());
    }
    hosted.shutdown.stop.cancel();
    hosted.end().await;
    let rest = Answer::read(stream).await;
    answer.tokens.extend(rest.tokens);
    assert_eq!(answer.tokens, expected);
    coordinator.end().await.unwrap();
    for worker in workers {
        worker.shutdown.drain.cancel();
        worker.end().await;
    }
}

#[tokio::test]
async fn a_program_without_a_worker_hosts_none() {
    let bed = Bed::new(1).await;
    let settings = CoordinatorSettings { host_stage0: true, ..CoordinatorSettings::default() };
    let error = bed.coordinator_that_fails(settings).await;
    assert!(matches!(error, CoordinatorError::NoHost), "{error}");
}

#[tokio::test]
async fn one_two_and_three_stages_give_the_models_tokens() {
    for n_stages in 1..=3 {
        let bed = Bed::new(n_stages).await;
        let workers = workers(&bed, 1).await;
        let coordinator = bed.coordinator(small_chunks()).await;
        let prompt: Vec<u32> = (0..100).collect();
        let answer = bed.ask(&tokens(&prompt, 40)).await;
        assert_eq!(answer.tokens, bed.expected(&prompt, 40), "{n_stages} stages");
        let (_, usage) = answer.done.unwrap();
        assert_eq!((answer.n_accepted, usage.prompt_tokens), (1, 100));
        assert_eq!(usage.completion_tokens as usize, answer.tokens.len());
        coordinator.end().await.unwrap();
        // A worker that still held a session would wait for it.
        for worker in workers {
            worker.shutdown.drain.cancel();
            worker.end().await;
        }
    }
}

#[tokio::test]
async fn many_sessions_on_two_workers_per_stage_all_finish_right() {
    let bed = Bed::new(2).await;
    let _workers = workers(&bed, 2).await;
    let settings = CoordinatorSettings { max_sessions: 12, ..small_chunks() };
    let _coordinator = bed.coordinator(settings).await;
    let mut clients = JoinSet::new();
    for client in 0..20 {
        let prompt: Vec<u32> = (client..client + 40).collect();
        let expected = bed.expected(&prompt, 25);
        let stream = bed.send(&tokens(&prompt, 25)).await;
        clients.spawn(async move { assert_eq!(Answer::read(stream).await.tokens, expected) });
    }
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
}

#[tokio::test]
async fn a_worker_that_leaves_or_fails_ends_its_sessions_and_another_takes_over() {
    for fails in [false, true] {
        let bed = Bed::new(2).await;
        let _first = Worker::start(&bed, 0, |_| {}).await;
        let second = Worker::start(&bed, 1, |settings| {
            settings.drain_ms = 0;
            settings.test.faults.extend(fails.then(|| "fail@7".to_owned()));
        })
        .await;
        let settings = CoordinatorSettings { recovery_wait_ms: 200, ..small_chunks() };
        let _coordinator = bed.coordinator(settings).await;
        let prompt = bed.prompt_with_long_answer(400);
        let mut stream = bed.send(&tokens(&prompt, 400)).await;
        let mut answer = Answer::default();
        while answer.n_token_events == 0 {
            answer.add(stream.next().await.unwrap().unwrap());
        }
        if !fails {
            second.shutdown.drain.cancel();
        }
        while let Some(event) = stream.next().await.unwrap() {
            answer.add(event);
        }
        let class = if fails { ErrorClass::Internal } else { ErrorClass::StageUnavailable };
        assert_eq!(answer.class(), Some(class), "{:?}", answer.error);
        assert!(bed.expected(&prompt, 400).starts_with(&answer.tokens));
        if !fails {
            second.end().await;
            let _third = Worker::start(&bed, 1, |_| {}).await;
            assert_eq!(bed.ask(&tokens(&[1], 3)).await.tokens, bed.expected(&[1], 3));
        }
    }
}

#[tokio::test]
async fn a_draining_worker_finishes_its_sessions_and_gets_no_new_ones() {
    let bed = Bed::new(1).await;
    let first = Worker::start(&bed, 0, |_| {}).await;
    let _coordinator = bed.coordinator(small_chunks()).await;
    let prompt = bed.prompt_with_long_answer(400);
    let mut stream = bed.send(&tokens(&prompt, 400)).await;
    assert!(matches!(stream.next().await.unwrap(), Some(Event::Accepted { .. })));
    first.shutdown.drain.cancel();
    let _second = Worker::start(&bed, 0, |_| {}).await;
    assert_eq!(bed.ask(&tokens(&[1], 3)).await.tokens, bed.expected(&[1], 3));
    assert_eq!(Answer::read(stream).await.tokens, bed.expected(&prompt, 400));
    first.end().await;
}

#[tokio::test]
async fn after_a_restart_of_the_broker_requests_are_served() {
    let mut bed = Bed::new(2).await;
    let _workers = workers(&bed, 1).await;
    let _coordinator = bed.coordinator(small_chunks()).await;
    assert_eq!(bed.ask(&tokens(&[1], 3)).await.tokens, bed.expected(&[1], 3));
    bed.broker.restart().await.unwrap();
    bed.bus = Bus::connect(BusOptions::new(bed.broker.url(), "client")).await.unwrap();
    // Until the coordinator is back, nobody listens.
    let subject = bed.subjects.prompt();
    let answer = loop {
        let mut stream = bed.send(&tokens(&[1], 3)).await;
        match stream.next().await {
            Ok(Some(Event::Accepted { .. })) => break Answer::read(stream).await,
            Ok(Some(Event::Error { class: ErrorClass::StageUnavailable, .. })) => {}
            Ok(other) => panic!("{other:?} on {subject}"),
            Err(StreamError::NoResponders { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(answer.tokens, bed.expected(&[1], 3));
}

#[tokio::test]
async fn sessions_go_on_when_the_broker_is_back() {
    let mut bed = Bed::new(2).await;
    let _workers = workers(&bed, 1).await;
    let _coordinator = bed.coordinator(small_chunks()).await;
    let prompt = bed.prompt_with_long_answer(450);
    let mut stream = bed.send(&tokens(&prompt, 450)).await;
    let mut answer = Answer::default();
    for round in 1..=2 {
        while answer.n_token_events < 100 * round {
            answer.add(stream.next().await.unwrap().unwrap());
        }
        bed.broker.restart().await.unwrap();
    }
    while let Some(event) = stream.next().await.unwrap() {
        answer.add(event);
    }
    assert_eq!(answer.error, None);
    assert!(answer.tokens == bed.expected(&prompt, 450), "other tokens");
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_session_on_all_stages() {
    let bed = Bed::new(2).await;
    let mut stages = bed.stages(1).await;
    let settings = CoordinatorSettings { client_wait_ms: 50, ..small_chunks() };
    let _coordinator = bed.coordinator(settings).await;
    let prompt = bed.prompt_with_long_answer(450);
    let mut stream = bed.send(&tokens(&prompt, 450)).await;
    while !matches!(stream.next().await.unwrap(), Some(Event::Token { .. })) {}
    for stage in &mut stages {
        stage.holds(1).await;
    }
    drop(stream);
    for stage in &mut stages {
        stage.idle().await;
    }
    assert_eq!(bed.ask(&tokens(&[1], 3)).await.tokens, bed.expected(&[1], 3));
}
