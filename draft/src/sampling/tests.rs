//! The sampled distribution against the softmax, and the edges of every parameter.

use proptest::prelude::*;

use super::*;
use crate::noise::gumbel;

/// A fixed row with a wide spread, two ties and one impossible token.
fn row() -> Vec<f32> {
    let mut row: Vec<f32> = (0..50_u8).map(|i| f32::from(i % 17) * 0.37 - 2.0).collect();
    row[49] = f32::NEG_INFINITY;
    row
}

fn params(temperature: f32, seed: u64) -> SamplingParams {
    SamplingParams { temperature, seed, ..SamplingParams::default() }
}

/// Probabilities after the parameters, computed directly from their definitions.
fn expected(row: &[f32], params: &SamplingParams) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut weights: Vec<f64> =
        row.iter().map(|l| (f64::from(l - max) / f64::from(params.temperature)).exp()).collect();
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
    if params.top_k > 0 {
        for idx in &order[(params.top_k as usize).min(order.len())..] {
            weights[*idx] = 0.0;
        }
    }
    if params.top_p < 1.0 {
        let total: f64 = weights.iter().sum();
        let mut sum = 0.0;
        for idx in &order {
            if sum >= total * f64::from(params.top_p) {
                weights[*idx] = 0.0;
            }
            sum += weights[*idx];
        }
    }
    for weight in &mut weights {
        if *weight < f64::from(params.min_p) {
            *weight = 0.0;
        }
    }
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}

/// G-test of `n` draws at different positions against [`expected`].
fn check_distribution(params: &SamplingParams) {
    let row = row();
    let probabilities = expected(&row, params);
    let n = 40_000_u32;
    let mut counts = vec![0_u32; row.len()];
    let mut sampler = Sampler::default();
    for position in 0..n {
        let choice = sampler.choose(&row, position, params, &mut History::default()).unwrap();
        counts[choice.token as usize] += 1;
    }
    let (mut g, mut cells) = (0.0, 0.0);
    for (count, p) in counts.iter().zip(&probabilities) {
        if *p == 0.0 {
            assert_eq!(*count, 0, "a token that the parameters rule out was drawn");
            continue;
        }
        cells += 1.0;
        let want = p * f64::from(n);
        if *count > 0 {
            g += 2.0 * f64::from(*count) * (f64::from(*count) / want).ln();
        }
    }
    // Wilson-Hilferty: the 1 - 1e-4 quantile of chi-square with `cells - 1` degrees of freedom.
    let df: f64 = cells - 1.0;
    let limit = if df < 1.0 {
        1e-9
    } else {
        let spread = 2.0 / (9.0 * df);
        df * (1.0 - spread + 3.719 * spread.sqrt()).powi(3)
    };
    assert!(g < limit, "G = {g:.1}, limit {limit:.1} with {df} degrees of freedom, {params:?}");
}

#[test]
fn draws_follow_the_softmax() {
    for seed in [0, 1, u64::MAX] {
        check_distribution(&params(1.0, seed));
        check_distribution(&params(0.8, seed));
        check_distribution(&params(2.5, seed));
    }
}

#[test]
fn draws_follow_the_truncated_softmax() {
    for seed in [3, 5] {
        check_distribution(&SamplingParams { top_k: 7, ..params(0.9, seed) });
        check_distribution(&SamplingParams { top_p: 0.6, ..params(0.9, seed) });
        check_distribution(&SamplingParams { min_p: 0.2, ..params(0.9, seed) });
        let all = SamplingParams { top_k: 20, top_p: 0.9, min_p: 0.05, ..params(1.1, seed) };
        check_distribution(&all);
    }
}

#[test]
fn greedy_edges_take_the_first_largest_logit() {
    let row = row();
    let first = row.iter().position(|l| *l == row[16]).unwrap() as u32;
    for params in [params(0.0, 9), params(1e-6, 9), SamplingParams { top_k: 1, ..params(1.0, 9) }] {
        let choice = Sampler::default().choose(&row, 5, &params, &mut History::default()).unwrap();
        assert_eq!(choice.token, first, "{params:?}");
    }
}

#[test]
fn a_bias_that_forbids_every_token_is_an_error() {
    let row = row();
    let bias = |token| (token, f32::NEG_INFINITY);
    for temperature in [0.0, 1.0] {
        let logit_bias = (0..row.len() as u32).map(bias).collect();
        let params = SamplingParams { logit_bias, ..params(temperature, 1) };
        let result = Sampler::default().choose(&row, 3, &params, &mut History::default());
        assert_eq!(result, Err(SamplingError::NothingLeft { position: 3, n_logits: 50 }));
    }
}

#[test]
fn logprobs_are_those_of_the_model() {
    let row = row();
    let params = SamplingParams { top_logprobs: Some(4), top_k: 3, ..params(0.7, 2) };
    let choice = Sampler::default().choose(&row, 0, &params, &mut History::default()).unwrap();
    let raw = expected(&row, &SamplingParams { temperature: 1.0, ..SamplingParams::default() });
    let want = raw[choice.token as usize].ln() as f32;
    assert!((choice.logprob.unwrap() - want).abs() < 1e-5);
    assert_eq!(choice.top.len(), 4);
    assert!(choice.top.windows(2).all(|pair| pair[0].logprob >= pair[1].logprob));
    assert_eq!(choice.top[0].token, 16);
}

#[test]
fn penalties_count_prompt_and_output_apart() {
    let row = vec![1.0, 1.0, 1.0, 0.5];
    let mut history = History::new(1);
    history.push(0);
    history.push(1);
    history.push(1);
    let base = SamplingParams::default();
    let presence = SamplingParams { presence_penalty: 0.6, ..base.clone() };
    let frequency = SamplingParams { frequency_penalty: 0.3, ..base.clone() };
    let repetition = SamplingParams { repetition_penalty: 3.0, ..base };
    let token = |params: &SamplingParams, history: &mut History| {
        Sampler::default().choose(&row, 0, params, history).unwrap().token
    };
    assert_eq!(token(&presence, &mut history), 0, "a prompt token is not penalised by presence");
    assert_eq!(token(&frequency, &mut history), 0);
    assert_eq!(token(&repetition, &mut history), 2, "a prompt token is penalised by repetition");
    history.truncate(1);
    history.truncate(0);
    assert_eq!(token(&repetition, &mut history), 0, "a truncated history penalises nothing");
}

proptest! {
    #[test]
    fn skipping_hopeless_tokens_changes_nothing(
        logits in prop::collection::vec(-30.0_f32..30.0, 1..300),
        seed: u64,
        position: u32,
        temperature in 0.05_f32..3.0,
    ) {
        let params = params(temperature, seed);
        let choice = Sampler::default()
            .choose(&logits, position, &params, &mut History::default())
            .unwrap();
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = temperature.recip();
        let score = |token: usize| {
            (logits[token] - max) * scale + gumbel(seed, position, token as u32)
        };
        let best = (0..logits.len()).map(score).fold(f32::NEG_INFINITY, f32::max);
        prop_assert!((score(choice.token as usize) - best).abs() < 1e-6);
    }

    #[test]
    fn the_winner_is_the_best_of_those_that_are_kept(
        logits in prop::collection::vec(-30.0_f32..30.0, 1..300),
        seed: u64,
        position: u32,
        temperature in 0.05_f32..3.0,
        top_k in 0_u32..40,
        min_p in prop::sample::select(vec![0.0_f32, 0.01, 0.3]),
    ) {
        let params = SamplingParams { top_k, min_p, ..params(temperature, seed) };
        let kept = expected(&logits, &params);
        let choice = Sampler::default()
            .choose(&logits, position, &params, &mut History::default())
            .unwrap();
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = temperature.recip();
        let score = |token: usize| {
            (logits[token] - max) * scale + gumbel(seed, position, token as u32)
        };
        if params.is_greedy() {
            prop_assert_eq!(logits[choice.token as usize], max);
        } else {
            let possible = (0..logits.len()).filter(|token| kept[*token] > 0.0);
            let best = possible.map(score).fold(f32::NEG_INFINITY, f32::max);
            prop_assert!((score(choice.token as usize) - best).abs() < 1e-6);
        }
    }

    #[test]
    fn a_history_truncates_to_what_it_was(
        prompt in 0_usize..6,
        tokens in prop::collection::vec(0_u32..5, 0..30),
        cut in 0_usize..30,
    ) {
        let cut = cut.min(tokens.len());
        let mut long = History::new(prompt);
        tokens.iter().for_each(|t| long.push(*t));
        long.truncate(cut);
        let mut short = History::new(prompt);
        tokens[..cut].iter().for_each(|t| short.push(*t));
        let params = SamplingParams {
            repetition_penalty: 1.3,
            presence_penalty: 0.4,
            frequency_penalty: 0.2,
            ..SamplingParams::default()
        };
        let (mut a, mut b) = (vec![1.0_f32; 5], vec![1.0_f32; 5]);
        adjust(&mut a, &params, &long);
        adjust(&mut b, &params, &short);
        prop_assert_eq!(a, b);
    }
}
