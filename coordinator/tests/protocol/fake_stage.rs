//! A stage that speaks the worker's side of the protocol message by message and can misbehave.
//!
//! Steps carry their tokens on every stage, so only the last stage computes, with the toy model
//! over all tokens of the session; the others pass rows on.

use std::collections::HashMap;

use stagebus_bus::{Bus, BusOptions, Delivery};
use stagebus_engine::testing::TestModel;
use stagebus_schemas::codec;
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{
    CoordinatorId, Epoch, ModelName, SessionId, StageIndex, StepNumber, WorkerId,
};
use stagebus_schemas::messages::control::{
    Control, ControlAction, ControlOutcome, ControlReply, SessionProgress, StepProgress,
};
use stagebus_schemas::messages::fleet::{WorkerAnnouncement, WorkerLoad, WorkerState};
use stagebus_schemas::messages::forward::{Forward, StageTime, Step};
use stagebus_schemas::messages::head::{Head, HeadRow, HeadStep, StepFault};
use stagebus_schemas::subjects::{LostStep, Subjects};
use stagebus_schemas::version::MessageVersion;
use stagebus_shards::Manifest;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// How a stage behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Behaviour {
    /// As it should.
    Good,
    /// Refuses every session for want of room.
    Full,
    /// Does not end any step.
    Mute,
    /// Hears no step of a session before it is opened again.
    Deaf,
    /// Refuses every step.
    Broken,
}

/// A running stage; it vanishes without a word when it is dropped.
pub(crate) struct FakeStage {
    n_sessions: watch::Receiver<usize>,
    n_steps: watch::Receiver<usize>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Drop for FakeStage {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl FakeStage {
    pub(crate) async fn start(
        url: &str,
        manifest: &Manifest,
        stage: usize,
        behaviour: Behaviour,
    ) -> Self {
        let stage = StageIndex::new(u16::try_from(stage).unwrap());
        let worker = WorkerId::random(stage);
        let bus = Bus::connect(BusOptions::new(url, worker.as_str())).await.unwrap();
        let (n_sessions, sessions_seen) = watch::channel(0);
        let (n_steps, steps_seen) = watch::channel(0);
        let model = ModelName::new(manifest.model.clone()).unwrap();
        let subjects = Subjects::new(&model);
        let inner = Inner {
            steps: bus.subscribe(&subjects.step(stage, &worker)).await.unwrap(),
            control: bus.subscribe(&subjects.control(stage, &worker)).await.unwrap(),
            probe: bus.subscribe(&subjects.probe()).await.unwrap(),
            manifest: manifest.clone(),
            model: TestModel::from_manifest(manifest),
            sessions: HashMap::new(),
            worker,
            n_sessions,
            n_steps,
            subjects,
            stage,
            behaviour,
            bus,
        };
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(inner.serve(stop.clone()));
        Self { n_sessions: sessions_seen, n_steps: steps_seen, stop, tasks }
    }

    /// Waits until the stage holds no session.
    pub(crate) async fn idle(&mut self) {
        self.n_sessions.wait_for(|n| *n == 0).await.unwrap();
    }

    /// Waits until the stage holds `n` sessions.
    pub(crate) async fn holds(&mut self, n: usize) {
        self.n_sessions.wait_for(|held| *held == n).await.unwrap();
    }

    /// Waits until the stage has seen `n` steps.
    pub(crate) async fn has_run(&mut self, n: usize) {
        self.n_steps.wait_for(|seen| *seen >= n).await.unwrap();
    }

    /// Steps seen so far.
    pub(crate) fn n_steps(&self) -> usize {
        *self.n_steps.borrow()
    }

    /// Vanishes without a word, and waits until the broker knows.
    pub(crate) async fn vanish(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

struct Held {
    coordinator: CoordinatorId,
    route: Vec<WorkerId>,
    tokens: Vec<u32>,
    progress: StepProgress,
}

struct Inner {
    bus: Bus,
    subjects: Subjects,
    manifest: Manifest,
    model: TestModel,
    stage: StageIndex,
    worker: WorkerId,
    behaviour: Behaviour,
    sessions: HashMap<SessionId, Held>,
    n_sessions: watch::Sender<usize>,
    n_steps: watch::Sender<usize>,
    steps: stagebus_bus::Subscription,
    control: stagebus_bus::Subscription,
    probe: stagebus_bus::Subscription,
}

impl Inner {
    async fn serve(mut self, stop: CancellationToken) {
        self.announce().await;
        loop {
            tokio::select! {
                Some(delivery) = self.control.next() => self.on_control(&delivery).await,
                Some(delivery) = self.steps.next() => {
                    let forward: Forward = delivery.decode().unwrap();
                    for step in forward.steps {
                        self.on_step(step).await;
                        self.n_steps.send_modify(|n| *n += 1);
                    }
                }
                Some(_) = self.probe.next() => self.announce().await,
                () = stop.cancelled() => break,
            }
        }
        self.bus.drain(std::time::Duration::from_secs(5)).await.unwrap();
    }

    async fn announce(&self) {
        let announcement = WorkerAnnouncement {
            version: MessageVersion::CURRENT,
            worker: self.worker.clone(),
            model: ModelName::new(self.manifest.model.clone()).unwrap(),
            fingerprint: self.manifest.fingerprint.clone(),
            stage: self.stage,
            n_stages: u16::try_from(self.manifest.n_stages()).unwrap(),
            first_layer: 0,
            end_layer: 1,
            device: "none".to_owned(),
            profile: "exact".to_owned(),
            host: "test".to_owned(),
            state: WorkerState::Ready,
            interval_ms: 60_000,
            load: self.load(),
        };
        let subject = self.subjects.worker(self.stage, &self.worker);
        self.bus.publish(&subject, &announcement).await.unwrap();
    }

    fn load(&self) -> WorkerLoad {
        WorkerLoad {
            n_sessions: u32::try_from(self.sessions.len()).unwrap(),
            max_sessions: 100,
            queue_depth: 0,
            kv_tokens: 0,
            kv_bytes: 0,
            kv_max_bytes: 0,
            steps_completed: 0,
            decode_us: 0,
            prefill_row_us: 0,
            ..WorkerLoad::default()
        }
    }

    async fn on_control(&mut self, delivery: &Delivery) {
        let control: Control = delivery.decode().unwrap();
        let outcome = match control.action {
            ControlAction::Open(_) if self.behaviour == Behaviour::Full => {
                ControlOutcome::Failed(ErrorReply {
                    class: ErrorClass::Overloaded,
                    message: "no room".to_owned(),
                    retry_after_ms: Some(50),
                })
            }
            ControlAction::Open(open) => {
                let (coordinator, route) = (open.coordinator, open.route);
                let (epoch, first) = (open.epoch, StepNumber::FIRST);
                let progress = StepProgress { epoch, expected: first, unsent: first };
                let held = Held { coordinator, route, tokens: Vec::new(), progress };
                self.sessions.insert(open.session, held);
                ControlOutcome::Opened { cached_len: 0 }
            }
            ControlAction::Close(close) => {
                self.sessions.remove(&close.session);
                ControlOutcome::Closed
            }
            ControlAction::Stats => ControlOutcome::Stats(self.load()),
            ControlAction::Progress(asked) => {
                let of = |session| {
                    let steps = self.sessions.get(&session).map(|held| held.progress);
                    SessionProgress { session, steps }
                };
                ControlOutcome::Progress(asked.into_iter().map(of).collect())
            }
            ControlAction::Keep(keep) => {
                self.sessions.retain(|session, held| {
                    held.coordinator != keep.coordinator || keep.sessions.contains(session)
                });
                ControlOutcome::Closed
            }
            ControlAction::Drain(_) => panic!("a coordinator drains nobody"),
        };
        self.n_sessions.send_replace(self.sessions.len());
        if delivery.reply().is_some() {
            let reply = ControlReply { version: MessageVersion::CURRENT, outcome };
            self.bus.respond(delivery, &reply).await.unwrap();
        }
    }

    async fn on_step(&mut self, mut step: Step) {
        let Some(held) = self.sessions.get_mut(&step.session) else { return };
        if self.behaviour == Behaviour::Deaf && held.progress.epoch == Epoch::FIRST {
            return;
        }
        held.progress.expected = step.step.next();
        held.tokens.truncate(step.start_pos as usize);
        assert_eq!(held.tokens.len(), step.start_pos as usize, "steps arrive without gaps");
        held.tokens.extend_from_slice(&step.tokens);
        match self.behaviour {
            Behaviour::Mute => return,
            Behaviour::Broken => {
                let error = ErrorReply::new(ErrorClass::Internal, "broken on purpose");
                let (session, epoch, number) = (step.session, step.epoch, step.step);
                let fault = StepFault { session, epoch, step: number, error };
                let coordinator = held.coordinator.clone();
                return self.send_head(&coordinator, Vec::new(), vec![fault]).await;
            }
            Behaviour::Good | Behaviour::Full | Behaviour::Deaf => {}
        }
        held.progress.unsent = step.step.next();
        let stage = self.stage;
        let time = StageTime { stage, queue_us: 1, infer_us: 2, rows: 1, masked: 0, total_us: 3 };
        step.trace.push(time);
        if stage.index() + 1 < self.manifest.n_stages() {
            let (next, worker) = (stage.next(), held.route[stage.next().index()].clone());
            let lost =
                LostStep { session: step.session, epoch: step.epoch, step: step.step, stage: next };
            let reply = self.subjects.lost(&held.coordinator, &lost);
            let (version, from) = (MessageVersion::CURRENT, Some(self.worker.clone()));
            let forward = Forward { version, from, steps: vec![step], hidden: None };
            let payload = codec::encode(&forward).unwrap().into();
            let subject = self.subjects.step(next, &worker);
            return self.bus.publish_with_reply(&subject, &reply, payload).await.unwrap();
        }
        let rows = step
            .wanted
            .iter()
            .map(|row| {
                let pos = step.start_pos + row;
                let token = self.model.expected(&held.tokens[..=pos as usize], 1)[0];
                HeadRow::new(pos, token)
            })
            .collect();
        let coordinator = held.coordinator.clone();
        let Step { session, epoch, step, trace, .. } = step;
        let answer = HeadStep { session, epoch, step, rows, logits: None, trace };
        self.send_head(&coordinator, vec![answer], Vec::new()).await;
    }

    async fn send_head(
        &self,
        coordinator: &CoordinatorId,
        steps: Vec<HeadStep>,
        faults: Vec<StepFault>,
    ) {
        let (version, worker) = (MessageVersion::CURRENT, self.worker.clone());
        let head = Head { version, stage: self.stage, worker, steps, faults };
        self.bus.publish(&self.subjects.head(coordinator), &head).await.unwrap();
    }
}
