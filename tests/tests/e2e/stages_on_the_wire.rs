//! Messages between the parts that do not fit: a worker refuses them with a typed error.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::{CoordinatorId, Epoch, SessionId, StepNumber, WorkerId};
use stagebus_schemas::messages::control::{
    Close, ControlAction, ControlOutcome, HeadMode, Open, Priority,
};
use stagebus_schemas::messages::forward::{Forward, Phase, Step};
use stagebus_schemas::messages::head::Head;
use stagebus_schemas::messages::sampling::Sampling;
use stagebus_schemas::tensor::{Dtype, Tensor};
use stagebus_schemas::version::MessageVersion;
use stagebus_tests::fleet::{Fleet, address};
use stagebus_tests::{shard_sets, wait};

/// A coordinator of our own beside the fleet's, with one session in mind.
struct Driver {
    fleet: Fleet,
    id: CoordinatorId,
    route: Vec<WorkerId>,
    session: SessionId,
    fingerprint: String,
    /// Elements of a row of the model's hidden states.
    hidden_dim: u32,
}

impl Driver {
    async fn start() -> Result<Self> {
        let fleet = Fleet::start(2, |_| {}).await?;
        let workers = [fleet.workers(0), fleet.workers(1)].concat();
        let route = workers.iter().map(|worker| Ok(address(worker)?.1)).collect::<Result<_>>()?;
        let manifest = shard_sets::get(2).await?.join("manifest.json");
        let manifest: Value = serde_json::from_slice(&std::fs::read(manifest)?)?;
        let hidden_dim = manifest["dims"]["hidden_dim"].as_u64().context("a width")?;
        let fingerprint = manifest["fingerprint"].as_str().context("a fingerprint")?.to_owned();
        let (id, session) = (CoordinatorId::random(), SessionId::random());
        let hidden_dim = u32::try_from(hidden_dim)?;
        Ok(Self { fleet, id, route, session, fingerprint, hidden_dim })
    }

    fn open(&self) -> Open {
        Open {
            session: self.session,
            epoch: Epoch::FIRST,
            coordinator: self.id.clone(),
            route: self.route.clone(),
            fingerprint: self.fingerprint.clone(),
            prompt: vec![1, 2],
            prompt_len: 2,
            max_len: 10,
            sampling: Sampling::default(),
            head: HeadMode::Token,
            priority: Priority::Interactive,
        }
    }

    async fn control(&self, stage: usize, action: ControlAction) -> Result<ControlOutcome> {
        self.fleet.control(&self.fleet.workers(stage)[0], action).await
    }

    /// The refusal of an `open` by a worker.
    async fn refused_open(&self, stage: usize, open: Open) -> Result<ErrorReply> {
        match self.control(stage, ControlAction::Open(open)).await? {
            ControlOutcome::Failed(error) => Ok(error),
            other => bail!("expected a refusal: {other:?}"),
        }
    }

    /// Sends a step to the worker of `stage` and waits for the fault that it reports.
    async fn refused_step(&self, stage: usize, forward: &Forward) -> Result<ErrorReply> {
        let subjects = self.fleet.subjects();
        let mut head = self.fleet.bus.subscribe(&subjects.head(&self.id)).await?;
        let (index, worker) = address(&self.fleet.workers(stage)[0])?;
        self.fleet.bus.publish(&subjects.step(index, &worker), forward).await?;
        let answer = tokio::time::timeout(wait::PATIENCE, head.next());
        let answer: Head = answer.await?.context("the connection is closed")?.decode()?;
        ensure!(answer.steps.is_empty() && answer.stage == index, "{answer:?}");
        ensure!(answer.faults.len() == 1, "{answer:?}");
        let fault = &answer.faults[0];
        ensure!(fault.session == self.session, "{fault:?}");
        Ok(fault.error.clone())
    }

    fn forward(&self, hidden_dim: Option<u32>) -> Forward {
        let step = Step {
            session: self.session,
            epoch: Epoch::FIRST,
            step: StepNumber::FIRST,
            start_pos: 0,
            phase: Phase::Prefill,
            tokens: vec![1, 2],
            wanted: vec![1],
            held_from: None,
            trace: Vec::new(),
        };
        let hidden = hidden_dim.map(|hidden_dim| Tensor {
            dtype: Dtype::F32,
            n_rows: 2,
            hidden_dim,
            data: vec![0; 2 * 4 * hidden_dim as usize].into(),
        });
        Forward { version: MessageVersion::CURRENT, from: None, steps: vec![step], hidden }
    }
}

#[tokio::test]
async fn an_open_that_does_not_fit_the_worker_is_refused() -> Result<()> {
    let driver = Driver::start().await?;
    let mut swapped = driver.open();
    swapped.route.reverse();
    let error = driver.refused_open(0, swapped).await?;
    ensure!(error.class == ErrorClass::InvalidRequest, "{error:?}");

    let short = Open { route: driver.route[..1].to_vec(), ..driver.open() };
    let error = driver.refused_open(0, short).await?;
    ensure!(error.class == ErrorClass::InvalidRequest, "{error:?}");

    let other = Open { fingerprint: "0".repeat(64), ..driver.open() };
    let error = driver.refused_open(1, other).await?;
    ensure!(error.class == ErrorClass::VersionMismatch, "{error:?}");
    driver.fleet.idle().await?;
    driver.fleet.end().await
}

#[tokio::test]
async fn a_step_on_the_wrong_stage_is_refused() -> Result<()> {
    let driver = Driver::start().await?;
    for stage in 0..2 {
        let outcome = driver.control(stage, ControlAction::Open(driver.open())).await?;
        ensure!(outcome == ControlOutcome::Opened { cached_len: 0 }, "{outcome:?}");
    }
    // The first stage embeds tokens; the later ones take the hidden states of the one before.
    let hidden = driver.forward(Some(driver.hidden_dim));
    let error = driver.refused_step(0, &hidden).await?;
    ensure!(error.class == ErrorClass::InvalidRequest, "{error:?}");
    let error = driver.refused_step(1, &driver.forward(None)).await?;
    ensure!(error.class == ErrorClass::InvalidRequest, "{error:?}");
    let from = Some(driver.route[0].clone());
    for hidden_dim in [None, Some(driver.hidden_dim - 1)] {
        let forward = Forward { from: from.clone(), ..driver.forward(hidden_dim) };
        let error = driver.refused_step(1, &forward).await?;
        ensure!(error.class == ErrorClass::InvalidRequest, "{hidden_dim:?}: {error:?}");
    }
    // Nothing of it hurts the others.
    let answer = driver.fleet.ask(&crate::prompts::short()).await?;
    answer.reason()?;
    for stage in 0..2 {
        let close = Close { session: driver.session, epoch: Epoch::FIRST };
        driver.control(stage, ControlAction::Close(close)).await?;
    }
    driver.fleet.idle().await?;
    driver.fleet.end().await
}
