//! The protocol against a real broker: a chain of workers with the test backend, and the
//! coordinator played by hand.

mod bulk;

use bytes::Bytes;
use stagebus_engine::testing::{Fault, TestBackend, TestModel, TestOptions};
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::SessionId;
use stagebus_schemas::messages::control::{ControlAction, ControlOutcome, Drain};
use stagebus_schemas::messages::fleet::WorkerState;
use stagebus_schemas::messages::forward::{Phase, StageTime, Step};
use stagebus_schemas::subjects::Subject;
use stagebus_schemas::tensor::Dtype;
use stagebus_settings::BrokerSettings;
use tokio_util::sync::CancellationToken;

use super::fixture::{self, Chain, Setup, connect_worker, failure, gone, next, start_worker, step};
use super::*;
use crate::config::EngineChoice;
use crate::gated_backend::gated;
use crate::results::u32_of;
use crate::shard_set_fixture::write_shard_set;

const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];

#[tokio::test]
async fn a_chain_gives_the_tokens_of_the_unsplit_model() {
    for wire_dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let settings = WorkerSettings { wire_dtype, ..WorkerSettings::default() };
        let mut chain = Chain::start(2, Setup { settings, ..Setup::default() }).await;
        let session = SessionId::random();
        assert_eq!(chain.open(session, 0).await, 0);
        let expected = chain.model.expected(&PROMPT, 12);
        assert_eq!(chain.generate(session, 0, &PROMPT, 12).await, expected);
        chain.close(session, 0).await;
    }
}

#[tokio::test]
async fn interleaved_sessions_give_the_tokens_of_their_solo_runs() {
    let mut chain = Chain::start(2, Setup::default()).await;
    let prompts: [&[u32]; 2] = [&PROMPT, &[2, 7, 1, 8]];
    let sessions = [SessionId::random(), SessionId::random()];
    let mut tokens = [Vec::new(), Vec::new()];
    for (session, prompt) in sessions.iter().zip(prompts) {
        chain.open(*session, 0).await;
        chain.send(step(*session, 0, 0, 0, prompt)).await;
    }
    // Both are under way at any time; each answer sends the next step of its session.
    while tokens.iter().any(|tokens| tokens.len() < 10) {
        let done = chain.step_done().await;
        let place = usize::from(done.session == sessions[1]);
        tokens[place].push(done.rows[0].token);
        if tokens[place].len() < 10 {
            let (number, pos) = (done.step.number() + 1, done.rows[0].pos + 1);
            let token = done.rows[0].token;
            chain.send(step(done.session, 0, number, pos, &[token])).await;
        }
    }
    for (prompt, tokens) in prompts.iter().zip(tokens) {
        assert_eq!(tokens, chain.model.expected(prompt, 10));
    }
}

#[tokio::test]
async fn every_stage_leaves_its_time_in_the_trace() {
    let mut chain = Chain::start(3, Setup::default()).await;
    let session = SessionId::random();
    chain.open(session, 0).await;
    chain.send(step(session, 0, 0, 0, &PROMPT)).await;
    let done = chain.step_done().await;
    let stages: Vec<usize> = done.trace.iter().map(|time| time.stage.index()).collect();
    assert_eq!(stages, [0, 1, 2]);
    let whole = |time: &StageTime| time.total_us >= time.queue_us;
    assert!(done.trace.iter().all(whole), "{:?}", done.trace);
}

#[tokio::test]
async fn steps_out_of_turn_are_faults_and_the_session_goes_on() {
    let mut chain = Chain::start(2, Setup::default()).await;
    let session = SessionId::random();
    chain.open(session, 3).await;
    chain.send(step(session, 3, 0, 0, &PROMPT)).await;
    let first = chain.step_done().await;
    let stranger = SessionId::random();
    for (out_of_turn, class) in [
        (step(session, 3, 2, 5, &[1]), ErrorClass::StepGap),
        (step(session, 2, 0, 0, &[1]), ErrorClass::StaleEpoch),
        (step(session, 4, 0, 0, &[1]), ErrorClass::UnknownSession),
        (step(stranger, 0, 0, 0, &[1]), ErrorClass::UnknownSession),
        (step(session, 3, 1, 5, &[u32::MAX]), ErrorClass::InvalidRequest),
        (step(session, 3, 1, 5000, &[1]), ErrorClass::InvalidRequest),
    ] {
        chain.send(out_of_turn.clone()).await;
        let fault = chain.fault().await;
        assert_eq!(
            (fault.session, fault.epoch, fault.step, fault.error.class),
            (out_of_turn.session, out_of_turn.epoch, out_of_turn.step, class)
        );
    }
    // A repeat is dropped: the next answer belongs to the next step.
    chain.send(step(session, 3, 0, 0, &PROMPT)).await;
    chain.send(step(session, 3, 1, 5, &[first.rows[0].token])).await;
    let second = chain.step_done().await;
    assert_eq!(second.step.number(), 1);
    let tokens = vec![first.rows[0].token, second.rows[0].token];
    assert_eq!(tokens, chain.model.expected(&PROMPT, 2));
}

#[tokio::test]
async fn a_higher_epoch_goes_on_where_the_cache_ends() {
    let mut chain = Chain::start(2, Setup::default()).await;
    let session = SessionId::random();
    chain.open(session, 0).await;
    let tokens = chain.generate(session, 0, &PROMPT, 4).await;
    let all = [&PROMPT[..], &tokens].concat();
    assert_eq!(chain.open_again(session, 1, &all).await, 8);
    chain.send(step(session, 1, 0, 8, &[tokens[3]])).await;
    let next_token = chain.step_done().await.rows[0].token;
    assert_eq!(next_token, chain.model.expected(&PROMPT, 5)[4]);
}

#[tokio::test]
async fn malformed_messages_are_answered_and_survived() {
    let mut chain = Chain::start(2, Setup::default()).await;
    let session = SessionId::random();
    chain.open(session, 0).await;
    let (subject, reply) = chain.step_subjects(&step(session, 0, 0, 0, &[1]));
    for payload in [&b"nonsense"[..], &[], &[0x84, 0xa1, 0x78]] {
        chain.send_raw(&subject, &reply, payload.to_vec().into()).await;
        let fault = chain.fault().await;
        assert_eq!((fault.session, fault.error.class), (session, ErrorClass::InvalidRequest));
    }
    // Rows for another stage on this stage's subject.
    let forward = stagebus_schemas::messages::forward::Forward {
        version: stagebus_schemas::version::MessageVersion::CURRENT,
        from: None,
        steps: vec![step(session, 0, 0, 0, &[1])],
        hidden: Some(stagebus_schemas::tensor::Tensor {
            dtype: Dtype::F32,
            n_rows: 1,
            hidden_dim: 16,
            data: vec![0; 64].into(),
        }),
    };
    let payload = stagebus_schemas::codec::encode(&forward).expect("encodes").into();
    chain.send_raw(&subject, &reply, payload).await;
    assert_eq!(chain.fault().await.error.class, ErrorClass::InvalidRequest);
    let expected = chain.model.expected(&PROMPT, 3);
    assert_eq!(chain.generate(session, 0, &PROMPT, 3).await, expected);
}

#[tokio::test]
async fn opens_that_do_not_fit_are_refused_by_class() {
    let settings = WorkerSettings { max_sessions: 1, ..WorkerSettings::default() };
    let chain = Chain::start(2, Setup { settings, ..Setup::default() }).await;
    let session = SessionId::random();
    let mut other_shards = chain.open_message(session, 0);
    other_shards.fingerprint = "beef".to_owned();
    let mut other_route = chain.open_message(session, 0);
    other_route.route.swap(0, 1);
    for (open, class) in
        [(other_shards, ErrorClass::VersionMismatch), (other_route, ErrorClass::InvalidRequest)]
    {
        let outcome = chain.control(0, ControlAction::Open(open)).await;
        assert_eq!(failure(outcome).class, class);
    }
    chain.open(session, 0).await;
    let second = chain.open_message(SessionId::random(), 0);
    let error = failure(chain.control(0, ControlAction::Open(second)).await);
    assert_eq!(error.class, ErrorClass::Overloaded);
    assert!(error.retry_after_ms.is_some());
    chain.close(session, 0).await;
    chain.open(SessionId::random(), 0).await;
}

#[tokio::test]
async fn a_result_beyond_the_brokers_limit_is_a_typed_fault() {
    let model = TestModel { hidden_dim: 4096, ..TestModel::default() };
    let mut chain = Chain::start(2, Setup { model, ..Setup::default() }).await;
    let session = SessionId::random();
    chain.open(session, 0).await;
    let rows: Vec<u32> = (0..600).map(|i| i % 200).collect();
    // Rows of an answer do not travel in parts.
    let answer = |epoch, number, start_pos: u32, rows: &[u32]| Step {
        phase: Phase::Decode,
        ..step(session, epoch, number, start_pos, rows)
    };
    chain.send(answer(0, 0, 0, &rows)).await;
    let fault = chain.fault().await;
    assert_eq!(fault.error.class, ErrorClass::InvalidRequest);
    // Smaller chunks at a higher epoch pass.
    chain.open(session, 1).await;
    chain.send(answer(1, 0, 0, &rows[..300])).await;
    chain.step_done().await;
    chain.send(answer(1, 1, 300, &rows[300..])).await;
    let token = chain.step_done().await.rows[0].token;
    assert_eq!(vec![token], chain.model.expected(&rows, 1));
}

#[tokio::test]
async fn a_dead_next_worker_is_told_to_the_coordinator() {
    let mut chain = Chain::start(2, Setup::default()).await;
    let session = SessionId::random();
    chain.open(session, 7).await;
    let last = chain.workers.pop().expect("two workers");
    last.shutdown.stop.cancel();
    let subject = chain.subjects.control(StageIndex::new(1), &last.id);
    last.ended().await.expect("an orderly end");
    gone(&chain.bus, &subject).await;
    let message = step(session, 7, 0, 0, &PROMPT);
    let subjects = chain.subjects.clone();
    chain.send(message).await;
    let answer = next(&mut chain.lost).await;
    let Ok(Subject::Lost(coordinator, lost)) = subjects.parse(answer.subject()) else {
        panic!("expected a lost step, got {}", answer.subject());
    };
    assert_eq!(coordinator, chain.coordinator);
    assert_eq!((lost.session, lost.epoch.number(), lost.stage.index()), (session, 7, 1));
}

#[tokio::test]
async fn sessions_that_came_together_travel_together_and_hear_together_of_a_dead_worker() {
    let options = TestOptions { useful_batch: 8, ..TestOptions::default() };
    let mut chain = Chain::start(2, Setup { options, ..Setup::default() }).await;
    let sessions = [SessionId::random(), SessionId::random(), SessionId::random()];
    for session in sessions {
        chain.open(session, 3).await;
    }
    let prompts: [&[u32]; 3] = [&PROMPT, &[2, 7, 1, 8], &[1, 2]];
    let steps = |number, start: u32| {
        let step = |(session, prompt): (&SessionId, &[u32])| {
            step(*session, 3, number, start * u32_of(prompt.len()), prompt)
        };
        sessions.iter().zip(prompts).map(step).collect()
    };
    chain.send_together(steps(0, 0)).await;
    let head = chain.head().await;
    assert_eq!(head.steps.len(), 3, "one message for all");
    for (done, prompt) in head.steps.iter().zip(prompts) {
        assert_eq!(vec![done.rows[0].token], chain.model.expected(prompt, 1));
    }
    let last = chain.workers.pop().expect("two workers");
    last.shutdown.stop.cancel();
    let subject = chain.subjects.control(StageIndex::new(1), &last.id);
    last.ended().await.expect("an orderly end");
    gone(&chain.bus, &subject).await;
    chain.send_together(steps(1, 1)).await;
    let mut told = Vec::new();
    while told.len() < 3 {
        let answer = next(&mut chain.lost).await;
        let Ok(Subject::Lost(_, lost)) = chain.subjects.parse(answer.subject()) else {
            panic!("expected a lost step, got {}", answer.subject());
        };
        assert_eq!((lost.epoch.number(), lost.step.number(), lost.stage.index()), (3, 1, 1));
        told.push(lost.session.to_string());
    }
    let mut expected = sessions.map(|session| session.to_string());
    told.sort();
    expected.sort();
    assert_eq!(told, expected);
}

#[tokio::test]
async fn a_stage_passes_on_what_it_holds_and_keeps_its_cache() {
    let mut chain = Chain::start(2, Setup::default()).await;
    let session = SessionId::random();
    chain.open(session, 0).await;
    let output = chain.generate(session, 0, &PROMPT, 3).await;
    let rows = async |chain: &Chain, stage| match chain.control(stage, ControlAction::Stats).await {
        ControlOutcome::Stats(load) => load.rows_completed,
        outcome => panic!("expected the load, got {outcome:?}"),
    };
    // Another worker takes the place of the first one.
    let old = chain.workers.swap_remove(0);
    old.shutdown.stop.cancel();
    old.ended().await.expect("an orderly end");
    let backend = TestBackend::pipeline(&chain.model, 2, &TestOptions::default()).swap_remove(0);
    let bus = connect_worker(&chain.broker).await;
    let stage = fixture::stage(&chain.model, 0, 2);
    let first = start_worker(bus, stage, Box::new(backend), WorkerSettings::default()).await;
    chain.workers.insert(0, first);
    let all = [&PROMPT[..], &output].concat();
    assert_eq!(chain.open_again(session, 1, &all).await, 0);
    let before = rows(&chain, 1).await;

    let held = |number, start_pos, tokens: &[u32]| Step {
        held_from: Some(StageIndex::new(1)),
        wanted: vec![],
        ..step(session, 1, number, start_pos, tokens)
    };
    let n_prompt = u32_of(PROMPT.len());
    let prompt = held(0, 0, &PROMPT);
    chain.send(prompt.clone()).await;
    chain.send(prompt).await;
    let generated = Step { phase: Phase::Decode, ..held(1, n_prompt, &output[..output.len() - 1]) };
    chain.send(generated).await;
    for number in 0..2 {
        let done = chain.step_done().await;
        assert_eq!((done.step.number(), done.rows.len()), (number, 0));
        assert_eq!(done.trace.len(), 2);
    }
    // What has run is counted when an open that came later is answered.
    assert_eq!(chain.open_again(session, 1, &all).await, u32_of(all.len()) - 1);
    assert_eq!(rows(&chain, 1).await, before, "nothing ran on the second stage");
    assert_eq!(rows(&chain, 0).await, all.len() as u64 - 1);
    // Its cache is what it was, and step numbers count on.
    let last = u32_of(all.len()) - 1;
    chain.send(step(session, 1, 3, last, &all[all.len() - 1..])).await;
    assert_eq!(chain.fault().await.error.class, ErrorClass::StepGap);
    chain.send(step(session, 1, 2, last, &all[all.len() - 1..])).await;
    let token = chain.step_done().await.rows[0].token;
    assert_eq!(vec![token], chain.model.expected(&all, 1));
}

/// Chains of windows that are sent without waiting, each with a wrong guess behind which the next
/// one begins: whatever waits when a chain begins anew is passed on without rows.
#[tokio::test]
async fn windows_that_are_taken_back_are_passed_on_in_order() {
    let mut chain = Chain::start(2, Setup::default()).await;
    let session = SessionId::random();
    chain.open(session, 0).await;
    let first = chain.generate(session, 0, &PROMPT, 1).await;
    let mut text = [&PROMPT[..], &first].concat();
    let (mut steps, mut texts) = (Vec::new(), Vec::new());
    let mut round = 0;
    while text.len() < 40 {
        let n_rows = 1 + round % 3;
        let n_right = round % 5;
        let mut guessed = text.clone();
        for i in 0..3 * n_rows - 1 {
            let right = chain.model.expected(&guessed, 1)[0];
            guessed.push(if i == n_right { (right + 1) % 50 } else { right });
        }
        for window in 0..3 {
            let start_pos = text.len() - 1 + window * n_rows;
            let tokens = &guessed[start_pos..start_pos + n_rows];
            let number = u32_of(1 + steps.len());
            let wanted = (0..u32_of(n_rows)).collect();
            let phase = Phase::Decode;
            let step = step(session, 0, number, u32_of(start_pos), tokens);
            steps.push(Step { phase, wanted, ..step });
            texts.push(guessed.clone());
        }
        let n_standing = (n_right + 1).min(3 * n_rows);
        text.extend(chain.model.expected(&text, n_standing));
        round += 1;
    }
    // Together and one by one.
    let (together, one_by_one) = steps.split_at(steps.len() / 2);
    chain.send_together(together.to_vec()).await;
    for step in one_by_one {
        chain.send(step.clone()).await;
    }
    let mut answers = Vec::new();
    while answers.len() < steps.len() {
        let head = chain.head().await;
        assert_eq!(head.faults, vec![]);
        answers.extend(head.steps);
    }
    let mut n_without = 0;
    for (at, (answer, step)) in answers.iter().zip(&steps).enumerate() {
        assert_eq!((answer.step, answer.trace.len()), (step.step, 2));
        if answer.rows.is_empty() {
            let later = &steps[at + 1..];
            assert!(later.iter().any(|later| later.start_pos <= step.start_pos), "{step:?}");
            n_without += 1;
            continue;
        }
        assert_eq!(answer.rows.len(), step.tokens.len());
        for row in &answer.rows {
            let before = &texts[at][..=row.pos as usize];
            assert_eq!(row.token, chain.model.expected(before, 1)[0], "{step:?}");
        }
    }
    assert!(n_without > 0, "what came together was seen together");
}

#[tokio::test]
async fn a_drained_worker_finishes_its_session_and_leaves() {
    let mut chain = Chain::start(1, Setup::default()).await;
    let (session, id) = (SessionId::random(), chain.workers[0].id.clone());
    chain.open(session, 0).await;
    assert_eq!(
        chain.control(0, ControlAction::Drain(Drain::default())).await,
        ControlOutcome::Draining
    );
    chain.announced(&id, WorkerState::Draining).await;
    let refused = chain.open_message(SessionId::random(), 0);
    let error = failure(chain.control(0, ControlAction::Open(refused)).await);
    assert_eq!(error.class, ErrorClass::Overloaded);
    let expected = chain.model.expected(&PROMPT, 4);
    assert_eq!(chain.generate(session, 0, &PROMPT, 4).await, expected);
    chain.close(session, 0).await;
    let farewell = chain.announced(&id, WorkerState::Leaving).await;
    assert_eq!(farewell.load.n_sessions, 0);
    // The load of the last step is written just after its result has left.
    assert!(farewell.load.steps_completed >= 3);
    chain.workers.pop().expect("one worker").ended().await.expect("an orderly end");
}

#[tokio::test]
async fn a_stopped_worker_leaves_its_sessions_to_recovery() {
    let mut chain = Chain::start(1, Setup::default()).await;
    chain.open(SessionId::random(), 0).await;
    let worker = chain.workers.pop().expect("one worker");
    worker.shutdown.drain.cancel();
    chain.announced(&worker.id, WorkerState::Draining).await;
    worker.shutdown.stop.cancel();
    let farewell = chain.announced(&worker.id, WorkerState::Leaving).await;
    assert_eq!(farewell.load.n_sessions, 1);
    worker.ended().await.expect("an orderly end");
}

#[tokio::test]
async fn a_probe_makes_everybody_announce_themselves() {
    let settings = WorkerSettings { announce_ms: 60_000, ..WorkerSettings::default() };
    let mut chain = Chain::start(2, Setup { settings, ..Setup::default() }).await;
    let ids = chain.route();
    // The announcements of the start and of the first tick.
    for id in &ids {
        chain.announced(id, WorkerState::Ready).await;
    }
    while chain.fleet.try_next().is_some() {}
    let probe = chain.subjects.probe();
    chain.bus.publish_bytes(&probe, None, Bytes::new()).await.expect("sent");
    let announcement = chain.announced(&ids[1], WorkerState::Ready).await;
    assert_eq!((announcement.stage.index(), announcement.n_stages), (1, 2));
}

#[tokio::test]
async fn a_panicking_backend_ends_the_worker_with_a_farewell() {
    let options =
        TestOptions { faults: vec![Fault::PanicAtStep { step: 0 }], ..TestOptions::default() };
    let mut chain = Chain::start(1, Setup { options, ..Setup::default() }).await;
    let session = SessionId::random();
    chain.open(session, 0).await;
    chain.send(step(session, 0, 0, 0, &PROMPT)).await;
    let worker = chain.workers.pop().expect("one worker");
    chain.announced(&worker.id, WorkerState::Leaving).await;
    assert!(matches!(worker.ended().await, Err(WorkerError::InferenceEnded)));
}

#[tokio::test]
async fn a_wedged_backend_is_cut_off_at_the_deadline() {
    let settings = WorkerSettings { shutdown_ms: 200, ..WorkerSettings::default() };
    let mut gate = None;
    let setup = Setup { settings, ..Setup::default() };
    let mut chain = Chain::start_with(1, setup, |backend| {
        let (backend, made) = gated(backend);
        gate = Some(made);
        Box::new(backend)
    })
    .await;
    let gate = gate.expect("a gate");
    let session = SessionId::random();
    chain.open(session, 0).await;
    chain.send(step(session, 0, 0, 0, &PROMPT)).await;
    let inside = tokio::task::spawn_blocking(move || {
        gate.entered();
        gate
    });
    let gate = inside.await.expect("the step runs");
    // The worker answers while its inference hangs; its completed steps stand still.
    let ControlOutcome::Stats(load) = chain.control(0, ControlAction::Stats).await else {
        panic!("expected the load");
    };
    assert_eq!((load.queue_depth, load.steps_completed), (1, 0));
    let worker = chain.workers.pop().expect("one worker");
    worker.shutdown.stop.cancel();
    let error = worker.ended().await.expect_err("the step is cut off");
    assert!(matches!(error, WorkerError::ShutdownDeadline { deadline_ms: 200 }), "{error}");
    drop(gate);
}

#[tokio::test]
async fn a_worker_outlives_its_broker() {
    let mut chain = Chain::start(2, Setup::default()).await;
    let ids = chain.route();
    chain.broker.restart().await.expect("a broker");
    // What was announced before.
    while chain.fleet.try_next().is_some() {}
    for id in &ids {
        chain.announced(id, WorkerState::Ready).await;
    }
    let session = SessionId::random();
    chain.open(session, 0).await;
    let expected = chain.model.expected(&PROMPT, 6);
    assert_eq!(chain.generate(session, 0, &PROMPT, 6).await, expected);
}

#[tokio::test]
async fn a_worker_runs_from_a_shard_set_to_an_orderly_end() {
    let dir = tempfile::tempdir().expect("a folder");
    let manifest = write_shard_set(dir.path(), 1);
    let broker = LocalBroker::start(BrokerOptions::default()).await.expect("a broker");
    let config = WorkerConfig {
        broker: BrokerSettings { url: broker.url(), ..BrokerSettings::default() },
        settings: WorkerSettings {
            shards: dir.path().to_owned(),
            stage: Some(0),
            engine: EngineChoice::Test,
            ..WorkerSettings::default()
        },
        switch: None,
        telemetry: WorkerTelemetry::default(),
    };
    let shutdown = CancellationToken::new();
    let mut said = None;
    let on_ready = |ready: &Ready| {
        said = Some(ready.clone());
        shutdown.cancel();
    };
    run(config, shutdown.clone(), on_ready).await.expect("an orderly end");
    let said = said.expect("it was ready");
    let line = serde_json::to_value(&said).expect("serialises");
    assert_eq!(
        line,
        serde_json::json!({
            "ready": true, "role": "worker", "id": said.id.as_str(), "stage": 0,
            "model": manifest.model,
        })
    );
}

#[tokio::test]
async fn a_worker_without_a_broker_says_so() {
    let dir = tempfile::tempdir().expect("a folder");
    write_shard_set(dir.path(), 1);
    let config = WorkerConfig {
        broker: BrokerSettings { url: "nats://127.0.0.1:1".to_owned(), ..Default::default() },
        settings: WorkerSettings {
            shards: dir.path().to_owned(),
            stage: Some(0),
            engine: EngineChoice::Test,
            connect_wait_ms: 0,
            ..WorkerSettings::default()
        },
        switch: None,
        telemetry: WorkerTelemetry::default(),
    };
    let error = run(config, CancellationToken::new(), |_| ()).await.expect_err("no broker");
    assert!(matches!(error, WorkerError::Connect(_)), "{error}");
}
