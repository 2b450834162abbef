//! Steps and answers that are lost, doubled, swapped or late on any way, and a way that breaks.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use stagebus_tests::fleet::Fleet;
use stagebus_tests::wait;

use crate::link::{Link, Mischief};
use crate::workers::{N_TOKENS, counting};

/// Who is reached over the link.
#[derive(Debug, Clone, Copy)]
enum Member {
    Worker(usize),
    Coordinator,
}

/// A fleet with one member over a link.
async fn behind_a_link(member: Member) -> Result<(Fleet, Link)> {
    let mut fleet = Fleet::start(2, |_| {}).await?;
    let link = Link::start(fleet.processes.url()).await?;
    let direct = match member {
        Member::Worker(stage) => {
            fleet.processes.add_worker_at(stage, &link.url()).await?;
            format!("worker-{stage}.0")
        }
        Member::Coordinator => {
            fleet.processes.add_coordinator_at(&link.url()).await?;
            "coordinator.0".to_owned()
        }
    };
    fleet.processes.retire(&direct).await?;
    Ok((fleet, link))
}

/// Requests of other users, whose steps keep the workers busy.
fn others() -> [Value; 2] {
    ["a, b, c, d, e, f, g, h,", "Monday, Tuesday, Wednesday,"]
        .map(|prompt| json!({ "prompt": prompt, "max_tokens": N_TOKENS }))
}

/// Strikes one way in every manner while several answers are generated.
async fn strike(member: Member) -> Result<()> {
    let (fleet, link) = behind_a_link(member).await?;
    let [first, second, third] = [counting(), others()[0].clone(), others()[1].clone()];
    let mut alone = Vec::new();
    for request in [&first, &second, &third] {
        alone.push(fleet.ask(request).await?.tokens);
    }
    for mischief in [Mischief::Double, Mischief::Late(7), Mischief::Drop(23), Mischief::Swap(29)] {
        let before = link.n_struck();
        link.set(mischief);
        let answers = tokio::try_join!(fleet.ask(&first), fleet.ask(&second), fleet.ask(&third));
        link.set(Mischief::None);
        let (first, second, third) = answers?;
        for (answer, alone) in [first, second, third].iter().zip(&alone) {
            ensure!(answer.tokens == *alone, "{member:?}, {mischief:?}: {answer:?}");
        }
        ensure!(link.n_struck() > before, "{member:?}: {mischief:?} struck nothing");
    }
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn mischief_on_the_way_to_the_first_stage_changes_no_token() -> Result<()> {
    strike(Member::Worker(0)).await
}

#[tokio::test]
async fn mischief_between_the_stages_changes_no_token() -> Result<()> {
    strike(Member::Worker(1)).await
}

#[tokio::test]
async fn mischief_on_the_way_to_the_coordinator_changes_no_token() -> Result<()> {
    strike(Member::Coordinator).await
}

#[tokio::test]
async fn an_answer_waits_for_a_worker_whose_link_is_cut() -> Result<()> {
    let (fleet, link) = behind_a_link(Member::Worker(1)).await?;
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
