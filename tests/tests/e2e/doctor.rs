//! `stagebus doctor` names what is wrong: each test plants faults, and finds their names.

use std::fs;
use std::net::TcpListener;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_schemas::messages::fleet::{WorkerAnnouncement, WorkerState};
use stagebus_schemas::subjects::Subject;
use stagebus_schemas::version::MessageVersion;
use stagebus_tests::broker::PlainBroker;
use stagebus_tests::fleet::{Fleet, address};
use stagebus_tests::program::Call;
use stagebus_tests::{setup, shard_sets, turn, wait};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::prompts;
use crate::secured::{config, made_keys};

/// A token's text in the model file, and another one of its length.
const TOKEN: (&[u8], &[u8]) = (b"<gh_stars>", b"<gh_starz>");

fn doctor() -> Call {
    Call::new(["doctor", "--json"])
}

/// Runs the doctor; the faults that it finds must be these, in its order, and its exit code must
/// follow from them.
async fn finds(call: Call, expected: &[&str]) -> Result<Value> {
    let ended = call.run().await?;
    let report = ended.json()?;
    let findings = report["findings"].as_array().context("findings")?;
    let fails = findings.iter().any(|finding| finding["level"] == "fail");
    let code = if fails { 1 } else { 0 };
    ensure!(report["sound"] != fails && ended.code() == Some(code), "{}", ended.report());
    let faults: Vec<&str> = findings
        .iter()
        .filter_map(|finding| finding["fault"].as_str())
        // The machine of the test may be nearly full, or far too busy.
        .filter(|fault| !["disk_low", "round_trip_long"].contains(fault))
        .collect();
    ensure!(faults == expected, "{faults:?} instead of {expected:?}\n{}", ended.report());
    Ok(report)
}

fn level<'a>(report: &'a Value, check: &str) -> Option<&'a str> {
    let mut findings = report["findings"].as_array()?.iter();
    findings.find(|finding| finding["check"] == check)?["level"].as_str()
}

#[tokio::test]
async fn a_missing_runtime_is_named() -> Result<()> {
    let _turn = turn::take().await;
    let nowhere = tempfile::tempdir()?;
    let here = || doctor().arg("--no-broker");
    let report = finds(here(), &[]).await?;
    for check in ["configuration", "openvino", "device", "nats_server", "cache"] {
        ensure!(level(&report, check) == Some("ok"), "{check}: {report:#}");
    }
    let without = here().env("STAGEBUS_OPENVINO", nowhere.path());
    finds(without, &["openvino_missing"]).await?;
    let file = nowhere.path().join("libopenvino_c.so");
    fs::write(&file, "no library")?;
    finds(here().env("STAGEBUS_OPENVINO", &file), &["openvino_unusable"]).await?;
    finds(here().args(&["--device", "XPU"]), &["device_missing"]).await?;
    let without = here().env("STAGEBUS_NATS_SERVER", nowhere.path().join("no"));
    finds(without, &["nats_server_missing"]).await?;
    let cache = here().arg("--cache").arg(file.join("shards"));
    finds(cache, &["cache_not_writable"]).await?;
    let wrong = here().args(&["--set", "worker.threads=many"]);
    finds(wrong, &["configuration_wrong"]).await?;
    Ok(())
}

#[tokio::test]
async fn every_damage_of_a_shard_set_is_named() -> Result<()> {
    let _turn = turn::take().await;
    let sound = shard_sets::get(2).await?;
    let of = |shards: &Path| doctor().args(&["--no-broker", "--shards"]).arg(shards);
    finds(of(&sound), &[]).await?;
    finds(of(&sound).args(&["--stage", "2"]), &["stage_unknown"]).await?;

    let folder = tempfile::tempdir()?;
    let spoilt = folder.path();
    shard_sets::copy(&sound, spoilt)?;
    let weights = spoilt.join("stage-1.bin");
    let mut bytes = fs::read(&weights)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&weights, &bytes)?;
    finds(of(spoilt), &["shard_hash_differs"]).await?;
    // A worker of the other stage reads none of it.
    finds(of(spoilt).args(&["--stage", "0"]), &[]).await?;
    bytes.truncate(middle);
    fs::write(&weights, &bytes)?;
    fs::remove_file(spoilt.join("stage-0.xml"))?;
    finds(of(spoilt), &["shard_unreadable", "shard_size_differs"]).await?;

    let manifest = spoilt.join("manifest.json");
    let text = fs::read_to_string(&manifest)?;
    fs::write(&manifest, text.replace("\"context_length\": 8192", "\"context_length\": 4096"))?;
    finds(of(spoilt), &["manifest_invalid"]).await?;
    fs::remove_file(&manifest)?;
    finds(of(spoilt), &["shard_set_missing"]).await?;
    Ok(())
}

#[tokio::test]
async fn a_draft_model_with_another_tokenizer_is_named() -> Result<()> {
    let _turn = turn::take().await;
    let target = shard_sets::get(2).await?;
    let with = |draft: &Path| {
        let call = doctor().args(&["--no-broker", "--shards"]).arg(&target);
        call.arg("--draft-shards").arg(draft)
    };
    finds(with(&shard_sets::draft().await?), &[]).await?;
    finds(with(&target), &["draft_unusable"]).await?;

    let folder = tempfile::tempdir()?;
    let (model, draft) = (folder.path().join("other.gguf"), folder.path().join("draft"));
    let mut bytes = fs::read(setup::model()?)?;
    let (token, other) = TOKEN;
    let at = bytes.windows(token.len()).position(|window| window == token);
    let at = at.context("the token is not in the model file")?;
    bytes[at..at + other.len()].copy_from_slice(other);
    fs::write(&model, bytes)?;
    let shard = Call::new(["shard", "--stages", "1"]).arg(&model).arg("--out").arg(&draft);
    shard.run().await?.success()?;
    finds(with(&draft), &["draft_tokenizer_differs"]).await?;
    Ok(())
}

#[tokio::test]
async fn a_broker_that_cannot_be_used_is_named() -> Result<()> {
    let _turn = turn::take().await;
    let at = |url: &str| doctor().args(&["--broker", url]);
    finds(at("nats://127.0.0.1:1"), &["broker_unreachable"]).await?;
    finds(at("http://127.0.0.1:1"), &["broker_address_wrong"]).await?;
    finds(at("nats://192.0.2.1:4222"), &["broker_unprotected"]).await?;
    // It takes the connection and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("nats://{}", silent.local_addr()?);
    finds(at(&url), &["broker_silent"]).await?;

    let folder = tempfile::tempdir()?;
    let configured = async |text: &str| {
        let file = folder.path().join("nats.conf");
        fs::write(&file, text)?;
        PlainBroker::start_with(&file).await
    };
    let broker = configured("authorization { user: ann, password: right }").await?;
    let ann = |password: &str| {
        let password = format!("broker.password={password}");
        at(broker.url()).args(&["--set", "broker.user=ann", "--set"]).arg(password)
    };
    finds(ann("wrong"), &["credentials_refused"]).await?;
    finds(ann("right"), &["nobody_there"]).await?;
    let ca = format!("broker.tls.ca_file={}", folder.path().join("no.pem").display());
    finds(at(broker.url()).arg("--set").arg(ca), &["tls_failed"]).await?;

    let shards = shard_sets::get(2).await?;
    let carries = |broker: &PlainBroker| at(broker.url()).arg("--shards").arg(&shards);
    let broker = configured("max_payload: 65536").await?;
    finds(carries(&broker), &["payload_small", "nobody_there"]).await?;
    let broker = configured("max_payload: 6000").await?;
    finds(carries(&broker), &["payload_too_small", "nobody_there"]).await?;
    let broker = PlainBroker::start().await?;
    let report = finds(at(broker.url()), &["nobody_there"]).await?;
    ensure!(level(&report, "jetstream") == Some("skipped"), "{report:#}");
    for check in ["broker", "clock", "payload", "permissions"] {
        ensure!(level(&report, check) == Some("ok"), "{check}: {report:#}");
    }
    finds(at(broker.url()).arg("--jobs"), &["jetstream_missing", "nobody_there"]).await?;
    let broker = LocalBroker::start(BrokerOptions::default()).await?;
    finds(at(&broker.url()).arg("--jobs"), &["nobody_there"]).await?;
    Ok(())
}

#[cfg(unix)]
#[tokio::test]
async fn a_key_that_is_open_broken_or_for_another_model_is_named() -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;

    let _turn = turn::take().await;
    let (_parent, keys) = made_keys().await?;
    let options = BrokerOptions { keys: Some(keys.clone()), ..BrokerOptions::default() };
    let broker = LocalBroker::start(options).await?;
    let url = broker.url();
    let holder = |name: &str| {
        doctor().args(&["--broker", &url, "--model", "other", "--config"]).arg(config(&keys, name))
    };
    let report = finds(holder("ann"), &["nobody_there"]).await?;
    ensure!(level(&report, "clock") == Some("skipped"), "{report:#}");
    finds(holder("ben"), &["permission_missing"]).await?;

    let seed = keys.join("ann").join("seed.nk");
    fs::set_permissions(&seed, fs::Permissions::from_mode(0o644))?;
    finds(holder("ann"), &["key_readable", "nobody_there"]).await?;
    fs::set_permissions(&seed, fs::Permissions::from_mode(0o600))?;
    fs::write(&seed, "SUNOSEED\n")?;
    finds(holder("ann"), &["key_unusable"]).await?;
    fs::remove_file(&seed)?;
    finds(holder("ann"), &["key_unusable"]).await?;
    Ok(())
}

/// A fleet that needs no OpenVINO, and the doctor's look at it.
async fn toy_fleet(settings: &[&str]) -> Result<(Fleet, Call)> {
    let fleet = Fleet::start(2, |spec| {
        spec.settings.push("worker.engine=test".to_owned());
        spec.settings.extend(settings.iter().copied().map(str::to_owned));
    })
    .await?;
    let call = doctor().args(&["--broker", fleet.processes.url(), "--shards"]);
    Ok((fleet, call.arg(shard_sets::get(2).await?)))
}

#[tokio::test]
async fn parts_that_are_missing_are_named() -> Result<()> {
    let (mut fleet, call) = toy_fleet(&[]).await?;
    let report = finds(call.clone(), &[]).await?;
    for check in ["shards", "broker", "clock", "payload", "jetstream", "fleet", "workers"] {
        ensure!(level(&report, check) == Some("ok"), "{check}: {report:#}");
    }
    fleet.processes.kill("worker-1.0").await?;
    finds(call.clone(), &["stage_missing"]).await?;
    fleet.processes.kill("coordinator.0").await?;
    finds(call, &["coordinator_missing", "stage_missing"]).await?;
    Ok(())
}

#[tokio::test]
async fn shards_that_differ_are_named() -> Result<()> {
    let (fleet, call) = toy_fleet(&[]).await?;
    let url = fleet.processes.url();
    let folder = tempfile::tempdir()?;
    let other = folder.path().join("set");
    let shard = Call::new(["shard", "--stages", "2", "--weights", "compact", "--name"]);
    let shard = shard.arg(fleet.model.as_str()).arg("--out").arg(&other).arg(setup::model()?);
    shard.run().await?.success()?;
    let here = doctor().args(&["--broker", url, "--shards"]).arg(&other);
    finds(here, &["fingerprints_differ"]).await?;

    let worker = Call::new(["worker", "--stage", "1", "--engine", "test", "--shards"]).arg(&other);
    let broker = format!("broker.url={url}");
    let mut worker = worker.arg("--set").arg(broker).start()?;
    let mut ready = String::new();
    let out = worker.stdout.take().context("a standard output")?;
    BufReader::new(out).read_line(&mut ready).await?;
    ensure!(ready.contains("\"ready\""), "{ready:?}");
    finds(call, &["fingerprints_differ"]).await?;
    Ok(())
}

#[tokio::test]
async fn a_worker_whose_inference_hangs_is_named() -> Result<()> {
    let (fleet, call) = toy_fleet(&["worker.test.faults=[\"hang@3:3600\"]"]).await?;
    let stream = fleet.send(serde_json::to_vec(&prompts::endless())?).await?;
    let worker = fleet.workers(0).into_iter().next().context("a worker")?;
    wait::until("its micro-batch takes far too long", async || {
        let load = fleet.load(&worker).await?;
        Ok(load.is_stuck(wait::PATIENCE).then_some(()))
    })
    .await?;
    finds(call, &["worker_wedged"]).await?;
    drop(stream);
    Ok(())
}

#[tokio::test]
async fn a_worker_that_falls_silent_is_named() -> Result<()> {
    let (fleet, call) = toy_fleet(&[]).await?;
    let subjects = fleet.subjects();
    let mut probes = fleet.bus.subscribe(&subjects.probe()).await?;
    let mut announcements = fleet.bus.subscribe(&subjects.fleet_all()).await?;
    let worker = fleet.workers(1).into_iter().next().context("a worker")?;
    let (_, id) = address(&worker)?;
    // Once the doctor has asked, it hears what we hear.
    let freeze = async {
        probes.next().await.context("a question")?;
        loop {
            let heard = announcements.next().await.context("an announcement")?;
            let subject = subjects.parse(heard.subject())?;
            if matches!(subject, Subject::Worker(_, worker) if worker == id) {
                return anyhow::Ok(fleet.processes.freeze(&worker.name).await?);
            }
        }
    };
    let (frozen, found) = tokio::join!(freeze, finds(call, &["worker_silent"]));
    fleet.processes.thaw(&worker.name).await?;
    frozen.and(found.map(drop))
}

#[tokio::test]
async fn a_part_of_another_version_is_named() -> Result<()> {
    let (fleet, call) = toy_fleet(&[]).await?;
    let subjects = fleet.subjects();
    let mut probes = fleet.bus.subscribe(&subjects.probe()).await?;
    let mut announcements = fleet.bus.subscribe(&subjects.fleet_all()).await?;
    let version: MessageVersion = serde_json::from_str("5")?;
    ensure!(version < MessageVersion::CURRENT);
    // An answer of the same form from an older build.
    let answer = async {
        probes.next().await.context("a question")?;
        loop {
            let heard = announcements.next().await.context("an announcement")?;
            if let Subject::Worker(stage, _) = subjects.parse(heard.subject())? {
                let worker = "old-1".parse()?;
                let announcement = heard.decode::<WorkerAnnouncement>()?;
                ensure!(announcement.state == WorkerState::Ready, "{announcement:?}");
                let old = WorkerAnnouncement { version, ..announcement };
                return anyhow::Ok(
                    fleet.bus.publish(&subjects.worker(stage, &worker), &old).await?,
                );
            }
        }
    };
    let (answered, found) = tokio::join!(answer, finds(call, &["versions_differ"]));
    answered.and(found.map(drop))
}
