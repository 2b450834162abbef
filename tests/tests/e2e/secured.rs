//! A fleet with keys and TLS: it serves, and every key opens its own doors only.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use bytes::Bytes;
use stagebus_bus::{Bus, BusEvent, BusEvents, Operation, RequestError, Role, Violation};
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_schemas::codec::ContentType;
use stagebus_schemas::ids::{CoordinatorId, ModelName, StageIndex, WorkerId};
use stagebus_schemas::messages::control::{Control, ControlAction, ControlReply};
use stagebus_schemas::subjects::Subjects;
use stagebus_schemas::version::MessageVersion;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::program::Call;
use stagebus_tests::{keys, shard_sets, turn};
use tempfile::TempDir;

use crate::prompts::{cases, of_case};

/// The model of the shard sets.
const MODEL: &str = "smollm2-135m-instruct-q4_1";

/// A model that nobody serves.
const OTHER: &str = "other";

/// Longest wait for what comes at once.
const PATIENCE: Duration = Duration::from_secs(60);

/// Exit code of a refusal.
const REFUSED: Option<i32> = Some(4);

/// Keys for two models, made as a user makes them.
pub(crate) async fn made_keys() -> Result<(TempDir, PathBuf)> {
    let parent = tempfile::tempdir()?;
    let keys = parent.path().join("keys");
    let call = Call::new(["keys", "new"]).arg(&keys).args(&["--model", MODEL, "--model", OTHER]);
    call.arg("--results").run().await?.success()?;
    for (name, model) in [("ann", OTHER), ("ben", MODEL)] {
        let add = Call::new(["keys", "add"]).arg(&keys).arg(name);
        add.args(&["--role", "client", "--model", model]).run().await?.success()?;
    }
    Ok((parent, keys))
}

async fn secured_broker(keys: &Path) -> Result<LocalBroker> {
    let options = BrokerOptions { keys: Some(keys.to_owned()), ..BrokerOptions::default() };
    Ok(LocalBroker::start(options).await?)
}

pub(crate) fn config(keys: &Path, holder: &str) -> PathBuf {
    keys.join(holder).join("stagebus.toml")
}

/// Waits for the broker's word that something is forbidden.
async fn violation(events: &mut BusEvents) -> Result<Violation> {
    let search = async {
        loop {
            match events.next().await {
                Some(BusEvent::PermissionViolation(violation)) => return Ok(violation),
                Some(_) => {}
                None => anyhow::bail!("the connection is gone"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, search).await?
}

#[tokio::test]
async fn a_fleet_with_keys_answers_whoever_has_one() -> Result<()> {
    let (_parent, keys) = made_keys().await?;
    let mut fleet = Fleet::start(2, |spec| spec.keys = Some(keys.clone())).await?;
    ensure!(fleet.model.as_str() == MODEL, "the shard set has another model");
    ensure!(fleet.processes.url().starts_with("tls://"), "{}", fleet.processes.url());
    let case = &cases()?[0];
    let answer = fleet.ask(&of_case(case, 64)).await?;
    ensure!(answer.tokens == case.output_ids, "{answer:?}");
    let url = fleet.processes.url().to_owned();
    let with_key = |call: Call| call.args(&["--broker", &url]).arg("--config");
    let ask = with_key(Call::new(["ask", "What is the capital of Japan?"]));
    let told = ask.arg(config(&keys, "client")).run().await?.success()?;
    ensure!(told.stdout().contains("Tokyo"), "{}", told.report());
    let status = with_key(Call::new(["status", "--json"]));
    let told = status.clone().arg(config(&keys, "client")).run().await?.success()?;
    ensure!(told.json()?["served"] == true, "{}", told.report());
    // A durable request, and who may read its events.
    let job = ["submit", "--id", "one", "--model", MODEL, "What is the capital of Japan?"];
    let ben = config(&keys, "ben");
    with_key(Call::new(job)).arg(&ben).run().await?.success()?;
    let results = with_key(Call::new(["results", "one", "--model", MODEL, "--follow"]));
    let told = results.clone().arg(config(&keys, "client")).run().await?.success()?;
    ensure!(told.stdout().contains("Tokyo"), "{}", told.report());
    let told = results.arg(&ben).run().await?;
    ensure!(told.code() == REFUSED, "{}", told.report());
    told.failure(&["publish", "$JS.API.CONSUMER.CREATE"])?;
    // A key for another model: what it may not ask is told, whatever the command.
    let told = status.arg(config(&keys, "ann")).run().await?;
    told.failure(&["stagebus.v1.*.fleet.>", "--model"])?;
    let ask = with_key(Call::new(["ask", "hello", "--model", MODEL]));
    let told = ask.arg(config(&keys, "ann")).run().await?;
    ensure!(told.code() == REFUSED, "{}", told.report());
    told.failure(&["publish", &fleet.subjects().prompt()])?;
    // Only an operator sends workers away; another one takes over.
    let drain = with_key(Call::new(["drain", "--stage", "1", "--model", MODEL, "--within", "5"]));
    let told = drain.clone().arg(config(&keys, "client")).run().await?;
    ensure!(told.code() == REFUSED, "{}", told.report());
    told.failure(&["subscribe", "_INBOX.operator."])?;
    drain.arg(config(&keys, "operator")).run().await?.success()?;
    fleet.processes.add_worker(1).await?;
    end_and_see_nobody_hurt(fleet).await
}

#[tokio::test]
async fn a_hosted_stage_logs_in_with_a_workers_key() -> Result<()> {
    let (_parent, keys) = made_keys().await?;
    let fleet = Fleet::start(2, |spec| {
        spec.keys = Some(keys.clone());
        spec.host_stage0 = true;
    })
    .await?;
    let url = fleet.processes.url().to_owned();
    let status = Call::new(["status", "--broker", &url, "--config"]);
    let told = status.arg(config(&keys, "client")).run().await?.success()?;
    ensure!(told.stdout().contains("hosted-"), "{}", told.report());
    // With the coordinator's key alone it would have to act as a worker without the right to.
    let part = Call::new(["coordinator", "--host-stage0", "--set", "worker.engine=test", "--set"]);
    let part = part.arg(format!("broker.url={url}")).arg("--shards").arg(shard_sets::get(2).await?);
    let told =
        part.arg("--config").arg(config(&keys, &format!("coordinator-{MODEL}"))).run().await?;
    ensure!(told.code() == REFUSED, "{}", told.report());
    told.failure(&["cannot do its work", "does not let these credentials", MODEL])?;
    end_and_see_nobody_hurt(fleet).await
}

/// A second answer after everything that was refused, and an orderly end.
async fn end_and_see_nobody_hurt(fleet: Fleet) -> Result<()> {
    let case = &cases()?[1];
    let answer = fleet.ask(&of_case(case, 64)).await?;
    ensure!(answer.tokens == case.output_ids, "{answer:?}");
    fleet.end().await
}

#[tokio::test]
async fn a_client_can_use_no_internal_subject() -> Result<()> {
    let _turn = turn::take().await;
    let (_parent, keys) = made_keys().await?;
    let broker = secured_broker(&keys).await?;
    let model: ModelName = MODEL.parse()?;
    let subjects = Subjects::new(&model);
    let bus = Bus::connect(keys::options(&keys, "client", Role::Client, &broker.url())?).await?;
    let mut events = bus.events();
    let stage = StageIndex::FIRST;
    let (worker, coordinator) = (WorkerId::random(stage), CoordinatorId::random());
    for subject in [
        subjects.step(stage, &worker),
        subjects.control(stage, &worker),
        subjects.head(&coordinator),
        subjects.worker(stage, &worker),
        subjects.coordinator(&coordinator),
        "_INBOX.coordinator.x".to_owned(),
        "$SYS.REQ.SERVER.PING".to_owned(),
    ] {
        bus.publish_bytes(&subject, None, Bytes::new()).await?;
        let operation = Operation::Publish;
        ensure!(violation(&mut events).await? == Violation { operation, subject });
    }
    let ann = keys::options(&keys, "ann", Role::Client, &broker.url())?.inbox_prefix;
    for subject in [
        subjects.step_all(),
        subjects.control_all(),
        subjects.head_all(),
        subjects.lost_any(),
        subjects.prompt(),
        subjects.all(),
        format!("{ann}.>"),
        "_INBOX.>".to_owned(),
        ">".to_owned(),
    ] {
        let _listening = bus.subscribe(&subject).await?;
        let operation = Operation::Subscribe;
        ensure!(violation(&mut events).await? == Violation { operation, subject });
    }
    // A question ends with the refusal, long before its time.
    let control = Control { version: MessageVersion::CURRENT, action: ControlAction::Stats };
    let subject = subjects.control(stage, &worker);
    let asked = bus.request::<_, ControlReply>(&subject, &control, Duration::from_secs(3600));
    let asked = tokio::time::timeout(PATIENCE, asked).await?;
    ensure!(matches!(&asked, Err(RequestError::Forbidden { .. })), "{asked:?}");
    // What it may do is still possible: nobody serves the model here, and the broker says so.
    let payload = Bytes::from_static(b"{\"prompt\":\"hello\"}");
    let mut stream =
        bus.event_stream(&subjects.prompt(), ContentType::Json, payload, PATIENCE).await?;
    let next = stream.next().await;
    ensure!(matches!(&next, Err(stagebus_bus::StreamError::NoResponders { .. })), "{next:?}");
    Ok(())
}

#[tokio::test]
async fn a_key_of_another_model_or_role_runs_nothing() -> Result<()> {
    let _turn = turn::take().await;
    let (_parent, keys) = made_keys().await?;
    let broker = secured_broker(&keys).await?;
    let shards = shard_sets::get(2).await?;
    let url = format!("broker.url={}", broker.url());
    let part = |words: &[&str], holder: &str| {
        let call = Call::new(words.iter().copied()).args(&["--set", &url]).arg("--shards");
        call.arg(&shards).arg("--config").arg(config(&keys, holder))
    };
    let worker = |holder: &str| part(&["worker", "--stage", "0", "--engine", "test"], holder);
    let coordinator = |holder: &str| part(&["coordinator"], holder);
    for call in [
        worker(&format!("worker-{OTHER}")),
        worker("client"),
        worker(&format!("coordinator-{MODEL}")),
        coordinator(&format!("coordinator-{OTHER}")),
        coordinator(&format!("worker-{MODEL}")),
    ] {
        let told = call.run().await?;
        ensure!(told.code() == REFUSED, "{}", told.report());
        ensure!(told.stdout().is_empty(), "{}", told.report());
        told.failure(&["cannot do its work", "does not let these credentials", MODEL])?;
    }
    Ok(())
}

#[tokio::test]
async fn nobody_gets_in_without_a_key() -> Result<()> {
    let _turn = turn::take().await;
    let (_parent, keys) = made_keys().await?;
    let (_strangers, strange) = made_keys().await?;
    let broker = secured_broker(&keys).await?;
    let status = |set: &[String]| {
        let mut call = Call::new(["status", "--broker", &broker.url()]);
        for set in set {
            call = call.arg("--set").arg(set);
        }
        call
    };
    let ca = format!("broker.tls.ca_file={}", keys.join("ca.pem").display());
    let seed = |keys: &Path| {
        format!("broker.nkey_seed_file={}", keys.join("client").join("seed.nk").display())
    };
    for (set, part) in [
        (vec![ca.clone()], "refused no credentials"),
        (vec![ca.clone(), seed(&strange)], "refused an nkey"),
        // Of another authority, or of none.
        (vec![seed(&keys)], "TLS"),
    ] {
        let told = status(&set).run().await?;
        ensure!(told.code() == REFUSED, "{}", told.report());
        told.failure(&[part])?;
    }
    Ok(())
}

#[cfg(unix)]
#[tokio::test]
async fn a_removed_key_is_cut_off_when_the_broker_reads_its_users_again() -> Result<()> {
    let _turn = turn::take().await;
    let (_parent, keys) = made_keys().await?;
    let broker = secured_broker(&keys).await?;
    let options = keys::options(&keys, "ann", Role::Client, &broker.url())?;
    let bus = Bus::connect(options).await?;
    let mut events = bus.events();
    Call::new(["keys", "remove"]).arg(&keys).arg("ann").run().await?.success()?;
    let pid = broker.pid().unwrap_or_default().to_string();
    let reload = tokio::process::Command::new("kill").args(["-HUP", &pid]).status().await?;
    ensure!(reload.success(), "the broker is gone");
    let search =
        async { while events.next().await.is_some_and(|event| event != BusEvent::AuthRefused) {} };
    tokio::time::timeout(PATIENCE, search).await?;
    Ok(())
}

#[tokio::test]
async fn off_this_machine_nothing_starts_without_tls_and_keys() -> Result<()> {
    let _turn = turn::take().await;
    let (_parent, keys) = made_keys().await?;
    let shards = shard_sets::get(2).await?;
    // An address for documentation (RFC 5737): were it tried, the message would be another one.
    let far = "broker.url=nats://192.0.2.1:4222";
    let seed = format!("broker.nkey_seed_file={}", keys.join("client/seed.nk").display());
    let with = |words: &[&str]| Call::new(words.iter().copied());
    let served = |words: &[&str]| with(words).arg("--shards").arg(&shards).args(&["--set", far]);
    for call in [
        served(&["worker", "--stage", "0", "--engine", "test"]),
        served(&["worker", "--stage", "0", "--engine", "test"]).arg("--set").arg(&seed),
        served(&["coordinator"]),
        with(&["ask", "hello", "--set", far]),
        with(&["status", "--set", far]),
    ] {
        let told = call.run().await?;
        ensure!(told.code() == REFUSED, "{}", told.report());
        told.failure(&["192.0.2.1", "not on this machine", "TLS", "docs/security.md"])?;
    }
    let tls_only = with(&["status", "--set", "broker.url=tls://192.0.2.1:4222"]).run().await?;
    ensure!(tls_only.code() == REFUSED, "{}", tls_only.report());
    tls_only.failure(&["192.0.2.1", "credentials"])?;
    let up = with(&["up", "--listen", "192.0.2.1", "--engine", "test", "--shards"]).arg(&shards);
    let told = up.run().await?;
    ensure!(told.code() == REFUSED, "{}", told.report());
    told.failure(&["192.0.2.1", "needs TLS and keys", "stagebus keys new"])?;
    Ok(())
}
