//! A running fleet and a client of it.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use stagebus_bus::{Bus, BusOptions, EventStream, Role};
use stagebus_fleet::{FleetSpec, LocalFleet, Member};
use stagebus_schemas::codec::ContentType;
use stagebus_schemas::ids::{ModelName, StageIndex, WorkerId};
use stagebus_schemas::messages::control::{Control, ControlAction, ControlOutcome, ControlReply};
use stagebus_schemas::messages::fleet::WorkerLoad;
use stagebus_schemas::subjects::Subjects;
use stagebus_schemas::version::MessageVersion;

use crate::answer::Answer;
use crate::turn::{self, Turn};
use crate::{keys, setup, shard_sets, wait};

/// Longest wait for an event: a long prefill on a loaded machine.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);

/// Longest wait for a worker's answer: it answers at once, but on a loaded machine.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(20);

/// A fleet of its own for one test, in the exact profile.
#[derive(Debug)]
pub struct Fleet {
    /// The processes.
    pub processes: LocalFleet,
    /// A client's connection.
    pub bus: Bus,
    /// The model served.
    pub model: ModelName,
    _turn: Turn,
}

impl Fleet {
    /// Starts a fleet of `n_stages` stages with one worker each; `change` sees its description
    /// before. With keys the client takes that of the holder `client`.
    ///
    /// # Errors
    /// What keeps it from starting.
    pub async fn start(n_stages: usize, change: impl FnOnce(&mut FleetSpec)) -> Result<Self> {
        let turn = turn::take().await;
        let mut spec = FleetSpec::new(setup::program()?, shard_sets::get(n_stages).await?);
        spec.settings = vec!["worker.profile=exact".to_owned()];
        change(&mut spec);
        let keys = spec.keys.clone();
        let processes = LocalFleet::start(spec).await.context("the fleet does not start")?;
        let options = match keys {
            None => BusOptions::new(processes.url(), "tests"),
            Some(keys) => keys::options(&keys, "client", Role::Client, processes.url())?,
        };
        let bus = Bus::connect(options).await?;
        let model = processes.model().context("nobody named the model")?.parse()?;
        Ok(Self { processes, bus, model, _turn: turn })
    }

    /// Starts a fleet in the fast profile whose coordinator drafts with prompt look-up and the draft
    /// model.
    ///
    /// # Errors
    /// As [`Fleet::start`].
    pub async fn fast(n_stages: usize, engine: &str) -> Result<Self> {
        let draft = shard_sets::draft().await?;
        let settings = [
            "worker.profile=fast".to_owned(),
            format!("worker.engine={engine}"),
            "coordinator.draft=hybrid".to_owned(),
            format!("coordinator.draft_shards={}", draft.display()),
        ];
        Self::start(n_stages, |spec| spec.settings.extend(settings)).await
    }

    /// The model's subjects.
    #[must_use]
    pub fn subjects(&self) -> Subjects {
        Subjects::new(&self.model)
    }

    /// Sends bytes as a JSON request.
    ///
    /// # Errors
    /// They cannot be sent.
    pub async fn send(&self, payload: Vec<u8>) -> Result<EventStream> {
        let subject = self.subjects().prompt();
        let content = ContentType::Json;
        Ok(self.bus.event_stream(&subject, content, payload.into(), IDLE_TIMEOUT).await?)
    }

    /// Sends a request and reads its answer to the end.
    ///
    /// # Errors
    /// A stream that breaks, or that breaks the contract.
    pub async fn ask(&self, request: &Value) -> Result<Answer> {
        let mut stream = self.send(serde_json::to_vec(request)?).await?;
        Answer::default().rest(&mut stream).await
    }

    /// Sends a request and reads its answer until `n_events` token events have come.
    ///
    /// # Errors
    /// As [`Fleet::ask`], or an answer that ends before.
    pub async fn begin(&self, request: &Value, n_events: usize) -> Result<(Answer, EventStream)> {
        let mut stream = self.send(serde_json::to_vec(request)?).await?;
        let mut answer = Answer::default();
        while answer.n_events < n_events {
            let goes_on = answer.next(&mut stream).await?;
            ensure!(goes_on && answer.end.is_none(), "the answer ended too early: {answer:?}");
        }
        Ok((answer, stream))
    }

    /// Cancels an accepted request.
    ///
    /// # Errors
    /// It was not accepted, or the broker is away.
    pub async fn cancel(&self, answer: &Answer) -> Result<()> {
        let (request, _) = answer.accepted.as_ref().context("the request was not accepted")?;
        let subject = self.subjects().cancel(request);
        Ok(self.bus.publish_bytes(&subject, None, Vec::new().into()).await?)
    }

    /// The workers of a stage.
    #[must_use]
    pub fn workers(&self, stage: usize) -> Vec<Member> {
        let members = self.processes.members().into_iter();
        members.filter(|member| member.stage == Some(stage)).collect()
    }

    /// The worker that a coordinator hosts, as a worker of stage 0; its name is the coordinator's.
    #[must_use]
    pub fn hosted(&self) -> Option<Member> {
        let members = self.processes.members().into_iter();
        let mut hosted = members.filter(|member| member.hosted.is_some());
        hosted.next().map(|coordinator| Member {
            stage: Some(0),
            id: coordinator.hosted.clone(),
            ..coordinator
        })
    }

    /// Asks a worker something.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn control(&self, worker: &Member, action: ControlAction) -> Result<ControlOutcome> {
        let (stage, id) = address(worker)?;
        let subject = self.subjects().control(stage, &id);
        let control = Control { version: MessageVersion::CURRENT, action };
        let reply: ControlReply = self
            .bus
            .request(&subject, &control, CONTROL_TIMEOUT)
            .await
            .with_context(|| format!("{} does not answer", worker.name))?;
        Ok(reply.outcome)
    }

    /// The load of a worker.
    ///
    /// # Errors
    /// It does not tell.
    pub async fn load(&self, worker: &Member) -> Result<WorkerLoad> {
        match self.control(worker, ControlAction::Stats).await? {
            ControlOutcome::Stats(load) => Ok(load),
            other => bail!("{} answers {other:?}", worker.name),
        }
    }

    /// Number of sessions of every worker of a stage, in the order of [`Fleet::workers`].
    ///
    /// # Errors
    /// A worker does not tell.
    pub async fn sessions(&self, stage: usize) -> Result<Vec<u32>> {
        let mut sessions = Vec::new();
        for worker in self.workers(stage) {
            sessions.push(self.load(&worker).await?.n_sessions);
        }
        Ok(sessions)
    }

    /// Waits until no worker holds a session or KV cache.
    ///
    /// # Errors
    /// They do not become free.
    pub async fn idle(&self) -> Result<()> {
        wait::until("all sessions are freed", async || {
            for stage in 0..self.processes.n_stages() {
                let hosted = self.hosted().filter(|_| stage == 0);
                for worker in self.workers(stage).into_iter().chain(hosted) {
                    let load = self.load(&worker).await?;
                    if (load.n_sessions, load.kv_tokens, load.kv_bytes) != (0, 0, 0) {
                        return Ok(None);
                    }
                }
            }
            Ok(Some(()))
        })
        .await
    }

    /// Ends the fleet.
    ///
    /// # Errors
    /// A process had to be killed or left with a failure.
    pub async fn end(self) -> Result<()> {
        let report = self.processes.shutdown().await?;
        ensure!(report == stagebus_fleet::ShutdownReport::default(), "{report:?}");
        Ok(())
    }
}

/// A request with more fields.
#[must_use]
pub fn with(request: &Value, fields: &Value) -> Value {
    let mut request = request.clone();
    for (name, value) in fields.as_object().into_iter().flatten() {
        request[name] = value.clone();
    }
    request
}

/// Stage and id of a worker.
///
/// # Errors
/// The member is no worker, or its id is not valid.
pub fn address(worker: &Member) -> Result<(StageIndex, WorkerId)> {
    let stage = worker.stage.context("the member is no worker")?;
    let id = worker.id.as_deref().context("the worker has no id")?;
    Ok((StageIndex::new(u16::try_from(stage)?), id.parse()?))
}
