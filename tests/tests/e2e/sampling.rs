//! Tokens drawn by the real pipeline, held against the logits of the real model.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_draft::sampling::{History, Sampler, SamplingParams};
use stagebus_schemas::ids::CoordinatorId;
use stagebus_schemas::messages::head::Head;
use stagebus_schemas::messages::public::FinishReason;
use stagebus_tests::answer::Answer;
use stagebus_tests::fleet::{Fleet, with};
use stagebus_tests::setup::VOCAB_SIZE;
use stagebus_tests::wait;

use crate::prompts;

/// A fleet whose coordinator chooses from whole rows of logits.
async fn full_head(n_stages: usize) -> Result<Fleet> {
    Fleet::start(n_stages, |spec| spec.settings.push("coordinator.head=full".to_owned())).await
}

/// The logits behind the first token that answers a request, and that answer.
async fn first_logits(fleet: &Fleet, request: &Value) -> Result<(Vec<f32>, Answer)> {
    let members = fleet.processes.members();
    let coordinator =
        members.iter().find(|member| member.stage.is_none()).context("a coordinator")?;
    let id: CoordinatorId = coordinator.id.as_deref().context("its id")?.parse()?;
    let mut head = fleet.bus.subscribe(&fleet.subjects().head(&id)).await?;
    fleet.bus.flush(wait::PATIENCE).await?;
    let answer = fleet.ask(request).await?;
    loop {
        let message = tokio::time::timeout(wait::PATIENCE, head.next());
        let message: Head = message.await?.context("the connection is closed")?.decode()?;
        let Some(logits) = message.steps.into_iter().find_map(|step| step.logits) else { continue };
        ensure!(logits.hidden_dim as usize == VOCAB_SIZE, "rows of {}", logits.hidden_dim);
        let numbers = logits.data.as_chunks().0.iter().map(|number| f32::from_le_bytes(*number));
        return Ok((numbers.take(VOCAB_SIZE).collect(), answer));
    }
}

/// Natural logarithms of the softmax.
fn log_softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|logit| f64::from(*logit) / temperature).collect();
    let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scaled.iter().map(|logit| (logit - max).exp()).sum();
    scaled.iter().map(|logit| logit - max - sum.ln()).collect()
}

/// What the parameters leave of the softmax, straight from their definitions.
fn probabilities(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let mut p: Vec<f64> =
        log_softmax(logits, params.temperature.into()).into_iter().map(f64::exp).collect();
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|a, b| p[*b].total_cmp(&p[*a]).then(a.cmp(b)));
    if params.top_k > 0 {
        order[params.top_k as usize..].iter().for_each(|token| p[*token] = 0.0);
    }
    let share = p.iter().sum::<f64>() * f64::from(params.top_p);
    let mut sum = 0.0;
    for token in &order {
        if params.top_p < 1.0 && sum >= share {
            p[*token] = 0.0;
        }
        sum += p[*token];
    }
    let least = p[order[0]] * f64::from(params.min_p);
    p.iter_mut().filter(|p| **p < least).for_each(|p| *p = 0.0);
    let sum: f64 = p.iter().sum();
    p.iter().map(|p| p / sum).collect()
}

/// G-test of drawn tokens against probabilities. Tokens that are expected fewer than five times are
/// one cell together; a token that cannot come must not.
fn check_draws(draws: &[u32], probabilities: &[f64], what: &str) -> Result<()> {
    let n = draws.len() as f64;
    let mut counts: HashMap<u32, f64> = HashMap::new();
    draws.iter().for_each(|token| *counts.entry(*token).or_default() += 1.0);
    for token in counts.keys() {
        ensure!(probabilities[*token as usize] > 0.0, "{what}: token {token} is ruled out");
    }
    let mut cells: Vec<(f64, f64)> = Vec::new();
    let mut rest = (0.0, 0.0);
    for (token, p) in (0..).zip(probabilities) {
        let cell = (counts.get(&token).copied().unwrap_or(0.0), p * n);
        if cell.1 >= 5.0 {
            cells.push(cell);
        } else {
            rest = (rest.0 + cell.0, rest.1 + cell.1);
        }
    }
    cells.extend((rest.1 >= 1.0).then_some(rest));
    ensure!(cells.len() > 3, "{what}: {} cells tell nothing", cells.len());
    let g: f64 = cells
        .iter()
        .filter(|(found, _)| *found > 0.0)
        .map(|(found, expected)| 2.0 * found * (found / expected).ln())
        .sum();
    // Wilson-Hilferty: the 1 - 1e-4 quantile of chi-square.
    let freedom = (cells.len() - 1) as f64;
    let spread = 2.0 / (9.0 * freedom);
    let limit = freedom * (1.0 - spread + 3.719 * spread.sqrt()).powi(3);
    ensure!(g < limit, "{what}: G = {g:.1} exceeds {limit:.1} with {freedom} degrees of freedom");
    Ok(())
}

#[tokio::test]
async fn draws_follow_the_softmax_of_the_models_logits() -> Result<()> {
    let request = json!({ "prompt": "My favourite animal is the", "max_tokens": 1 });
    let fleet = full_head(2).await?;
    let asked = with(&request, &json!({ "logprobs": true, "top_logprobs": 20 }));
    let (logits, answer) = first_logits(&fleet, &asked).await?;
    let position = u32::try_from(answer.prompt_tokens()?)?;

    // Log-probabilities are those of the row.
    let expected = log_softmax(&logits, 1.0);
    let entry = answer.logprobs.first().context("log-probabilities")?;
    ensure!(entry.top.len() == 20 && entry.top[0] == entry.chosen, "{entry:?}");
    ensure!(entry.top.windows(2).all(|pair| pair[0].logprob >= pair[1].logprob), "{entry:?}");
    for found in &entry.top {
        let off = (f64::from(found.logprob) - expected[found.token as usize]).abs();
        ensure!(off < 1e-3, "{found:?} is off by {off}");
    }
    fleet.end().await?;

    // Many draws from the row.
    let warm = SamplingParams { temperature: 0.9, ..SamplingParams::default() };
    let mut sampler = Sampler::default();
    let mut draw = |params: &SamplingParams, seed: u64| {
        let params = SamplingParams { seed, ..params.clone() };
        Ok::<_, anyhow::Error>(
            sampler.choose(&logits, position, &params, &mut History::default())?.token,
        )
    };
    for (what, params) in [
        ("temperature", warm.clone()),
        ("top_p", SamplingParams { top_p: 0.8, ..warm.clone() }),
        ("top_k", SamplingParams { top_k: 20, ..warm.clone() }),
        ("min_p", SamplingParams { min_p: 0.05, ..warm.clone() }),
        ("all", SamplingParams { top_p: 0.9, top_k: 40, min_p: 0.02, ..warm.clone() }),
    ] {
        let draws: Vec<u32> = (0..4000).map(|seed| draw(&params, seed)).collect::<Result<_>>()?;
        check_draws(&draws, &probabilities(&logits, &params), what)?;
    }

    // The pipeline's own draws: each is the sampler's, and together they follow the softmax.
    let fleet = Fleet::start(2, |_| {}).await?;
    let mut draws = Vec::new();
    for seed in 0..250 {
        let asked = with(&request, &json!({ "temperature": 0.9, "seed": seed }));
        let answer = fleet.ask(&asked).await?;
        ensure!(answer.seed == Some(seed), "{answer:?}");
        let token = *answer.tokens.first().context("a token")?;
        ensure!(token == draw(&warm, seed)?, "seed {seed}: token {token}");
        draws.push(token);
    }
    check_draws(&draws, &probabilities(&logits, &warm), "the pipeline")?;
    fleet.idle().await?;
    fleet.end().await
}

/// Requests whose answers must not depend on the fleet.
fn requests() -> Result<Vec<Value>> {
    let case = &prompts::cases()?[4];
    let base = prompts::of_case(case, 24);
    let fields = [
        json!({ "temperature": 0.8, "seed": 0 }),
        json!({ "temperature": 0.8, "seed": u64::MAX }),
        json!({ "temperature": 1.0, "seed": 7, "top_p": 0.9 }),
        json!({ "temperature": 1.2, "seed": 7, "top_k": 30, "min_p": 0.02 }),
        json!({ "temperature": 0.8, "seed": 3, "repetition_penalty": 1.2,
                "presence_penalty": 0.5, "frequency_penalty": 0.3 }),
        json!({ "temperature": 0.8, "seed": 3, "logit_bias": { "28": -100, "30": 2 } }),
    ];
    Ok(fields.iter().map(|fields| with(&base, fields)).collect())
}

#[tokio::test]
async fn drawn_tokens_do_not_depend_on_stages_or_on_where_they_are_chosen() -> Result<()> {
    let mut first: Vec<Vec<u32>> = Vec::new();
    for (n_stages, full) in [(1, false), (2, false), (3, false), (2, true)] {
        let fleet = match full {
            true => full_head(n_stages).await?,
            false => Fleet::start(n_stages, |_| {}).await?,
        };
        let mut found = Vec::new();
        for request in requests()? {
            found.push(fleet.ask(&request).await?.tokens);
        }
        if first.is_empty() {
            first.clone_from(&found);
        }
        ensure!(found == first, "{n_stages} stages, full {full}: {found:?}, not {first:?}");
        fleet.idle().await?;
        fleet.end().await?;
    }
    for (index, tokens) in first.iter().enumerate() {
        ensure!(!first[..index].contains(tokens), "request {index} gave an earlier one's answer");
    }
    Ok(())
}

#[tokio::test]
async fn the_edges_of_sampling_are_greedy_and_seeds_can_be_repeated() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let case = &prompts::cases()?[0];
    let base = prompts::of_case(case, 64);
    for fields in [
        json!({ "temperature": 0, "seed": 9 }),
        json!({ "temperature": 1e-6, "seed": 9 }),
        json!({ "temperature": 1.5, "top_k": 1 }),
    ] {
        let answer = fleet.ask(&with(&base, &fields)).await?;
        ensure!(answer.tokens == case.output_ids && answer.seed.is_none(), "{fields}: {answer:?}");
    }
    let hot = with(&base, &json!({ "temperature": 1.5 }));
    let (one, other) = (fleet.ask(&hot).await?, fleet.ask(&hot).await?);
    ensure!(one.seed != other.seed && one.tokens != other.tokens, "{one:?} and {other:?}");
    let again = fleet.ask(&with(&hot, &json!({ "seed": one.seed }))).await?;
    ensure!(again.tokens == one.tokens && again.seed == one.seed, "{again:?}, not {one:?}");
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn bias_and_penalties_act_and_log_probabilities_stay_with_their_tokens() -> Result<()> {
    let fleet = Fleet::start(2, |_| {}).await?;
    let case = &prompts::cases()?[0];
    let base = prompts::of_case(case, 12);
    let first = case.output_ids[0];
    let against = with(&base, &json!({ "logit_bias": { first.to_string(): -100 } }));
    let forbidden = fleet.ask(&against).await?.tokens;
    ensure!(!forbidden.contains(&first), "{forbidden:?}");
    let forced = fleet.ask(&with(&base, &json!({ "logit_bias": { "905": 100 } }))).await?;
    ensure!(forced.tokens == [905; 12], "{forced:?}");

    // The model goes on counting for ever; with penalties it must not repeat itself.
    let distinct = |answer: &Answer| {
        let mut tokens = answer.tokens.clone();
        tokens.sort_unstable();
        tokens.dedup();
        tokens.len()
    };
    let endless = with(&prompts::endless(), &json!({ "max_tokens": 60 }));
    let plain = distinct(&fleet.ask(&endless).await?);
    for fields in [
        json!({ "presence_penalty": 2.0, "frequency_penalty": 2.0 }),
        json!({ "repetition_penalty": 2.0 }),
    ] {
        let penalised = distinct(&fleet.ask(&with(&endless, &fields)).await?);
        ensure!(penalised > plain + 10, "{fields}: {penalised} tokens differ, {plain} without");
    }

    // The tests' client holds every entry against its token; here, across a stop string.
    let stop = json!({ "logprobs": true, "stop": ["Japan"], "max_tokens": 64 });
    let stopped = fleet.ask(&with(&base, &stop)).await?;
    ensure!(stopped.reason()? == FinishReason::Stop, "{stopped:?}");
    ensure!(!stopped.tokens.is_empty() && stopped.logprobs.len() == stopped.tokens.len());
    ensure!(
        stopped.logprobs.iter().all(|entry| entry.top.is_empty() && entry.chosen.logprob <= 0.0)
    );
    let silent = fleet.ask(&with(&base, &with(&stop, &json!({ "stream": false })))).await?;
    ensure!(silent.n_events == 0 && silent.logprobs == stopped.logprobs, "{silent:?}");
    fleet.idle().await?;
    fleet.end().await
}
