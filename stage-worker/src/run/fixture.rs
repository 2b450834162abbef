//! A chain of workers on a real broker, and the coordinator's side of the protocol by hand.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use stagebus_bus::{Bus, BusOptions, Delivery, RequestError, Subscription};
use stagebus_engine::backend::Backend;
use stagebus_engine::testing::{TestBackend, TestModel, TestOptions};
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_schemas::codec;
use stagebus_schemas::error::ErrorReply;
use stagebus_schemas::ids::{
    CoordinatorId, Epoch, ModelName, SessionId, StageIndex, StepNumber, WorkerId,
};
use stagebus_schemas::messages::control::{
    Close, Control, ControlAction, ControlOutcome, ControlReply, HeadMode, Open, Priority,
};
use stagebus_schemas::messages::fleet::{WorkerAnnouncement, WorkerState};
use stagebus_schemas::messages::forward::{Forward, Phase, Step};
use stagebus_schemas::messages::head::{Head, HeadStep, StepFault};
use stagebus_schemas::messages::sampling::Sampling;
use stagebus_schemas::subjects::{LostStep, Subjects};
use stagebus_schemas::version::MessageVersion;
use stagebus_telemetry::WorkerTelemetry;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::config::WorkerSettings;
use crate::error::WorkerError;
use crate::results::u32_of;
use crate::run::{Connections, serve};
use crate::shutdown::Shutdown;
use crate::stage::Stage;

/// Longest wait for something that must come.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

const FINGERPRINT: &str = "f00d";

/// A worker in this process.
pub(super) struct Running {
    pub id: WorkerId,
    pub shutdown: Shutdown,
    pub task: JoinHandle<Result<(), WorkerError>>,
}

impl Running {
    /// Waits for the worker's end.
    pub(super) async fn ended(self) -> Result<(), WorkerError> {
        timeout(PATIENCE, self.task).await.expect("an end in time").expect("no panic")
    }
}

/// A broker, workers of every stage, and a coordinator that the test plays.
pub(super) struct Chain {
    pub broker: LocalBroker,
    pub bus: Bus,
    pub model: TestModel,
    pub subjects: Subjects,
    pub coordinator: CoordinatorId,
    pub workers: Vec<Running>,
    pub head: Subscription,
    pub lost: Subscription,
    pub fleet: Subscription,
}

/// What differs between tests.
#[derive(Clone, Default)]
pub(super) struct Setup {
    pub model: TestModel,
    pub options: TestOptions,
    pub settings: WorkerSettings,
}

impl Chain {
    pub(super) async fn start(n_stages: u16, setup: Setup) -> Self {
        Self::start_with(n_stages, setup, |backend| Box::new(backend)).await
    }

    /// Starts a chain whose backends are wrapped.
    pub(super) async fn start_with(
        n_stages: u16,
        setup: Setup,
        mut wrap: impl FnMut(TestBackend) -> Box<dyn Backend>,
    ) -> Self {
        let broker = LocalBroker::start(BrokerOptions::default()).await.expect("a broker");
        let bus = connect(&broker, "coordinator").await;
        let subjects = Subjects::new(&ModelName::new("toy").expect("valid"));
        let coordinator = CoordinatorId::random();
        let head = bus.subscribe(&subjects.head(&coordinator)).await.expect("head");
        let lost = bus.subscribe(&subjects.lost_all(&coordinator)).await.expect("lost");
        let fleet = bus.subscribe(&subjects.fleet_all()).await.expect("fleet");
        bus.flush(PATIENCE).await.expect("subscribed");
        let backends = TestBackend::pipeline(&setup.model, usize::from(n_stages), &setup.options);
        let mut workers = Vec::new();
        for (index, backend) in (0..).zip(backends) {
            let stage = stage(&setup.model, index, n_stages);
            let bus = connect_worker(&broker).await;
            workers.push(start_worker(bus, stage, wrap(backend), setup.settings.clone()).await);
        }
        let model = setup.model;
        Self { broker, bus, model, subjects, coordinator, workers, head, lost, fleet }
    }

    pub(super) fn route(&self) -> Vec<WorkerId> {
        self.workers.iter().map(|worker| worker.id.clone()).collect()
    }

    pub(super) fn open_message(&self, session: SessionId, epoch: u32) -> Open {
        Open {
            session,
            epoch: Epoch::new(epoch),
            coordinator: self.coordinator.clone(),
            route: self.route(),
            fingerprint: FINGERPRINT.to_owned(),
            prompt: vec![],
            prompt_len: 0,
            max_len: 64,
            sampling: Sampling::default(),
            head: HeadMode::Token,
            priority: Priority::Interactive,
        }
    }

    pub(super) async fn control(&self, stage: usize, action: ControlAction) -> ControlOutcome {
        let index = StageIndex::new(u16::try_from(stage).expect("small"));
        let subject = self.subjects.control(index, &self.workers[stage].id);
        let control = Control { version: MessageVersion::CURRENT, action };
        let reply: ControlReply =
            self.bus.request(&subject, &control, PATIENCE).await.expect("an answer");
        reply.outcome
    }

    /// Opens a session on every stage and returns the cached length that all share.
    pub(super) async fn open(&self, session: SessionId, epoch: u32) -> u32 {
        self.open_again(session, epoch, &[]).await
    }

    /// The same for a session whose tokens are known.
    pub(super) async fn open_again(&self, session: SessionId, epoch: u32, tokens: &[u32]) -> u32 {
        let mut shared = u32::MAX;
        for stage in 0..self.workers.len() {
            let prompt_len = u32_of(tokens.len());
            let message = self.open_message(session, epoch);
            let open = ControlAction::Open(Open { prompt: tokens.to_vec(), prompt_len, ..message });
            match self.control(stage, open).await {
                ControlOutcome::Opened { cached_len } => shared = shared.min(cached_len),
                outcome => panic!("session not opened: {outcome:?}"),
            }
        }
        shared
    }

    pub(super) async fn close(&self, session: SessionId, epoch: u32) {
        for stage in 0..self.workers.len() {
            let close = Close { session, epoch: Epoch::new(epoch) };
            let outcome = self.control(stage, ControlAction::Close(close)).await;
            assert_eq!(outcome, ControlOutcome::Closed);
        }
    }

    /// Sends a step to the first stage.
    pub(super) async fn send(&self, step: Step) {
        self.send_together(vec![step]).await;
    }

    /// Sends steps to the first stage in one message.
    pub(super) async fn send_together(&self, steps: Vec<Step>) {
        let (subject, reply) = self.step_subjects(&steps[0]);
        let forward = Forward { version: MessageVersion::CURRENT, from: None, steps, hidden: None };
        self.send_raw(&subject, &reply, codec::encode(&forward).expect("encodes").into()).await;
    }

    pub(super) async fn send_raw(&self, subject: &str, reply: &str, payload: Bytes) {
        self.bus.publish_with_reply(subject, reply, payload).await.expect("sent");
    }

    /// Step subject of the first stage, and the reply subject of this step.
    pub(super) fn step_subjects(&self, step: &Step) -> (String, String) {
        let lost = LostStep {
            session: step.session,
            epoch: step.epoch,
            step: step.step,
            stage: StageIndex::FIRST,
        };
        (
            self.subjects.step(StageIndex::FIRST, &self.workers[0].id),
            self.subjects.lost(&self.coordinator, &lost),
        )
    }

    pub(super) async fn head(&mut self) -> Head {
        let delivery = next(&mut self.head).await;
        delivery.decode().expect("a head message")
    }

    pub(super) async fn step_done(&mut self) -> HeadStep {
        let mut head = self.head().await;
        assert_eq!(head.faults, vec![]);
        head.steps.pop().expect("a step")
    }

    pub(super) async fn fault(&mut self) -> StepFault {
        let mut head = self.head().await;
        assert_eq!(head.steps, vec![]);
        head.faults.pop().expect("a fault")
    }

    /// Generates greedily from a session whose cache is empty.
    pub(super) async fn generate(
        &mut self,
        session: SessionId,
        epoch: u32,
        prompt: &[u32],
        n_tokens: usize,
    ) -> Vec<u32> {
        self.send(step(session, epoch, 0, 0, prompt)).await;
        let mut tokens = Vec::new();
        loop {
            let done = self.step_done().await;
            let [row] = done.rows.as_slice() else { panic!("expected one row: {done:?}") };
            tokens.push(row.token);
            if tokens.len() == n_tokens {
                return tokens;
            }
            let number = done.step.number() + 1;
            self.send(step(session, epoch, number, row.pos + 1, &[row.token])).await;
        }
    }

    /// Waits until a worker announces a state.
    pub(super) async fn announced(
        &mut self,
        worker: &WorkerId,
        state: WorkerState,
    ) -> WorkerAnnouncement {
        loop {
            let announcement: WorkerAnnouncement =
                next(&mut self.fleet).await.decode().expect("an announcement");
            if announcement.worker == *worker && announcement.state == state {
                return announcement;
            }
        }
    }
}

pub(super) async fn next(subscription: &mut Subscription) -> Delivery {
    timeout(PATIENCE, subscription.next()).await.expect("a message in time").expect("a message")
}

/// Waits until the broker knows that nobody listens on a worker's control subject any more.
pub(super) async fn gone(bus: &Bus, subject: &str) {
    let look = async {
        loop {
            let asked = bus.request_bytes(subject, None, Bytes::new(), PATIENCE).await;
            if matches!(asked, Err(RequestError::NoResponders { .. })) {
                return;
            }
        }
    };
    timeout(PATIENCE, look).await.expect("gone in time");
}

pub(super) async fn connect(broker: &LocalBroker, name: &str) -> Bus {
    Bus::connect(BusOptions::new(broker.url(), name)).await.expect("a connection")
}

pub(super) async fn connect_worker(broker: &LocalBroker) -> Connections {
    let (steps, bulk) = (connect(broker, "worker").await, connect(broker, "worker bulk").await);
    Connections { steps, bulk }
}

pub(super) fn stage(model: &TestModel, index: u16, n_stages: u16) -> Arc<Stage> {
    let name = ModelName::new("toy").expect("valid");
    Arc::new(Stage {
        worker: WorkerId::random(StageIndex::new(index)),
        subjects: Subjects::new(&name),
        model: name,
        fingerprint: FINGERPRINT.to_owned(),
        index: StageIndex::new(index),
        n_stages,
        first_layer: 0,
        end_layer: 1,
        hidden_dim: model.hidden_dim,
        vocab_size: model.vocab_size,
        eos_ids: vec![],
        context_length: model.context_length,
    })
}

#[expect(clippy::disallowed_methods, reason = "the test joins the worker's task itself")]
pub(super) async fn start_worker(
    bus: Connections,
    stage: Arc<Stage>,
    backend: Box<dyn Backend>,
    settings: WorkerSettings,
) -> Running {
    let (shutdown, id) = (Shutdown::new(), stage.worker.clone());
    let (ready, is_ready) = oneshot::channel();
    let wishes = shutdown.clone();
    let task = tokio::spawn(async move {
        let on_ready = |_: &crate::run::Ready| ready.send(()).expect("the test waits");
        let settings = (&settings, &WorkerTelemetry::default());
        serve(bus, stage, backend, settings, &wishes, on_ready).await
    });
    timeout(PATIENCE, is_ready).await.expect("ready in time").expect("ready");
    Running { id, shutdown, task }
}

/// A step that wants the token of its last row; several rows are a prefill chunk.
pub(super) fn step(
    session: SessionId,
    epoch: u32,
    number: u32,
    start_pos: u32,
    tokens: &[u32],
) -> Step {
    Step {
        session,
        epoch: Epoch::new(epoch),
        step: StepNumber::new(number),
        start_pos,
        phase: if tokens.len() > 1 { Phase::Prefill } else { Phase::Decode },
        tokens: tokens.to_vec(),
        wanted: vec![u32::try_from(tokens.len()).expect("small") - 1],
        held_from: None,
        trace: vec![],
    }
}

pub(super) fn failure(outcome: ControlOutcome) -> ErrorReply {
    match outcome {
        ControlOutcome::Failed(error) => error,
        outcome => panic!("expected a failure: {outcome:?}"),
    }
}
