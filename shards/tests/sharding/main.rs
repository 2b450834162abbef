//! Shards made-up models and looks at what comes out.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test stops at the first surprise, in its own functions too"
)]
#![expect(clippy::cast_possible_truncation, reason = "sizes of made-up models are small")]

#[path = "../support/synthetic.rs"]
#[expect(dead_code, reason = "the models here are all small")]
mod synthetic;

mod graphs;
mod ir;
mod ir_refusals;
mod outputs;
mod refusals;

use std::path::{Path, PathBuf};

use stagebus_shards::{Manifest, ShardError, ShardRequest, shard};
use synthetic::Synthetic;
use tempfile::TempDir;

/// A folder with a made-up model, and room for its shard sets.
struct Workshop {
    dir: TempDir,
}

impl Workshop {
    fn new(model: &Synthetic) -> Self {
        let dir = TempDir::new().unwrap();
        model.write(&dir.path().join("made-up.gguf")).unwrap();
        Self { dir }
    }

    fn source(&self) -> PathBuf {
        self.dir.path().join("made-up.gguf")
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("set")
    }

    fn request(&self, n_stages: usize) -> ShardRequest {
        ShardRequest::new(self.source(), self.out(), n_stages)
    }

    fn shard(&self, n_stages: usize) -> Result<Manifest, ShardError> {
        shard(&self.request(n_stages), &mut |_| {})
    }

    /// Names of what lies beside the model, sorted.
    fn entries(&self) -> Vec<String> {
        names(self.dir.path())
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
