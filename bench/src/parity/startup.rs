//! From starting `stagebus up` to the first token of a first prompt.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use stagebus_bus::{Bus, BusOptions};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::messages::public::{Event, PromptRequest};
use stagebus_schemas::subjects::Subjects;
use stagebus_shards::WeightMode;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::{Context, UP_TO_FIRST_TOKEN};
use crate::harness::claims::Claim;
use crate::harness::machine;
use crate::harness::stats::median;

/// How often a fleet is started.
const N_STARTS: usize = 3;

/// Stages of the fleet that is started.
const N_STAGES: usize = 2;

/// How long a fleet may take to leave.
const PATIENCE: Duration = Duration::from_secs(20);

/// Longest wait for an event.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Times of starts, in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Startup {
    /// From the start of `stagebus up` until it says that it is ready.
    pub ready_s: Vec<f64>,
    /// From the start of `stagebus up` to the first token.
    pub first_token_s: Vec<f64>,
}

/// What `stagebus up --json` says when it is ready; other fields are not used.
#[derive(Debug, Deserialize)]
struct Up {
    broker: String,
    model: ModelName,
}

/// Starts fleets one after the other, with the user's defaults: no core is chosen, all threads.
/// `None` if no set of two stages was made.
///
/// # Errors
/// A fleet that does not start, answer or leave.
pub(super) async fn run(context: &Context, stages: &[usize]) -> anyhow::Result<Option<Startup>> {
    if !stages.contains(&N_STAGES) {
        return Ok(None);
    }
    let shards = context.set(N_STAGES, WeightMode::Exact)?;
    let mut startup = Startup { ready_s: Vec::new(), first_token_s: Vec::new() };
    for _ in 0..N_STARTS {
        let started = Instant::now();
        let mut child = spawn(shards)?;
        let up = ready(&mut child).await?;
        startup.ready_s.push(started.elapsed().as_secs_f64());
        first_token(&up, &context.prompt).await?;
        startup.first_token_s.push(started.elapsed().as_secs_f64());
        end(child).await?;
    }
    Ok(Some(startup))
}

fn spawn(shards: &Path) -> anyhow::Result<Child> {
    Command::new(machine::this_program()?)
        .args(["up", "--broker-port", "0", "--json", "--quiet", "--shards"])
        .arg(shards)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .context("cannot start `stagebus up`")
}

async fn ready(child: &mut Child) -> anyhow::Result<Up> {
    let stdout = child.stdout.take().context("`stagebus up` has no standard output")?;
    let line = BufReader::new(stdout).lines().next_line().await?;
    let line = line.context("`stagebus up` ended before it was ready")?;
    serde_json::from_str(&line).with_context(|| format!("`stagebus up` wrote {line}"))
}

async fn first_token(up: &Up, prompt: &[u32]) -> anyhow::Result<()> {
    let bus = Bus::connect(BusOptions::new(up.broker.as_str(), "stagebus-bench")).await?;
    let request = PromptRequest {
        tokens: Some(prompt.to_vec()),
        max_tokens: Some(1),
        ..PromptRequest::default()
    };
    let subject = Subjects::new(&up.model).prompt();
    let mut events = bus.prompt(&subject, &request, IDLE_TIMEOUT).await?;
    while let Some(event) = events.next().await? {
        match event {
            Event::Token { .. } => return Ok(()),
            Event::Error { class, message, .. } => anyhow::bail!("{message} ({class:?})"),
            Event::Accepted { .. } | Event::Status { .. } | Event::Done { .. } => {}
        }
    }
    anyhow::bail!("the answer has no token")
}

/// Ends `stagebus up` as a user would; where there is no such signal it is killed, and its children
/// leave by themselves.
async fn end(mut child: Child) -> anyhow::Result<()> {
    if let (true, Some(pid)) = (cfg!(unix), child.id()) {
        let status = Command::new("kill").args(["-TERM", &pid.to_string()]).status().await?;
        anyhow::ensure!(status.success(), "cannot signal `stagebus up` ({status})");
        let left = tokio::time::timeout(PATIENCE, child.wait()).await;
        let status = left.context("`stagebus up` did not leave")??;
        anyhow::ensure!(status.success(), "`stagebus up` left with {status}");
        return Ok(());
    }
    child.kill().await.context("cannot end `stagebus up`")
}

/// The claim of a run.
pub(super) fn claim(startup: Option<&Startup>) -> Claim {
    let seconds = startup.and_then(|startup| median(startup.first_token_s.iter().copied()));
    match seconds {
        None => UP_TO_FIRST_TOKEN.missing("a set of 2 stages is needed: give --stages 2"),
        Some(seconds) => UP_TO_FIRST_TOKEN
            .measured(seconds, format!("median of {N_STARTS} starts, 2 stages, exact weights")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_up_is_read_and_more_fields_are_fine() {
        let line = r#"{"ready":true,"broker":"nats://127.0.0.1:5","model":"m","stages":2}"#;
        let up: Up = serde_json::from_str(line).expect("a ready line");
        assert_eq!((up.broker.as_str(), up.model.as_str()), ("nats://127.0.0.1:5", "m"));
    }

    #[test]
    fn the_claim_is_the_median_start() {
        let startup = Startup { ready_s: vec![], first_token_s: vec![9.0, 2.0, 3.0] };
        let claim = claim(Some(&startup));
        assert_eq!((claim.value, claim.holds), (Some(3.0), Some(true)));
        assert_eq!(super::claim(None).holds, None);
    }
}
