//! Shard sets that come through the broker: pushed by an operator, pulled by a fleet without files.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use stagebus_bus::{Bus, Role};
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_schemas::codec::ContentType;
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::store::{Bucket, object_name};
use stagebus_schemas::subjects::Subjects;
use stagebus_shards::ShardSet;
use stagebus_tests::answer::Answer;
use stagebus_tests::program::{Call, signal};
use stagebus_tests::{keys, setup, shard_sets, turn};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Child;

use crate::foreign_client;
use crate::prompts::{cases, of_case};
use crate::secured::{config, made_keys};

/// Longest wait for a process: it loads a stage, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Exit code of a refusal.
const REFUSED: Option<i32> = Some(4);

/// A worker or coordinator that was started by hand; killed when dropped.
struct Part {
    process: Child,
    /// What it wrote when it was ready.
    ready: Value,
}

/// What all processes of one test share.
struct Site {
    broker: LocalBroker,
    keys: PathBuf,
    folder: TempDir,
}

impl Site {
    fn call(&self, words: &[&str], holder: &str) -> Call {
        let call = Call::new(words.iter().copied()).arg("--config").arg(config(&self.keys, holder));
        let cache = self.folder.path().join("cache");
        call.arg("--set")
            .arg(format!("broker.url={}", self.broker.url()))
            .arg("--set")
            .arg(format!("store.cache_dir={}", cache.display()))
    }

    /// Starts a process that shall become ready.
    async fn start(&self, words: &[&str], holder: &str, name: &str) -> Result<Part> {
        let log = self.folder.path().join(name);
        let mut process = self.call(words, holder).start_logged(&log)?;
        let stdout = process.stdout.take().context("no standard output")?;
        let mut line = String::new();
        let mut stdout = BufReader::new(stdout);
        let told = stdout.read_line(&mut line);
        tokio::time::timeout(PATIENCE, told).await.context("it is not ready")??;
        let ready = serde_json::from_str(&line);
        let ready = ready.with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
        Ok(Part { process, ready })
    }

    /// Starts a worker that is told nothing but the broker's address and its key.
    async fn worker(&self, model: &str, name: &str) -> Result<Part> {
        let holder = format!("worker-{model}");
        self.start(&["worker", "--profile", "exact"], &holder, name).await
    }
}

impl Part {
    async fn end(mut self) -> Result<()> {
        signal("INT", &self.process).await?;
        let status = tokio::time::timeout(PATIENCE, self.process.wait()).await??;
        ensure!(status.success(), "it ended with {status}: {}", self.ready);
        Ok(())
    }
}

fn model_of(set: &Path) -> Result<(ShardSet, ModelName)> {
    let set = ShardSet::open(set)?;
    let model = set.manifest.model.parse()?;
    Ok((set, model))
}

#[tokio::test]
async fn a_fleet_without_files_takes_what_it_needs_from_the_broker() -> Result<()> {
    let _turn = turn::take().await;
    let (_parent, keys) = made_keys().await?;
    let options = BrokerOptions { keys: Some(keys.clone()), ..BrokerOptions::default() };
    let broker = LocalBroker::start(options).await?;
    let site = Site { broker, keys: keys.clone(), folder: tempfile::tempdir()? };
    let shards = shard_sets::get(2).await?;
    let (set, model) = model_of(&shards)?;
    let name = model.as_str();
    let folder = shards.to_string_lossy().into_owned();

    // Before anything is stored.
    let told = site.call(&["worker"], &format!("worker-{name}")).run().await?;
    told.failure(&["no shard set of model", name, "stagebus push"])?;
    // Only an operator stores, and each key opens its own model only.
    for (words, holder, part) in [
        (vec!["push", &folder], "client", "_INBOX.operator."),
        (vec!["push", &folder], "worker-other", "_INBOX.operator."),
        (vec!["worker", "--model", name], "worker-other", "_INBOX.worker."),
        (vec!["coordinator", "--model", name], "client", "_INBOX.coordinator."),
    ] {
        let told = site.call(&words, holder).run().await?;
        ensure!(told.code() == REFUSED, "{}", told.report());
        told.failure(&["does not let these credentials", part])?;
    }
    let told = site.call(&["push", &folder, "--json"], "operator").run().await?.success()?;
    let pushed = told.json()?;
    ensure!(pushed["model"] == name && pushed["kept_bytes"] == 0, "{pushed}");
    let told = site.call(&["models", "--json"], "operator").run().await?.success()?;
    let listed = told.json()?;
    ensure!(listed[0]["sets"][0]["fingerprint"] == set.manifest.fingerprint, "{listed}");
    ensure!(
        listed[0]["sets"][0]["current"] == true && listed[0]["unfinished_bytes"] == 0,
        "{listed}"
    );

    let draft = shard_sets::draft().await?;
    let call = site.call(&["push", "--draft-of", name], "operator");
    call.arg(&draft).run().await?.success()?;

    // Both at the same moment: they share the stages, whoever is first. The coordinator does not
    // start without a draft model.
    let holder = format!("coordinator-{name}");
    let (one, two, coordinator) = tokio::try_join!(
        site.worker(name, "one"),
        site.worker(name, "two"),
        site.start(&["coordinator", "--set", "coordinator.draft=model"], &holder, "coordinator"),
    )?;
    ensure!(coordinator.ready["model"] == name, "{}", coordinator.ready);
    let stages = [&one, &two].map(|part| part.ready["stage"].as_u64());
    ensure!(stages == [Some(0), Some(1)] || stages == [Some(1), Some(0)], "{stages:?}");
    let options = keys::options(&keys, "client", Role::Client, &site.broker.url())?;
    let bus = Bus::connect(options).await?;
    let case = &cases()?[0];
    ask(&bus, &model, case).await?;

    // What it fetched is in the cache by fingerprint, and nothing else.
    let cache = site.folder.path().join("cache").join(name);
    for (set, n_stages) in [(&set, 2), (&ShardSet::open(&draft)?, 1)] {
        let cached = ShardSet::open(&cache.join(&set.manifest.fingerprint))?;
        for stage in 0..n_stages {
            cached.verify_stage(stage)?;
        }
        cached.verify_text()?;
    }

    // The next one takes the place of the one that is gone, with the files that are here.
    let gone = one.ready["stage"].clone();
    drop(one);
    let three = site.worker(name, "three").await?;
    ensure!(three.ready["stage"] == gone, "{} instead of {gone}", three.ready);
    let log = fs::read_to_string(site.folder.path().join("three"))?;
    ensure!(log.contains("fetched_bytes=0"), "{log}");
    ask(&bus, &model, &cases()?[1]).await?;
    for part in [coordinator, two, three] {
        part.end().await?;
    }

    // What else an operator may.
    let out = site.folder.path().join("out");
    let call = site.call(&["pull", name, "--stage", "0"], "operator").arg("--out");
    call.arg(&out).run().await?.success()?;
    ShardSet::open(&out)?.verify_stage(0)?;
    let remove =
        |words: &[&str]| site.call(&[&["models", "remove", name][..], words].concat(), "operator");
    let told =
        remove(&["--fingerprint", &set.manifest.fingerprint, "--json"]).run().await?.success()?;
    let left = told.json()?;
    ensure!(left[0]["sets"] == serde_json::json!([]), "{left}");
    ensure!(left[0]["drafts"][0]["complete"] == true, "{left}");
    let told = remove(&["--json"]).run().await?.success()?;
    ensure!(told.json()? == serde_json::json!([]), "{}", told.report());
    remove(&[]).run().await?.failure(&["no shard set of model", name])?;
    Ok(())
}

/// Asks for a case of the reference and compares the tokens.
async fn ask(bus: &Bus, model: &ModelName, case: &crate::prompts::Case) -> Result<()> {
    let (subject, payload) =
        (Subjects::new(model).prompt(), serde_json::to_vec(&of_case(case, 64))?);
    let content = ContentType::Json;
    let mut stream = bus.event_stream(&subject, content, payload.into(), PATIENCE).await?;
    let answer = Answer::default().rest(&mut stream).await?;
    ensure!(answer.tokens == case.output_ids, "{answer:?}");
    Ok(())
}

#[tokio::test]
async fn what_is_stored_is_read_by_others_pulled_and_removed() -> Result<()> {
    let _turn = turn::take().await;
    let broker = LocalBroker::start(BrokerOptions::default()).await?;
    let url = broker.url();
    let at = |words: &[&str]| Call::new(words.iter().copied()).args(&["--broker", &url]);
    let shards = shard_sets::get(2).await?;
    let (set, model) = model_of(&shards)?;
    let fingerprint = set.manifest.fingerprint.as_str();
    let told = at(&["models"]).run().await?.success()?;
    ensure!(told.stdout().contains("nothing is stored"), "{}", told.report());
    at(&["push"]).arg(&shards).run().await?.success()?;

    let script = setup::root().join("tests").join("clients").join("object_store.py");
    let bucket = Bucket::of(&model);
    let read = foreign_client::run(&script, &[&url, bucket.name()]).await?;
    let read: Value = serde_json::from_str(&read)?;
    let stages = set.manifest.stages.iter().flat_map(|stage| [&stage.xml, &stage.bin]);
    let mut n_files = 1;
    for file in stages.chain(&set.manifest.text_files) {
        let found = &read[object_name(fingerprint, &file.name)];
        ensure!(found["sha256"] == file.sha256 && found["bytes"] == file.bytes, "{read:#}");
        n_files += 1;
    }
    ensure!(read.as_object().is_some_and(|objects| objects.len() == n_files), "{read:#}");

    let folder = tempfile::tempdir()?;
    let out = folder.path().join("set");
    let pull = |words: &[&str]| at(&["pull", "--json"]).arg("--out").arg(&out).args(words);
    let told = pull(&["--stage", "1"]).run().await?.success()?;
    ensure!(told.json()?["kept_bytes"] == 0, "{}", told.report());
    let told =
        pull(&[model.as_str(), "--fingerprint", &fingerprint[..8]]).run().await?.success()?;
    let pulled = told.json()?;
    let bin = &set.manifest.stages[1].bin;
    ensure!(pulled["kept_bytes"].as_u64() > Some(bin.bytes), "{pulled}");
    let pulled = ShardSet::open(&out)?;
    ensure!(pulled.manifest == set.manifest, "another manifest");
    pulled.verify_stage(0)?;
    let told = pull(&["--fingerprint", "ffff0000"]).run().await?;
    told.failure(&["ffff0000", fingerprint])?;

    let removed = at(&["models", "remove", model.as_str(), "--json"]).run().await?.success()?;
    ensure!(removed.json()? == serde_json::json!([]), "{}", removed.report());
    pull(&[model.as_str()]).run().await?.failure(&["no shard set of model", model.as_str()])?;
    drop(broker);

    // The claims of the benchmark hold for a small size too.
    let bench = Call::new(["bench", "delivery", "--mib", "40", "--json"]);
    let found = bench.run().await?.success()?.last_json()?;
    for claim in found["claims"].as_array().context("no claims")? {
        ensure!(claim["holds"] == true, "{claim:#}");
    }
    ensure!(found["broken_pull"]["parts"] == found["parts"], "{found:#}");
    Ok(())
}
