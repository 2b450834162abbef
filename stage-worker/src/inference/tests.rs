//! The inference thread with the test backend and an outlet that the test reads.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use stagebus_engine::testing::{Fault, TestBackend, TestModel, TestOptions};
use stagebus_schemas::codec;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::{CoordinatorId, StepNumber};
use stagebus_schemas::messages::control::{HeadMode, Priority};
use stagebus_schemas::messages::forward::{Phase, Step};
use stagebus_schemas::messages::head::{Head, HeadStep, StepFault};
use stagebus_schemas::messages::sampling::Sampling;

mod needless;
mod real;
mod sharing;

use super::*;
use crate::gated_backend::{Gate, gated};
use crate::sessions::Route;
use crate::stage_fixture::{FINGERPRINT, stage, worker};

/// Longest wait for something that must come.
const PATIENCE: Duration = Duration::from_secs(20);

/// A whole model on one stage.
struct Bench {
    inference: Inference,
    events: mpsc::Receiver<InferenceEvent>,
    sent: Receiver<Outgoing>,
    route: Arc<Route>,
}

impl Bench {
    fn new(options: TestOptions, max_payload: usize) -> Self {
        Self::with(options, max_payload, |backend| Box::new(backend))
    }

    /// A bench whose backend waits at a gate before every micro-batch.
    fn gated() -> (Self, Gate) {
        let mut gate = None;
        let wrap = |backend| -> Box<dyn Backend> {
            let (backend, made) = gated(backend);
            gate = Some(made);
            Box::new(backend)
        };
        let bench = Self::with(TestOptions::default(), usize::MAX, wrap);
        (bench, gate.expect("made"))
    }

    fn with(
        options: TestOptions,
        max_payload: usize,
        wrap: impl FnOnce(TestBackend) -> Box<dyn Backend>,
    ) -> Self {
        let model = model();
        let spec = model.stage(0..model.n_layers);
        let policy = Policy {
            n_stages: 1,
            max_sessions: 4,
            batch_rows: 40,
            mixes: options.useful_batch > 1,
            prefill_percent: 60,
            decodes_per_prefill: 8,
        };
        let backend = wrap(TestBackend::new(model, spec, options));
        Self::over(backend, stage(0, 1), policy, max_payload)
    }

    fn over(
        backend: Box<dyn Backend>,
        stage: Arc<Stage>,
        policy: Policy,
        max_payload: usize,
    ) -> Self {
        let (sender, sent) = channel();
        let outlet = move |message: Outgoing, _: Manner| {
            let bytes = message.payload.len();
            if bytes > max_payload {
                return Err(PublishError::PayloadTooLarge { bytes, limit: max_payload });
            }
            sender.send(message).map_err(|_closed| PublishError::Closed)
        };
        let options = InferenceOptions {
            command_capacity: 64,
            policy,
            wire_dtype: Dtype::F32,
            telemetry: WorkerTelemetry::default(),
        };
        let (inference, events) =
            Inference::start(backend, stage, options, outlet).expect("a thread");
        let route = Arc::new(Route {
            coordinator: CoordinatorId::new("c").expect("valid"),
            head_subject: "head".to_owned(),
            previous: None,
            next: None,
            unsent: AtomicU32::default(),
            bulk_end: AtomicU32::default(),
        });
        Self { inference, events, sent, route }
    }

    fn open(&mut self, session: u64, epoch: u32) -> Result<u32, ErrorReply> {
        self.open_with(open(session, epoch))
    }

    /// Opens a session again whose tokens are known.
    fn open_again(&mut self, session: u64, epoch: u32, tokens: &[u32]) -> Result<u32, ErrorReply> {
        let prompt_len = u32_of(tokens.len());
        self.open_with(Open { prompt: tokens.to_vec(), prompt_len, ..open(session, epoch) })
    }

    fn open_with(&mut self, open: Open) -> Result<u32, ErrorReply> {
        let order = Box::new(OpenOrder { open, trace: None });
        self.inference.send(Command::Open(order, None)).expect("room");
        match self.events.blocking_recv().expect("the thread lives") {
            InferenceEvent::Opened { outcome, .. } => outcome,
            InferenceEvent::Lost { .. } => panic!("expected the answer to the open"),
        }
    }

    fn run(&self, session: u64, epoch: u32, number: u32, start_pos: u32, tokens: &[u32]) {
        let step = step(session, epoch, number, start_pos, tokens);
        let job = Job::new(step, None, Arc::clone(&self.route), Instant::now());
        self.inference.send(Command::Run(vec![job])).expect("room");
    }

    fn head(&self) -> Head {
        let message = self.sent.recv_timeout(PATIENCE).expect("a message");
        codec::decode(&message.payload).expect("a head message")
    }

    fn step_done(&self) -> HeadStep {
        let mut head = self.head();
        assert_eq!(head.faults, vec![]);
        head.steps.pop().expect("a step")
    }

    fn fault(&self) -> StepFault {
        let mut head = self.head();
        assert_eq!(head.steps, vec![]);
        head.faults.pop().expect("a fault")
    }

    /// Generates greedily from a session whose cache is empty.
    fn generate(&self, session: u64, epoch: u32, prompt: &[u32], n: usize) -> Vec<u32> {
        let mut tokens = Vec::new();
        self.run(session, epoch, 0, 0, prompt);
        let mut number = 1;
        loop {
            let row = self.step_done().rows.pop().expect("a row");
            tokens.push(row.token);
            if tokens.len() == n {
                return tokens;
            }
            self.run(session, epoch, number, row.pos + 1, &[row.token]);
            number += 1;
        }
    }

    /// Ends the thread and returns its result.
    fn end(mut self) -> std::thread::Result<()> {
        let thread = self.inference.stop();
        while self.events.blocking_recv().is_some() {}
        thread.join()
    }
}

fn model() -> TestModel {
    TestModel { vocab_size: 50, context_length: 64, ..TestModel::default() }
}

/// A step that wants the token of its last row; several rows are a prefill chunk.
fn step(session: u64, epoch: u32, number: u32, start_pos: u32, tokens: &[u32]) -> Step {
    Step {
        session: SessionId::from_u64(session),
        epoch: Epoch::new(epoch),
        step: StepNumber::new(number),
        start_pos,
        phase: if tokens.len() > 1 { Phase::Prefill } else { Phase::Decode },
        tokens: tokens.to_vec(),
        wanted: vec![u32_of(tokens.len()) - 1],
        held_from: None,
        trace: vec![],
    }
}

fn open(session: u64, epoch: u32) -> Open {
    Open {
        session: SessionId::from_u64(session),
        epoch: Epoch::new(epoch),
        coordinator: CoordinatorId::new("c").expect("valid"),
        route: vec![worker(0)],
        fingerprint: FINGERPRINT.to_owned(),
        prompt: vec![],
        prompt_len: 0,
        max_len: 64,
        sampling: Sampling::default(),
        head: HeadMode::Token,
        priority: Priority::Interactive,
    }
}

#[test]
fn a_session_gives_the_tokens_of_the_model() {
    let mut bench = Bench::new(TestOptions::default(), usize::MAX);
    assert_eq!(bench.open(1, 0), Ok(0));
    let prompt = [3, 1, 4, 1, 5];
    let output = model().expected(&prompt, 8);
    assert_eq!(bench.generate(1, 0, &prompt, 8), output);
    // A higher epoch keeps what is still right of the cache, and a step at position 0 rewinds it.
    let mut all = [&prompt[..], &output].concat();
    assert_eq!(bench.open_again(1, 1, &all), Ok(12));
    all[7] = output[2] + 1;
    assert_eq!(bench.open_again(1, 1, &all), Ok(7));
    assert_eq!(bench.generate(1, 1, &prompt, 8), model().expected(&prompt, 8));
    // A closed session starts empty.
    bench.inference.send(Command::Close { session: SessionId::from_u64(1) }).expect("room");
    assert_eq!(bench.open(1, 0), Ok(0));
    assert_eq!(bench.inference.queued(), 0);
    let load = bench.inference.load();
    assert_eq!((load.steps_completed, load.kv_tokens), (16, 0));
    bench.end().expect("an orderly end");
}

#[test]
fn times_are_measured_and_traced() {
    let delay = Duration::from_millis(2);
    let options = TestOptions { delay_per_row: delay, ..TestOptions::default() };
    let mut bench = Bench::new(options, usize::MAX);
    bench.open(1, 0).expect("room");
    bench.run(1, 0, 0, 0, &[1, 2]);
    let trace = bench.step_done().trace;
    let [time] = trace.as_slice() else { panic!("expected one stage, got {trace:?}") };
    assert!(time.infer_us >= 4_000, "{time:?}");
    assert!(time.total_us >= time.queue_us + time.infer_us, "{time:?}");
    bench.run(1, 0, 1, 2, &[3]);
    bench.step_done();
    // The load is written after the result has left; the next answer comes after both.
    bench.open(2, 0).expect("room");
    let load = bench.inference.load();
    assert!(load.decode_us >= 2_000.0 && load.prefill_row_us >= 2_000.0, "{load:?}");
    assert_eq!(load.kv_tokens, 3);
}

#[test]
fn a_failed_step_ends_the_epoch_and_is_told_once() {
    let options = TestOptions { faults: vec![Fault::FailAtStep { step: 1 }], ..Default::default() };
    let mut bench = Bench::new(options, usize::MAX);
    bench.open(1, 0).expect("room");
    bench.run(1, 0, 0, 0, &[1, 2]);
    bench.step_done();
    bench.run(1, 0, 1, 2, &[3]);
    let fault = bench.fault();
    assert_eq!((fault.step.number(), fault.error.class), (1, ErrorClass::Internal));
    let lost = InferenceEvent::Lost { session: SessionId::from_u64(1), epoch: Epoch::new(0) };
    assert_eq!(bench.events.blocking_recv(), Some(lost));
    // A step of the failed epoch is skipped in silence; the next open starts afresh.
    bench.run(1, 0, 2, 2, &[3]);
    assert_eq!(bench.open(1, 1), Ok(0));
    assert_eq!(bench.generate(1, 1, &[5, 6], 3), model().expected(&[5, 6], 3));
    bench.open(2, 0).expect("room");
    assert_eq!(bench.inference.queued(), 0);
}

#[test]
fn a_step_behind_a_hole_is_refused_and_keeps_the_cache() {
    let mut bench = Bench::new(TestOptions::default(), usize::MAX);
    bench.open(1, 0).expect("room");
    bench.run(1, 0, 0, 0, &[1, 2]);
    bench.step_done();
    bench.run(1, 0, 1, 9, &[3]);
    assert_eq!(bench.fault().error.class, ErrorClass::StepGap);
    bench.run(1, 0, 2, 2, &[3]);
    assert_eq!(bench.open_again(1, 1, &[1, 2, 3]), Ok(2));
    assert_eq!(bench.route.unsent.load(Ordering::Relaxed), 2, "the fault of step 1 has left");
    bench.run(1, 1, 0, 2, &[3]);
    let token = bench.step_done().rows[0].token;
    assert_eq!(vec![token], model().expected(&[1, 2, 3], 1));
}

#[test]
fn a_result_too_large_for_the_broker_is_a_fault_of_the_request() {
    let mut bench = Bench::new(TestOptions::default(), 400);
    bench.open(1, 0).expect("room");
    let (session, epoch) = (SessionId::from_u64(1), Epoch::new(0));
    let tokens: Vec<u32> = (0..40).collect();
    let step = Step {
        session,
        epoch,
        step: StepNumber::new(0),
        start_pos: 0,
        phase: Phase::Prefill,
        wanted: tokens.clone(),
        tokens: tokens.clone(),
        held_from: None,
        trace: vec![],
    };
    let job = Job::new(step, None, Arc::clone(&bench.route), Instant::now());
    bench.inference.send(Command::Run(vec![job])).expect("room");
    assert_eq!(bench.fault().error.class, ErrorClass::InvalidRequest);
    assert_eq!(bench.open_again(1, 1, &tokens), Ok(40));
    assert_eq!(bench.generate(1, 1, &[5, 6], 3), model().expected(&[5, 6], 3));
}

#[test]
fn steps_that_wait_are_dropped_with_their_session() {
    let (mut bench, gate) = Bench::gated();
    bench.open(1, 0).expect("room");
    bench.open(2, 0).expect("room");
    bench.run(2, 0, 0, 0, &[9]);
    gate.entered();
    for number in 0..5 {
        bench.run(1, 0, number, number, &[1]);
    }
    assert_eq!(bench.inference.queued(), 6);
    bench.inference.send(Command::Close { session: SessionId::from_u64(1) }).expect("room");
    bench.run(2, 0, 1, 1, &[9]);
    for _ in 0..2 {
        gate.open();
        assert_eq!(bench.step_done().session, SessionId::from_u64(2));
    }
    // Nothing else runs: the answer to an open comes without another micro-batch.
    bench.open(3, 0).expect("room");
    assert_eq!(bench.inference.queued(), 0);
    assert_eq!(bench.inference.load().steps_completed, 2);
}

#[test]
fn an_open_beyond_the_backends_room_is_overload() {
    let options = TestOptions { max_sessions: 1, ..TestOptions::default() };
    let mut bench = Bench::new(options, usize::MAX);
    bench.open(1, 0).expect("room");
    let error = bench.open(2, 0).expect_err("no room");
    assert_eq!(error.class, ErrorClass::Overloaded);
    assert!(error.retry_after_ms.is_some());
}

#[test]
fn a_panic_of_the_backend_closes_the_event_channel() {
    let faults = vec![Fault::PanicAtStep { step: 0 }];
    let mut bench = Bench::new(TestOptions { faults, ..TestOptions::default() }, usize::MAX);
    bench.open(1, 0).expect("room");
    bench.run(1, 0, 0, 0, &[1]);
    assert_eq!(bench.events.blocking_recv(), None);
    bench.end().expect_err("the thread panicked");
}
