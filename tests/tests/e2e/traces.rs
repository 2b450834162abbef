//! One request, one trace: what an OpenTelemetry collector gets from a fleet behind a gateway.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stagebus_schemas::trace::{TRACEPARENT, TraceContext};
use stagebus_settings::{MetricsSettings, TelemetrySettings};
use stagebus_telemetry::Telemetry;
use stagebus_tests::collector::{Collector, Received};
use stagebus_tests::fleet::Fleet;
use stagebus_tests::program::Call;

use crate::gateway::Gateway;

/// A word that stands in no model and no program.
const CANARY: &str = "Xyloqwrtz";

/// The span of a client that records it.
const RECORDED: TraceContext = TraceContext { trace_id: 0xfeed, span_id: 0xbeef, is_sampled: true };

/// The span of a client that does not.
const UNRECORDED: TraceContext =
    TraceContext { trace_id: 0xdead, span_id: 0xbeef, is_sampled: false };

/// Spans that wait for a collector at most.
const N_WAITING: usize = 2_048;

/// Many more.
const N_MANY: usize = 20_000;

/// Asks a gateway within a client's span, and returns what was used.
async fn ask(gateway: &Gateway, fleet: &Fleet, span: TraceContext) -> Result<Value> {
    let body = json!({
        "model": fleet.model.as_str(), "prompt": format!("{CANARY} is a word, and so is"),
        "max_tokens": 20, "temperature": 0, "logit_bias": { "2": -100 },
    });
    let header = format!("{TRACEPARENT}: {span}\r\n");
    let path = "/v1/completions";
    let (status, answer) = gateway.send_with("POST", path, &header, &body.to_string()).await?;
    ensure!(status == 200, "{status}: {answer}");
    let answer: Value = serde_json::from_str(&answer)?;
    Ok(answer["usage"].clone())
}

/// The one span of this name within another one.
fn within<'a>(spans: &'a [Received], parent: &Received, name: &str) -> Result<&'a Received> {
    let is_it = |span: &&Received| span.name == name && span.parent == Some(parent.span_id);
    let mut found = spans.iter().filter(is_it);
    let span = found.next().with_context(|| format!("no {name} within {parent:?}"))?;
    ensure!(found.next().is_none(), "{name} comes twice");
    Ok(span)
}

/// Whether a span is within the time of another one of the same process.
fn is_inside(inner: &Received, outer: &Received) -> bool {
    outer.time.0 <= inner.time.0 && inner.time.0 <= inner.time.1 && inner.time.1 <= outer.time.1
}

/// The outermost span of a trace.
fn outermost(spans: &[Received]) -> Result<&Received> {
    let request = spans.iter().find(|span| span.name == "request").context("no request")?;
    ensure!(request.service == "stagebus-coordinator", "{request:?}");
    Ok(request)
}

/// The stages of the spans within a session.
fn stages<'a>(spans: &'a [Received], session: &Received) -> Result<Vec<&'a str>> {
    let of_session =
        |span: &&Received| span.name == "stage" && span.parent == Some(session.span_id);
    let stages = spans.iter().filter(of_session).map(|span| note(span, "stagebus.stage"));
    let mut stages: Vec<&str> = stages.collect::<Result<_>>()?;
    stages.sort_unstable();
    Ok(stages)
}

/// Checks the trace of the one request that a dead worker has interrupted.
pub(crate) fn check_recovered(spans: &[Received]) -> Result<()> {
    let request = outermost(spans)?;
    let of_request =
        |span: &&Received| span.name == "session" && span.parent == Some(request.span_id);
    let mut sessions: Vec<&Received> = spans.iter().filter(of_request).collect();
    sessions.sort_by_key(|session| session.time);
    let [interrupted @ .., last] = sessions.as_slice() else { bail!("no session: {spans:?}") };
    let is_gone = |session: &&Received| {
        session.attributes.get("error.type").is_some_and(|class| class == "worker_gone")
    };
    ensure!(interrupted.iter().any(is_gone), "{interrupted:?}");
    ensure!(!last.attributes.contains_key("error.type"), "{last:?}");
    let epochs: Vec<u32> = sessions
        .iter()
        .map(|session| Ok(note(session, "stagebus.epoch")?.parse()?))
        .collect::<Result<_>>()?;
    ensure!(epochs.is_sorted_by(|a, b| a < b), "{epochs:?}");
    ensure!(stages(spans, last)? == ["0", "1"], "{spans:?}");
    Ok(())
}

/// Checks the trace of a request that was done, and returns its outermost span.
fn check_done(spans: &[Received]) -> Result<&Received> {
    let request = outermost(spans)?;
    ensure!(request.events == ["first token"], "{request:?}");
    let (queue, session) = (within(spans, request, "queue")?, within(spans, request, "session")?);
    ensure!(is_inside(queue, request) && is_inside(session, request), "{spans:?}");
    for stage in spans.iter().filter(|span| span.name == "stage") {
        ensure!(stage.service == "stagebus-worker", "{stage:?}");
        for name in ["prefill", "decode"] {
            let steps = within(spans, stage, name)?;
            ensure!(is_inside(steps, stage), "{steps:?} is not inside {stage:?}");
            let n_steps: u32 = note(steps, "stagebus.steps")?.parse()?;
            let n_rows: u32 = note(steps, "stagebus.rows")?.parse()?;
            ensure!(n_steps > 0 && n_rows >= n_steps, "{steps:?}");
        }
    }
    ensure!(stages(spans, session)? == ["0", "1"] && spans.len() == 3 + 2 * 3, "{spans:?}");
    Ok(request)
}

/// What is noted of a span.
fn note<'a>(span: &'a Received, key: &str) -> Result<&'a str> {
    span.attributes.get(key).map(String::as_str).with_context(|| format!("no {key} in {span:?}"))
}

#[tokio::test]
async fn a_request_is_one_trace_from_its_client_to_the_last_stage() -> Result<()> {
    let collector = Collector::start().await?;
    let setting = format!("telemetry.otlp_endpoint={}", collector.url());
    let fleet = Fleet::start(2, |spec| spec.settings.push(setting)).await?;
    let folder = tempfile::tempdir()?;
    let call = Call::new(["gateway", "--broker", fleet.processes.url()]);
    let gateway = Gateway::start(call, &folder.path().join("log")).await?;
    gateway.lists(fleet.model.as_str()).await?;

    // It asks for a token, which is no part of any trace.
    let (status, _) = gateway.send_with("GET", "/ready", "", "").await?;
    ensure!(status == 200, "not ready: {status}");
    let usage = ask(&gateway, &fleet, RECORDED).await?;
    ask(&gateway, &fleet, UNRECORDED).await?;
    let request = json!({ "prompt": CANARY, "max_tokens": 24, "logit_bias": { "2": -100 } });
    let answer = fleet.ask(&request).await?;
    fleet.ask(&json!({ "prompt": CANARY, "messages": [] })).await?.failure()?;
    fleet.idle().await?;
    gateway.end().await?;
    // Each process sends its last spans before it ends.
    fleet.end().await?;

    let spans = collector.spans()?;
    let mut traces = BTreeMap::<u128, Vec<Received>>::new();
    for span in &spans {
        traces.entry(span.trace_id).or_default().push(span.clone());
    }
    let recorded = traces.remove(&RECORDED.trace_id).context("the client's trace is missing")?;
    let request = check_done(&recorded)?;
    ensure!(request.parent == Some(RECORDED.span_id), "{request:?}");
    for (key, name) in [
        ("gen_ai.usage.input_tokens", "prompt_tokens"),
        ("gen_ai.usage.output_tokens", "completion_tokens"),
    ] {
        let n_tokens: u64 = note(request, key)?.parse()?;
        ensure!(usage[name] == n_tokens, "{name} of {request:?}");
    }
    for prefill in recorded.iter().filter(|span| span.name == "prefill") {
        let n_rows: u64 = note(prefill, "stagebus.rows")?.parse()?;
        ensure!(usage["prompt_tokens"] == n_rows, "{prefill:?}");
    }
    ensure!(!traces.contains_key(&UNRECORDED.trace_id), "what the client does not record is kept");

    let (refused, done): (Vec<_>, Vec<_>) = traces.values().partition(|spans| spans.len() == 1);
    let ([refused], [done]) = (refused.as_slice(), done.as_slice()) else {
        bail!("two more traces are expected: {traces:?}");
    };
    ensure!(note(&refused[0], "error.type")? == "invalid_request", "{refused:?}");
    ensure!(check_done(done)?.parent.is_none(), "{done:?}");
    let told = format!("{spans:?}");
    ensure!(answer.text.len() > 20 && !told.contains(answer.text.trim()), "{told}");
    ensure!(!told.contains(CANARY), "{told}");
    Ok(())
}

#[tokio::test]
async fn spans_beyond_the_queue_are_dropped_and_nobody_waits_for_a_collector() -> Result<()> {
    let collector = Collector::start().await?;
    let otlp_endpoint = Some(stagebus_settings::Collector::try_from(collector.url())?);
    let settings = TelemetrySettings { otlp_endpoint, ..TelemetrySettings::default() };
    let mut telemetry = Telemetry::start(&MetricsSettings::default(), &settings, "test").await?;
    let tracer = telemetry.coordinator().tracer;
    // On the one thread of this test: the collector answers nothing until all of them have ended.
    for _ in 0..N_MANY {
        let now = Instant::now();
        tracer.begin("request", None, now).context("all are in the sample")?.end(now);
    }
    telemetry.end().await;
    let n_spans = collector.spans()?.len();
    ensure!((N_WAITING..N_MANY / 2).contains(&n_spans), "{n_spans} of {N_MANY} spans have come");
    ensure!(tracer.begin("request", None, Instant::now()).is_none(), "nobody sends it any more");
    Ok(())
}
