//! More sessions than fit: into the slots, into the KV memory, and beginnings that they share.

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::public::Event;
use stagebus_tests::answer::Answer;
use stagebus_tests::fleet::Fleet;

use crate::prompts::cases;

/// Answers of the requests, all sent at once.
pub(crate) async fn together(fleet: &Fleet, requests: &[Value]) -> Result<Vec<Answer>> {
    let mut streams = Vec::new();
    for request in requests {
        streams.push(fleet.send(serde_json::to_vec(request)?).await?);
    }
    let mut answers = Vec::new();
    for stream in &mut streams {
        answers.push(Answer::default().rest(stream).await?);
    }
    Ok(answers)
}

#[tokio::test]
async fn two_thousand_short_sessions_go_through_32_slots() -> Result<()> {
    let settings = [
        "worker.profile=fast",
        "worker.max_sessions=32",
        "coordinator.max_sessions=32",
        "coordinator.max_queued=2000",
        "coordinator.draft=off",
    ];
    let fleet = Fleet::start(2, |spec| spec.settings.extend(settings.map(str::to_owned))).await?;
    let cases = cases()?;
    let requests: Vec<Value> = (0..20_usize)
        .map(|i| json!({ "tokens": cases[i % 8].input_ids[i / 8..i / 8 + 5], "max_tokens": 2 }))
        .collect();
    let mut alone = Vec::new();
    for request in &requests {
        alone.push(fleet.ask(request).await?.tokens);
    }
    for _ in 0..4 {
        let crowd: Vec<Value> = requests.iter().cycle().take(500).cloned().collect();
        let answers = together(&fleet, &crowd).await?;
        for (i, answer) in answers.iter().enumerate() {
            let expected = &alone[i % alone.len()];
            ensure!(answer.tokens == *expected, "{i}: {answer:?} instead of {expected:?}");
        }
    }
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn sessions_that_give_way_for_want_of_memory_lose_nothing() -> Result<()> {
    // Without the limit on what sessions need, so that they push each other out.
    let settings = [
        "worker.profile=fast",
        "worker.kv_memory_mib=5",
        "coordinator.draft=off",
        "coordinator.kv_percent=0",
    ];
    let fleet = Fleet::start(2, |spec| spec.settings.extend(settings.map(str::to_owned))).await?;
    let cases = cases()?;
    let requests: Vec<Value> = (0..8_usize)
        .map(|i| {
            let priority = if i % 2 == 0 { "interactive" } else { "batch" };
            json!({ "tokens": cases[i].input_ids, "max_tokens": 150, "priority": priority,
                    "temperature": 1.0, "seed": i, "logit_bias": { "2": -100 } })
        })
        .collect();
    let mut alone = Vec::new();
    let mut n_tokens = 0;
    for request in &requests {
        let answer = fleet.ask(request).await?;
        n_tokens += answer.prompt_tokens()? + answer.tokens.len();
        alone.push(answer.tokens);
    }
    let (mut watched, mut stream) = fleet.begin(&requests[0], 20).await?;
    let load = fleet.load(&fleet.workers(0)[0]).await?;
    let needed = n_tokens as u64 * load.kv_bytes / load.kv_tokens.max(1);
    ensure!(needed > load.kv_max_bytes, "all fit: {needed} bytes of {}", load.kv_max_bytes);
    while watched.next(&mut stream).await? {}

    for (i, answer) in together(&fleet, &requests).await?.iter().enumerate() {
        let (found, expected) = (&answer.tokens, &alone[i]);
        ensure!(found == expected, "session {i}: {found:?} instead of {expected:?}, {answer:?}");
    }
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_shared_beginning_is_not_computed_again() -> Result<()> {
    let settings = ["worker.profile=fast", "coordinator.draft=off"];
    let fleet = Fleet::start(2, |spec| {
        spec.workers_per_stage = 2;
        spec.settings.extend(settings.map(str::to_owned));
    })
    .await?;
    let cases = cases()?;
    let shared: Vec<u32> =
        cases.iter().flat_map(|case| case.input_ids.iter().copied()).cycle().take(400).collect();
    let with_end = |end: &[u32]| {
        let tokens = [&shared[..], end].concat();
        json!({ "tokens": tokens, "max_tokens": 12 })
    };
    let cold = fleet.ask(&with_end(&cases[1].input_ids)).await?;
    ensure!(cold.usage()?.cached_tokens == 0, "{cold:?}");
    // The workers that have it get it, though the others are as free.
    let warm = fleet.ask(&with_end(&cases[1].input_ids)).await?;
    ensure!(warm.usage()?.cached_tokens >= 384, "{warm:?}");
    ensure!(warm.tokens == cold.tokens, "{:?} instead of {:?}", warm.tokens, cold.tokens);
    let other = fleet.ask(&with_end(&cases[2].input_ids)).await?;
    // Chats begin with the same words too, so the common part may be longer than `shared`.
    ensure!(other.usage()?.cached_tokens >= 384, "{other:?}");
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_crowd_past_the_queue_is_refused_and_the_rest_answered_right() -> Result<()> {
    let settings = ["coordinator.max_sessions=2", "coordinator.max_queued=3"];
    let fleet = Fleet::start(2, |spec| spec.settings.extend(settings.map(str::to_owned))).await?;
    let case = &cases()?[7];
    let request = serde_json::to_vec(&json!({ "tokens": case.input_ids, "max_tokens": 32 }))?;
    let mut streams = Vec::new();
    for _ in 0..40 {
        streams.push(fleet.send(request.clone()).await?);
    }
    let (mut n_done, mut n_refused) = (0, 0);
    for stream in &mut streams {
        match stream.next().await? {
            Some(Event::Error { class, message, retry_after_ms }) => {
                ensure!(class == ErrorClass::Overloaded, "{class:?}: {message}");
                ensure!(retry_after_ms.is_some_and(|ms| ms > 0), "no hint: {message}");
                n_refused += 1;
            }
            Some(Event::Accepted { .. }) => {
                let mut tokens = Vec::new();
                while let Some(event) = stream.next().await? {
                    match event {
                        Event::Token { tokens: more, .. } => tokens.extend(more),
                        Event::Done { .. } => {}
                        other => bail!("{other:?}"),
                    }
                }
                ensure!(tokens == case.output_ids[..32], "{tokens:?}");
                n_done += 1;
            }
            other => bail!("{other:?}"),
        }
    }
    // Five at a time have a place or wait; sending the others takes less time than those.
    ensure!(n_done >= 5 && n_refused > 0 && n_done + n_refused == 40, "{n_done} {n_refused}");
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn one_client_cannot_have_all_places() -> Result<()> {
    let limit = "coordinator.max_per_client=1".to_owned();
    let fleet = Fleet::start(1, |spec| spec.settings.push(limit.clone())).await?;
    let (running, mut stream) = fleet.begin(&crate::prompts::endless(), 1).await?;
    let refused = fleet.ask(&crate::prompts::short()).await?;
    let (class, message) = refused.failure()?;
    ensure!(class == ErrorClass::Overloaded && message.contains("this client"), "{message}");
    fleet.cancel(&running).await?;
    running.rest(&mut stream).await?;
    fleet.ask(&crate::prompts::short()).await?.reason()?;
    fleet.end().await
}
