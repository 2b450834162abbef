//! What a request can ask for, and in which encoding.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_schemas::codec::{self, ContentType};
use stagebus_schemas::messages::public::{FinishReason, PromptRequest};
use stagebus_tests::answer::Answer;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::program::Call;
use stagebus_tests::wait;

use crate::prompts;

#[tokio::test]
async fn generation_ends_where_it_is_told_to() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let case = &prompts::cases()?[0];
    let whole = fleet.ask(&prompts::of_case(case, 64)).await?;
    ensure!(whole.tokens == case.output_ids && whole.reason()? == FinishReason::Stop, "{whole:?}");

    let one = fleet.ask(&prompts::of_case(case, 1)).await?;
    ensure!(one.tokens == case.output_ids[..1] && one.reason()? == FinishReason::Length, "{one:?}");

    let at = whole.text.find("Japan").context("the answer names the country")?;
    let mut request = prompts::of_case(case, 64);
    request["stop"] = json!(["nowhere", "Japan"]);
    let stopped = fleet.ask(&request).await?;
    ensure!(stopped.text == whole.text[..at], "{stopped:?}");
    ensure!(stopped.reason()? == FinishReason::Stop, "{stopped:?}");

    request["stop"] = json!([]);
    request["stream"] = json!(false);
    let silent = fleet.ask(&request).await?;
    ensure!((silent.n_events, &silent.text) == (0, &whole.text), "{silent:?}");
    ensure!(silent.tokens == whole.tokens, "{silent:?}");

    // Greedy by every way of saying it.
    request["stream"] = json!(true);
    for (key, value) in [("temperature", json!(0)), ("seed", json!(7)), ("top_k", json!(1))] {
        request[key] = value;
        ensure!(fleet.ask(&request).await?.tokens == whole.tokens, "{key}");
    }
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_request_in_messagepack_is_answered_in_messagepack() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let case = &prompts::cases()?[0];
    let request = PromptRequest { tokens: Some(case.input_ids.clone()), ..Default::default() };
    let payload = codec::encode_public(ContentType::MessagePack, &request)?;
    let (subject, content) = (fleet.subjects().prompt(), ContentType::MessagePack);
    let open = async |payload: Vec<u8>| {
        fleet.bus.event_stream(&subject, content, payload.into(), wait::PATIENCE).await
    };
    let first = open(payload.clone()).await?.next_raw().await?.context("an event")?;
    ensure!(first.content() == content && !first.payload.starts_with(b"{"), "{first:?}");
    let answer = Answer::default().rest(&mut open(payload).await?).await?;
    ensure!(answer.tokens == case.output_ids, "{answer:?}");
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn several_coordinators_share_the_requests() -> Result<()> {
    let fleet = Fleet::start(2, |spec| spec.n_coordinators = 2).await?;
    let case = &prompts::cases()?[0];
    for _ in 0..16 {
        ensure!(fleet.ask(&prompts::of_case(case, 2)).await?.tokens == case.output_ids[..2]);
    }
    let url = fleet.processes.url().to_owned();
    let status =
        Call::new(["status", "--json", "--broker", &url]).run().await?.success()?.json()?;
    let coordinators = status["models"][0]["coordinators"].as_array().context("coordinators")?;
    let done: Vec<u64> =
        coordinators.iter().filter_map(|one: &Value| one["requests_done"].as_u64()).collect();
    // The broker picks by chance: all sixteen at one happens once in 32768 runs.
    ensure!(done.len() == 2 && done.iter().sum::<u64>() == 16, "{done:?}");
    ensure!(done.iter().all(|&n| n > 0), "{done:?}");
    fleet.end().await
}
