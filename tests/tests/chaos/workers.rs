//! Workers that die, freeze, leave and are replaced.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use stagebus_fleet::Member;
use stagebus_schemas::messages::control::{ControlAction, ControlOutcome, Drain};
use stagebus_schemas::messages::public::RequestState;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::wait;

use crate::dice::Dice;

/// Tokens of an answer.
pub(crate) const N_TOKENS: usize = 60;

/// A prompt whose answer goes on for [`N_TOKENS`].
pub(crate) fn counting() -> Value {
    json!({ "prompt": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,", "max_tokens": N_TOKENS })
}

/// A fleet with two workers for each of two stages.
pub(crate) async fn pairs() -> Result<Fleet> {
    Fleet::start(2, |spec| spec.workers_per_stage = 2).await
}

/// The worker of a stage that holds the only session.
async fn holder(fleet: &Fleet, stage: usize) -> Result<Member> {
    let sessions = fleet.sessions(stage).await?;
    let busy = sessions.iter().position(|&n| n == 1).context("no worker holds the session")?;
    Ok(fleet.workers(stage).swap_remove(busy))
}

#[tokio::test]
async fn answers_survive_the_death_of_any_worker_at_any_token() -> Result<()> {
    let mut fleet = pairs().await?;
    let mut dice = Dice::new(5);
    let alone = fleet.ask(&counting()).await?;
    for round in 0..6 {
        let (stage, after) = (round % 2, dice.between(1, N_TOKENS / 2));
        let (answer, mut stream) = fleet.begin(&counting(), after).await?;
        let worker = holder(&fleet, stage).await?;
        fleet.processes.kill(&worker.name).await?;
        let answer = answer.rest(&mut stream).await?;
        ensure!(answer.tokens == alone.tokens, "round {round}, token {after}: {answer:?}");
        ensure!(answer.text == alone.text, "round {round}: {:?}", answer.text);
        fleet.processes.add_worker(stage).await?;
    }
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn the_second_stage_keeps_a_long_prompt_when_the_first_one_dies() -> Result<()> {
    let without_drafts = "coordinator.max_draft_tokens=0".to_owned();
    let mut fleet = Fleet::start(2, |spec| spec.settings.push(without_drafts)).await?;
    let prompt = "One, two, three, four, five, six. ".repeat(30);
    let request = json!({ "prompt": prompt, "max_tokens": N_TOKENS });
    let alone = fleet.ask(&request).await?;
    let (_, n_prompt) = alone.accepted.clone().context("a prompt")?;
    let (answer, mut stream) = fleet.begin(&request, 3).await?;
    let second = fleet.workers(1).swap_remove(0);
    let before = fleet.load(&second).await?.rows_completed;
    fleet.processes.kill("worker-0.0").await?;
    let first = fleet.processes.add_worker(0).await?;
    let answer = answer.rest(&mut stream).await?;
    ensure!(answer.tokens == alone.tokens, "{answer:?}");
    let replayed = fleet.load(&first).await?.rows_completed;
    let kept = fleet.load(&second).await?.rows_completed - before;
    let (n_prompt, n_tokens) = (u64::from(n_prompt), N_TOKENS as u64);
    ensure!(replayed >= n_prompt, "{replayed} rows of {n_prompt}");
    ensure!(n_prompt > 3 * n_tokens && kept <= n_tokens, "{kept} rows of {n_prompt}");
    fleet.idle().await?;
    fleet.end().await
}

#[cfg(unix)]
#[tokio::test]
async fn answers_survive_workers_that_freeze_and_come_back() -> Result<()> {
    let fleet = pairs().await?;
    let mut dice = Dice::new(6);
    let alone = fleet.ask(&counting()).await?;
    for stage in [0, 1] {
        let after = dice.between(1, N_TOKENS / 2);
        let (answer, mut stream) = fleet.begin(&counting(), after).await?;
        let worker = holder(&fleet, stage).await?;
        fleet.processes.freeze(&worker.name).await?;
        let answer = answer.rest(&mut stream).await;
        // What it still has to do is of an epoch that is over.
        fleet.processes.thaw(&worker.name).await?;
        let answer = answer?;
        ensure!(answer.tokens == alone.tokens, "stage {stage}, token {after}: {answer:?}");
        ensure!(fleet.ask(&counting()).await?.tokens == alone.tokens, "after stage {stage}");
    }
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_session_waits_for_a_worker_and_says_so() -> Result<()> {
    let mut fleet = Fleet::start(2, |_| {}).await?;
    let alone = fleet.ask(&counting()).await?;
    let (mut answer, mut stream) = fleet.begin(&counting(), 5).await?;
    fleet.processes.kill("worker-1.0").await?;
    let waits = |states: &[(RequestState, _)]| {
        states.iter().any(|(state, _)| *state == RequestState::Waiting)
    };
    while !waits(&answer.states) {
        ensure!(answer.next(&mut stream).await? && answer.end.is_none(), "{answer:?}");
    }
    fleet.processes.add_worker(1).await?;
    let answer = answer.rest(&mut stream).await?;
    ensure!(answer.tokens == alone.tokens, "{answer:?}");
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn every_worker_is_replaced_while_users_ask() -> Result<()> {
    let mut fleet = Fleet::start(2, |_| {}).await?;
    let alone = fleet.ask(&counting()).await?;
    let (first, mut first_stream) = fleet.begin(&counting(), 3).await?;
    let (second, mut second_stream) = fleet.begin(&counting(), 3).await?;
    for stage in [0, 1] {
        let old = fleet.workers(stage).swap_remove(0);
        fleet.processes.add_worker(stage).await?;
        // The sessions get no time to finish: they move.
        let drain = ControlAction::Drain(Drain { within_ms: Some(0) });
        let outcome = fleet.control(&old, drain).await?;
        ensure!(outcome == ControlOutcome::Draining, "{outcome:?}");
        let ended = fleet.processes.ended().await?;
        ensure!(ended.name == old.name && ended.status.success(), "{ended:?}");
    }
    let (first, second) =
        (first.rest(&mut first_stream).await?, second.rest(&mut second_stream).await?);
    ensure!(first.tokens == alone.tokens && second.tokens == alone.tokens, "{first:?} {second:?}");
    ensure!(fleet.ask(&counting()).await?.tokens == alone.tokens, "with new workers only");
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_worker_drains_by_command_and_leaves() -> Result<()> {
    let mut fleet = pairs().await?;
    let worker = fleet.workers(1).swap_remove(0);
    let id = worker.id.clone().context("the worker has no id")?;
    let url = fleet.processes.url().to_owned();
    let drained = stagebus_tests::program::Call::new(["drain", "--within", "30", "--broker"])
        .arg(url)
        .arg(id)
        .run()
        .await?;
    drained.success()?;
    let ended = fleet.processes.ended().await?;
    ensure!(ended.name == worker.name && ended.status.success(), "{ended:?}");
    wait::until(
        "the other worker serves",
        async || Ok((fleet.workers(1).len() == 1).then_some(())),
    )
    .await?;
    fleet.ask(&counting()).await?.reason()?;
    fleet.end().await
}
