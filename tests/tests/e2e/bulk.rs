//! Long prompts, whose hidden states travel between workers in parts.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stagebus_bench::link::{Conditions, Link, LinkPlan};
use stagebus_bus::Subscription;
use stagebus_fleet::{BrokerChoice, BrokerOptions, LocalBroker, Member};
use stagebus_schemas::ids::WorkerId;
use stagebus_schemas::messages::public::RequestState;
use stagebus_schemas::subjects::Subject;
use stagebus_tests::answer::Answer;
use stagebus_tests::fleet::Fleet;

/// Longest wait for a part on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A prompt of some hundred tokens: each of its chunks is large.
fn prompt(first: u32) -> Value {
    let numbers: Vec<String> = (first..first + 130).map(|number| number.to_string()).collect();
    json!({ "prompt": numbers.join(", "), "max_tokens": 12 })
}

/// The tokens of a single stage, which sends nothing to another one.
async fn expected(prompts: &[Value]) -> Result<Vec<Vec<u32>>> {
    let fleet = Fleet::start(1, |_| {}).await?;
    let mut tokens = Vec::new();
    for prompt in prompts {
        tokens.push(fleet.ask(prompt).await?.tokens);
    }
    fleet.end().await?;
    Ok(tokens)
}

/// The worker that the next part is for.
async fn receiver(fleet: &Fleet, parts: &mut Subscription) -> Result<WorkerId> {
    let part = tokio::time::timeout(PATIENCE, parts.next()).await?;
    let part = part.context("the connection is gone")?;
    match fleet.subjects().parse(part.subject())? {
        Subject::Bulk(_, worker) => Ok(worker),
        other => bail!("{other:?} is not for parts"),
    }
}

#[tokio::test]
async fn long_prompts_survive_a_slow_link_and_the_worker_at_its_end() -> Result<()> {
    let prompts = [prompt(100), prompt(300)];
    let expected = expected(&prompts).await?;
    let mut broker = LocalBroker::start(BrokerOptions::default()).await?;
    // A chunk takes most of a second.
    let slow = LinkPlan::both(Conditions::queued(Duration::from_millis(5), 400_000));
    let link = Link::to_broker(&broker.url(), slow)?;
    let mut fleet = Fleet::start(2, |spec| {
        spec.broker = BrokerChoice::Running(broker.url());
        spec.routes.workers = vec![None, Some(link.url())];
        spec.workers_per_stage = 2;
        // Only what the workers say can move a session.
        spec.settings.push("coordinator.step_timeout_ms=3600000".to_owned());
    })
    .await?;
    let answer = fleet.ask(&prompts[0]).await?;
    ensure!(answer.tokens == expected[0], "{:?}, not {:?}", answer.tokens, expected[0]);
    let lost = [RequestState::Recovering, RequestState::Waiting];
    let is_lost = answer.states.iter().any(|(state, _)| lost.contains(state));
    ensure!(!is_lost, "what is on its way counts as lost: {answer:?}");

    let mut parts = fleet.bus.subscribe(&fleet.subjects().bulk_all()).await?;
    let mut stream = fleet.send(serde_json::to_vec(&prompts[1])?).await?;
    let worker = receiver(&fleet, &mut parts).await?;
    let of_stage = fleet.workers(1);
    let is_it = |member: &&Member| member.id.as_deref() == Some(worker.as_str());
    let busy = of_stage.iter().find(is_it).context("parts go to nobody")?;
    fleet.processes.kill(&busy.name).await?;
    let answer = Answer::default().rest(&mut stream).await?;
    ensure!(answer.tokens == expected[1], "{:?}, not {:?}", answer.tokens, expected[1]);
    fleet.idle().await?;
    fleet.end().await?;
    ensure!(broker.stop().await?, "the broker had to be killed");
    Ok(())
}

#[tokio::test]
async fn a_long_prompt_passes_a_fleet_with_keys() -> Result<()> {
    let prompt = prompt(500);
    let expected = expected(std::slice::from_ref(&prompt)).await?;
    let (_parent, keys) = crate::secured::made_keys().await?;
    let fleet = Fleet::start(3, |spec| spec.keys = Some(keys.clone())).await?;
    let answer = fleet.ask(&prompt).await?;
    ensure!(answer.tokens == expected[0], "{:?}, not {:?}", answer.tokens, expected[0]);
    fleet.end().await
}
