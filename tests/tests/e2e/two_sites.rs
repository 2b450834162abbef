//! Two sites with a broker each, in the configuration of the example: stages at both, and a site
//! alone.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use stagebus_bus::{Bus, BusOptions};
use stagebus_fleet::BrokerChoice;
use stagebus_schemas::codec::ContentType;
use stagebus_tests::answer::Answer;
use stagebus_tests::broker::PlainBroker;
use stagebus_tests::fleet::Fleet;
use tempfile::TempDir;

use crate::prompts::{cases, of_case};

/// Port of the example at which the second site's broker knocks.
const LEAF_PORT: &str = "7422";

/// Longest wait for an event.
const PATIENCE: Duration = Duration::from_secs(60);

/// Both brokers, on free ports.
async fn two_sites() -> Result<(TempDir, PlainBroker, PlainBroker)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("no repository")?;
    let folder = tempfile::tempdir()?;
    let example = folder.path().join("examples").join("two-sites");
    fs::create_dir_all(&example)?;
    fs::copy(root.join("nats.conf"), folder.path().join("nats.conf"))?;
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port().to_string();
    let mut brokers = Vec::new();
    for name in ["hub.conf", "site.conf"] {
        let text = fs::read_to_string(root.join("examples/two-sites").join(name))?;
        ensure!(text.contains(LEAF_PORT), "{name} names another port");
        fs::write(example.join(name), text.replace(LEAF_PORT, &port))?;
        brokers.push(PlainBroker::start_with(&example.join(name)).await?);
    }
    let site = brokers.pop().context("two brokers")?;
    let hub = brokers.pop().context("two brokers")?;
    Ok((folder, hub, site))
}

/// Asks at another broker than the fleet's.
async fn ask_at(url: &str, fleet: &Fleet, request: &Value) -> Result<Answer> {
    let bus = Bus::connect(BusOptions::new(url, "tests")).await?;
    let (subject, payload) = (fleet.subjects().prompt(), serde_json::to_vec(request)?);
    let content = ContentType::Json;
    let mut stream = bus.event_stream(&subject, content, payload.into(), PATIENCE).await?;
    Answer::default().rest(&mut stream).await
}

#[tokio::test]
async fn stages_at_two_sites_serve_clients_at_both() -> Result<()> {
    let (_folder, hub, site) = two_sites().await?;
    let url = hub.url().to_owned();
    let mut fleet =
        Fleet::start(2, |spec| spec.broker = BrokerChoice::Running(url.clone())).await?;
    let case = &cases()?[0];
    ensure!(fleet.ask(&of_case(case, 8)).await?.tokens == case.output_ids[..8], "at one site");
    // Stage 1 moves to the other site.
    let old = fleet.workers(1).swap_remove(0);
    let there = fleet.processes.add_worker_at(1, site.url()).await?;
    fleet.processes.retire(&old.name).await?;
    let answer = fleet.ask(&of_case(case, 64)).await?;
    ensure!(answer.tokens == case.output_ids, "over the link: {answer:?}");
    let answer = ask_at(site.url(), &fleet, &of_case(case, 64)).await?;
    ensure!(answer.tokens == case.output_ids, "from the other site: {answer:?}");
    // The other site is gone in the middle of an answer, and a worker here takes over.
    let (answer, mut stream) = fleet.begin(&of_case(case, 64), 3).await?;
    site.kill().await?;
    fleet.processes.add_worker(1).await?;
    let answer = answer.rest(&mut stream).await?;
    ensure!(answer.tokens == case.output_ids, "after the cut: {answer:?}");
    // Without a broker it could not leave in order.
    fleet.processes.kill(&there.name).await?;
    fleet.end().await
}

#[tokio::test]
async fn a_site_with_all_stages_goes_on_when_the_link_is_cut() -> Result<()> {
    let (_folder, hub, site) = two_sites().await?;
    let url = site.url().to_owned();
    let fleet = Fleet::start(2, |spec| spec.broker = BrokerChoice::Running(url.clone())).await?;
    let case = &cases()?[0];
    let answer = ask_at(hub.url(), &fleet, &of_case(case, 64)).await?;
    ensure!(answer.tokens == case.output_ids, "from the other site: {answer:?}");
    let (answer, mut stream) = fleet.begin(&of_case(case, 64), 3).await?;
    hub.kill().await?;
    let answer = answer.rest(&mut stream).await?;
    ensure!(answer.tokens == case.output_ids, "after the cut: {answer:?}");
    ensure!(fleet.ask(&of_case(case, 64)).await?.tokens == case.output_ids, "alone");
    fleet.end().await
}
