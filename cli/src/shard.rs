//! `stagebus shard`: a model file becomes a shard set.

use std::path::PathBuf;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_shards::{
    CodedTensor, FloatCoding, FloatException, Form, Manifest, ShardError, ShardRequest, StaticForm,
    WeightMode,
};
use tokio_util::sync::CancellationToken;

use crate::console;
use crate::exit::{Outcome, UsageError};
use crate::progress::ShardProgress;
use crate::weights;

/// Arguments of `stagebus shard`.
#[expect(clippy::struct_excessive_bools, reason = "a switch on the command line is a bool")]
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus shard SmolLM2-135M-Instruct.Q4_1.gguf --stages 2 --out shard-sets/smollm2
  stagebus shard models/draft --stages 1 --tokenizer-from shard-sets/smollm2 --out shard-sets/draft
  stagebus shard llama-8b.gguf --stages 3 --split 12,12,8 --out shard-sets/llama-8b --force
  stagebus shard models/qwen3-8b --stages 2 --tensor \"*.down_proj.*=int8\" --out shard-sets/qwen3-8b
  stagebus shard Qwen3-8B-int4-ov --stages 2 --out shard-sets/qwen3-8b
  stagebus shard llama-8b.gguf --stages 2 --form static --window 2048 --out shard-sets/llama-8b-npu

The folder appears when everything in it is complete; after a failure there is none.")]
pub struct ShardArgs {
    /// The model: a GGUF file, a folder with config.json and safetensors, or one with
    /// openvino_model.xml
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

    /// How weights that the model stores in integers are mapped: exact keeps every value, compact is
    /// the smallest and loses some. An OpenVINO model's weights are copied, whatever they are
    #[arg(long, value_name = "MODE", default_value_t, value_parser = weights::parser())]
    pub weights: WeightMode,

    /// What becomes of matrices that the model stores in floats; where it is int4 or int4-asym, the
    /// embedding table and the head are int8 [default: int4 for a folder of safetensors, else keep]
    #[arg(long, value_name = "CODING", value_parser = weights::floats_parser())]
    pub floats: Option<FloatCoding>,

    /// Another coding for the tensors of this name, in which * stands for anything; may be given
    /// several times, and the last that fits counts
    #[arg(long = "tensor", value_name = "NAME=CODING", value_parser = weights::exception)]
    pub tensors: Vec<FloatException>,

    /// Search the scales of 4-bit groups for the least error: some five per cent of it, for ten
    /// times the work
    #[arg(long)]
    pub search_scales: bool,

    /// Print what the coding changed, tensor by tensor
    #[arg(long)]
    pub errors: bool,

    /// The form of the graphs: static has fixed shapes and its caches outside, as NPUs take it; its
    /// longest session is --window
    #[arg(long, value_name = "FORM", value_enum, default_value_t)]
    pub form: FormChoice,

    /// Static form: positions of a session, in tokens; at most the model's context [default: 1024]
    #[arg(long, value_name = "N")]
    pub window: Option<usize>,

    /// Static form: rows of a call; longer prompts and drafts take several calls [default: 16]
    #[arg(long, value_name = "N")]
    pub rows: Option<usize>,

    /// Static form: sessions that share a call, each with a window of its own [default: 4]
    #[arg(long, value_name = "N")]
    pub slots: Option<usize>,

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

/// The form of stage graphs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FormChoice {
    /// Open shapes, caches inside.
    #[default]
    Stateful,
    /// Fixed shapes, caches outside.
    Static,
}

/// What `stagebus shard --json` prints.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct ShardReport<'a> {
    dir: &'a std::path::Path,
    model: &'a str,
    fingerprint: &'a str,
    weights: WeightMode,
    floats: FloatCoding,
    form: Form,
    coded: &'a [CodedTensor],
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
    let form = form(args.form, [args.window, args.rows, args.slots])?;
    let mut floats = weights::floats(args.floats, &args.model);
    floats.exceptions = args.tensors;
    floats.search_scales = args.search_scales;
    let request = ShardRequest {
        split: args.split,
        weights: args.weights,
        floats,
        form,
        model_name: args.name,
        tokenizer_from: args.tokenizer_from,
        head_tokens: args.head_tokens,
        force: args.force,
        ..ShardRequest::new(args.model, args.out, n_stages)
    };
    let sharded = shard_with_progress(request.clone(), quiet, &stop).await?;
    if args.json {
        console::print_json(&report(&request, &sharded))?;
        return Ok(Outcome::Good);
    }
    if args.errors {
        console::print(&errors(&sharded.coded))?;
    }
    console::print(&describe(&request, &sharded))?;
    Ok(Outcome::Good)
}

/// What came of a request.
#[derive(Debug)]
pub(crate) struct Sharded {
    manifest: Manifest,
    /// Every tensor that was coded anew, once.
    coded: Vec<CodedTensor>,
}

/// Writes a shard set and shows how far it is. When `stop` is cancelled nothing is left behind.
///
/// # Errors
/// What the sharder says, with the names of source and target, or that it was stopped.
pub(crate) async fn shard_with_progress(
    request: ShardRequest,
    quiet: bool,
    stop: &CancellationToken,
) -> anyhow::Result<Sharded> {
    let (source, out_dir) = (request.source.clone(), request.out_dir.clone());
    let bar = ShardProgress::new(quiet);
    let (shown, stopped) = (bar.clone(), stop.clone());
    let work = tokio::task::spawn_blocking(move || -> Result<Sharded, ShardError> {
        let mut coded: Vec<CodedTensor> = Vec::new();
        let manifest = stagebus_shards::shard(&request, &mut |progress| {
            if stopped.is_cancelled() {
                // The sharder cannot be called off; unwinding through it removes what it wrote.
                std::panic::resume_unwind(Box::new("stopped"));
            }
            shown.update(progress);
            // A table that two stages need was coded twice.
            let new = |found: &&CodedTensor| !coded.contains(found);
            let new: Vec<CodedTensor> = progress.coded.iter().filter(new).cloned().collect();
            coded.extend(new);
        })?;
        Ok(Sharded { manifest, coded })
    });
    let result = work.await;
    bar.finish();
    match result {
        Ok(sharded) => sharded.with_context(|| {
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

/// The form that the options ask for.
fn form(choice: FormChoice, numbers: [Option<usize>; 3]) -> Result<Form, UsageError> {
    let mut given = ["--window", "--rows", "--slots"].into_iter().zip(numbers);
    let given = given.find(|(_, number)| number.is_some());
    match (choice, given) {
        (FormChoice::Static, _) => {
            let [window, rows, slots] = numbers;
            let default = StaticForm::default();
            Ok(Form::Static(StaticForm {
                window: window.unwrap_or(default.window),
                rows: rows.unwrap_or(default.rows),
                slots: slots.unwrap_or(default.slots),
            }))
        }
        (FormChoice::Stateful, None) => Ok(Form::Stateful),
        (FormChoice::Stateful, Some((option, _))) => {
            Err(UsageError::Needs { option, needs: "--form static" })
        }
    }
}

fn report<'a>(request: &'a ShardRequest, sharded: &'a Sharded) -> ShardReport<'a> {
    let manifest = &sharded.manifest;
    ShardReport {
        dir: &request.out_dir,
        model: &manifest.model,
        fingerprint: &manifest.fingerprint,
        weights: manifest.weights,
        floats: manifest.floats.unwrap_or_default(),
        form: manifest.form,
        coded: &sharded.coded,
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

/// One line for each coded tensor.
fn errors(coded: &[CodedTensor]) -> String {
    let row = |tensor: &CodedTensor| {
        vec![
            tensor.name.clone(),
            format!("{} x {}", tensor.n_rows, tensor.n_cols),
            tensor.coding.to_string(),
            format!("{:.3} %", tensor.relative_error * 100.0),
            format!("{:.2e}", tensor.largest_error),
        ]
    };
    let rows: Vec<Vec<String>> = coded.iter().map(row).collect();
    console::table(&["tensor", "size", "coding", "error", "largest"], &rows)
}

/// What the coding of floats changed, in a line; nothing if it changed nothing.
fn summary(coded: &[CodedTensor]) -> String {
    let worst = coded.iter().max_by(|a, b| a.relative_error.total_cmp(&b.relative_error));
    let Some(worst) = worst else { return String::new() };
    format!(
        "{} matrices coded anew, {} changed most: {} by {:.1} %\n",
        coded.len(),
        worst.name,
        worst.coding,
        worst.relative_error * 100.0
    )
}

/// What a static form holds, with a comma behind it.
fn shapes(form: Form) -> String {
    match form {
        Form::Stateful => String::new(),
        Form::Static(StaticForm { window, rows, slots }) => {
            format!("{slots} slots of {window} tokens, {rows} rows a call, ")
        }
    }
}

fn describe(request: &ShardRequest, sharded: &Sharded) -> String {
    let manifest = &sharded.manifest;
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
        "{} in {} ({} weights, {}fingerprint {})\n{}{}",
        manifest.model,
        request.out_dir.display(),
        manifest.weights,
        shapes(manifest.form),
        manifest.fingerprint.get(..12).unwrap_or(&manifest.fingerprint),
        summary(&sharded.coded),
        console::table(&["stage", "layers", "MiB", "cost"], &rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_changed_tensor_is_named() {
        let coded = |name: &str, relative_error| CodedTensor {
            name: name.to_owned(),
            n_rows: 2,
            n_cols: 32,
            coding: FloatCoding::Int4,
            relative_error,
            largest_error: 0.5,
        };
        let all = [coded("a", 0.01), coded("b", 0.09), coded("c", 0.02)];
        assert_eq!(summary(&all), "3 matrices coded anew, b changed most: int4 by 9.0 %\n");
        assert_eq!(summary(&[]), "");
        let table = errors(&all);
        assert!(table.contains("9.000 %") && table.contains("2 x 32"), "{table}");
    }

    #[test]
    fn only_a_static_form_has_numbers() {
        let three = StaticForm { slots: 3, ..StaticForm::default() };
        let found = form(FormChoice::Static, [None, None, Some(3)]);
        assert_eq!(found, Ok(Form::Static(three)));
        assert_eq!(shapes(Form::Static(three)), "3 slots of 1024 tokens, 16 rows a call, ");
        assert_eq!(form(FormChoice::Stateful, [None; 3]), Ok(Form::Stateful));
        let refused = form(FormChoice::Stateful, [None, Some(8), Some(3)]);
        assert_eq!(refused, Err(UsageError::Needs { option: "--rows", needs: "--form static" }));
    }

    #[test]
    fn stages_and_split_must_agree() {
        assert_eq!(stage_count(Some(2), None), Ok(2));
        assert_eq!(stage_count(None, Some(&[16, 14])), Ok(2));
        assert_eq!(stage_count(Some(2), Some(&[16, 14])), Ok(2));
        assert!(matches!(stage_count(Some(3), Some(&[16, 14])), Err(UsageError::Conflict { .. })));
        assert!(matches!(stage_count(None, None), Err(UsageError::Needs { .. })));
    }
}
