//! The owner, fed by hand: no broker, no inference, no clock but ours.

mod constrained;
mod progress;

use std::sync::mpsc::Receiver;

use stagebus_schemas::ids::{CoordinatorId, StepNumber};
use stagebus_schemas::messages::control::{Drain, HeadMode, Keep, Open, Priority};
use stagebus_schemas::messages::fleet::WorkerAnnouncement;
use stagebus_schemas::messages::forward::Phase;
use stagebus_schemas::messages::head::{Head, StepFault};
use stagebus_schemas::messages::sampling::Sampling;
use stagebus_schemas::tensor::{Dtype, Tensor};

use super::*;
use crate::stage_fixture::{FINGERPRINT, HIDDEN_DIM, stage, worker as worker_id};

const QUEUE: u32 = 3;

/// The last stage of two and everything around it.
struct Bench {
    worker: Worker,
    commands: Receiver<Command>,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        let limits = WorkerLimits {
            max_sessions: 2,
            queue_capacity: QUEUE,
            session_idle: Duration::from_secs(600),
            drain_deadline: Duration::from_secs(60),
            announce_interval: Duration::from_millis(500),
            device: "CPU".to_owned(),
            profile: "fast".to_owned(),
            host: "here".to_owned(),
        };
        let (inference, commands) = Inference::by_hand(limits.command_capacity());
        let worker = Worker::new(stage(1, 2), limits, inference, WorkerMetrics::default());
        Self { worker, commands, now: Instant::now() }
    }

    /// A bench with these sessions open at epoch 0.
    fn with_sessions(sessions: &[u64]) -> Self {
        let mut bench = Self::new();
        for session in sessions {
            bench.control(ControlAction::Open(open(*session, 0)));
            bench.opened(*session, 0, Ok(0));
        }
        bench.commands();
        bench.sent();
        bench
    }

    fn apply(&mut self, action: Action) {
        self.worker.apply(action, self.now).expect("the thread listens");
    }

    fn control(&mut self, action: ControlAction) {
        let control = Control { version: MessageVersion::CURRENT, action };
        let payload = codec::encode(&control).expect("encodes").into();
        let reply = Some("answers".to_owned());
        self.apply(Action::Control(Incoming { payload, reply, trace: None, arrived: self.now }));
    }

    fn opened(&mut self, session: u64, epoch: u32, outcome: Result<u32, ErrorReply>) {
        let (session, epoch) = (SessionId::from_u64(session), Epoch::new(epoch));
        self.apply(Action::Inference(InferenceEvent::Opened { session, epoch, outcome }));
    }

    /// Sends a message with one step per entry, and the reply subject of the first one.
    fn steps(&mut self, steps: Vec<Step>) {
        let forward = forward(steps, HIDDEN_DIM);
        self.forward(&forward);
    }

    fn forward(&mut self, forward: &Forward) {
        let step = &forward.steps[0];
        let lost = LostStep {
            session: step.session,
            epoch: step.epoch,
            step: step.step,
            stage: self.worker.stage.index,
        };
        let asker = CoordinatorId::new("asker").expect("valid");
        let reply = Some(self.worker.stage.subjects.lost(&asker, &lost));
        let payload = codec::encode(forward).expect("encodes").into();
        self.apply(Action::Step(Incoming { payload, reply, trace: None, arrived: self.now }));
    }

    fn commands(&self) -> Vec<Command> {
        self.commands.try_iter().collect()
    }

    /// Steps handed to the inference thread: session, step number and hidden states.
    fn runs(&self) -> Vec<(u64, u32, Vec<f32>)> {
        let jobs = |command| match command {
            Command::Run(jobs) => jobs,
            Command::Open(..) | Command::Close { .. } => vec![],
        };
        let of = |job: Job| {
            let hidden = job.hidden.unwrap_or_default();
            (job.step.session.as_u64(), job.step.step.number(), hidden)
        };
        self.commands().into_iter().flat_map(jobs).map(of).collect()
    }

    fn sent(&mut self) -> Vec<Outgoing> {
        self.worker.take_outbox()
    }

    fn outcomes(&mut self) -> Vec<ControlOutcome> {
        let sent = self.sent();
        let answers = sent.iter().filter(|message| message.subject == "answers");
        answers
            .map(|message| {
                codec::decode::<ControlReply>(&message.payload).expect("a reply").outcome
            })
            .collect()
    }

    /// Faults sent, each with the coordinator's subject.
    fn faults(&mut self) -> Vec<(String, StepFault)> {
        let of = |message: Outgoing| {
            let head: Head = codec::decode(&message.payload).expect("a head message");
            assert!(head.steps.is_empty());
            let subject = message.subject;
            head.faults.into_iter().map(move |fault| (subject.clone(), fault))
        };
        self.sent().into_iter().flat_map(of).collect()
    }

    fn fault_classes(&mut self) -> Vec<ErrorClass> {
        self.faults().into_iter().map(|(_, fault)| fault.error.class).collect()
    }

    fn states(&mut self) -> Vec<WorkerState> {
        let sent = self.sent();
        let of = |message: &Outgoing| codec::decode::<WorkerAnnouncement>(&message.payload).ok();
        sent.iter().filter_map(of).map(|announcement| announcement.state).collect()
    }
}

fn open(session: u64, epoch: u32) -> Open {
    Open {
        session: SessionId::from_u64(session),
        epoch: Epoch::new(epoch),
        coordinator: CoordinatorId::new("owner").expect("valid"),
        route: vec![worker_id(0), worker_id(1)],
        fingerprint: FINGERPRINT.to_owned(),
        prompt: vec![1, 2, 3],
        prompt_len: 3,
        max_len: 32,
        sampling: Sampling::default(),
        head: HeadMode::Token,
        priority: Priority::Interactive,
    }
}

fn close(session: u64, epoch: u32) -> ControlAction {
    ControlAction::Close(Close { session: SessionId::from_u64(session), epoch: Epoch::new(epoch) })
}

fn step(session: u64, epoch: u32, number: u32, n_rows: u32) -> Step {
    Step {
        session: SessionId::from_u64(session),
        epoch: Epoch::new(epoch),
        step: StepNumber::new(number),
        start_pos: 0,
        phase: Phase::Decode,
        tokens: (0..n_rows).collect(),
        wanted: vec![n_rows - 1],
        held_from: None,
        trace: vec![],
    }
}

/// Element `i` of the tensor is `i`.
fn forward(steps: Vec<Step>, hidden_dim: usize) -> Forward {
    let n_rows: usize = steps.iter().map(|step| step.tokens.len()).sum();
    let hidden: Vec<f32> = (0..n_rows * hidden_dim).map(|i| i as f32).collect();
    Forward {
        version: MessageVersion::CURRENT,
        from: Some(worker_id(0)),
        steps,
        hidden: Some(Tensor {
            dtype: Dtype::F32,
            n_rows: u32_of(n_rows),
            hidden_dim: u32_of(hidden_dim),
            data: Dtype::F32.encode(&hidden, hidden_dim).into(),
        }),
    }
}

#[test]
fn an_open_is_answered_when_the_backend_has_answered() {
    let mut bench = Bench::new();
    bench.control(ControlAction::Open(open(1, 0)));
    assert_eq!(bench.outcomes(), vec![]);
    let commands = bench.commands();
    let [Command::Open(passed_on, None)] = commands.as_slice() else {
        panic!("expected one open, got {commands:?}");
    };
    assert_eq!(**passed_on, OpenOrder { open: open(1, 0), trace: None });
    bench.opened(1, 0, Ok(2));
    assert_eq!(bench.outcomes(), vec![ControlOutcome::Opened { cached_len: 2 }]);
}

#[test]
fn an_open_that_the_backend_refuses_leaves_no_session() {
    let mut bench = Bench::new();
    bench.control(ControlAction::Open(open(1, 0)));
    let refusal = ErrorReply::new(ErrorClass::Internal, "no");
    bench.opened(1, 0, Err(refusal.clone()));
    assert_eq!(bench.outcomes(), vec![ControlOutcome::Failed(refusal)]);
    bench.steps(vec![step(1, 0, 0, 1)]);
    assert_eq!(bench.fault_classes(), vec![ErrorClass::UnknownSession]);
}

#[test]
fn opens_beyond_what_fits_are_answered_at_once() {
    let mut bench = Bench::with_sessions(&[1, 2]);
    bench.control(ControlAction::Open(open(3, 0)));
    let outcomes = bench.outcomes();
    let [ControlOutcome::Failed(error)] = outcomes.as_slice() else {
        panic!("expected a refusal, got {outcomes:?}");
    };
    assert_eq!(error.class, ErrorClass::Overloaded);
    assert!(error.retry_after_ms.is_some());
    assert!(bench.commands().is_empty());
    // Opens that the backend has not answered are bounded as well, whatever is closed meanwhile.
    bench.control(close(1, 0));
    bench.control(close(2, 0));
    for session in 4..6 {
        bench.control(ControlAction::Open(open(session, 0)));
        bench.control(close(session, 0));
    }
    bench.sent();
    bench.control(ControlAction::Open(open(6, 0)));
    assert!(matches!(
        bench.outcomes().as_slice(),
        [ControlOutcome::Failed(ErrorReply { class: ErrorClass::Overloaded, .. })]
    ));
}

#[test]
fn each_step_of_a_message_gets_its_rows() {
    let mut bench = Bench::with_sessions(&[1, 2]);
    bench.steps(vec![step(1, 0, 0, 1), step(2, 0, 0, 2)]);
    let rows = |from: usize, to: usize| (from * HIDDEN_DIM..to * HIDDEN_DIM).map(|i| i as f32);
    assert_eq!(bench.runs(), vec![(1, 0, rows(0, 1).collect()), (2, 0, rows(1, 3).collect())]);
    // A step that is dropped does not shift the rows of the next one.
    bench.steps(vec![step(1, 0, 0, 2), step(2, 0, 1, 1)]);
    assert_eq!(bench.runs(), vec![(2, 1, rows(2, 3).collect())]);
    assert_eq!(bench.worker.counters().duplicates, 1);
    assert!(bench.sent().is_empty());
}

#[test]
fn faults_go_to_the_coordinator_that_sent_the_step() {
    let mut bench = Bench::with_sessions(&[1]);
    for (refused, class) in [
        (step(1, 0, 5, 1), ErrorClass::StepGap),
        (step(9, 0, 0, 1), ErrorClass::UnknownSession),
        (step(1, 3, 0, 1), ErrorClass::UnknownSession),
    ] {
        bench.steps(vec![refused.clone()]);
        let faults = bench.faults();
        let [(subject, fault)] = faults.as_slice() else { panic!("expected a fault") };
        assert_eq!(subject, "stagebus.v1.tiny.head.asker");
        assert_eq!(
            (fault.session, fault.epoch, fault.step, fault.error.class),
            (refused.session, refused.epoch, refused.step, class)
        );
    }
    assert!(bench.runs().is_empty());
    assert_eq!(bench.worker.counters().refused, 3);
}

#[test]
fn without_a_reply_subject_the_sessions_coordinator_hears_of_a_fault() {
    let mut bench = Bench::with_sessions(&[1]);
    for (session, heard) in [(1, true), (9, false)] {
        let payload = codec::encode(&forward(vec![step(session, 0, 5, 1)], HIDDEN_DIM));
        let payload = payload.expect("encodes").into();
        bench.apply(Action::Step(Incoming {
            payload,
            reply: None,
            trace: None,
            arrived: bench.now,
        }));
        let subjects: Vec<String> =
            bench.faults().into_iter().map(|(subject, _)| subject).collect();
        let expected = if heard { vec!["stagebus.v1.tiny.head.owner".to_owned()] } else { vec![] };
        assert_eq!(subjects, expected);
    }
}

#[test]
fn a_higher_epoch_fences_the_steps_before_it() {
    let mut bench = Bench::with_sessions(&[1]);
    bench.steps(vec![step(1, 0, 0, 1)]);
    bench.control(ControlAction::Open(open(1, 1)));
    bench.opened(1, 1, Ok(7));
    assert_eq!(bench.outcomes(), vec![ControlOutcome::Opened { cached_len: 7 }]);
    bench.commands();
    bench.steps(vec![step(1, 0, 1, 1)]);
    assert_eq!(bench.fault_classes(), vec![ErrorClass::StaleEpoch]);
    bench.steps(vec![step(1, 1, 0, 1)]);
    assert_eq!(bench.runs().len(), 1);
}

#[test]
fn a_step_of_the_wrong_form_is_refused_and_the_worker_lives_on() {
    type Spoil = fn(&mut Forward);
    let cases: [(&str, Spoil); 6] = [
        ("no tensor", |forward| forward.hidden = None),
        ("another width", |forward| {
            let steps = std::mem::take(&mut forward.steps);
            *forward = super::tests::forward(steps, HIDDEN_DIM + 1);
        }),
        ("a token outside the vocabulary", |forward| forward.steps[0].tokens[0] = 50),
        ("positions outside the context", |forward| forward.steps[0].start_pos = 64),
        ("another sender", |forward| forward.from = Some(worker_id(1))),
        ("no sender", |forward| forward.from = None),
    ];
    let mut bench = Bench::with_sessions(&[1]);
    for (case, spoil) in cases {
        let mut spoilt = forward(vec![step(1, 0, 0, 1)], HIDDEN_DIM);
        spoil(&mut spoilt);
        bench.forward(&spoilt);
        assert_eq!(bench.fault_classes(), vec![ErrorClass::InvalidRequest], "{case}");
        assert!(bench.runs().is_empty(), "{case}");
    }
    // None of them has moved the expected number.
    bench.steps(vec![step(1, 0, 0, 1)]);
    assert_eq!(bench.runs().len(), 1);
}

#[test]
fn malformed_bytes_are_counted_and_answered_where_an_answer_is_asked_for() {
    let mut bench = Bench::with_sessions(&[1]);
    let reply = "stagebus.v1.tiny.lost.asker.0000000000000001.0.4.1";
    let mut wrong_version =
        codec::encode(&forward(vec![step(1, 0, 0, 1)], HIDDEN_DIM)).expect("ok");
    let current = MessageVersion::CURRENT.number();
    let version =
        wrong_version.iter().position(|byte| u16::from(*byte) == current).expect("a version");
    wrong_version[version] = 99;
    let cases = [
        (b"nonsense".to_vec(), ErrorClass::InvalidRequest),
        (Vec::new(), ErrorClass::InvalidRequest),
        (wrong_version, ErrorClass::VersionMismatch),
    ];
    for (payload, class) in cases {
        for reply in [Some(reply.to_owned()), None] {
            let heard = reply.is_some();
            let payload = payload.clone().into();
            bench.apply(Action::Step(Incoming { payload, reply, trace: None, arrived: bench.now }));
            let faults = bench.faults();
            assert_eq!(faults.len(), usize::from(heard));
            for (subject, fault) in faults {
                assert_eq!(subject, "stagebus.v1.tiny.head.asker");
                assert_eq!((fault.step.number(), fault.error.class), (4, class));
            }
        }
    }
    let reply = Some("answers".to_owned());
    let payload = Bytes::from_static(b"nonsense");
    bench.apply(Action::Control(Incoming { payload, reply, trace: None, arrived: bench.now }));
    assert!(matches!(
        bench.outcomes().as_slice(),
        [ControlOutcome::Failed(ErrorReply { class: ErrorClass::InvalidRequest, .. })]
    ));
    assert_eq!(bench.worker.counters().malformed, 7);
    bench.steps(vec![step(1, 0, 0, 1)]);
    assert_eq!(bench.runs().len(), 1);
}

#[test]
fn a_full_queue_refuses_without_losing_the_place() {
    let mut bench = Bench::with_sessions(&[1]);
    for number in 0..QUEUE {
        bench.steps(vec![step(1, 0, number, 1)]);
    }
    assert_eq!(bench.runs().len(), QUEUE as usize);
    bench.steps(vec![step(1, 0, QUEUE, 1)]);
    let faults = bench.faults();
    let [(_, fault)] = faults.as_slice() else { panic!("expected a fault") };
    assert_eq!(fault.error.class, ErrorClass::Overloaded);
    assert!(fault.error.retry_after_ms.is_some());
    bench.worker.inference.done(1);
    bench.steps(vec![step(1, 0, QUEUE, 1)]);
    assert_eq!(bench.runs().len(), 1);
}

#[test]
fn a_session_whose_cache_is_lost_must_be_opened_again() {
    let mut bench = Bench::with_sessions(&[1]);
    let (session, epoch) = (SessionId::from_u64(1), Epoch::new(0));
    bench.apply(Action::Inference(InferenceEvent::Lost { session, epoch }));
    bench.steps(vec![step(1, 0, 0, 1)]);
    assert_eq!(bench.fault_classes(), vec![ErrorClass::UnknownSession]);
    bench.control(ControlAction::Open(open(1, 1)));
    // News of the old epoch that comes late concerns nobody.
    bench.apply(Action::Inference(InferenceEvent::Lost { session, epoch }));
    bench.opened(1, 1, Ok(0));
    bench.commands();
    bench.steps(vec![step(1, 1, 0, 1)]);
    assert_eq!(bench.runs().len(), 1);
}

#[test]
fn closing_frees_the_session_and_stale_closes_do_not() {
    let mut bench = Bench::with_sessions(&[1]);
    bench.control(ControlAction::Open(open(1, 2)));
    bench.opened(1, 2, Ok(0));
    bench.commands();
    bench.sent();
    bench.control(close(1, 1));
    assert!(matches!(
        bench.outcomes().as_slice(),
        [ControlOutcome::Failed(ErrorReply { class: ErrorClass::StaleEpoch, .. })]
    ));
    assert!(bench.commands().is_empty());
    bench.control(close(1, 2));
    bench.control(close(1, 2));
    assert_eq!(bench.outcomes(), vec![ControlOutcome::Closed, ControlOutcome::Closed]);
    assert!(matches!(bench.commands().as_slice(), [Command::Close { .. }]));
}

#[test]
fn a_drained_worker_leaves_with_its_last_session() {
    let mut bench = Bench::with_sessions(&[1]);
    bench.control(ControlAction::Drain(Drain::default()));
    assert_eq!(bench.states(), vec![WorkerState::Draining]);
    assert!(!bench.worker.has_left());
    bench.control(ControlAction::Open(open(2, 0)));
    assert!(matches!(
        bench.outcomes().as_slice(),
        [ControlOutcome::Failed(ErrorReply { class: ErrorClass::Overloaded, .. })]
    ));
    bench.steps(vec![step(1, 0, 0, 1)]);
    assert_eq!(bench.runs().len(), 1);
    bench.control(close(1, 0));
    assert_eq!(bench.states(), vec![WorkerState::Leaving]);
    assert!(bench.worker.has_left());
}

#[test]
fn a_drain_has_a_deadline_and_an_idle_worker_needs_none() {
    let mut bench = Bench::with_sessions(&[1]);
    bench.apply(Action::Drain);
    bench.now += Duration::from_secs(59);
    bench.apply(Action::Tick);
    assert!(!bench.worker.has_left());
    bench.now += Duration::from_secs(1);
    bench.apply(Action::Tick);
    assert!(bench.worker.has_left());
    let mut idle = Bench::new();
    idle.apply(Action::Drain);
    assert_eq!(idle.states(), vec![WorkerState::Draining, WorkerState::Leaving]);
    let mut stopped = Bench::with_sessions(&[1]);
    stopped.apply(Action::Stop);
    assert_eq!(stopped.states(), vec![WorkerState::Leaving]);
}

#[test]
fn a_session_that_nobody_uses_is_closed() {
    let mut bench = Bench::with_sessions(&[1, 2]);
    bench.now += Duration::from_secs(300);
    bench.steps(vec![step(2, 0, 0, 1)]);
    bench.commands();
    bench.now += Duration::from_secs(300);
    bench.apply(Action::Tick);
    let commands = bench.commands();
    let [Command::Close { session }] = commands.as_slice() else {
        panic!("expected one close, got {commands:?}");
    };
    assert_eq!(session.as_u64(), 1);
    assert_eq!(bench.worker.counters().expired, 1);
}

#[test]
fn announcements_tell_load_and_come_when_asked_for() {
    let mut bench = Bench::with_sessions(&[1]);
    bench.steps(vec![step(1, 0, 0, 1)]);
    for action in [Action::Probe, Action::Tick, Action::Connection(BusEvent::Connected)] {
        bench.apply(action);
        let sent = bench.sent();
        let [message] = sent.as_slice() else { panic!("expected one announcement") };
        assert_eq!(message.subject, "stagebus.v1.tiny.fleet.1.w1");
        let announced: WorkerAnnouncement = codec::decode(&message.payload).expect("decodes");
        assert_eq!((announced.state, announced.n_stages), (WorkerState::Ready, 2));
        assert_eq!((announced.load.n_sessions, announced.load.queue_depth), (1, 1));
    }
    bench.control(ControlAction::Stats);
    let outcomes = bench.outcomes();
    let [ControlOutcome::Stats(load)] = outcomes.as_slice() else { panic!("expected the load") };
    assert_eq!((load.n_sessions, load.max_sessions, load.queue_depth), (1, 2, 1));
}

#[test]
fn the_news_that_nobody_hears_the_next_worker_is_passed_on_once() {
    let mut bench = Bench::with_sessions(&[1]);
    let subject = "stagebus.v1.tiny.lost.owner.0000000000000001.0.4.2".to_owned();
    bench.apply(Action::Lost { subject: subject.clone(), told: false });
    let sent = bench.sent();
    assert_eq!(
        sent,
        vec![Outgoing { subject: subject.clone(), reply: None, payload: Bytes::new() }]
    );
    // What others have told, this worker's own message included, is not told again.
    bench.apply(Action::Lost { subject, told: true });
    bench.apply(Action::Lost { subject: "stagebus.v1.tiny.lost.owner".to_owned(), told: false });
    assert!(bench.sent().is_empty());
    assert_eq!(bench.worker.counters().unheard, 1);
}

/// Sessions that the inference thread was told to end.
fn ended(bench: &Bench) -> Vec<u64> {
    let session = |command| match command {
        Command::Close { session } => Some(session.as_u64()),
        Command::Open(..) | Command::Run(_) => None,
    };
    bench.commands().into_iter().filter_map(session).collect()
}

fn coordinator(name: &str) -> CoordinatorAnnouncement {
    CoordinatorAnnouncement {
        version: MessageVersion::CURRENT,
        coordinator: CoordinatorId::new(name).expect("valid"),
        model: "tiny".parse().expect("valid"),
        fingerprint: FINGERPRINT.to_owned(),
        n_stages: 2,
        host: "there".to_owned(),
        accepting: true,
        interval_ms: 500,
        n_sessions: 1,
        requests_done: 0,
        tokens_out: 0,
        tokens_drafted: 0,
        tokens_accepted: 0,
        recoveries: 0,
    }
}

#[test]
fn the_sessions_of_a_coordinator_that_falls_silent_end() {
    let mut bench = Bench::with_sessions(&[1]);
    let wait = |bench: &mut Bench, seconds| {
        bench.now += Duration::from_secs(seconds);
        bench.apply(Action::Tick);
        ended(bench)
    };
    assert_eq!(
        wait(&mut bench, 60),
        Vec::<u64>::new(),
        "a coordinator that was never heard is not missed"
    );
    bench.apply(Action::Coordinator(coordinator("owner")));
    bench.apply(Action::Coordinator(coordinator("other")));
    assert_eq!(wait(&mut bench, 6), Vec::<u64>::new());
    bench.apply(Action::Coordinator(coordinator("owner")));
    assert_eq!(wait(&mut bench, 6), Vec::<u64>::new());
    assert_eq!(wait(&mut bench, 10), [1]);
    assert_eq!(bench.worker.counters().expired, 1);
}

#[test]
fn a_coordinator_that_lost_touch_says_which_sessions_it_still_has() {
    let mut bench = Bench::with_sessions(&[1, 2]);
    let keep = |name: &str| {
        let coordinator = CoordinatorId::new(name).expect("valid");
        ControlAction::Keep(Keep { coordinator, sessions: vec![SessionId::from_u64(2)] })
    };
    bench.control(keep("another"));
    assert_eq!(ended(&bench), Vec::<u64>::new());
    bench.control(keep("owner"));
    assert_eq!(ended(&bench), [1]);
    assert_eq!(bench.outcomes(), [ControlOutcome::Closed, ControlOutcome::Closed]);
}

#[test]
fn losses_are_announced_at_once_and_after_a_broken_connection() {
    let mut bench = Bench::with_sessions(&[1]);
    let losses = |bench: &mut Bench| -> Vec<u64> {
        let sent = bench.sent();
        let of = |message: &Outgoing| codec::decode::<WorkerAnnouncement>(&message.payload).ok();
        sent.iter().filter_map(of).map(|announcement| announcement.load.losses).collect()
    };
    bench.apply(Action::Connection(BusEvent::SlowConsumer));
    assert_eq!(losses(&mut bench), [1]);
    bench.apply(Action::Connection(BusEvent::Disconnected));
    bench.apply(Action::Connection(BusEvent::Connected));
    assert_eq!(losses(&mut bench), [2]);
}

#[test]
fn a_drain_may_be_given_less_time_but_not_more() {
    for (within_ms, leaves_after) in [(Some(5_000), 5), (Some(3_600_000), 60), (None, 60)] {
        let mut bench = Bench::with_sessions(&[1]);
        bench.control(ControlAction::Drain(Drain { within_ms }));
        bench.now += Duration::from_secs(leaves_after) - Duration::from_millis(1);
        bench.apply(Action::Tick);
        assert!(!bench.worker.has_left());
        bench.now += Duration::from_millis(1);
        bench.apply(Action::Tick);
        assert!(bench.worker.has_left());
    }
}
