//! Fleets whose processes reach the broker over slow, lossy and broken links.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_bench::link::{Conditions, Link, LinkPlan, Passage};
use stagebus_fleet::{BrokerChoice, BrokerOptions, LocalBroker, Routes};
use stagebus_tests::fleet::Fleet;
use stagebus_tests::shard_sets;

use crate::crowds::together;
use crate::prompts::cases;

/// A prompt whose answer goes on for a while.
fn counting() -> Value {
    json!({ "prompt": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,", "max_tokens": 40 })
}

/// A broker that belongs to the test, and what the tokens are without links.
async fn direct() -> Result<(LocalBroker, Vec<u32>)> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let answer = fleet.ask(&counting()).await?;
    fleet.end().await?;
    Ok((LocalBroker::start(BrokerOptions::default()).await?, answer.tokens))
}

#[tokio::test]
async fn links_of_any_kind_change_no_token() -> Result<()> {
    let (mut broker, expected) = direct().await?;
    let conditions = Conditions {
        delay: Duration::from_millis(3),
        jitter: Duration::from_millis(4),
        bytes_per_s: Some(2_500_000),
        loss: 0.02,
        retransmit: Duration::from_millis(20),
        ..Conditions::CLEAR
    };
    let plan = LinkPlan::both(conditions);
    let (relay, own) =
        (Link::to_broker(&broker.url(), plan)?, Link::to_broker(&broker.url(), plan)?);
    let fleet = Fleet::start(2, |spec| {
        spec.broker = BrokerChoice::Running(broker.url());
        spec.routes = Routes {
            workers: vec![Some(own.url()), Some(relay.url())],
            coordinators: Some(relay.url()),
        };
    })
    .await?;
    let answer = fleet.ask(&counting()).await?;
    ensure!(answer.tokens == expected, "{answer:?}");
    for (name, link) in [("relay", &relay), ("own", &own)] {
        let traffic = link.traffic();
        ensure!(
            traffic.up.n_bytes > 10_000 && traffic.down.n_bytes > 10_000,
            "{name}: {traffic:?}"
        );
    }
    fleet.end().await?;
    ensure!(broker.stop().await?, "the broker had to be killed");
    Ok(())
}

#[tokio::test]
async fn an_answer_goes_on_when_a_silent_link_is_heard_again() -> Result<()> {
    let (mut broker, expected) = direct().await?;
    let link = Link::to_broker(&broker.url(), LinkPlan::both(Conditions::CLEAR))?;
    let fleet = Fleet::start(2, |spec| {
        spec.broker = BrokerChoice::Running(broker.url());
        spec.routes.workers = vec![None, Some(link.url())];
    })
    .await?;
    let (answer, mut stream) = fleet.begin(&counting(), 5).await?;
    link.set_passage(Passage::Silent);
    let held = answer.tokens.len();
    tokio::time::sleep(Duration::from_millis(300)).await;
    link.set_passage(Passage::Open);
    let answer = answer.rest(&mut stream).await?;
    ensure!(answer.tokens == expected, "held after {held} tokens: {answer:?}");
    fleet.idle().await.context("after the answer")?;
    fleet.end().await?;
    ensure!(broker.stop().await?, "the broker had to be killed");
    Ok(())
}

/// A fleet far from its broker, whose coordinator drafts. The links and the broker belong to the test.
async fn far_fleet(
    broker: &LocalBroker,
    n_workers: usize,
    settings: &[&str],
) -> Result<(Fleet, [Link; 3])> {
    let plan = LinkPlan::both(Conditions::delay(Duration::from_millis(12)));
    let link = || Link::to_broker(&broker.url(), plan);
    let links = [link()?, link()?, link()?];
    let draft = shard_sets::draft().await?;
    let fleet = Fleet::start(2, |spec| {
        spec.workers_per_stage = n_workers;
        spec.broker = BrokerChoice::Running(broker.url());
        spec.routes = Routes {
            workers: vec![Some(links[0].url()), Some(links[1].url())],
            coordinators: Some(links[2].url()),
        };
        spec.settings.extend(settings.iter().map(|&setting| setting.to_owned()));
        spec.settings.push("worker.profile=fast".to_owned());
        spec.settings.push("coordinator.draft=hybrid".to_owned());
        spec.settings.push(format!("coordinator.draft_shards={}", draft.display()));
    })
    .await?;
    Ok((fleet, links))
}

/// The same request, decoded token by token, and with windows in flight and second guesses.
fn plain_and_windows(prompt: &str, n_tokens: u32) -> (Value, Value) {
    let chat = json!({
        "messages": [{ "role": "user", "content": prompt }],
        "max_tokens": n_tokens,
        "draft_tokens": 0,
    });
    let mut windows = chat.clone();
    windows["draft_tokens"] = json!(4);
    windows["draft_windows"] = json!(3);
    windows["draft_alternatives"] = json!(4);
    (chat, windows)
}

const STORY: &str = "Write a short story about a lighthouse keeper and his cat.";

#[tokio::test]
async fn second_guesses_over_a_long_way_change_no_token() -> Result<()> {
    let mut broker = LocalBroker::start(BrokerOptions::default()).await?;
    let (fleet, _links) = far_fleet(&broker, 1, &[]).await?;
    let mut accepted = 0;
    for prompt in [STORY, "Name three rivers of France.", "What is a prime number?"] {
        let (plain, windows) = plain_and_windows(prompt, 40);
        let expected = fleet.ask(&plain).await?;
        for k in [4, 7] {
            let mut windows = windows.clone();
            windows["draft_tokens"] = json!(k);
            let answer = fleet.ask(&windows).await?;
            let (found, expected) = (&answer.tokens, &expected.tokens);
            ensure!(found == expected, "{prompt}: {found:?} not {expected:?}");
            accepted += answer.usage()?.accepted_tokens;
        }
    }
    ensure!(accepted > 50, "hardly any draft was accepted: {accepted}");
    fleet.idle().await?;
    fleet.end().await?;
    ensure!(broker.stop().await?, "the broker had to be killed");
    Ok(())
}

#[tokio::test]
async fn a_worker_that_dies_under_windows_in_flight_changes_no_token() -> Result<()> {
    let mut broker = LocalBroker::start(BrokerOptions::default()).await?;
    let (mut fleet, _links) = far_fleet(&broker, 2, &[]).await?;
    let (plain, windows) = plain_and_windows(STORY, 60);
    let expected = fleet.ask(&plain).await?;
    for stage in [1, 0] {
        let (answer, mut stream) = fleet.begin(&windows, 4).await?;
        let sessions = fleet.sessions(stage).await?;
        let busy = sessions.iter().position(|&n| n == 1).context("no worker holds the session")?;
        let name = fleet.workers(stage)[busy].name.clone();
        fleet.processes.kill(&name).await?;
        let answer = answer.rest(&mut stream).await?;
        ensure!(answer.tokens == expected.tokens, "stage {stage}: {answer:?}");
    }
    fleet.idle().await?;
    fleet.end().await?;
    ensure!(broker.stop().await?, "the broker had to be killed");
    Ok(())
}

#[tokio::test]
async fn sessions_that_give_way_under_windows_in_flight_keep_their_tokens() -> Result<()> {
    let mut broker = LocalBroker::start(BrokerOptions::default()).await?;
    let settings = ["worker.kv_memory_mib=5", "coordinator.kv_percent=0"];
    let (fleet, _links) = far_fleet(&broker, 1, &settings).await?;
    let cases = cases()?;
    let requests = |drafts: &dyn Fn(u32) -> Value| -> Vec<Value> {
        (0..8_u32)
            .zip(&cases)
            .map(|(i, case)| {
                let mut request = json!({ "tokens": case.input_ids, "max_tokens": 150,
                                          "draft_windows": i % 3 + 1,
                                          "logit_bias": { "2": -100 } });
                request["draft_tokens"] = drafts(i);
                request
            })
            .collect()
    };
    let plain = together(&fleet, &requests(&|_| json!(0))).await?;
    let n_tokens: usize = plain.iter().map(|answer| answer.tokens.len()).sum();
    let (answer, mut stream) = fleet.begin(&requests(&|_| json!(0))[0], 20).await?;
    let load = fleet.load(&fleet.workers(0)[0]).await?;
    answer.rest(&mut stream).await?;
    let needed = n_tokens as u64 * load.kv_bytes / load.kv_tokens.max(1);
    ensure!(needed > load.kv_max_bytes, "all fit: {needed} bytes, {load:?}");
    let drafted = together(&fleet, &requests(&|i| json!(2 + i % 4))).await?;
    for (i, (answer, expected)) in drafted.iter().zip(&plain).enumerate() {
        let (found, expected) = (&answer.tokens, &expected.tokens);
        ensure!(found == expected, "session {i}: {found:?} instead of {expected:?}, {answer:?}");
    }
    fleet.idle().await?;
    fleet.end().await?;
    ensure!(broker.stop().await?, "the broker had to be killed");
    Ok(())
}
