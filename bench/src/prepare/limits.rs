//! A model on nodes that each have too little memory for it.
//!
//! Workers run in memory control groups of their own (Linux, as root). The limit lies halfway between
//! what a worker with the whole model takes and what the larger of two stages takes. The whole model
//! must not start under it, and two stages must answer as the whole model does without a limit.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Serialize;
use stagebus_fleet::FleetSpec;
use stagebus_shards::WeightMode;

use crate::fleet_run::FleetRun;
use crate::harness::claims::{Bound, Claim, Target};
use crate::harness::machine;
use crate::harness::output;
use crate::random_gguf::{Fill, RandomModel};
use crate::shard_once::{self, ShardOnceArgs};

/// The claim of this part.
pub const IDENTICAL: Target = Target {
    name: "limited_nodes_tokens_identical",
    target: 1.0,
    bound: Bound::AtLeast,
    what: "share of tokens of two nodes, each with too little memory for the model, that equal the whole model's",
};

/// Layers of the model: 1.4 GB.
const N_LAYERS: u64 = 8;

/// Tokens of the answer that is compared.
const N_TOKENS: usize = 16;

/// The prompt: any ids below the vocabulary's size.
const PROMPT: [u32; 6] = [300, 1000, 4000, 70, 9000, 12];

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Limited {
    /// Size of the model file, in bytes.
    model_bytes: u64,
    /// Memory of its own that a worker with the whole model takes, in bytes.
    whole_bytes: u64,
    /// The same for each of two stages.
    stage_bytes: Vec<u64>,
    /// The limit of every worker, in bytes.
    limit_bytes: u64,
    /// Whether the whole model ran under the limit.
    whole_ran: bool,
    /// Tokens of two stages under the limit that are those of the whole model, from the start.
    n_equal: usize,
    /// Tokens of the whole model.
    n_tokens: usize,
}

/// Why a limit could not be set, for people.
pub type Unlimited = String;

/// Measures, or says why limits cannot be set here.
///
/// # Errors
/// A full disk, what the sharder says, a fleet that does not run without a limit, or with two stages.
pub async fn run(folder: &Path, quiet: bool) -> anyhow::Result<Result<Limited, Unlimited>> {
    let groups = match Groups::make() {
        Ok(groups) => groups,
        Err(error) => return Ok(Err(format!("no memory control group can be made: {error}"))),
    };
    let path = folder.join("limited.gguf");
    let file = path.clone();
    let write = move || RandomModel::large(N_LAYERS).write(&file, Fill::Whole);
    let written = tokio::task::spawn_blocking(write).await.context("the generator failed")?;
    let model_bytes = written.with_context(|| format!("cannot write {}", path.display()))?;
    let mut sets = Vec::new();
    for stages in [1, 2] {
        let out = folder.join(format!("limited-{stages}"));
        let weights = WeightMode::Exact;
        let args =
            ShardOnceArgs { model: path.clone(), stages, weights, split: None, out: out.clone() };
        shard_once::in_child(&args).await?;
        sets.push(out);
    }
    let program = machine::this_program()?;
    output::note(quiet, "without a limit");
    let (expected, whole) = answer(&program, &sets[0]).await?;
    let (_, stage_bytes) = answer(&program, &sets[1]).await?;
    let whole_bytes = whole.iter().copied().max().unwrap_or(0);
    let limit_bytes = (whole_bytes + stage_bytes.iter().copied().max().unwrap_or(0)) / 2;
    let limited = groups.wrapper(folder, &program, limit_bytes)?;
    output::note(quiet, &format!("with {} MB a worker", limit_bytes / 1_000_000));
    let whole_ran = answer(&limited, &sets[0]).await.is_ok();
    let (tokens, _) = answer(&limited, &sets[1]).await?;
    let n_equal = expected.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
    let n_tokens = expected.len();
    Ok(Ok(Limited {
        model_bytes,
        whole_bytes,
        stage_bytes,
        limit_bytes,
        whole_ran,
        n_equal,
        n_tokens,
    }))
}

/// The claim for what was measured.
pub(super) fn claim(limited: &Result<Limited, Unlimited>) -> Claim {
    match limited {
        Err(why) => IDENTICAL.missing(why.as_str()),
        Ok(limited) if limited.whole_ran => {
            IDENTICAL.missing("the whole model ran under the limit, too")
        }
        Ok(limited) => {
            let share = limited.n_equal as f64 / limited.n_tokens as f64;
            IDENTICAL.measured(share, "exact profile; the whole model did not run under the limit")
        }
    }
}

/// Asks a fleet of `program`; returns the tokens, and the memory of each worker's own afterwards.
async fn answer(program: &Path, set: &Path) -> anyhow::Result<(Vec<u32>, Vec<u64>)> {
    let mut spec = FleetSpec::new(program.to_owned(), set.to_owned());
    spec.settings = ["worker.profile=exact", "worker.kv_memory_mib=64"].map(str::to_owned).into();
    let fleet = FleetRun::start(spec).await?;
    let answer = fleet.ask(&PROMPT, N_TOKENS, false).await?;
    let bytes = fleet.worker_bytes()?;
    fleet.end().await?;
    Ok((answer.tokens, bytes))
}

/// The two versions of control groups.
#[derive(Debug, Clone, Copy)]
enum Version {
    One,
    Two,
}

/// Memory control groups, one for each worker; removed at the end.
#[derive(Debug)]
struct Groups {
    folder: PathBuf,
    version: Version,
}

impl Groups {
    fn make() -> io::Result<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let (parent, version) = match root.join("cgroup.controllers").try_exists()? {
            true => (root.to_owned(), Version::Two),
            false => (root.join("memory"), Version::One),
        };
        let groups =
            Self { folder: parent.join(format!("stagebus-{}", std::process::id())), version };
        fs::create_dir(&groups.folder)?;
        if matches!(version, Version::Two) {
            fs::write(groups.folder.join("cgroup.subtree_control"), "+memory")?;
        }
        Ok(groups)
    }

    /// A program that does what `program` does, its workers with at most so much memory.
    fn wrapper(&self, folder: &Path, program: &Path, limit: u64) -> anyhow::Result<PathBuf> {
        let path = folder.join("limited");
        let limit_file = match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        let text = format!(
            "#!/bin/sh\nset -e\nif [ \"$1\" = worker ]; then\n  group='{}'/$$\n  mkdir \"$group\"\n  \
             echo {limit} > \"$group/{limit_file}\"\n  echo $$ > \"$group/cgroup.procs\"\nfi\n\
             exec '{}' \"$@\"\n",
            self.folder.display(),
            program.display()
        );
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        Ok(path)
    }
}

impl Drop for Groups {
    /// What cannot be removed is empty and harmless.
    fn drop(&mut self) {
        let members = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        for member in members.filter(|entry| entry.path().is_dir()) {
            drop(fs::remove_dir(member.path()));
        }
        drop(fs::remove_dir(&self.folder));
    }
}

impl Limited {
    /// A sentence for people.
    pub(super) fn describe(&self) -> String {
        let mb = |bytes: u64| bytes / 1_000_000;
        let stages: Vec<String> =
            self.stage_bytes.iter().map(|&bytes| mb(bytes).to_string()).collect();
        format!(
            "a model of {} MB: the whole takes {} MB, two stages {} MB; with {} MB a worker the \
             whole {}, two stages give {} of {} tokens\n",
            mb(self.model_bytes),
            mb(self.whole_bytes),
            stages.join(" and "),
            mb(self.limit_bytes),
            if self.whole_ran { "runs" } else { "does not run" },
            self.n_equal,
            self.n_tokens
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limited(whole_ran: bool, n_equal: usize) -> Result<Limited, Unlimited> {
        let (model_bytes, whole_bytes, stage_bytes) = (1000, 900, vec![500, 520]);
        let limit_bytes = 710;
        Ok(Limited {
            model_bytes,
            whole_bytes,
            stage_bytes,
            limit_bytes,
            whole_ran,
            n_equal,
            n_tokens: 16,
        })
    }

    #[test]
    fn only_a_limit_that_stops_the_whole_model_counts() {
        assert_eq!(claim(&limited(false, 16)).holds, Some(true));
        assert_eq!(claim(&limited(false, 15)).holds, Some(false));
        assert_eq!(claim(&limited(true, 16)).holds, None);
        assert_eq!(claim(&Err("no rights".to_owned())).how, "no rights");
    }
}
