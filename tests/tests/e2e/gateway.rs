//! The HTTP API in front of a real fleet, as its users' programs and the broker's keys see it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_tests::fleet::Fleet;
use stagebus_tests::program::Call;
use stagebus_tests::{setup, shard_sets, wait};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Child;

use crate::foreign_client;
use crate::secured::made_keys;

/// Longest wait for a response.
const PATIENCE: Duration = Duration::from_secs(120);

/// A word that stands in no model and no program.
const CANARY: &str = "Xyloqwrtz";

/// The key of a client.
const KEY: &str = "sk-0123456789abcdef-Xyloqwrtz";

/// A running `stagebus gateway`; killed when dropped.
pub(crate) struct Gateway {
    process: Child,
    pub(crate) base_url: String,
    address: String,
}

impl Gateway {
    /// Starts one on a free port.
    pub(crate) async fn start(call: Call, log: &Path) -> Result<Self> {
        let mut process = call.args(&["--listen", "127.0.0.1:0"]).start_logged(log)?;
        let stdout = process.stdout.take().context("no standard output")?;
        let mut line = String::new();
        tokio::time::timeout(PATIENCE, BufReader::new(stdout).read_line(&mut line)).await??;
        let ready: Value = serde_json::from_str(&line)
            .with_context(|| std::fs::read_to_string(log).unwrap_or_default())?;
        let text = |name: &str| ready[name].as_str().map(str::to_owned).context("not ready");
        Ok(Self { base_url: text("base_url")?, address: text("listen")?, process })
    }

    /// Sends a request and returns status and body.
    async fn send(&self, method: &str, path: &str, body: &str) -> Result<(u16, String)> {
        self.send_with(method, path, "", body).await
    }

    /// Sends a request with more headers, each with its line's end.
    pub(crate) async fn send_with(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        body: &str,
    ) -> Result<(u16, String)> {
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\
             Content-Type: application/json\r\n{headers}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let exchange = async {
            let mut stream = TcpStream::connect(&self.address).await?;
            stream.write_all(request.as_bytes()).await?;
            let mut response = String::new();
            stream.read_to_string(&mut response).await?;
            let (head, body) = response.split_once("\r\n\r\n").context("no head")?;
            let status = head.split(' ').nth(1).context("no status")?.parse()?;
            anyhow::Ok((status, body.to_owned()))
        };
        tokio::time::timeout(PATIENCE, exchange).await?
    }

    /// Waits until a model is listed.
    pub(crate) async fn lists(&self, model: &str) -> Result<()> {
        wait::until("the model is listed", async || {
            let (status, _) = self.send("GET", &format!("/v1/models/{model}"), "").await?;
            Ok((status == 200).then_some(()))
        })
        .await
    }

    /// Ends it as Ctrl-C does, where there are signals.
    pub(crate) async fn end(mut self) -> Result<()> {
        if cfg!(unix) {
            let id = self.process.id().context("it has ended")?.to_string();
            let mut kill = tokio::process::Command::new("kill");
            ensure!(kill.args(["-TERM", &id]).status().await?.success(), "kill");
            let ended = tokio::time::timeout(PATIENCE, self.process.wait()).await??;
            ensure!(ended.success(), "the gateway ended with {ended}");
        }
        Ok(())
    }
}

#[tokio::test]
async fn the_official_client_gets_what_it_expects() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let folder = tempfile::tempdir()?;
    let call = Call::new(["gateway", "--broker", fleet.processes.url()]);
    let gateway = Gateway::start(call, &folder.path().join("log")).await?;
    gateway.lists(fleet.model.as_str()).await?;
    let script = setup::root().join("tests").join("clients").join("openai_api.py");
    let out = foreign_client::run(&script, &[&gateway.base_url, fleet.model.as_str()]).await?;
    let found: Value = serde_json::from_str(&out)?;

    ensure!(found["listed"] == json!([[fleet.model.as_str(), "stagebus"]]), "{found:#}");
    let messages = json!([{"role": "user", "content": "What is the capital of Japan?"}]);
    let asked = fleet.ask(&json!({"messages": messages})).await?;
    let (prompt, output) = (asked.prompt_tokens()?, asked.tokens.len());
    let whole = json!({"text": asked.text, "role": "assistant", "reason": "stop",
        "usage": [prompt, output, prompt + output], "id_is_the_header": true});
    ensure!(found["whole"] == whole, "{found:#}");
    let streamed = json!({"text": asked.text, "reason": "stop",
        "usage": [prompt, output, prompt + output], "several": true});
    ensure!(found["streamed"] == streamed, "{found:#}");
    let drawn = &found["drawn"];
    ensure!(drawn["both"] == drawn["each"] && drawn["both"][0] != drawn["both"][1], "{drawn:#}");

    let count = |more: Value| {
        let mut request = json!({"prompt": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,", "max_tokens": 12});
        more.as_object().into_iter().flatten().for_each(|(k, v)| request[k] = v.clone());
        request
    };
    let text = fleet.ask(&count(json!({}))).await?.text;
    let stopped = fleet.ask(&count(json!({"max_tokens": 60, "stop": [" 13"]}))).await?.text;
    let completed = json!({"whole": text, "streamed": text, "stopped": [stopped, "stop"]});
    ensure!(found["completed"] == completed, "{found:#}");

    let logprobs = &found["logprobs"];
    let bytes: Vec<u8> =
        serde_json::from_value::<Vec<Vec<u8>>>(logprobs["bytes"].clone())?.concat();
    ensure!(logprobs["text"] == String::from_utf8(bytes)?, "{logprobs:#}");
    for (name, expected) in [
        ("greedy", json!(true)),
        ("tops", json!([3, 3, 3, 3, 3])),
        ("negative", json!(true)),
        ("legacy_joined", json!(true)),
        ("legacy_tops", json!([2, 2, 2, 2])),
    ] {
        ensure!(logprobs[name] == expected, "{name} in {logprobs:#}");
    }
    ensure!(logprobs["legacy_offsets"][0] == 0, "{logprobs:#}");

    let structured = &found["structured"];
    let object = &structured["object"];
    let expected = json!({"object": object, "fits": true, "parsed": object,
        "streamed": [true, "stop"], "any_object": "{"});
    ensure!(*structured == expected, "{structured:#}");
    let called = json!({"name": "weather", "fits": true, "reason": "tool_calls", "content": null,
        "streamed": true, "free": [null, true], "auto": true, "required": "weather"});
    ensure!(found["called"] == called, "{:#}", found["called"]);

    let errors = json!({
        "model": ["NotFoundError", 404, "model_not_found", "model"],
        "temperature": ["BadRequestError", 400, "invalid_value", "temperature"],
        "stop": ["BadRequestError", 400, "invalid_value", "stop"],
        "functions": ["BadRequestError", 400, "unsupported_parameter", "functions"],
        "tools": ["BadRequestError", 400, "invalid_value", "tools[0].function.name"],
        "schema": ["BadRequestError", 400, "invalid_value", null],
        "context": ["BadRequestError", 400, "invalid_value", null],
        "large": ["APIStatusError", 413, "request_too_large", null],
        "embeddings": ["InternalServerError", 501, "embeddings_unavailable", null],
    });
    ensure!(found["errors"] == errors, "{:#}", found["errors"]);
    ensure!(found["cancelled"] == 3, "{found:#}");
    // Long before 4,000 tokens.
    fleet.idle().await?;
    gateway.end().await?;
    fleet.end().await
}

#[tokio::test]
async fn it_is_a_client_to_the_broker_and_logs_neither_text_nor_keys() -> Result<()> {
    let (folder, keys) = made_keys().await?;
    let fleet = Fleet::start(1, |spec| spec.keys = Some(keys.clone())).await?;
    let model = fleet.model.as_str();
    let call = |holder: &str| {
        let config = keys.join(holder).join("stagebus.toml");
        Call::new(["gateway", "--broker", fleet.processes.url(), "--config"])
            .arg(config)
            .args(&["--set", "log.level=trace"])
            .env("STAGEBUS_GATEWAY__API_KEYS", KEY)
    };
    // A key for one model does not hear of others.
    let refused = call("ben").args(&["--listen", "127.0.0.1:0"]).run().await?;
    ensure!(refused.code() == Some(4), "{}", refused.report());
    refused.failure(&["gateway.models"])?;

    let shards = shard_sets::get(1).await?;
    let of_ben = call("ben")
        .args(&["--set", &format!("gateway.models=[\"{model}\"]")])
        .args(&["--set", &format!("gateway.shards=[\"{}\"]", shards.display())]);
    for (name, call) in [("client", call("client")), ("ben", of_ben)] {
        let log = folder.path().join(format!("{name}.log"));
        let gateway = Gateway::start(call, &log).await?;
        gateway.lists(model).await?;
        for body in [
            json!({"model": model, "prompt": CANARY, "max_tokens": 2}),
            json!({"model": model, "prompt": CANARY, "max_tokens": 2, "stream": true}),
        ] {
            let (status, text) = gateway.send("POST", "/v1/completions", &body.to_string()).await?;
            ensure!(status == 200, "{name}: {text}");
        }
        // What is refused is told to the client, and to nobody else.
        for body in [
            json!({"model": "other", "prompt": CANARY}),
            json!({"model": "a.b", "prompt": CANARY}),
            json!({"model": model, "prompt": {CANARY: CANARY}}),
            json!({"model": model, "prompt": CANARY, CANARY: CANARY}),
            json!({"model": model, "prompt": CANARY, "stop": CANARY, "temperature": -1}),
        ] {
            let (status, text) = gateway.send("POST", "/v1/completions", &body.to_string()).await?;
            ensure!(status == 400 || status == 404, "{name}: {body} gives {status} {text}");
        }
        let body = json!({"model": model, "prompt": CANARY}).to_string();
        let (status, text) = gateway.send("POST", "/tokenize", &body).await?;
        ensure!(status == if name == "ben" { 200 } else { 501 }, "{name}: {status} {text}");
        gateway.end().await?;
        let log = std::fs::read_to_string(log)?;
        ensure!(log.contains("ready") && !log.contains(CANARY), "a text or key is logged:\n{log}");
    }
    fleet.end().await
}
