//! Users who ask for a while, with a fault every so often.

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
    /// Memory of all workers and coordinators after the first tenth and at the end, in bytes.
    pub memory_bytes: Option<(u64, u64)>,
}

/// Kinds of faults, in turn.
const KINDS: [&str; 3] = ["worker killed", "worker frozen", "broker killed"];

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
    let (faults, memory_bytes) = struck?;
    Ok(Soak {
        seconds: started.elapsed().as_secs_f64(),
        faults: KINDS.into_iter().zip(faults).collect(),
        asked: asked.into_iter().fold(Asked::default(), Asked::with),
        memory_bytes,
    })
}

type Struck = ([usize; KINDS.len()], Option<(u64, u64)>);

async fn strike(
    context: &Context,
    fleet: &mut FaultFleet,
    started: Instant,
) -> anyhow::Result<Struck> {
    let length = Duration::from_secs(context.args.soak);
    let every = Duration::from_secs(context.args.fault_every);
    let mut dice = Dice::new(context.args.seed + 1000);
    let mut faults = [0; KINDS.len()];
    let mut memory = None;
    let mut next = started + every;
    while next < started + length {
        sleep_until(next).await;
        let kind = faults.iter().sum::<usize>() % KINDS.len();
        faults[kind] += 1;
        one(fleet, kind, &mut dice).await?;
        if memory.is_none() && started.elapsed() * 10 >= length {
            memory = fleet.memory();
        }
        next += every;
    }
    sleep_until(started + length).await;
    Ok((faults, memory.zip(fleet.memory())))
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
