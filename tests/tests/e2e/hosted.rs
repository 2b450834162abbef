//! A coordinator that runs the first stage in its own process.

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use serde_json::json;
use stagebus_bus::{RequestError, Subscription};
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::control::{
    Control, ControlAction, ControlOutcome, ControlReply, Drain,
};
use stagebus_schemas::subjects::{Subject, Subjects};
use stagebus_schemas::version::MessageVersion;
use stagebus_tests::fleet::{Fleet, address};
use stagebus_tests::program::Call;
use stagebus_tests::{shard_sets, wait};

use crate::faults::a_session_survives_its_worker;
use crate::prompts::{cases, of_case};

/// What crossed the broker so far, by a tap on it: messages to the first stage, to later stages, and
/// head rows. A message of our own is the last that is read.
async fn crossed(fleet: &Fleet, tap: &mut Subscription, subjects: &Subjects) -> Result<[usize; 3]> {
    let last = subjects.cancel(&RequestId::new("the-last")?);
    fleet.bus.publish_bytes(&last, None, Bytes::new()).await?;
    let mut n = [0; 3];
    loop {
        let message = tokio::time::timeout(wait::PATIENCE, tap.next()).await?;
        let message = message.context("the connection is gone")?;
        match subjects.parse(message.subject()) {
            _ if message.subject() == last => return Ok(n),
            Ok(Subject::Step(stage, _) | Subject::Control(stage, _)) => {
                n[usize::from(stage.index() > 0)] += 1;
            }
            Ok(Subject::Head(_)) => n[2] += 1,
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_hosted_stage_gives_the_same_tokens_and_its_steps_stay_in_the_process() -> Result<()> {
    let draft = shard_sets::draft().await?;
    for n_stages in [1, 2] {
        let fleet = Fleet::start(n_stages, |spec| {
            spec.host_stage0 = true;
            spec.settings.push("coordinator.draft=hybrid".to_owned());
            spec.settings.push(format!("coordinator.draft_shards={}", draft.display()));
        })
        .await?;
        let subjects = fleet.subjects();
        let hosted = fleet.hosted().context("no coordinator hosts a worker")?;
        ensure!(hosted.id.as_deref().is_some_and(|id| id.starts_with("hosted-")), "{hosted:?}");
        let mut tap = fleet.bus.subscribe(&subjects.all()).await?;
        let mut accepted = 0;
        for case in &cases()?[..3] {
            for drafts in [json!(0), json!(4)] {
                let mut request = of_case(case, case.output_ids.len());
                (request["draft_tokens"], request["draft_windows"]) = (drafts, json!(2));
                let answer = fleet.ask(&request).await?;
                let (found, expected) = (&answer.tokens, &case.output_ids);
                ensure!(found == expected, "{n_stages} stages: {found:?} not {expected:?}");
                accepted += answer.usage()?.accepted_tokens;
            }
        }
        ensure!(accepted > 0, "no draft was accepted");
        let [first, later, heads] = crossed(&fleet, &mut tap, &subjects).await?;
        ensure!(first == 0, "{first} messages to the first stage crossed the broker");
        match n_stages {
            1 => ensure!(heads == 0, "{heads} answers of the only stage crossed the broker"),
            _ => ensure!(later > 64 && heads > 64, "the tap heard {later} and {heads} only"),
        }
        let load = fleet.load(&hosted).await?;
        ensure!(load.steps_completed > 100, "{load:?}");
        fleet.idle().await?;
        fleet.end().await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_session_on_a_hosted_stage_survives_the_worker_of_the_next_one() -> Result<()> {
    a_session_survives_its_worker(1, true).await
}

#[tokio::test]
async fn another_worker_takes_over_when_the_hosted_one_is_drained() -> Result<()> {
    let mut fleet = Fleet::start(2, |spec| spec.host_stage0 = true).await?;
    let hosted = fleet.hosted().context("no coordinator hosts a worker")?;
    let other = fleet.processes.add_worker(0).await?;
    let case = &cases()?[7];
    let request = of_case(case, 64);
    let (answer, mut stream) = fleet.begin(&request, 3).await?;
    ensure!(fleet.load(&hosted).await?.n_sessions == 1, "the session is elsewhere");
    ensure!(fleet.load(&other).await?.n_sessions == 0, "the session is elsewhere");
    let drain = ControlAction::Drain(Drain { within_ms: Some(0) });
    let outcome = fleet.control(&hosted, drain).await?;
    ensure!(outcome == ControlOutcome::Draining, "{outcome:?}");
    let answer = answer.rest(&mut stream).await?;
    ensure!(answer.tokens == case.output_ids, "{answer:?}");
    wait::until("the hosted worker is gone", async || {
        let (stage, id) = address(&hosted)?;
        let subject = fleet.subjects().control(stage, &id);
        let stats = Control { version: MessageVersion::CURRENT, action: ControlAction::Stats };
        let asked = fleet.bus.request::<_, ControlReply>(&subject, &stats, wait::PATIENCE).await;
        Ok(matches!(asked, Err(RequestError::NoResponders { .. })).then_some(()))
    })
    .await?;
    ensure!(fleet.ask(&request).await?.tokens == case.output_ids);
    ensure!(fleet.load(&other).await?.steps_completed > 0, "who has served it?");
    fleet.end().await
}

#[tokio::test]
async fn a_hosted_stage_that_cannot_start_is_told() -> Result<()> {
    let set = shard_sets::get(2).await?;
    let call = Call::new(["coordinator", "--host-stage0", "--set", "worker.device=NOSUCH"]);
    let told = call.arg("--shards").arg(&set).run().await?;
    told.failure(&["stage 0 cannot be loaded on NOSUCH"])?;
    Ok(())
}
