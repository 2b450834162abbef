//! Machines are measured, the plan is written, the fleet starts as written.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stagebus_tests::broker::PlainBroker;
use stagebus_tests::program::{Call, signal};
use stagebus_tests::{setup, turn, wait};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use crate::prompts::cases;

const QUESTION: &str = "What is the capital of Japan?";

/// Starts a process and waits for the line that says that it is ready.
async fn start(call: Call) -> Result<(Child, Value)> {
    let mut child = call.start()?;
    let stdout = child.stdout.take().context("no standard output")?;
    let mut line = String::new();
    let mut lines = BufReader::new(stdout);
    tokio::time::timeout(wait::PATIENCE, lines.read_line(&mut line)).await??;
    let ready: Value = serde_json::from_str(&line).context("no ready line")?;
    ensure!(ready["ready"] == true, "{ready}");
    Ok((child, ready))
}

/// Ends processes as Ctrl-C does, in order.
async fn end(children: Vec<Child>) -> Result<()> {
    for mut child in children {
        signal("INT", &child).await?;
        let status = tokio::time::timeout(wait::PATIENCE, child.wait()).await??;
        ensure!(status.success(), "{status}");
    }
    Ok(())
}

/// What a node has of the model.
enum Has<'a> {
    /// Its file, whose probe is kept in a folder.
    File(&'a Path),
    /// Nothing; what it pulls is kept in a folder.
    Nothing(&'a Path),
}

async fn node(broker: &PlainBroker, name: &str, has: Has<'_>) -> Result<Child> {
    let call = Call::new(["node", "--devices", "CPU", "--name", name, "--broker", broker.url()])
        .args(&["--set", "worker.profile=exact", "--set", "worker.threads=1"]);
    let call = match has {
        Has::File(cache) => call.arg("--model").arg(setup::model()?).arg("--cache").arg(cache),
        Has::Nothing(pulled) => {
            call.arg("--set").arg(format!("store.cache_dir={}", pulled.display()))
        }
    };
    let (child, ready) = start(call).await?;
    ensure!(ready["name"] == name && ready["devices"][0] == "CPU", "{ready}");
    Ok(child)
}

#[tokio::test]
async fn what_is_planned_runs_as_it_is_written() -> Result<()> {
    let _turn = turn::take().await;
    let broker = PlainBroker::start_with(&setup::root().join("nats.conf")).await?;
    let folder = tempfile::tempdir()?;
    let pulled = folder.path().join("pulled");
    let (cache, planned) = (folder.path().join("cache"), folder.path().join("planned"));
    let plan = Call::new(["--quiet", "plan", "--broker", broker.url(), "--cache"])
        .arg(&cache)
        .arg(setup::model()?);
    plan.clone().run().await?.failure(&["no node answered", "stagebus node"])?;

    let nodes = vec![
        node(&broker, "a", Has::File(&cache)).await?,
        node(&broker, "b", Has::Nothing(&pulled)).await?,
    ];
    plan.clone()
        .args(&["--nodes", "3"])
        .run()
        .await?
        .failure(&["2 of 3 nodes answered", "a, b"])?;
    let report = plan
        .args(&["--nodes", "2", "--stages", "2", "--context", "1024", "--json", "--apply"])
        .arg(&planned)
        .run()
        .await?
        .success()?
        .json()?;
    end(nodes).await?;
    check(&report)?;
    let stages = std::fs::read_dir(&pulled)?.count();
    ensure!(stages > 0, "nothing was pulled");
    let stored = Call::new(["models", "--json", "--broker", broker.url()]).run().await?;
    ensure!(stored.success()?.json()? == Value::Array(Vec::new()), "the probe was left");

    let commands = report["applied"]["commands"].as_array().context("commands")?;
    let mut fleet = Vec::new();
    // The worker first: the coordinator is ready without it, but has nobody to give a request to.
    for command in commands.iter().rev() {
        let line = command["command"].as_str().context("a command")?;
        let mut words = line.split(' ');
        ensure!(words.next() == Some("stagebus"), "{line}");
        fleet.push(start(Call::new(words)).await?.0);
    }
    let ask = Call::new(["ask", "--json", "--broker", broker.url(), QUESTION]);
    let answer = ask.run().await?.success()?.json()?;
    let tokens: Vec<u32> = serde_json::from_value(answer["tokens"].clone())?;
    ensure!(tokens == cases()?[0].output_ids, "{answer:#}");
    let status = Call::new(["status", "--json", "--broker", broker.url()]).run().await?;
    let status = status.success()?.json()?;
    let workers = status["models"][0]["workers"].as_array().context("workers")?;
    for (worker, stage) in
        workers.iter().zip(report["chosen"]["stages"].as_array().into_iter().flatten())
    {
        for field in ["first_layer", "end_layer", "device"] {
            ensure!(worker[field] == stage[field], "{field} of {worker} is not that of {stage}");
        }
        ensure!(worker["profile"] == "exact", "{worker}");
    }
    ensure!(workers.len() == 2, "{status:#}");
    // The coordinator first, as it hosts a stage and has sessions on the other.
    fleet.reverse();
    end(fleet).await
}

#[tokio::test]
async fn a_node_without_the_model_needs_a_broker_that_stores() -> Result<()> {
    let _turn = turn::take().await;
    let broker = PlainBroker::start().await?;
    let folder = tempfile::tempdir()?;
    let nodes = vec![node(&broker, "empty", Has::Nothing(folder.path())).await?];
    let plan = Call::new(["plan", "--broker", broker.url(), "--cache"])
        .arg(folder.path().join("cache"))
        .arg(setup::model()?);
    let refused = ["on empty: the probe is lent", "the probe is not stored", "no JetStream"];
    plan.run().await?.failure(&refused)?;
    end(nodes).await
}

/// The plan covers the model, and what it predicts follows from what was measured.
fn check(report: &Value) -> Result<()> {
    let number = |value: &Value| value.as_f64().context("a number");
    let split: Vec<usize> = serde_json::from_value(report["chosen"]["split"].clone())?;
    ensure!(split.len() == 2 && split.iter().sum::<usize>() == setup::N_LAYERS, "{report:#}");
    let stages = report["chosen"]["stages"].as_array().context("stages")?;
    ensure!(stages[0]["node"] != stages[1]["node"], "{report:#}");
    ensure!(report["chosen"]["coordinator"] == stages[0]["node"], "{report:#}");
    for node in report["nodes"].as_array().context("nodes")? {
        let device = &node["devices"][0];
        let layer = number(&device["layer"]["one_ms"])?;
        ensure!(layer > 0.0 && number(&device["head"]["one_ms"])? > layer, "{node:#}");
        ensure!(number(&device["kv_token_bytes"])? > 0.0, "{node:#}");
        ensure!(number(&node["handoff_ms"])? > 0.0, "{node:#}");
        ensure!(node["profile"] == "exact" && node["threads"] == 1, "{node:#}");
    }
    let parts = &report["chosen"]["parts"];
    let parts = ["passes_ms", "links_ms", "handoffs_ms"].map(|part| number(&parts[part]));
    let sum = parts.into_iter().sum::<Result<f64>>()?;
    let token = number(&report["chosen"]["token_ms"])?;
    ensure!((token - sum).abs() < 1e-6 && token > 1.0, "{report:#}");
    ensure!(number(&report["links"]["hidden_ms"][0][1])? > 0.0, "{report:#}");
    Ok(())
}
