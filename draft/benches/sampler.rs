//! What choosing a token costs, in microseconds a row of 49,152 logits: `cargo bench -p
//! stagebus-draft`. Prints the median and the quickest of many rows at different positions.

use std::io::Write as _;
use std::time::Instant;

use stagebus_draft::noise::philox;
use stagebus_draft::sampling::{History, Sampler, SamplingParams};

const VOCAB_SIZE: u32 = 49_152;
const N_ROWS: u32 = 400;

/// A row in the shape of a language model's: a wide bell and a few hundred likely tokens above it.
#[expect(clippy::cast_possible_truncation, reason = "logits are single precision")]
fn row() -> Vec<f32> {
    let uniform = |word: u32| f64::from(word) / f64::from(u32::MAX);
    let logit = |token: u32| {
        let bell: f64 =
            philox(1, [token, 0, 0, 0]).into_iter().map(uniform).sum::<f64>() * 4.3 - 8.6;
        let likely = token.is_multiple_of(151);
        let lift = if likely { -3.0 * uniform(philox(2, [token, 0, 0, 0])[0]).ln() } else { 0.0 };
        (bell + lift) as f32
    };
    (0..VOCAB_SIZE).map(logit).collect()
}

fn main() -> std::io::Result<()> {
    let plain = || SamplingParams { seed: 7, ..SamplingParams::default() };
    let warm = || SamplingParams { temperature: 0.8, ..plain() };
    let cases = [
        ("greedy", plain()),
        ("temperature 0.8", warm()),
        ("temperature 2", SamplingParams { temperature: 2.0, ..plain() }),
        ("top_p 0.9", SamplingParams { top_p: 0.9, ..warm() }),
        ("top_k 40", SamplingParams { top_k: 40, ..warm() }),
        ("min_p 0.05", SamplingParams { min_p: 0.05, ..warm() }),
        (
            "top_k 40, top_p 0.9, min_p 0.05",
            SamplingParams { top_k: 40, top_p: 0.9, min_p: 0.05, ..warm() },
        ),
        (
            "penalties, greedy",
            SamplingParams { repetition_penalty: 1.1, presence_penalty: 0.5, ..plain() },
        ),
        ("penalties, top_p 0.9", SamplingParams { repetition_penalty: 1.1, top_p: 0.9, ..warm() }),
        ("log-probabilities of 5, greedy", SamplingParams { top_logprobs: Some(5), ..plain() }),
    ];
    let row = row();
    let mut history = History::new(500);
    (0..1000).for_each(|i| history.push(i * 37 % VOCAB_SIZE));
    let mut sampler = Sampler::default();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:34} {:>9} {:>9}", "", "median us", "least us")?;
    for (name, params) in cases {
        let mut times = Vec::new();
        for position in 0..N_ROWS {
            let started = Instant::now();
            let choice = sampler.choose(&row, position, &params, &mut history);
            times.push(started.elapsed().as_secs_f64() * 1e6);
            choice.map_err(std::io::Error::other)?;
        }
        times.sort_by(f64::total_cmp);
        writeln!(out, "{name:34} {:9.1} {:9.1}", times[times.len() / 2], times[0])?;
    }
    Ok(())
}
