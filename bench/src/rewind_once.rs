//! The hidden subcommand `rewind-once`: what a rewind costs the stateful engine, by masking what
//! is left behind and by cutting the state.
//!
//! Both do the same steps in turn: append a token and three drafted ones, all of them wrong, and go
//! back behind the first. The masking engine rewinds with the next step; the other one reads, cuts
//! and writes its state at the end of the step.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Instant;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use stagebus_engine::{
    Backend, EngineKind, EngineOptions, Profile, RowPath, Runtime, SessionKey, StageRequest,
    StepRows, TrimmedModel, open_backend,
};
use stagebus_shards::ShardSet;

use crate::contender::Launch;
use crate::harness::stats::Summary;
use crate::harness::{machine, output};

/// The one session.
const SESSION: SessionKey = SessionKey(1);

/// Steps of each kind.
const N_STEPS: usize = 24;

/// Rows of a step: a token and three drafted ones.
const ROWS: [u32; 4] = [260, 504, 3575, 282];

/// Tokens of the caches at the beginning.
pub const CACHE_TOKENS: [usize; 2] = [72, 512];

/// Arguments of `rewind-once`.
#[derive(Debug, Clone, clap::Args)]
pub struct RewindOnceArgs {
    /// A shard set with one stage
    #[arg(long, value_name = "DIR")]
    shards: PathBuf,
}

/// What rewinding took with one cache length, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rewind {
    /// Tokens of the cache at the beginning.
    pub cache_tokens: usize,
    /// A step whose rewind masks.
    pub mask_ms: Summary,
    /// A step whose rewind cuts the state.
    pub trim_ms: Summary,
    /// The cut alone.
    pub cut_ms: Summary,
}

/// Measures and prints a list of [`Rewind`].
///
/// # Errors
/// A shard set or runtime that cannot be used, a step that fails.
pub async fn run(args: RewindOnceArgs) -> anyhow::Result<()> {
    let work = tokio::task::spawn_blocking(move || measure(&args));
    Ok(output::print_json(&work.await.context("the engine failed")??)?)
}

/// Measures in a child process tied to a core.
///
/// # Errors
/// A child that does not start, or fails with what it says.
pub async fn in_child(shards: &std::path::Path, cpu: Option<usize>) -> anyhow::Result<Vec<Rewind>> {
    let launch = Launch {
        name: "rewind-once".to_owned(),
        program: machine::this_program()?,
        args: vec!["bench".into(), "rewind-once".into(), "--shards".into(), shards.into()],
        cpu,
    };
    let output = launch.command().stdin(Stdio::null()).output().await;
    let output = output.context("cannot start the measurement of rewinds")?;
    anyhow::ensure!(
        output.status.success(),
        "rewinds cannot be measured: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout).context("the measured rewinds cannot be read")
}

fn measure(args: &RewindOnceArgs) -> anyhow::Result<Vec<Rewind>> {
    let shards = ShardSet::open(&args.shards)?;
    let n_stages = shards.manifest.n_stages();
    anyhow::ensure!(n_stages == 1, "the shard set has {n_stages} stages, expected 1");
    let library = stagebus_settings::find_openvino()?;
    let options =
        EngineOptions { profile: Profile::Fast, threads: Some(1), ..EngineOptions::default() };
    let request = StageRequest { shards: &shards, stage: 0, library: Some(library.path()) };
    let mut backend = open_backend(EngineKind::Stateful, &request, &options)?;
    let runtime = Runtime::load(library.path())?;
    let mut rewinds = Vec::new();
    for cache_tokens in CACHE_TOKENS {
        let mut model = TrimmedModel::load(&runtime, &shards.stage_files(0)?, &options)?;
        rewinds.push(one_length(&mut *backend, &mut model, cache_tokens)?);
    }
    Ok(rewinds)
}

fn one_length(
    backend: &mut dyn Backend,
    model: &mut TrimmedModel,
    cache_tokens: usize,
) -> anyhow::Result<Rewind> {
    // Any text does: the time of a step does not depend on what is said.
    let text: Vec<u32> = (0..cache_tokens).map(|index| 300 + (index as u32 * 7) % 1000).collect();
    backend.open(SESSION, &text, cache_tokens + N_STEPS * ROWS.len())?;
    step(backend, 0, RowPath::Prefill, &text)?;
    model.append(&text)?;
    let (mut mask_ms, mut trim_ms, mut cut_ms) = (Vec::new(), Vec::new(), Vec::new());
    for index in 0..N_STEPS {
        let start_pos = cache_tokens + index;
        let started = Instant::now();
        step(backend, start_pos, RowPath::Decode, &ROWS)?;
        mask_ms.push(ms_since(started));
        let started = Instant::now();
        model.append(&ROWS)?;
        let cut = Instant::now();
        model.trim(start_pos + 1)?;
        cut_ms.push(ms_since(cut));
        trim_ms.push(ms_since(started));
    }
    backend.close(SESSION);
    let summary = |samples: Vec<f64>| Summary::of(samples).context("there were no steps");
    Ok(Rewind {
        cache_tokens,
        mask_ms: summary(mask_ms)?,
        trim_ms: summary(trim_ms)?,
        cut_ms: summary(cut_ms)?,
    })
}

fn step(
    backend: &mut dyn Backend,
    start_pos: usize,
    path: RowPath,
    tokens: &[u32],
) -> anyhow::Result<()> {
    let wanted = [u32::try_from(tokens.len() - 1).context("too many rows")?];
    let step =
        StepRows { session: SESSION, start_pos, path, tokens, hidden: None, wanted: &wanted };
    let mut result = Err(anyhow::anyhow!("the step was not answered"));
    backend.run(&[step], &mut |done| {
        result = done.output.map(drop).map_err(anyhow::Error::from);
    });
    result
}

fn ms_since(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_child_prints_is_read() {
        let summary = Summary::of([2.0]).expect("a sample");
        let rewind =
            Rewind { cache_tokens: 72, mask_ms: summary, trim_ms: summary, cut_ms: summary };
        let text = serde_json::to_string(&[rewind]).expect("JSON");
        let read: Vec<Rewind> = serde_json::from_str(&text).expect("the same form");
        assert_eq!(read, [rewind]);
    }
}
