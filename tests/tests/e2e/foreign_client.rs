//! A client that is not ours: `nats-py`, with JSON only.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::{foreign, setup};
use tokio::process::Command;

/// Runs a Python script to its end and returns its standard output.
pub(crate) async fn run(script: &Path, args: &[&str]) -> Result<String> {
    let mut command = Command::new(foreign::python().await?);
    command.arg(script).args(args);
    output_of(&mut command).await
}

/// Runs a program to its end and returns its standard output.
pub(crate) async fn output_of(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await;
    let output = output.with_context(|| format!("cannot run {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.success(), "{command:?} failed:\n{errors}\n{text}");
    Ok(text)
}

/// The names of the events of one request; the empty message is `null`.
fn names(events: &Value) -> Vec<&str> {
    let all = events.as_array().into_iter().flatten();
    all.map(|event| event["event"].as_str().unwrap_or("null")).collect()
}

#[tokio::test]
async fn nats_py_is_answered_cancelled_and_refused() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let script = setup::root().join("tests").join("clients").join("nats_py.py");
    let url = fleet.processes.url().to_owned();
    let found: Value = serde_json::from_str(&run(&script, &[&url, fleet.model.as_str()]).await?)?;

    let case = &crate::prompts::cases()?[0];
    let answered = &found["answered"];
    let order = names(answered);
    let n_tokens = order.len() - 3;
    ensure!(order[0] == "accepted" && order[1..=n_tokens].iter().all(|&name| name == "token"));
    ensure!(order[n_tokens + 1..] == ["done", "null"], "{answered:#}");
    ensure!(answered[0]["prompt_tokens"] == case.input_ids.len(), "{answered:#}");
    let mut tokens = Vec::new();
    for i in 0..n_tokens {
        let event = &answered[i + 1];
        ensure!(event["i"] == i, "{event:#}");
        tokens.extend(serde_json::from_value::<Vec<u32>>(event["tokens"].clone())?);
    }
    ensure!(tokens == case.output_ids, "{answered:#}");
    let done = &answered[n_tokens + 1];
    ensure!(done["finish_reason"] == "stop", "{done:#}");
    ensure!(done["usage"]["completion_tokens"] == tokens.len(), "{done:#}");
    for timing in ["queue_ms", "ttft_ms", "decode_tok_s"] {
        ensure!(done["timings"][timing].is_number(), "{timing} in {done:#}");
    }

    let cancelled = &found["cancelled"];
    let order = names(cancelled);
    ensure!(cancelled[0]["request_id"] == "python-1", "{cancelled:#}");
    ensure!(order.ends_with(&["done", "null"]) && order.len() < 1000, "{order:?}");
    ensure!(cancelled[order.len() - 2]["finish_reason"] == "cancelled", "{cancelled:#}");

    let refused = &found["refused"];
    ensure!(names(refused) == ["error", "null"], "{refused:#}");
    ensure!(refused[0]["class"] == "invalid_request", "{refused:#}");
    fleet.idle().await?;
    fleet.end().await
}
