//! Every worker is replaced while users ask.

use std::cell::Cell;
use std::time::Duration;

use futures::future::join_all;
use serde::Serialize;
use stagebus_fleet::Ended;
use tokio::time::Instant;

use super::Context;
use super::fleet::{Asker, FaultFleet, Lost, N_STAGES, Told};

/// How long a worker may finish its sessions; the rest moves.
const DRAIN: Duration = Duration::from_secs(2);

/// What became of requests.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Asked {
    /// Answers.
    pub n: usize,
    /// Requests that failed.
    pub n_failed: usize,
    /// Answers with other tokens.
    pub n_wrong: usize,
    /// Answers that ended with their coordinator; those with other tokens count as wrong as well.
    pub n_orphans: usize,
    /// Requests that nobody accepted: the coordinator or the broker that had them died.
    pub n_unheard: usize,
    /// Some of the failures.
    pub failures: Vec<String>,
}

/// What became of requests while workers were replaced.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rolling {
    /// Workers replaced.
    pub n_replaced: usize,
    /// How long that took, in seconds.
    pub seconds: f64,
    /// The requests.
    pub asked: Asked,
}

/// Failures that are kept.
const KEPT_FAILURES: usize = 8;

impl Asked {
    /// Puts two together.
    #[must_use]
    pub fn with(mut self, other: Self) -> Self {
        self.n += other.n;
        self.n_failed += other.n_failed;
        self.n_wrong += other.n_wrong;
        self.n_orphans += other.n_orphans;
        self.n_unheard += other.n_unheard;
        self.failures.extend(other.failures);
        self.failures.truncate(KEPT_FAILURES);
        self
    }
}

/// A user who asks one question after the other while `goes_on` says so.
pub(super) async fn user(
    context: &Context,
    asker: &Asker,
    lane: usize,
    goes_on: &Cell<bool>,
) -> Asked {
    let mut asked = Asked::default();
    for turn in lane.. {
        if !goes_on.get() {
            break;
        }
        let idx = turn % context.prompts.len();
        let mut told = Told::default();
        match asker.send(&context.prompts[idx].tokens, context.args.tokens.into()).await {
            Ok(mut stream) => told.rest(&mut stream).await,
            Err(error) => told.failure = Some(error.to_string()),
        }
        asked.n += 1;
        match (told.failure, told.lost) {
            (_, Some(Lost::Coordinator)) => {
                asked.n_orphans += 1;
                asked.n_wrong += usize::from(!context.answers[idx].starts_with(&told.tokens));
            }
            (_, Some(Lost::OnItsWay)) => asked.n_unheard += 1,
            (Some(failure), None) => {
                asked.n_failed += 1;
                asked.failures.push(failure);
            }
            (None, None) => asked.n_wrong += usize::from(told.tokens != context.answers[idx]),
        }
    }
    asked.failures.truncate(KEPT_FAILURES);
    asked
}

/// Replaces all workers, one after the other.
///
/// # Errors
/// A worker does not start, or does not leave.
pub async fn run(context: &Context, fleet: &mut FaultFleet) -> anyhow::Result<Rolling> {
    context.note("every worker is replaced");
    let started = Instant::now();
    let (goes_on, asker) = (Cell::new(true), fleet.asker());
    let users = join_all(
        (0..usize::from(context.args.users)).map(|lane| user(context, &asker, lane, &goes_on)),
    );
    let replacing = async {
        let replaced = replace_all(fleet).await;
        goes_on.set(false);
        replaced
    };
    let (asked, n_replaced) = tokio::join!(users, replacing);
    Ok(Rolling {
        n_replaced: n_replaced?,
        seconds: started.elapsed().as_secs_f64(),
        asked: asked.into_iter().fold(Asked::default(), Asked::with),
    })
}

async fn replace_all(fleet: &mut FaultFleet) -> anyhow::Result<usize> {
    let mut n_replaced = 0;
    for stage in 0..N_STAGES {
        for old in fleet.workers(stage) {
            fleet.processes.add_worker(stage).await?;
            fleet.drain(&old, DRAIN).await?;
            let Ended { name, status, .. } = fleet.processes.ended().await?;
            anyhow::ensure!(name == old.name && status.success(), "{name} ended: {status}");
            n_replaced += 1;
        }
    }
    Ok(n_replaced)
}
