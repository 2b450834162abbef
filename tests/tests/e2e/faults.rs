//! Parts that die without a warning.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stagebus_schemas::error::ErrorClass;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::wait;

use crate::prompts::{self, cases, of_case};

/// Kills the worker of `stage` that holds the only session while it generates: the stream goes on
/// with another worker as if nothing had happened. Steps may take for ever, so only the knowledge
/// that the worker is gone can move the session.
/// With `hosted`, the coordinator hosts stage 0.
pub(crate) async fn a_session_survives_its_worker(stage: usize, hosted: bool) -> Result<()> {
    let mut fleet = Fleet::start(2, |spec| {
        spec.host_stage0 = hosted;
        spec.workers_per_stage = 2;
        spec.settings.push("coordinator.step_timeout_ms=3600000".to_owned());
    })
    .await?;
    let mut request = prompts::endless();
    request["max_tokens"] = json!(120);
    let alone = fleet.ask(&request).await?;
    let (answer, mut stream) = fleet.begin(&request, 3).await?;
    let sessions = fleet.sessions(stage).await?;
    let busy = sessions.iter().position(|&n| n == 1).context("no worker holds the session")?;
    let name = fleet.workers(stage)[busy].name.clone();
    fleet.processes.kill(&name).await?;
    let answer = answer.rest(&mut stream).await?;
    ensure!(answer.reason()? == alone.reason()?, "{answer:?}");
    let (found, expected) = (&answer.tokens, &alone.tokens);
    ensure!(found == expected && answer.text == alone.text, "{found:?} instead of {expected:?}");
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_session_survives_its_first_stage() -> Result<()> {
    a_session_survives_its_worker(0, false).await
}

#[tokio::test]
async fn a_session_survives_its_last_stage() -> Result<()> {
    a_session_survives_its_worker(1, false).await
}

#[tokio::test]
async fn a_session_whose_stage_has_no_other_worker_ends_and_says_so() -> Result<()> {
    let mut fleet =
        Fleet::start(2, |spec| spec.settings.push("coordinator.recovery_wait_ms=100".to_owned()))
            .await?;
    let (answer, mut stream) = fleet.begin(&prompts::endless(), 3).await?;
    fleet.processes.kill("worker-1.0").await?;
    let answer = answer.rest(&mut stream).await?;
    let (class, message) = answer.failure()?;
    ensure!(class == ErrorClass::StageUnavailable, "{class:?}: {message}");
    ensure!(message.contains("stage 1"), "{message}");
    fleet.end().await
}

#[tokio::test]
async fn a_stage_without_a_worker_is_named_and_served_again_by_a_new_one() -> Result<()> {
    let mut fleet =
        Fleet::start(2, |spec| spec.settings.push("coordinator.route_wait_ms=100".to_owned()))
            .await?;
    fleet.processes.kill("worker-1.0").await?;
    let answer = fleet.ask(&prompts::short()).await?;
    let (class, message) = answer.failure()?;
    ensure!(class == ErrorClass::StageUnavailable, "{class:?}: {message}");
    ensure!(message.contains("stage 1"), "{message}");
    fleet.processes.add_worker(1).await?;
    let case = &cases()?[0];
    let next = fleet.ask(&of_case(case, 64)).await?;
    ensure!(next.tokens == case.output_ids, "{next:?}");
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_fleet_serves_again_when_its_broker_is_back() -> Result<()> {
    // The word that a session is over may be lost as well: then its idle time ends it.
    let mut fleet =
        Fleet::start(2, |spec| spec.settings.push("worker.session_idle_s=5".to_owned())).await?;
    // The session under way ends with or without an error, depending on what was lost.
    let mut request = prompts::endless();
    request["max_tokens"] = json!(200);
    let (_, stream) = fleet.begin(&request, 3).await?;
    fleet.processes.broker().context("a broker")?.restart().await?;
    drop(stream);
    let case = &cases()?[0];
    // Everybody finds the broker at a moment of their own: until then nobody may listen, or a
    // stage may be missing.
    wait::until("it serves again", async || {
        let answer = fleet.ask(&of_case(case, 64)).await;
        Ok(answer.ok().filter(|answer| answer.tokens == case.output_ids).map(drop))
    })
    .await?;
    ensure!(fleet.processes.members().len() == 3, "somebody gave up");
    fleet.idle().await?;
    fleet.end().await
}
