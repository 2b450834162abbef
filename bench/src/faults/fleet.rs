//! The fleet that faults strike, and how it is asked.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use stagebus_bus::{Bus, BusOptions, EventStream, StreamError};
use stagebus_fleet::{FleetSpec, LocalFleet, Member};
use stagebus_schemas::codec::{self, ContentType};
use stagebus_schemas::ids::{StageIndex, WorkerId};
use stagebus_schemas::messages::control::{
    Control, ControlAction, ControlOutcome, ControlReply, Drain,
};
use stagebus_schemas::messages::fleet::WorkerLoad;
use stagebus_schemas::messages::public::{Event, PromptRequest, RequestState};
use stagebus_schemas::subjects::Subjects;
use stagebus_schemas::version::MessageVersion;
use stagebus_shards::ShardSet;

use crate::fleet_run;
use crate::harness::machine;

/// Stages of the fleet.
pub const N_STAGES: usize = 2;

/// Workers of each stage.
pub const PER_STAGE: usize = 2;

/// Longest wait for an event: far above the longest recovery.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest wait for a worker's answer on a busy machine.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(5);

/// KV memory of a worker, in MiB: several of them share a machine.
const KV_MEMORY_MIB: u64 = 256;

/// A running fleet, and a connection to its broker.
#[derive(Debug)]
pub struct FaultFleet {
    /// The processes.
    pub processes: LocalFleet,
    asker: Asker,
}

/// Whoever asks the fleet, whatever happens to it meanwhile.
#[derive(Debug, Clone)]
pub struct Asker {
    bus: Bus,
    subjects: Subjects,
}

/// How an answer went.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Told {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// When each event with tokens came.
    pub arrivals: Vec<Instant>,
    /// When the client heard that the request lost its place or waits.
    pub troubles: Vec<Instant>,
    /// Why it failed, if it did.
    pub failure: Option<String>,
    /// Whether a coordinator has taken the request.
    pub is_accepted: bool,
    /// With whom it was lost, if it was.
    pub lost: Option<Lost>,
}

/// With whom an answer was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// With the coordinator that had accepted the request.
    Coordinator,
    /// With whoever had it before a coordinator had accepted it.
    OnItsWay,
}

impl FaultFleet {
    /// Starts a fleet and connects to it.
    ///
    /// # Errors
    /// A fleet that does not start.
    pub async fn start(shards: &Path, settings: &[String]) -> anyhow::Result<Self> {
        let set = ShardSet::open(shards)?;
        let model = set.manifest.model.parse().context("the model's name is not valid")?;
        let mut spec = FleetSpec::new(machine::this_program()?, shards.to_owned());
        spec.workers_per_stage = PER_STAGE;
        spec.settings =
            vec!["worker.threads=1".to_owned(), format!("worker.kv_memory_mib={KV_MEMORY_MIB}")];
        spec.settings.extend(settings.iter().cloned());
        let processes = LocalFleet::start(spec).await.context("the fleet did not start")?;
        let bus = Bus::connect(BusOptions::new(processes.url(), "stagebus-bench")).await?;
        let asker = Asker { bus, subjects: Subjects::new(&model) };
        Ok(Self { processes, asker })
    }

    /// Asks beside the fleet.
    #[must_use]
    pub fn asker(&self) -> Asker {
        self.asker.clone()
    }

    /// Sends a request.
    ///
    /// # Errors
    /// It cannot be sent.
    pub async fn send(&self, prompt: &[u32], max_tokens: usize) -> anyhow::Result<EventStream> {
        self.asker.send(prompt, max_tokens).await
    }

    /// The tokens that answer a prompt.
    ///
    /// # Errors
    /// The request fails.
    pub async fn answer(&self, prompt: &[u32], max_tokens: usize) -> anyhow::Result<Vec<u32>> {
        let mut told = Told::default();
        told.rest(&mut self.send(prompt, max_tokens).await?).await;
        match told.failure {
            Some(failure) => anyhow::bail!("a request failed without a fault: {failure}"),
            None => Ok(told.tokens),
        }
    }

    /// The workers of a stage.
    #[must_use]
    pub fn workers(&self, stage: usize) -> Vec<Member> {
        let members = self.processes.members().into_iter();
        members.filter(|member| member.stage == Some(stage)).collect()
    }

    /// The coordinators.
    #[must_use]
    pub fn coordinators(&self) -> Vec<Member> {
        let members = self.processes.members().into_iter();
        members.filter(|member| member.stage.is_none()).collect()
    }

    /// The worker of a stage that holds the only session, if it tells.
    pub async fn holder(&self, stage: usize) -> Option<Member> {
        for worker in self.workers(stage) {
            if self.load(&worker).await.is_ok_and(|load| load.n_sessions > 0) {
                return Some(worker);
            }
        }
        None
    }

    /// What a worker says of its load.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn load(&self, worker: &Member) -> anyhow::Result<WorkerLoad> {
        match self.control(worker, ControlAction::Stats).await? {
            ControlOutcome::Stats(load) => Ok(load),
            other => anyhow::bail!("{} answers {other:?}", worker.name),
        }
    }

    /// Lets a worker finish its sessions for `within`, and leave.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn drain(&self, worker: &Member, within: Duration) -> anyhow::Result<()> {
        let within_ms = Some(u64::try_from(within.as_millis())?);
        self.control(worker, ControlAction::Drain(Drain { within_ms })).await.map(drop)
    }

    async fn control(
        &self,
        worker: &Member,
        action: ControlAction,
    ) -> anyhow::Result<ControlOutcome> {
        let stage = StageIndex::new(u16::try_from(worker.stage.context("no worker")?)?);
        let id: WorkerId = worker.id.as_deref().context("the worker has no id")?.parse()?;
        let subject = self.asker.subjects.control(stage, &id);
        let control = Control { version: MessageVersion::CURRENT, action };
        let reply: ControlReply =
            self.asker.bus.request(&subject, &control, CONTROL_TIMEOUT).await?;
        Ok(reply.outcome)
    }

    /// Sessions, KV tokens and queued steps that all workers hold together.
    ///
    /// # Errors
    /// A worker does not answer.
    pub async fn held(&self) -> anyhow::Result<u64> {
        let mut held = 0;
        for stage in 0..N_STAGES {
            for worker in self.workers(stage) {
                let load = self.load(&worker).await?;
                held += u64::from(load.n_sessions) + load.kv_tokens + u64::from(load.queue_depth);
            }
        }
        Ok(held)
    }

    /// Memory of all members, in bytes, if the platform tells.
    #[must_use]
    pub fn memory(&self) -> Option<u64> {
        let of = |member: &Member| {
            let path = format!("/proc/{}/statm", member.pid);
            let text = std::fs::read_to_string(path).ok()?;
            text.split_whitespace().nth(1)?.parse::<u64>().ok()
        };
        let pages: Option<u64> = self.processes.members().iter().map(of).sum();
        Some(pages? * 4096)
    }

    /// Ends the fleet in order.
    ///
    /// # Errors
    /// A part that had to be killed, or left with a failure.
    pub async fn end(self) -> anyhow::Result<()> {
        fleet_run::end(self.processes).await
    }
}

impl Asker {
    /// Sends a request.
    ///
    /// # Errors
    /// It cannot be sent.
    pub async fn send(&self, prompt: &[u32], max_tokens: usize) -> anyhow::Result<EventStream> {
        let request = PromptRequest {
            tokens: Some(prompt.to_vec()),
            max_tokens: Some(u32::try_from(max_tokens)?),
            ..PromptRequest::default()
        };
        let encoding = ContentType::MessagePack;
        let payload = codec::encode_public(encoding, &request)?;
        let subject = self.subjects.prompt();
        Ok(self.bus.event_stream(&subject, encoding, payload.into(), IDLE_TIMEOUT).await?)
    }
}

impl Told {
    /// Takes events until they have brought `n` tokens, or the end.
    pub async fn until(&mut self, stream: &mut EventStream, n: usize) {
        while self.tokens.len() < n && self.next(stream).await {}
    }

    /// Takes all events.
    pub async fn rest(&mut self, stream: &mut EventStream) {
        while self.next(stream).await {}
    }

    /// Takes one event; returns whether more may come.
    pub async fn next(&mut self, stream: &mut EventStream) -> bool {
        let event = match stream.next().await {
            Ok(Some(event)) => event,
            Ok(None) => return false,
            Err(error) => {
                self.lost = match error {
                    StreamError::CoordinatorGone { .. } => Some(Lost::Coordinator),
                    StreamError::Idle { .. } if !self.is_accepted => Some(Lost::OnItsWay),
                    _ => None,
                };
                self.failure = Some(error.to_string());
                return false;
            }
        };
        match event {
            Event::Token { tokens, .. } => {
                self.arrivals.push(Instant::now());
                self.tokens.extend(tokens);
            }
            Event::Status { state: RequestState::Recovering | RequestState::Waiting, .. } => {
                self.troubles.push(Instant::now());
            }
            Event::Error { class, message, .. } => {
                self.failure = Some(format!("{message} ({class:?})"));
            }
            Event::Accepted { .. } => self.is_accepted = true,
            Event::Status { .. } | Event::Done { .. } => {}
        }
        true
    }
}
