//! The scenario `prepare`: models of the shape of one with 70 billion weights, and nodes that are too
//! small for a whole model.
//!
//! A sparse GGUF file and a sparse folder of safetensors, with random weights between the holes, are
//! each sharded in a process of its own, whose memory and time are told. Copying the weights that came
//! out, to the same disk, is the measure of the time.

pub mod limits;

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_shards::{ShardSet, WeightMode};

use crate::harness::claims::{self, Bound, Claim, Target};
use crate::harness::machine::Machine;
use crate::harness::output;
use crate::harness::table::{number, table};
use crate::random_folder;
use crate::random_gguf::{Fill, RandomModel};
use crate::shard_once::{self, ShardOnceArgs, Sharding};
use limits::Limited;

const PEAK: Target = Target {
    name: "shard70b_peak_mb",
    target: 1000.0,
    bound: Bound::AtMost,
    what: "most memory of the sharder for a model of 70B shape, mapped pages included, the worse of GGUF and safetensors",
};
const RATE: Target = Target {
    name: "shard70b_rate_vs_copy",
    target: 0.5,
    bound: Bound::AtLeast,
    what: "bytes of the model sharded per second over bytes copied per second on the same disk, the worse of both",
};

/// The claims of this scenario.
pub const CLAIMS: &[Target] = &[PEAK, RATE, limits::IDENTICAL];

/// Stages of the shard sets.
const N_STAGES: usize = 8;

/// Bytes that are copied at once.
const COPY_BYTES: usize = 1 << 20;

/// Bytes of output per byte of model, at most: Q4_1 becomes 5.5 bits a weight from 5.
const MOST_OUTPUT: f64 = 1.15;

/// Arguments of `stagebus bench prepare`.
#[derive(Debug, Clone, clap::Args)]
pub struct PrepareArgs {
    /// Size of the models, in GiB; less where the disk has no room for their shards
    #[arg(long, value_name = "GIB", default_value_t = 28, value_parser = clap::value_parser!(u32).range(1..))]
    gib: u32,

    /// Where models and shard sets are made [default: the system's folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,

    /// Print one JSON object last
    #[arg(long)]
    json: bool,
}

/// One model that was sharded.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prepared {
    /// `gguf` or `safetensors`.
    format: &'static str,
    /// Layers.
    n_layers: u64,
    /// Size of the model, in bytes.
    model_bytes: u64,
    /// What it took.
    #[serde(flatten)]
    sharding: Sharding,
    /// Time that a copy of the stages' weights takes, in seconds.
    copy_seconds: f64,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct PrepareReport {
    scenario: &'static str,
    machine: Machine,
    prepared: Vec<Prepared>,
    limited: Option<Limited>,
    claims: Vec<Claim>,
}

/// Runs the scenario and prints its tables, and with `--json` one object last.
///
/// # Errors
/// A full disk, what the sharder says, a fleet that does not run.
pub async fn run(args: PrepareArgs, quiet: bool) -> anyhow::Result<()> {
    let mut machine = Machine::look();
    let folder = match &args.folder {
        Some(folder) => tempfile::tempdir_in(folder),
        None => tempfile::tempdir(),
    };
    let folder = folder.context("cannot create a temporary folder")?;
    let wanted = u64::from(args.gib) << 30;
    let mut prepared = Vec::new();
    for format in [Format::Gguf, Format::Safetensors] {
        let n_layers = format.layers_that_fit(folder.path(), wanted)?;
        output::note(quiet, &format!("{}, {n_layers} layers", format.name()));
        prepared.push(prepare(folder.path(), format, n_layers).await?);
    }
    output::note(quiet, "nodes with too little memory for the whole model");
    let limited = limits::run(folder.path(), quiet).await?;
    machine.finish();
    let claims = vec![peak_claim(&prepared), rate_claim(&prepared), limits::claim(&limited)];
    let limited = limited.ok();
    let report = PrepareReport { scenario: "prepare", machine, prepared, limited, claims };
    let claims = claims::describe(&report.claims, CLAIMS);
    Ok(output::print_report(&report, &report.describe(), &claims, None, args.json)?)
}

/// A format of models.
#[derive(Debug, Clone, Copy)]
enum Format {
    Gguf,
    Safetensors,
}

impl Format {
    const fn name(self) -> &'static str {
        match self {
            Self::Gguf => "gguf",
            Self::Safetensors => "safetensors",
        }
    }

    /// Bits of a weight, of the model's and at most of the shard set's.
    const fn bits(self) -> (f64, f64) {
        match self {
            Self::Gguf => (5.0, 5.0 * MOST_OUTPUT),
            Self::Safetensors => (16.0, 5.0),
        }
    }

    /// Layers of a model of so many bytes, or of as many as there is room to shard: for all stages,
    /// the copy of one, and what is written of the model.
    fn layers_that_fit(self, folder: &Path, wanted: u64) -> anyhow::Result<u64> {
        let free = fs4::available_space(folder).context("cannot see what the disk has left")?;
        Ok(self.layers(wanted, free))
    }

    fn layers(self, wanted: u64, free: u64) -> u64 {
        let weights = RandomModel::huge(1).layer_weights() as f64;
        let (model, made) = self.bits();
        let by_size = wanted as f64 / (weights * model / 8.0);
        let written = made * (1.0 + 1.0 / N_STAGES as f64) + model / 32.0;
        let by_room = free as f64 / (weights * written / 8.0);
        let most = if by_size <= by_room { by_size.ceil() } else { by_room.floor() };
        (most as u64).max(N_STAGES as u64)
    }
}

/// Makes a model, shards it, copies what came out, and removes everything.
async fn prepare(folder: &Path, format: Format, n_layers: u64) -> anyhow::Result<Prepared> {
    let (path, out) = (folder.join(format.name()), folder.join("set"));
    let file = path.clone();
    let write = tokio::task::spawn_blocking(move || match format {
        Format::Gguf => RandomModel::huge(n_layers).write(&file, Fill::Sparse),
        Format::Safetensors => {
            random_folder::write(&RandomModel::huge(n_layers), &file, Fill::Sparse)
        }
    });
    let written = write.await.context("the generator failed")?;
    let model_bytes = written.with_context(|| format!("cannot write {}", path.display()))?;
    let args = ShardOnceArgs {
        model: path.clone(),
        stages: N_STAGES,
        weights: WeightMode::Exact,
        split: None,
        out: out.clone(),
    };
    let sharding = shard_once::in_child(&args).await?;
    let set = out.clone();
    let copy = tokio::task::spawn_blocking(move || copy_weights(&set));
    let copy_seconds = copy.await.context("the copy failed")??;
    let removed = match format {
        Format::Gguf => fs::remove_file(&path),
        Format::Safetensors => fs::remove_dir_all(&path),
    };
    removed.with_context(|| format!("cannot remove {}", path.display()))?;
    fs::remove_dir_all(&out).with_context(|| format!("cannot remove {}", out.display()))?;
    Ok(Prepared { format: format.name(), n_layers, model_bytes, sharding, copy_seconds })
}

/// Copies the weights of every stage and removes each copy; returns the seconds that copying took.
fn copy_weights(set: &Path) -> anyhow::Result<f64> {
    let to = set.join("copy");
    let mut seconds = 0.0;
    for stage in ShardSet::open(set)?.manifest.stages {
        let from = set.join(&stage.bin.name);
        let begun = Instant::now();
        copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        seconds += begun.elapsed().as_secs_f64();
        fs::remove_file(&to).with_context(|| format!("cannot remove {}", to.display()))?;
    }
    Ok(seconds)
}

/// Every byte through this process: a system that shares blocks between files copies nothing.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let (mut from, mut to) = (File::open(from)?, File::create_new(to)?);
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        let n_read = from.read(&mut buffer)?;
        if n_read == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..n_read])?;
    }
}

impl Prepared {
    /// Bytes of the model per second.
    fn rate(&self) -> f64 {
        self.model_bytes as f64 / self.sharding.seconds
    }

    /// Bytes copied per second.
    fn copy_rate(&self) -> f64 {
        self.sharding.weight_bytes as f64 / self.copy_seconds
    }

    fn peak_mb(&self) -> Option<f64> {
        self.sharding.peak_rss_bytes.map(|bytes| bytes as f64 / 1e6)
    }

    fn size(&self) -> String {
        format!("{} {:.1} GB", self.format, self.model_bytes as f64 / 1e9)
    }
}

fn peak_claim(prepared: &[Prepared]) -> Claim {
    let peaks: Option<Vec<f64>> = prepared.iter().map(Prepared::peak_mb).collect();
    match peaks.and_then(|peaks| peaks.into_iter().max_by(f64::total_cmp)) {
        None => PEAK.missing("this platform does not tell peak memory"),
        Some(peak) => PEAK.measured(peak, sizes(prepared)),
    }
}

fn rate_claim(prepared: &[Prepared]) -> Claim {
    let ratios = prepared.iter().map(|one| one.rate() / one.copy_rate());
    match ratios.min_by(f64::total_cmp) {
        None => RATE.missing("nothing was sharded"),
        Some(ratio) => RATE.measured(ratio, sizes(prepared)),
    }
}

fn sizes(prepared: &[Prepared]) -> String {
    prepared.iter().map(Prepared::size).collect::<Vec<_>>().join(", ")
}

impl PrepareReport {
    /// The tables for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let row = |one: &Prepared| {
            vec![
                one.format.to_owned(),
                one.n_layers.to_string(),
                number(Some(one.model_bytes as f64 / 1e9), 1),
                number(Some(one.sharding.weight_bytes as f64 / 1e9), 1),
                number(Some(one.sharding.seconds), 0),
                number(one.peak_mb(), 0),
                number(Some(one.rate() / 1e6), 0),
                number(Some(one.copy_rate() / 1e6), 0),
            ]
        };
        let header =
            ["format", "layers", "GB", "GB of shards", "s", "peak MB", "MB/s", "copy MB/s"];
        let rows: Vec<_> = self.prepared.iter().map(row).collect();
        let limited = self.limited.as_ref().map(Limited::describe).unwrap_or_default();
        format!("{N_STAGES} stages\n{}\n{limited}", table(&header, &rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_the_size_that_was_asked_for_or_the_one_that_fits() {
        let layers =
            |format: Format, wanted: u64, free: u64| format.layers(wanted << 30, free << 30);
        assert_eq!(layers(Format::Gguf, 28, 100), 57);
        assert_eq!(layers(Format::Gguf, 28, 20), 30);
        assert_eq!(layers(Format::Safetensors, 28, 100), 18);
        assert_eq!(layers(Format::Gguf, 28, 1), 8, "a layer for each stage at least");
    }

    #[test]
    fn the_worse_format_counts() {
        let one = |format, seconds, peak| Prepared {
            format,
            n_layers: 8,
            model_bytes: 30_000_000_000,
            sharding: Sharding {
                seconds,
                peak_rss_bytes: Some(peak),
                weight_bytes: 30_000_000_000,
            },
            copy_seconds: 30.0,
        };
        let all = [one("gguf", 40.0, 700_000_000), one("safetensors", 100.0, 300_000_000)];
        let (peak, rate) = (peak_claim(&all), rate_claim(&all));
        assert_eq!((peak.value, peak.holds), (Some(700.0), Some(true)));
        assert_eq!((rate.value, rate.holds), (Some(0.3), Some(false)));
        assert_eq!(peak.how, "gguf 30.0 GB, safetensors 30.0 GB");
    }
}
