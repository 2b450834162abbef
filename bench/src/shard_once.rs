//! The hidden subcommand `shard-once`: writes one shard set in a process of its own, so that its
//! time and peak memory are those of the sharder.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Instant;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use stagebus_shards::{ShardRequest, WeightMode};

use crate::harness::{machine, output};

/// Arguments of `shard-once`.
#[derive(Debug, Clone, clap::Args)]
pub struct ShardOnceArgs {
    /// A GGUF file
    #[arg(long, value_name = "GGUF")]
    pub model: PathBuf,

    /// Number of stages
    #[arg(long, value_name = "N")]
    pub stages: usize,

    /// How weights are mapped
    #[arg(long, value_name = "MODE")]
    pub weights: WeightMode,

    /// Layers of each stage [default: stages that cost alike when decoding]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub split: Option<Vec<usize>>,

    /// The folder to create
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// What sharding took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sharding {
    /// Time from the start of the work to the complete shard set, in seconds.
    pub seconds: f64,
    /// Most memory of the process, mapped file pages included, in bytes, if the platform tells.
    pub peak_rss_bytes: Option<u64>,
    /// Bytes of all stages' weights.
    pub weight_bytes: u64,
}

/// Shards and prints a [`Sharding`].
///
/// # Errors
/// What the sharder says.
pub async fn run(args: ShardOnceArgs) -> anyhow::Result<()> {
    let work = tokio::task::spawn_blocking(move || shard(args));
    Ok(output::print_json(&work.await.context("the sharder failed")??)?)
}

fn shard(args: ShardOnceArgs) -> anyhow::Result<Sharding> {
    let request = ShardRequest {
        split: args.split,
        weights: args.weights,
        ..ShardRequest::new(args.model, args.out, args.stages)
    };
    let started = Instant::now();
    let manifest = stagebus_shards::shard(&request, &mut |_| {})?;
    Ok(Sharding {
        seconds: started.elapsed().as_secs_f64(),
        peak_rss_bytes: stagebus_fleet::peak_rss_bytes(std::process::id()).ok(),
        weight_bytes: manifest.stages.iter().map(|stage| stage.bin.bytes).sum(),
    })
}

/// Shards in a child process.
///
/// # Errors
/// A child that does not start, or fails with what it says.
pub async fn in_child(args: &ShardOnceArgs) -> anyhow::Result<Sharding> {
    let split = args.split.iter().flatten().map(usize::to_string).collect::<Vec<_>>().join(",");
    let split = args.split.is_some().then(|| format!("--split={split}"));
    let output = tokio::process::Command::new(machine::this_program()?)
        .args(["bench", "shard-once", "--model"])
        .arg(&args.model)
        .args(["--stages", &args.stages.to_string(), "--weights", args.weights.as_str()])
        .args(split)
        .arg("--out")
        .arg(&args.out)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .context("cannot start the sharder")?;
    anyhow::ensure!(
        output.status.success(),
        "cannot shard {} into {} stages: {}",
        args.model.display(),
        args.stages,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout).context("the sharder's report cannot be read")
}
