//! `stagebus plan`: measures machines and chooses how a model is spread over them.
//!
//! The order: who is there (`ask`), the probe (a cut of the model that tells the costs of its parts
//! apart), which nodes without the model get through the broker (`lend`), its times on every node, the
//! ways between them, the choice (`stagebus_plan`), what is said (`report`) and written (`apply`).

mod apply;
mod ask;
mod error;
mod facts;
mod lend;
mod report;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use stagebus_bus::{Bus, Role};
use stagebus_plan::{MANY_ROWS, Question, Wish, probe_split};
use stagebus_schemas::messages::node::Probe;
use stagebus_shards::manifest::ModelDims;
use stagebus_shards::{FloatCoding, ShardRequest, ShardSet, WeightMode};
use tokio_util::sync::CancellationToken;

use crate::client::ClientArgs;
use crate::console;
use crate::exit::Outcome;
use crate::source::{self, Cut, SourceArgs};
use crate::weights;
use apply::Applied;
use ask::Measured;
use lend::Lent;
use report::Report;

/// Arguments of `stagebus plan`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus plan model.gguf
  stagebus plan model.gguf --sessions 16 --context 8192 --json
  stagebus plan model.gguf --nodes 3 --apply planned
  stagebus plan model.gguf --stages 2 --config operator/stagebus.toml

Start `stagebus node` on every machine that may take part, then plan on any of them. Measuring takes
seconds to minutes; nodes that are busy with something else are measured as slow. One node is chosen
when the model fits it, unless more are at least 5 % faster for so many sessions. The times are
without drafts, which make every layout faster. With --apply the model is cut and a configuration
written for each machine, and the commands are printed that start them. docs/plan.md says what is
measured and how the time is predicted. A broker with permissions takes it from an operator's key.

Exit code 0: a plan was made. 1: none fits, or a node failed.")]
pub struct PlanArgs {
    /// The model: a GGUF file, or a folder with config.json and safetensors
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// Sessions at the same time for which it is to be fast
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    sessions: u16,

    /// Tokens that each of them may reach, for the room of their KV caches
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,

    /// Number of stages [default: what is best]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    stages: Option<u16>,

    /// Nodes that must answer [default: all that do within two seconds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    nodes: Option<u16>,

    /// How weights that the model stores in integers are mapped
    #[arg(long, value_name = "MODE", default_value_t, value_parser = weights::parser())]
    weights: WeightMode,

    /// What becomes of matrices that the model stores in floats [default: int4 for a folder, keep for
    /// a GGUF file]
    #[arg(long, value_name = "CODING", value_parser = weights::floats_parser())]
    floats: Option<FloatCoding>,

    /// Folder in which the probe, a cut of the model, is kept
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,

    /// Cut the model as planned into DIR/shards and write a configuration for each machine to DIR
    #[arg(long, value_name = "DIR")]
    apply: Option<PathBuf>,

    /// With --apply: replace what an earlier plan wrote
    #[arg(long, requires = "apply")]
    force: bool,

    #[command(flatten)]
    client: ClientArgs,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// Nobody answers, a node fails, the model fits nowhere, or what keeps the plan from being written.
pub async fn run(args: PlanArgs, quiet: bool, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let bus = args.client.connect_as(Role::Operator, "stagebus-plan").await?;
    let lent = Lent::default();
    let work = Box::pin(make(&args, &bus, &lent, quiet, &stop));
    let made = stop.run_until_cancelled(work).await;
    lent.take_back().await;
    let (report, applied) = made.context("stopped before there was a plan")??;
    if args.json {
        console::print_json(&report.with(applied.as_ref()))?;
    } else {
        console::print(&report.describe())?;
        if let Some(applied) = &applied {
            console::print(&applied.describe())?;
        }
    }
    Ok(Outcome::Good)
}

async fn make(
    args: &PlanArgs,
    bus: &Bus,
    lent: &Lent,
    quiet: bool,
    stop: &CancellationToken,
) -> anyhow::Result<(Report, Option<Applied>)> {
    let nodes = ask::call(bus, args.nodes.map(usize::from)).await?;
    let set = probe_set(args, quiet, stop).await?;
    let manifest = &set.manifest;
    let layers = |stage: &stagebus_shards::manifest::StageEntry| {
        u32::try_from(stage.end_layer - stage.first_layer)
    };
    let probe = Probe {
        model: manifest.model.parse().context("the model's name is not valid")?,
        fingerprint: manifest.fingerprint.clone(),
        split: manifest.stages.iter().map(layers).collect::<Result<_, _>>()?,
        weights: args.weights.to_string(),
        floats: args.floats.map(|floats| floats.to_string()),
        many_rows: u32::try_from(MANY_ROWS)?,
    };
    lent.store(&set, &nodes, &args.client, quiet).await?;
    let measured = ask::measure(bus, nodes, &probe, quiet).await?;
    let links = ask::links(bus, &measured, manifest.dims.hidden_dim).await?;
    let question = Question {
        model: facts::model(manifest)?,
        nodes: facts::nodes(&measured, manifest)?,
        links,
        wish: Wish {
            sessions: args.sessions.into(),
            context: usize::try_from(args.context)?,
            stages: args.stages.map(usize::from),
        },
    };
    let plan = stagebus_plan::plan(&question).with_context(|| failures(&measured))?;
    let report = Report::new(probe.model, measured, question, plan);
    let applied = match &args.apply {
        Some(dir) => Some(apply(args, dir, &report, quiet, stop).await?),
        None => None,
    };
    Ok((report, applied))
}

/// What stands before the reason for which there is no plan.
fn failures(measured: &[Measured]) -> String {
    let failed: Vec<String> = measured
        .iter()
        .flat_map(|node| node.failures().map(move |(device, why)| (node, device, why)))
        .map(|(node, device, why)| format!("; {device} of {} was left out: {why}", node.name))
        .collect();
    format!("the model cannot be placed on {} nodes{}", measured.len(), failed.concat())
}

/// The model, cut so that the costs of its parts can be told apart.
async fn probe_set(
    args: &PlanArgs,
    quiet: bool,
    stop: &CancellationToken,
) -> anyhow::Result<ShardSet> {
    let model = args.model.clone();
    let dims = tokio::task::spawn_blocking(move || sizes(&model));
    let dims = dims.await.context("the model cannot be looked at")??;
    let split = probe_split(dims.n_layers)?;
    let cut = Cut {
        n_stages: split.len(),
        split: Some(split),
        weights: args.weights,
        floats: args.floats,
    };
    let source = SourceArgs { shards: None, cache: args.cache.clone() };
    source::shard_set(&source, Some(&args.model), &cut, quiet, stop).await
}

/// Sizes of the model, from its file.
fn sizes(model: &Path) -> anyhow::Result<ModelDims> {
    stagebus_shards::model_dims(model).with_context(|| format!("cannot read {}", model.display()))
}

/// Cuts the model as planned and writes the configurations.
async fn apply(
    args: &PlanArgs,
    dir: &Path,
    report: &Report,
    quiet: bool,
    stop: &CancellationToken,
) -> anyhow::Result<Applied> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let dir = std::path::absolute(dir)?;
    let split = report.layout().split();
    let request = ShardRequest {
        split: Some(split.clone()),
        weights: args.weights,
        floats: weights::floats(args.floats, &args.model),
        force: args.force,
        ..ShardRequest::new(args.model.clone(), dir.join(apply::SHARDS), split.len())
    };
    crate::shard::shard_with_progress(request, quiet, stop).await?;
    let broker = args.client.broker_settings()?;
    Ok(apply::write(&dir, report, &broker)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_model_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("m.gguf");
        std::fs::write(&model, "no model").expect("a file");
        let error = sizes(&model).expect_err("no model");
        assert!(format!("{error:#}").contains("m.gguf"), "{error:#}");
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }
}
