//! Fleets whose processes reach the broker over slow, lossy and broken links.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_bench::link::{Conditions, Link, LinkPlan, Passage};
use stagebus_fleet::{BrokerChoice, BrokerOptions, LocalBroker, Routes};
use stagebus_tests::fleet::Fleet;

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
