//! Passes over loaded stages, in turn and timed.
//!
//! The stages run as in a pipeline: pass by pass through all of them, so that a stage comes back to
//! its weights when all others have been read since. Their input is made up; a row costs the same
//! whatever it holds. A stage of a pipeline also waits for the others: that is timed with rests.

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use stagebus_engine::argmax::greedy;
use stagebus_engine::{Backend, RowPath, SessionKey, StageOutput, StepRows};
use stagebus_shards::Manifest;
use tokio_util::sync::CancellationToken;

/// Tokens of a session's prompt: several KV blocks, of which later sessions share all but the last.
const PROMPT: usize = 128;

/// Passes before those that count.
const WARM_UP: usize = 3;

/// Fewest passes that count; their median is then no chance.
const MIN_PASSES: usize = 5;

/// Most passes that count.
const MAX_PASSES: usize = 96;

/// Time after which no more passes are made than the fewest.
const PATIENCE: Duration = Duration::from_secs(2);

/// Rest before each stage's pass when rests are timed: some tens of milliseconds cost no more.
pub(super) const REST: Duration = Duration::from_millis(10);

/// Runs that the first session takes part in: one row, one row with rests, many rows.
const RUNS: usize = 3;

/// The length that no session of the probe passes, in tokens.
pub(super) const MAX_POSITION: usize = PROMPT + RUNS * (WARM_UP + MAX_PASSES);

/// A loaded stage.
pub(super) struct Stage {
    index: usize,
    layers: Range<usize>,
    backend: Box<dyn Backend>,
}

impl Stage {
    pub(super) fn new(index: usize, layers: Range<usize>, backend: Box<dyn Backend>) -> Self {
        Self { index, layers, backend }
    }
}

/// Loaded stages of one model and the sessions on them.
pub(super) struct Chain {
    stages: Vec<Stage>,
    /// Width of a hidden state.
    hidden_dim: usize,
    /// Hidden states of the prompt's rows, made up.
    hidden: Vec<f32>,
    prompt: Vec<u32>,
    /// Tokens of each session.
    lens: Vec<usize>,
}

impl Chain {
    /// A chain without stages.
    pub(super) fn new(manifest: &Manifest) -> Self {
        let dims = &manifest.dims;
        Self::of(dims.hidden_dim, dims.vocab_size)
    }

    fn of(hidden_dim: usize, vocab_size: usize) -> Self {
        // Steps of a multiplicative generator: spread evenly, and the same everywhere.
        let spread = |at: usize| at.wrapping_mul(2_654_435_761) >> 7;
        let value = |at: usize| (spread(at) % 2001) as f32 / 1000.0 - 1.0;
        let token = |at: usize| u32::try_from(spread(at + 1) % vocab_size).unwrap_or(0);
        Self {
            stages: Vec::new(),
            hidden_dim,
            hidden: (0..PROMPT * hidden_dim).map(value).collect(),
            prompt: (0..PROMPT).map(token).collect(),
            lens: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, stage: Stage) {
        self.stages.push(stage);
    }

    /// Brings the stages into the order of the model.
    pub(super) fn sort(&mut self) {
        self.stages.sort_by_key(|stage| stage.index);
    }

    pub(super) fn stage_indices(&self) -> impl Iterator<Item = usize> {
        self.stages.iter().map(|stage| stage.index)
    }

    /// Opens the first session and runs its prompt.
    pub(super) fn fill_first(&mut self) -> anyhow::Result<()> {
        self.fill(0)
    }

    /// Opens the other ones of `n_sessions`.
    pub(super) fn fill_others(&mut self, n_sessions: usize) -> anyhow::Result<()> {
        (1..n_sessions).try_for_each(|session| self.fill(session))
    }

    fn fill(&mut self, session: usize) -> anyhow::Result<()> {
        let key = SessionKey(session as u64);
        for stage in &mut self.stages {
            let cached = stage.backend.open(key, &self.prompt, MAX_POSITION)?;
            let rows = cached..PROMPT;
            let hidden = &self.hidden[rows.start * self.hidden_dim..];
            let step = StepRows {
                session: key,
                start_pos: rows.start,
                path: RowPath::Prefill,
                tokens: &self.prompt[rows],
                hidden: (stage.layers.start > 0).then_some(hidden),
                wanted: &[],
            };
            run(stage.backend.as_mut(), &[step])?;
        }
        self.lens.push(PROMPT);
        Ok(())
    }

    /// Runs passes of one row of each of the first `n_rows` sessions, every stage after a `rest`, and
    /// returns the median time of every stage in nanoseconds.
    pub(super) fn run(
        &mut self,
        n_rows: usize,
        rest: Duration,
        stop: &CancellationToken,
    ) -> anyhow::Result<Vec<u64>> {
        for _ in 0..WARM_UP {
            self.pass(n_rows, rest)?;
        }
        let mut times: Vec<Vec<Duration>> = vec![Vec::new(); self.stages.len()];
        let began = Instant::now();
        for n_passes in 0..MAX_PASSES {
            anyhow::ensure!(!stop.is_cancelled(), "stopped");
            if n_passes >= MIN_PASSES && began.elapsed() > PATIENCE {
                break;
            }
            for (times, time) in times.iter_mut().zip(self.pass(n_rows, rest)?) {
                times.push(time);
            }
        }
        let median = |mut times: Vec<Duration>| {
            times.sort_unstable();
            times.get(times.len() / 2).map_or(0, |time| {
                // A pass takes less than the 584 years that fit.
                u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
            })
        };
        Ok(times.into_iter().map(median).collect())
    }

    /// One row of each session through all stages.
    fn pass(&mut self, n_rows: usize, rest: Duration) -> anyhow::Result<Vec<Duration>> {
        let token = |session: usize| self.prompt[(self.lens[session] + session) % PROMPT];
        let tokens: Vec<u32> = (0..n_rows).map(token).collect();
        let mut times = Vec::with_capacity(self.stages.len());
        for stage in &mut self.stages {
            let hidden = |session: usize| {
                let at = session % PROMPT * self.hidden_dim;
                &self.hidden[at..at + self.hidden_dim]
            };
            let takes_hidden = stage.layers.start > 0;
            let steps: Vec<StepRows<'_>> = (0..n_rows)
                .map(|session| StepRows {
                    session: SessionKey(session as u64),
                    start_pos: self.lens[session],
                    path: RowPath::Decode,
                    tokens: &tokens[session..=session],
                    hidden: takes_hidden.then(|| hidden(session)),
                    wanted: &[0],
                })
                .collect();
            wait(rest);
            let began = Instant::now();
            run(stage.backend.as_mut(), &steps)?;
            times.push(began.elapsed());
        }
        self.lens.iter_mut().take(n_rows).for_each(|len| *len += 1);
        Ok(times)
    }

    /// Bytes of the KV caches, and the tokens in them, counted once for each layer.
    pub(super) fn kv_use(&self) -> (u64, u64) {
        self.stages.iter().fold((0, 0), |(bytes, tokens), stage| {
            let used = stage.backend.kv_use();
            (bytes + used.bytes, tokens + used.tokens * stage.layers.len() as u64)
        })
    }
}

/// Lets the processor rest.
fn wait(rest: Duration) {
    if !rest.is_zero() {
        #[expect(
            clippy::disallowed_methods,
            reason = "on the thread that measures, no task waits"
        )]
        std::thread::sleep(rest);
    }
}

/// Runs a micro-batch, and chooses tokens where there are logits, as a worker does.
fn run(backend: &mut dyn Backend, steps: &[StepRows<'_>]) -> anyhow::Result<()> {
    let mut outcome = Ok(());
    backend.run(steps, &mut |done| match done.output {
        Ok(StageOutput::Logits(rows)) => {
            black_box(greedy(rows).is_ok());
        }
        Ok(StageOutput::Hidden(_)) => {}
        Err(error) => outcome = Err(error),
    });
    outcome.map_err(anyhow::Error::from)
}

#[cfg(test)]
mod tests {
    use stagebus_engine::testing::{TestBackend, TestModel, TestOptions};

    use super::*;

    /// Three stages of a toy; the middle one is slower.
    fn chain(slow: Duration) -> Chain {
        let model = TestModel { n_layers: 4, context_length: 4096, ..TestModel::default() };
        let mut chain = Chain::of(model.hidden_dim, model.vocab_size);
        for (index, layers) in [(2, 3..4), (0, 0..1), (1, 1..3)] {
            let delay_per_row = if index == 1 { slow } else { Duration::ZERO };
            let options = TestOptions { delay_per_row, ..TestOptions::default() };
            let backend = TestBackend::new(model.clone(), model.stage(layers.clone()), options);
            chain.push(Stage::new(index, layers, Box::new(backend)));
        }
        chain.sort();
        chain
    }

    #[test]
    fn every_stage_is_timed_in_the_order_of_the_model() {
        let slow = Duration::from_millis(1);
        let (mut chain, stop) = (chain(slow), CancellationToken::new());
        chain.fill_first().expect("a session");
        let one = chain.run(1, Duration::ZERO, &stop).expect("passes");
        let rested = chain.run(1, REST, &stop).expect("passes");
        let n_passes = chain.lens[0] - PROMPT;
        assert!(u128::from(rested[1]) >= slow.as_nanos(), "{rested:?}");
        assert!(
            u128::from(rested[0]) < REST.as_nanos(),
            "a rest is not part of a pass: {rested:?}"
        );
        assert!(n_passes > 2 * WARM_UP && n_passes <= 2 * (WARM_UP + MAX_PASSES), "{n_passes}");
        assert_eq!(chain.stage_indices().collect::<Vec<_>>(), [0, 1, 2]);
        assert!(u128::from(one[1]) >= slow.as_nanos(), "{one:?}");
        chain.fill_others(3).expect("sessions");
        let many = chain.run(3, Duration::ZERO, &stop).expect("passes");
        assert!(u128::from(many[1]) >= 3 * slow.as_nanos(), "{many:?}");
        assert_eq!(many.len(), 3);
        assert!(chain.lens.iter().all(|&len| len <= MAX_POSITION), "{:?}", chain.lens);
    }

    #[test]
    fn tokens_count_once_for_each_layer() {
        let mut chain = chain(Duration::ZERO);
        chain.fill_first().expect("a session");
        let (_, tokens) = chain.kv_use();
        assert_eq!(tokens, 4 * PROMPT as u64);
    }

    #[test]
    fn a_stopped_run_ends() {
        let (mut chain, stop) = (chain(Duration::ZERO), CancellationToken::new());
        chain.fill_first().expect("a session");
        stop.cancel();
        chain.run(1, REST, &stop).expect_err("stopped");
    }
}
