//! `stagebus drain`: lets workers finish and leave.

use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_bus::{Bus, Delivery, RequestError, Role, Subscription};
use stagebus_schemas::ids::{ModelName, StageIndex, WorkerId};
use stagebus_schemas::messages::control::{
    Control, ControlAction, ControlOutcome, ControlReply, Drain,
};
use stagebus_schemas::messages::fleet::{WorkerAnnouncement, WorkerState};
use stagebus_schemas::subjects::{Subject, Subjects};
use stagebus_schemas::version::MessageVersion;
use tokio::time::interval;
use tokio_util::sync::CancellationToken;

use crate::client::ClientArgs;
use crate::console;
use crate::discover;
use crate::exit::Outcome;

/// Longest wait for a worker's answer.
const ANSWER: Duration = Duration::from_secs(5);

/// How often the workers are asked whether they are still there.
const LOOK: Duration = Duration::from_secs(2);

/// Arguments of `stagebus drain`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus drain w1-3f9a2c41d0b7
  stagebus drain --stage 1 --within 5
  stagebus drain --all --within 30 --json

A worker that drains takes no new sessions. Those that it has may finish for --within seconds; what
still runs then is replayed on other workers, and no token is lost. Start the new worker before you
drain the old one. The command returns when the workers have left. A broker with permissions takes
it from an operator's key (docs/security.md).

Exit code 0: all have left. 1: no such worker, or the command was interrupted.")]
pub struct DrainArgs {
    /// Workers, by the ids that `stagebus status` shows
    #[arg(value_name = "WORKER", required_unless_present_any = ["stage", "all"], conflicts_with_all = ["stage", "all"])]
    workers: Vec<WorkerId>,

    /// All workers of a stage that are there now
    #[arg(long, value_name = "K", conflicts_with = "all")]
    stage: Option<u16>,

    /// All workers that are there now
    #[arg(long)]
    all: bool,

    /// How long running sessions may take, in seconds [default: the workers' own setting]
    #[arg(long, value_name = "SECONDS")]
    within: Option<u64>,

    /// Name of the model; found through the fleet's announcements when absent
    #[arg(long, value_name = "NAME")]
    model: Option<ModelName>,

    #[command(flatten)]
    client: ClientArgs,

    /// Print one JSON object at the end: who has left, and who is still there
    #[arg(long)]
    json: bool,
}

/// What `stagebus drain --json` prints.
#[derive(Debug, Serialize)]
struct DrainReport {
    left: Vec<Place>,
    still_there: Vec<Place>,
}

/// A worker and its stage.
#[derive(Debug, Serialize)]
struct Place {
    worker: WorkerId,
    stage: StageIndex,
}

impl DrainArgs {
    fn means(&self, worker: &WorkerAnnouncement) -> bool {
        self.all
            || self.stage.is_some_and(|stage| worker.stage == StageIndex::new(stage))
            || self.workers.contains(&worker.worker)
    }
}

/// Runs the command until the workers have left, or `stop`.
///
/// # Errors
/// A broker that cannot be reached, or a worker that does not answer.
pub async fn run(args: DrainArgs, quiet: bool, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let bus = args.client.connect_as(Role::Operator, "stagebus-drain").await?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => discover::only_model(&bus).await?,
    };
    let subjects = Subjects::new(&model);
    // Before anybody is asked, so that no goodbye is missed.
    let mut announcements = bus.subscribe(&subjects.fleet_all()).await?;
    let view = discover::listen(&bus, Some(&model), discover::ANSWER, |_| false).await?;
    let workers = view.models().into_iter().flat_map(|model| model.workers);
    let left: Vec<_> = workers
        .filter(|worker| args.means(worker))
        .map(|WorkerAnnouncement { worker, stage, .. }| Place { worker, stage })
        .collect();
    if left.is_empty() || left.len() < args.workers.len() {
        console::note("not all of these workers are there; see `stagebus status`");
        return Ok(Outcome::Bad);
    }
    let within_ms = args.within.map(|seconds| seconds.saturating_mul(1000));
    for Place { worker, stage } in &left {
        drain(&bus, &subjects.control(*stage, worker), within_ms)
            .await
            .with_context(|| format!("worker {worker} was not asked to leave"))?;
    }
    let mut report = DrainReport { left: Vec::new(), still_there: left };
    let waited = wait(&bus, &subjects, &mut announcements, &mut report, quiet);
    let outcome = tokio::select! {
        waited = waited => waited.map(|()| Outcome::Good)?,
        () = stop.cancelled() => Outcome::Bad,
    };
    if args.json {
        console::print_json(&report)?;
    }
    Ok(outcome)
}

/// Waits until all have left.
///
/// # Cancel safety
/// Those who were heard to leave are in the report.
async fn wait(
    bus: &Bus,
    subjects: &Subjects,
    announcements: &mut Subscription,
    report: &mut DrainReport,
    quiet: bool,
) -> anyhow::Result<()> {
    let mut look = interval(LOOK);
    while !report.still_there.is_empty() {
        let gone = tokio::select! {
            heard = announcements.next() => {
                let heard = heard.context("the connection was closed")?;
                goodbye(subjects, &heard).into_iter().collect()
            }
            // One that dies says no goodbye.
            _ = look.tick() => dead(bus, subjects, &report.still_there).await,
        };
        for worker in gone {
            let still_there = &mut report.still_there;
            let Some(i) = still_there.iter().position(|there| there.worker == worker) else {
                continue;
            };
            report.left.push(still_there.remove(i));
            if !quiet {
                console::note(&format!("{worker} has left"));
            }
        }
    }
    Ok(())
}

/// The worker that says goodbye in a message.
fn goodbye(subjects: &Subjects, heard: &Delivery) -> Option<WorkerId> {
    let Ok(Subject::Worker(..)) = subjects.parse(heard.subject()) else { return None };
    let announcement = heard.decode::<WorkerAnnouncement>().ok()?;
    (announcement.state == WorkerState::Leaving).then_some(announcement.worker)
}

/// The workers among some that nobody hears any more.
async fn dead(bus: &Bus, subjects: &Subjects, among: &[Place]) -> Vec<WorkerId> {
    let mut dead = Vec::new();
    for Place { worker, stage } in among {
        let control = Control { version: MessageVersion::CURRENT, action: ControlAction::Stats };
        let subject = subjects.control(*stage, worker);
        let answer = bus.request::<Control, ControlReply>(&subject, &control, ANSWER).await;
        if matches!(answer, Err(RequestError::NoResponders { .. })) {
            dead.push(worker.clone());
        }
    }
    dead
}

/// Asks one worker; one that is gone already has left.
async fn drain(bus: &Bus, subject: &str, within_ms: Option<u64>) -> anyhow::Result<()> {
    let action = ControlAction::Drain(Drain { within_ms });
    let control = Control { version: MessageVersion::CURRENT, action };
    match bus.request::<Control, ControlReply>(subject, &control, ANSWER).await {
        Ok(ControlReply { outcome: ControlOutcome::Draining, .. }) => Ok(()),
        Ok(ControlReply { outcome, .. }) => anyhow::bail!("it answers {outcome:?}"),
        Err(RequestError::NoResponders { .. }) => anyhow::bail!("it is not there any more"),
        Err(error) => Err(error.into()),
    }
}
