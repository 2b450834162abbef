//! Several sessions at a time, several workers of a stage, long prompts.

use std::cell::RefCell;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_bus::EventStream;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::control::{ControlAction, ControlOutcome, Drain};
use stagebus_schemas::messages::public::FinishReason;
use stagebus_tests::answer::Answer;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::wait;

use crate::prompts::{self, cases, of_case};

/// Reads to the end and notes whose event came when.
async fn read_noting(
    name: char,
    mut answer: Answer,
    mut stream: EventStream,
    order: &RefCell<String>,
) -> Result<Answer> {
    while answer.next(&mut stream).await? {
        order.borrow_mut().push(name);
    }
    Ok(answer)
}

#[tokio::test]
async fn interleaved_sessions_give_the_tokens_of_their_solo_runs() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let cases = cases()?;
    let (a, b) = (of_case(&cases[4], 64), of_case(&cases[7], 64));
    let solo = [fleet.ask(&a).await?.tokens, fleet.ask(&b).await?.tokens];
    ensure!(solo == [cases[4].output_ids.clone(), cases[7].output_ids.clone()], "{solo:?}");

    let order = RefCell::default();
    let (answer_a, stream_a) = fleet.begin(&a, 2).await?;
    let (answer_b, stream_b) = fleet.begin(&b, 1).await?;
    let (answer_a, answer_b) = tokio::join!(
        read_noting('a', answer_a, stream_a, &order),
        read_noting('b', answer_b, stream_b, &order),
    );
    ensure!([answer_a?.tokens, answer_b?.tokens] == solo);
    // Neither waited for the other: their events alternate for the most part.
    let order = order.into_inner();
    let changes = order.as_bytes().windows(2).filter(|pair| pair[0] != pair[1]).count();
    ensure!(changes > 20, "the sessions ran one after the other: {order}");
    fleet.idle().await?;
    fleet.end().await
}

/// Twenty prompts of different lengths, from the text of the reference's prompts.
fn twenty() -> Result<Vec<Value>> {
    let cases = cases()?;
    let request = |i: usize| {
        let case = &cases[i % cases.len()];
        let cut = case.input_ids.len() - i / cases.len();
        json!({ "tokens": case.input_ids[..cut], "max_tokens": 8 + i % 5 })
    };
    Ok((0..20).map(request).collect())
}

#[tokio::test]
async fn twenty_sessions_on_two_workers_a_stage_all_finish_right() -> Result<()> {
    let fleet = Fleet::start(2, |spec| spec.workers_per_stage = 2).await?;
    let requests = twenty()?;
    let mut solo = Vec::new();
    for request in &requests {
        solo.push(fleet.ask(request).await?);
    }
    fleet.idle().await?;
    let mut before = Vec::new();
    for worker in [fleet.workers(0), fleet.workers(1)].concat() {
        before.push(fleet.load(&worker).await?.steps_completed);
    }

    let mut streams = Vec::new();
    for request in &requests {
        streams.push(fleet.send(serde_json::to_vec(request)?).await?);
    }
    for (i, (stream, solo)) in streams.iter_mut().zip(&solo).enumerate() {
        let answer = Answer::default().rest(stream).await?;
        answer.reason()?;
        let (found, expected) = (&answer.tokens, &solo.tokens);
        ensure!(found == expected, "session {i}: {found:?} instead of {expected:?}");
        ensure!(answer.text == solo.text, "session {i}");
    }
    // Ten sessions of about ten steps each went through every worker.
    for (worker, before) in [fleet.workers(0), fleet.workers(1)].concat().iter().zip(before) {
        let steps = fleet.load(worker).await?.steps_completed - before;
        ensure!(steps >= 60, "{} ran {steps} steps of some 200", worker.name);
    }
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_worker_started_later_takes_new_sessions() -> Result<()> {
    let mut fleet = Fleet::start(2, |_| {}).await?;
    let request = prompts::endless();
    let (mut first, mut first_stream) = fleet.begin(&request, 1).await?;
    for stage in 0..2 {
        fleet.processes.add_worker(stage).await?;
    }
    // The coordinator may hear of the new workers after the next request; they are never awaited.
    let (mut second, mut second_stream) = wait::until("the new workers are used", async || {
        let (answer, mut stream) = fleet.begin(&request, 1).await?;
        if fleet.sessions(0).await? == [1, 1] && fleet.sessions(1).await? == [1, 1] {
            return Ok(Some((answer, stream)));
        }
        fleet.cancel(&answer).await?;
        answer.rest(&mut stream).await?;
        Ok(None)
    })
    .await?;
    // Both generate the same, wherever they run.
    while first.tokens.len().min(second.tokens.len()) < 40 {
        ensure!(first.next(&mut first_stream).await? && second.next(&mut second_stream).await?);
    }
    ensure!(first.tokens[..40] == second.tokens[..40], "{first:?} {second:?}");
    fleet.cancel(&first).await?;
    fleet.cancel(&second).await?;
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_drained_worker_finishes_its_session_gets_no_other_and_leaves() -> Result<()> {
    let mut fleet = Fleet::start(2, |spec| spec.workers_per_stage = 2).await?;
    let case = &cases()?[7];
    let (answer, mut stream) = fleet.begin(&of_case(case, 64), 1).await?;
    let busy = fleet.sessions(1).await?.iter().position(|&n| n == 1).context("nobody is busy")?;
    let worker = fleet.workers(1)[busy].clone();
    let outcome = fleet.control(&worker, ControlAction::Drain(Drain::default())).await?;
    ensure!(outcome == ControlOutcome::Draining, "{outcome:?}");
    ensure!(fleet.ask(&of_case(case, 4)).await?.tokens == case.output_ids[..4]);
    let answer = answer.rest(&mut stream).await?;
    ensure!(answer.tokens == case.output_ids, "{answer:?}");
    let ended = tokio::time::timeout(wait::PATIENCE, fleet.processes.ended()).await??;
    ensure!(ended.name == worker.name && ended.status.success(), "{ended:?}");
    ensure!(fleet.ask(&of_case(case, 4)).await?.tokens == case.output_ids[..4]);
    fleet.end().await
}

/// A prompt of `n` tokens: the reference's prompts again and again, then one whole.
fn long_prompt(n: usize) -> Result<Vec<u32>> {
    let cases = cases()?;
    let last = &cases[0].input_ids;
    let filler = cases.iter().flat_map(|case| case.input_ids.iter().chain(&case.output_ids));
    let filler = filler.copied().cycle().take(n - last.len());
    Ok(filler.chain(last.iter().copied()).collect())
}

#[tokio::test]
async fn a_prompt_of_3000_tokens_goes_through_in_chunks() -> Result<()> {
    let request = json!({ "tokens": long_prompt(3000)?, "max_tokens": 6 });
    let mut found = Vec::new();
    // The unsplit model takes it in other chunks, so that both the cut and the chunks are seen.
    for (n_stages, chunk) in [(1, 500), (2, 128)] {
        let fleet = Fleet::start(n_stages, |spec| {
            spec.settings.push(format!("coordinator.prefill_chunk={chunk}"));
        })
        .await?;
        let answer = fleet.ask(&request).await?;
        ensure!(answer.prompt_tokens()? == 3000, "{answer:?}");
        ensure!(matches!(answer.reason()?, FinishReason::Length | FinishReason::Stop));
        let steps = fleet.load(&fleet.workers(0)[0]).await?.steps_completed;
        let n_chunks = 3000_u64.div_ceil(chunk);
        ensure!(steps >= n_chunks, "{steps} steps for {n_chunks} chunks");
        found.push(answer.tokens);
        fleet.idle().await?;
        fleet.end().await?;
    }
    ensure!(found[0] == found[1], "{found:?}");
    Ok(())
}

#[tokio::test]
async fn a_session_more_than_the_worker_holds_is_told_so() -> Result<()> {
    let fleet =
        Fleet::start(2, |spec| spec.settings.push("worker.max_sessions=1".to_owned())).await?;
    let (running, mut stream) = fleet.begin(&prompts::endless(), 1).await?;
    let refused = fleet.ask(&prompts::short()).await?;
    let (class, message) = refused.failure()?;
    ensure!(class == ErrorClass::Overloaded, "{message}");
    fleet.cancel(&running).await?;
    ensure!(running.rest(&mut stream).await?.reason()? == FinishReason::Cancelled);
    // The place is free again.
    wait::until("the place is free", async || {
        let answer = fleet.ask(&prompts::short()).await?;
        Ok(answer.reason().is_ok().then_some(()))
    })
    .await?;
    fleet.end().await
}
