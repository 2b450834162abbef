//! A broker that dies in the middle of answers, and a coordinator that does.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use stagebus_bus::StreamError;
use stagebus_tests::fleet::Fleet;

use crate::dice::Dice;
use crate::workers::{N_TOKENS, counting};

#[tokio::test]
async fn answers_go_on_when_the_broker_is_back() -> Result<()> {
    let mut fleet = Fleet::start(2, |_| {}).await?;
    let mut dice = Dice::new(7);
    let alone = fleet.ask(&counting()).await?;
    for away in [0, 700] {
        let after = dice.between(1, N_TOKENS / 2);
        let (answer, mut stream) = fleet.begin(&counting(), after).await?;
        let broker = fleet.processes.broker().context("a broker")?;
        broker.kill().await?;
        tokio::time::sleep(Duration::from_millis(away)).await;
        broker.restart().await?;
        let answer = answer.rest(&mut stream).await?;
        ensure!(answer.tokens == alone.tokens, "token {after}: {answer:?}");
        ensure!(answer.text == alone.text, "{:?}", answer.text);
    }
    ensure!(fleet.processes.members().len() == 3, "somebody gave up");
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn the_death_of_a_coordinator_ends_its_answers_and_frees_the_stages() -> Result<()> {
    let mut fleet = Fleet::start(2, |_| {}).await?;
    let alone = fleet.ask(&counting()).await?;
    let (answer, mut stream) = fleet.begin(&counting(), 3).await?;
    fleet.processes.kill("coordinator.0").await?;
    let mut rest = answer.clone();
    let error = loop {
        match rest.next(&mut stream).await {
            Ok(goes_on) => ensure!(goes_on, "the answer ended: {rest:?}"),
            Err(error) => break error,
        }
    };
    let gone = error.downcast_ref::<StreamError>();
    ensure!(matches!(gone, Some(StreamError::CoordinatorGone { .. })), "{error:?}");
    fleet.idle().await?;
    fleet.processes.add_coordinator().await?;
    ensure!(fleet.ask(&counting()).await?.tokens == alone.tokens, "with a new coordinator");
    fleet.end().await
}
