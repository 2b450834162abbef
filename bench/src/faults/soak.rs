//! Users who ask for a while, with a fault every so often.
//!
//! The death of a coordinator ends the answers under way: the client hears nothing more, says so, and
//! asks again. Such answers are counted apart, and what had come of them must be right. A request
//! that was on its way to a coordinator or broker that died is lost, since nobody had accepted it;
//! these are counted too.

use std::cell::Cell;
use std::time::Duration;

use futures::future::join_all;
use serde::Serialize;
use tokio::time::{Instant, sleep, sleep_until};

use super::fleet::{FaultFleet, N_STAGES};
use super::rolling::{Asked, user};
use super::{Context, Dice};

/// What became of requests in the long run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Soak {
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Faults by kind.
    pub faults: Vec<(&'static str, usize)>,
    /// The requests.
    pub asked: Asked,
    /// Memory of all workers and coordinators before each fault and at the end, in bytes; nothing
    /// where the platform does not tell.
    pub memory_bytes: Vec<u64>,
}

impl Soak {
    /// Memory after the first tenth of the run, the most after that, and at the end, in bytes.
    #[must_use]
    pub fn memory(&self) -> Option<(u64, u64, u64)> {
        let settled = self.memory_bytes.len().div_ceil(10);
        let later =
            self.memory_bytes.get(settled.min(self.memory_bytes.len().checked_sub(1)?)..)?;
        Some((*later.first()?, later.iter().copied().max()?, *later.last()?))
    }
}

/// Kinds of faults, in turn.
const KINDS: [&str; 4] = ["worker killed", "worker frozen", "broker killed", "coordinator killed"];

/// How long a frozen worker stays so, and the broker away.
const AWAY: Duration = Duration::from_secs(3);

/// Runs the users and the faults.
///
/// # Errors
/// A process cannot be started again.
pub async fn run(context: &Context, fleet: &mut FaultFleet) -> anyhow::Result<Soak> {
    let length = Duration::from_secs(context.args.soak);
    context.note(&format!("{} s under load with faults", length.as_secs()));
    let started = Instant::now();
    let (goes_on, asker) = (Cell::new(true), fleet.asker());
    let lanes = 0..usize::from(context.args.users);
    let users = join_all(lanes.map(|lane| user(context, &asker, lane, &goes_on)));
    let striking = async {
        let struck = strike(context, fleet, started).await;
        goes_on.set(false);
        struck
    };
    let (asked, struck) = tokio::join!(users, striking);
    let Struck { faults, memory_bytes } = struck?;
    Ok(Soak {
        seconds: started.elapsed().as_secs_f64(),
        faults: KINDS.into_iter().zip(faults).collect(),
        asked: asked.into_iter().fold(Asked::default(), Asked::with),
        memory_bytes,
    })
}

#[derive(Debug, Default)]
struct Struck {
    faults: [usize; KINDS.len()],
    memory_bytes: Vec<u64>,
}

async fn strike(
    context: &Context,
    fleet: &mut FaultFleet,
    started: Instant,
) -> anyhow::Result<Struck> {
    let length = Duration::from_secs(context.args.soak);
    let every = Duration::from_secs(context.args.fault_every);
    let mut dice = Dice::new(context.args.seed + 1000);
    let mut struck = Struck::default();
    let mut next = started + every;
    while next < started + length {
        sleep_until(next).await;
        struck.memory_bytes.extend(fleet.memory());
        let kind = struck.faults.iter().sum::<usize>() % KINDS.len();
        struck.faults[kind] += 1;
        one(fleet, kind, &mut dice).await?;
        next += every;
    }
    sleep_until(started + length).await;
    struck.memory_bytes.extend(fleet.memory());
    Ok(struck)
}

async fn one(fleet: &mut FaultFleet, kind: usize, dice: &mut Dice) -> anyhow::Result<()> {
    let stage = dice.below(N_STAGES);
    let workers = fleet.workers(stage);
    let victim = &workers[dice.below(workers.len())].name;
    match kind {
        0 => {
            fleet.processes.kill(victim).await?;
            fleet.processes.add_worker(stage).await?;
        }
        #[cfg(unix)]
        1 => {
            fleet.processes.freeze(victim).await?;
            sleep(AWAY).await;
            fleet.processes.thaw(victim).await?;
        }
        3 => {
            for coordinator in fleet.coordinators() {
                fleet.processes.kill(&coordinator.name).await?;
            }
            fleet.processes.add_coordinator().await?;
        }
        _ => {
            if let Some(broker) = fleet.processes.broker() {
                broker.kill().await?;
                sleep(AWAY / 3).await;
                broker.restart().await?;
            }
        }
    }
    Ok(())
}
