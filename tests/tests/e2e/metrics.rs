//! What Prometheus sees of a fleet at work.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stagebus_fleet::Member;
use stagebus_tests::collector::Collector;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::scrape::{Scrape, get};
use stagebus_tests::wait;

use crate::prompts::{self, cases};
use crate::traces::check_recovered;

/// Every process listens on a free port of its own.
const ANYWHERE: &str = "metrics.listen=0";

fn coordinator(fleet: &Fleet) -> Result<Member> {
    let mut members = fleet.processes.members().into_iter();
    members.find(|member| member.stage.is_none()).context("no coordinator")
}

/// Fails unless the sample has this value.
fn expect(scrape: &Scrape, name: &str, labels: &[(&str, &str)], expected: usize) -> Result<()> {
    let found = scrape.value(name, labels)?;
    // Counts are whole numbers, far below those that a float rounds.
    ensure!(
        found.to_string() == expected.to_string(),
        "{name} {labels:?}: {found}, not {expected}"
    );
    Ok(())
}

#[tokio::test]
async fn metrics_say_what_requests_have_done() -> Result<()> {
    let fleet = Fleet::start(2, |spec| spec.settings.push(ANYWHERE.to_owned())).await?;
    let cases = cases()?;
    // Long enough for whole blocks of the prefix cache.
    let shared: Vec<u32> =
        cases.iter().flat_map(|case| case.input_ids.iter().copied()).cycle().take(120).collect();
    let (mut n_prompt, mut n_output, mut n_cached, mut n_drafted, mut n_accepted) = (0, 0, 0, 0, 0);
    const N_REQUESTS: usize = 3;
    for _ in 0..N_REQUESTS {
        let request = json!({ "tokens": shared, "max_tokens": 24, "draft_tokens": 4,
                              "logit_bias": { "2": -100 } });
        let answer = fleet.ask(&request).await?;
        let usage = answer.usage()?;
        n_prompt += answer.prompt_tokens()?;
        n_output += answer.tokens.len();
        n_cached += usage.cached_tokens as usize;
        n_drafted += usage.drafted_tokens as usize;
        n_accepted += usage.accepted_tokens as usize;
    }
    let refused = fleet.ask(&json!({ "prompt": "a", "messages": [] })).await?;
    refused.failure()?;
    ensure!(n_cached > 0 && n_drafted > 0, "{n_cached} cached, {n_drafted} drafted");
    fleet.idle().await?;

    let scrape = Scrape::of(&coordinator(&fleet)?).await?;
    let is = |name: &str, labels: &[(&str, &str)], expected| {
        expect(&scrape, &format!("stagebus_coordinator_{name}"), labels, expected)
    };
    is("requests_total", &[("outcome", "length")], N_REQUESTS)?;
    is("requests_total", &[("outcome", "invalid_request")], 1)?;
    is("requests_total", &[("outcome", "overloaded")], 0)?;
    is("prompt_tokens_total", &[], n_prompt)?;
    is("cached_prompt_tokens_total", &[], n_cached)?;
    is("generated_tokens_total", &[], n_output)?;
    is("drafted_tokens_total", &[], n_drafted)?;
    is("accepted_tokens_total", &[], n_accepted)?;
    is("time_to_first_token_seconds_count", &[], N_REQUESTS)?;
    is("inter_token_seconds_count", &[], n_output - N_REQUESTS)?;
    is("request_seconds_count", &[], N_REQUESTS)?;
    is("queue_seconds_count", &[], N_REQUESTS)?;
    is("sessions", &[], 0)?;
    is("queued_requests", &[], 0)?;
    is("workers", &[("stage", "1")], 1)?;
    let n_steps =
        scrape.value("stagebus_coordinator_step_seconds_count", &[("phase", "decode")])?;
    let n_hops = scrape.value("stagebus_coordinator_hop_seconds_count", &[])?;
    ensure!(n_steps > 3.0 && n_hops.total_cmp(&n_steps).is_eq(), "{n_steps} steps, {n_hops} hops");
    let time_of = |name: &str| scrape.value(&format!("stagebus_coordinator_{name}_sum"), &[]);
    let (first, whole) = (time_of("time_to_first_token_seconds")?, time_of("request_seconds")?);
    ensure!(0.0 < first && first < whole, "{first} s to the first token, {whole} s in all");

    for stage in 0..2 {
        let worker = &fleet.workers(stage)[0];
        let load = fleet.load(worker).await?;
        let scrape = Scrape::of(worker).await?;
        let label = stage.to_string();
        let is = |name: &str, labels: &[(&str, &str)], expected| {
            let labels = [&[("stage", label.as_str())], labels].concat();
            expect(&scrape, &format!("stagebus_worker_{name}"), &labels, expected)
        };
        is("ready", &[], 1)?;
        is("sessions", &[], 0)?;
        is("queue_steps", &[], 0)?;
        is("kv_tokens", &[], 0)?;
        is("kv_capacity_bytes", &[], usize::try_from(load.kv_max_bytes)?)?;
        is("rows_total", &[], usize::try_from(load.rows_completed)?)?;
        is("steps_total", &[("outcome", "done")], usize::try_from(load.steps_completed)?)?;
        is("steps_total", &[("outcome", "failed")], 0)?;
        is("prompt_tokens_total", &[], n_prompt)?;
        is("prefix_hit_tokens_total", &[], n_cached)?;
        let sample = |name: &str| scrape.value(&format!("stagebus_worker_{name}"), &[]);
        ensure!(sample("kv_capacity_tokens")? > 0.0, "no capacity is known");
        ensure!(sample("decode_seconds_sum")? > 0.0 && sample("prefill_seconds_sum")? > 0.0);
        ensure!(sample("received_bytes_total")? > 0.0, "nothing was received");
        ensure!(scrape.sum("stagebus_worker_sent_bytes_total") > 0.0, "nothing was sent");
        let batches = sample("micro_batch_rows_count")?;
        ensure!(batches.total_cmp(&sample("micro_batch_sessions_count")?).is_eq(), "{batches}");
        let address = worker.metrics.context("an address")?;
        ensure!(get(address, "/health").await? == "ok\n");
    }
    fleet.end().await
}

#[tokio::test]
async fn metrics_and_traces_tell_a_recovery_by_its_class() -> Result<()> {
    let collector = Collector::start().await?;
    let mut fleet = Fleet::start(2, |spec| {
        spec.workers_per_stage = 2;
        spec.settings.push(ANYWHERE.to_owned());
        spec.settings.push(format!("telemetry.otlp_endpoint={}", collector.url()));
        spec.settings.push("coordinator.step_timeout_ms=3600000".to_owned());
    })
    .await?;
    let coordinator = coordinator(&fleet)?;
    let workers = |scrape: &Scrape, expected| {
        expect(scrape, "stagebus_coordinator_workers", &[("stage", "1")], expected).ok()
    };
    let two = wait::until("both workers are known", async || {
        let scrape = Scrape::of(&coordinator).await?;
        Ok(workers(&scrape, 2).map(|()| scrape))
    })
    .await?;
    ensure!(two.sum("stagebus_coordinator_recoveries_total") < 1.0, "{two:?}");
    let mut request = prompts::endless();
    request["max_tokens"] = json!(120);
    let (answer, mut stream) = fleet.begin(&request, 3).await?;
    let running = Scrape::of(&coordinator).await?;
    expect(&running, "stagebus_coordinator_sessions", &[], 1)?;
    let sessions = fleet.sessions(1).await?;
    let busy = sessions.iter().position(|&n| n == 1).context("no worker holds the session")?;
    let name = fleet.workers(1)[busy].name.clone();
    fleet.processes.kill(&name).await?;
    answer.rest(&mut stream).await?.reason()?;
    let after = Scrape::of(&coordinator).await?;
    let recovered = after
        .value("stagebus_coordinator_recoveries_total", &[("class", "worker_gone")])
        .context("the class is shown")?;
    ensure!(recovered >= 1.0, "{recovered} recoveries from a worker that is gone");
    wait::until("one worker is left", async || {
        let scrape = Scrape::of(&coordinator).await?;
        Ok(workers(&scrape, 1))
    })
    .await?;
    fleet.end().await?;
    check_recovered(&collector.spans()?)
}

#[tokio::test]
async fn a_coordinator_that_hosts_a_stage_shows_both() -> Result<()> {
    let fleet = Fleet::start(1, |spec| {
        spec.host_stage0 = true;
        spec.settings.push(ANYWHERE.to_owned());
        // Nobody collects there: it works and ends all the same.
        spec.settings.push("telemetry.otlp_endpoint=http://127.0.0.1:1".to_owned());
    })
    .await?;
    let answer = fleet.ask(&prompts::short()).await?;
    let scrape = Scrape::of(&coordinator(&fleet)?).await?;
    let n_tokens = answer.tokens.len();
    expect(&scrape, "stagebus_coordinator_generated_tokens_total", &[], n_tokens)?;
    let rows = scrape.value("stagebus_worker_rows_total", &[("stage", "0")])?;
    ensure!(rows > 0.0, "the hosted worker has run nothing");
    fleet.end().await
}

#[tokio::test]
async fn an_address_that_is_taken_stops_the_start_and_says_so() -> Result<()> {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = taken.local_addr()?.to_string();
    let set = stagebus_tests::shard_sets::get(1).await?;
    for role in [["worker", "--stage=0"], ["coordinator", "--wait-for-workers"]] {
        let call = stagebus_tests::program::Call::new(role);
        let told =
            call.arg("--shards").arg(&set).args(&["--metrics-listen", &address]).run().await?;
        told.failure(&[&format!("cannot listen on {address}"), "metrics.listen"])?;
    }
    Ok(())
}
