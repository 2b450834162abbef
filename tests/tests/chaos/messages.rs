//! Steps that are lost, doubled, swapped or late on the way to a worker, and a way that breaks.

use anyhow::{Result, ensure};
use stagebus_tests::fleet::Fleet;
use stagebus_tests::wait;

use crate::link::{Link, Mischief};
use crate::workers::counting;

/// A fleet whose only worker of the second stage is reached over a link.
async fn behind_a_link() -> Result<(Fleet, Link)> {
    let mut fleet = Fleet::start(2, |_| {}).await?;
    let link = Link::start(fleet.processes.url()).await?;
    fleet.processes.add_worker_at(1, &link.url()).await?;
    fleet.processes.retire("worker-1.0").await?;
    Ok((fleet, link))
}

#[tokio::test]
async fn steps_that_are_lost_doubled_swapped_or_late_change_no_token() -> Result<()> {
    let (fleet, link) = behind_a_link().await?;
    let alone = fleet.ask(&counting()).await?;
    for mischief in [Mischief::Double, Mischief::Late(7), Mischief::Drop(23), Mischief::Swap(29)] {
        let before = link.n_struck();
        link.set(mischief);
        let answer = fleet.ask(&counting()).await?;
        link.set(Mischief::None);
        ensure!(answer.tokens == alone.tokens, "{mischief:?}: {answer:?}");
        ensure!(link.n_struck() > before, "{mischief:?} struck nothing");
    }
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn an_answer_waits_for_a_worker_whose_link_is_cut() -> Result<()> {
    let (fleet, link) = behind_a_link().await?;
    let alone = fleet.ask(&counting()).await?;
    let (mut answer, mut stream) = fleet.begin(&counting(), 5).await?;
    link.set(Mischief::Cut);
    while answer.states.is_empty() {
        ensure!(answer.next(&mut stream).await? && answer.end.is_none(), "{answer:?}");
    }
    link.set(Mischief::None);
    let answer = answer.rest(&mut stream).await?;
    ensure!(answer.tokens == alone.tokens, "{answer:?}");
    wait::until("the fleet is idle", async || Ok(fleet.idle().await.ok())).await?;
    fleet.end().await
}
