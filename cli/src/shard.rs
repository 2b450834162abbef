//! `stagebus shard`: a model file becomes a shard set.

use std::path::PathBuf;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_shards::{Manifest, ShardRequest, WeightMode};
use tokio_util::sync::CancellationToken;

use crate::console;
use crate::exit::{Outcome, UsageError};
use crate::progress::ShardProgress;
use crate::weights;

/// Arguments of `stagebus shard`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus shard SmolLM2-135M-Instruct.Q4_1.gguf --stages 2 --out shards/smollm2
  stagebus shard models/draft --stages 1 --tokenizer-from shards/smollm2 --out shards/draft
  stagebus shard llama-8b.gguf --stages 3 --split 12,12,8 --out shards/llama-8b --force

The folder appears when everything in it is complete; after a failure there is none.")]
pub struct ShardArgs {
    /// The model: a GGUF file, or a folder with config.json and model.safetensors
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,

    /// Number of stages, 1 to the number of layers; layers are split by cost
    #[arg(long, value_name = "N", required_unless_present = "split")]
    pub stages: Option<usize>,

    /// Layers of each stage, by hand
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    pub split: Option<Vec<usize>>,

    /// The folder to create
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,

    /// How weights are mapped: exact keeps every value, compact is the smallest and loses some
    #[arg(long, value_name = "MODE", default_value_t, value_parser = weights::parser())]
    pub weights: WeightMode,

    /// The model's name in every subject; made from the file name when absent
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// The shard set whose tokenizer and chat template the model shares
    #[arg(long, value_name = "SHARDS")]
    pub tokenizer_from: Option<PathBuf>,

    /// Cut the head to the N most frequent tokens (a folder with token_rank.u16): a quicker draft
    /// model, which cannot be served
    #[arg(long, value_name = "N")]
    pub head_tokens: Option<usize>,

    /// Replace an existing shard set
    #[arg(long)]
    pub force: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// What `stagebus shard --json` prints.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct ShardReport<'a> {
    dir: &'a std::path::Path,
    model: &'a str,
    fingerprint: &'a str,
    weights: WeightMode,
    stages: Vec<StageReport>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct StageReport {
    stage: usize,
    first_layer: usize,
    end_layer: usize,
    bytes: u64,
    cost_share: f64,
}

/// Runs the command.
///
/// # Errors
/// [`UsageError`] for stages that contradict the split, else what the sharder says.
pub async fn run(args: ShardArgs, quiet: bool, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let n_stages = stage_count(args.stages, args.split.as_deref())?;
    let request = ShardRequest {
        source: args.model,
        out_dir: args.out,
        n_stages,
        split: args.split,
        weights: args.weights,
        model_name: args.name,
        tokenizer_from: args.tokenizer_from,
        head_tokens: args.head_tokens,
        force: args.force,
    };
    let manifest = shard_with_progress(request.clone(), quiet, &stop).await?;
    if args.json {
        console::print_json(&report(&request, &manifest))?;
    } else {
        console::print(&describe(&request, &manifest))?;
    }
    Ok(Outcome::Good)
}

/// Writes a shard set and shows how far it is. When `stop` is cancelled nothing is left behind.
///
/// # Errors
/// What the sharder says, with the names of source and target, or that it was stopped.
pub(crate) async fn shard_with_progress(
    request: ShardRequest,
    quiet: bool,
    stop: &CancellationToken,
) -> anyhow::Result<Manifest> {
    let (source, out_dir) = (request.source.clone(), request.out_dir.clone());
    let bar = ShardProgress::new(quiet);
    let (shown, stopped) = (bar.clone(), stop.clone());
    let work = tokio::task::spawn_blocking(move || {
        stagebus_shards::shard(&request, &mut |progress| {
            if stopped.is_cancelled() {
                // The sharder cannot be called off; unwinding through it removes what it wrote.
                std::panic::resume_unwind(Box::new("stopped"));
            }
            shown.update(progress);
        })
    });
    let result = work.await;
    bar.finish();
    match result {
        Ok(manifest) => manifest.with_context(|| {
            format!("cannot shard {} into {}", source.display(), out_dir.display())
        }),
        Err(_) if stop.is_cancelled() => {
            anyhow::bail!("stopped, {} is not written", out_dir.display())
        }
        Err(error) => Err(error).context("the sharder failed"),
    }
}

/// The number of stages that the two options ask for together.
pub(crate) fn stage_count(
    stages: Option<usize>,
    split: Option<&[usize]>,
) -> Result<usize, UsageError> {
    match (stages, split) {
        (Some(stages), Some(split)) if stages != split.len() => Err(UsageError::Conflict {
            left: format!("--stages {stages}"),
            right: "--split".to_owned(),
            reason: format!("the split has {} stages", split.len()),
        }),
        (Some(stages), _) => Ok(stages),
        (None, Some(split)) => Ok(split.len()),
        (None, None) => Err(UsageError::Needs { option: "shard", needs: "--stages or --split" }),
    }
}

fn report<'a>(request: &'a ShardRequest, manifest: &'a Manifest) -> ShardReport<'a> {
    ShardReport {
        dir: &request.out_dir,
        model: &manifest.model,
        fingerprint: &manifest.fingerprint,
        weights: manifest.weights,
        stages: manifest
            .stages
            .iter()
            .map(|stage| StageReport {
                stage: stage.index,
                first_layer: stage.first_layer,
                end_layer: stage.end_layer,
                bytes: stage.xml.bytes + stage.bin.bytes,
                cost_share: stage.cost_share,
            })
            .collect(),
    }
}

fn describe(request: &ShardRequest, manifest: &Manifest) -> String {
    let rows: Vec<Vec<String>> = manifest
        .stages
        .iter()
        .map(|stage| {
            #[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
            let mib = (stage.xml.bytes + stage.bin.bytes) as f64 / f64::from(1 << 20);
            vec![
                stage.index.to_string(),
                format!("{}..{}", stage.first_layer, stage.end_layer),
                format!("{mib:.1}"),
                format!("{:.0} %", stage.cost_share * 100.0),
            ]
        })
        .collect();
    format!(
        "{} in {} ({} weights, fingerprint {})\n{}",
        manifest.model,
        request.out_dir.display(),
        manifest.weights,
        manifest.fingerprint.get(..12).unwrap_or(&manifest.fingerprint),
        console::table(&["stage", "layers", "MiB", "cost"], &rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_and_split_must_agree() {
        assert_eq!(stage_count(Some(2), None), Ok(2));
        assert_eq!(stage_count(None, Some(&[16, 14])), Ok(2));
        assert_eq!(stage_count(Some(2), Some(&[16, 14])), Ok(2));
        assert!(matches!(stage_count(Some(3), Some(&[16, 14])), Err(UsageError::Conflict { .. })));
        assert!(matches!(stage_count(None, None), Err(UsageError::Needs { .. })));
    }
}
