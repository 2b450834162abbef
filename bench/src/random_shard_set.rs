//! A shard set of random bytes: everything that a delivery looks at, and nothing that can be run.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use anyhow::Context as _;
use sha2::{Digest as _, Sha256};
use stagebus_shards::manifest::{
    FORMAT_VERSION, FileEntry, MANIFEST_FILE, Manifest, ModelDims, StageEntry, WeightMode, hex,
};
use stagebus_shards::{Form, ShardSet};

use crate::faults::Dice;

/// Bytes that are made and hashed at once.
const BLOCK_BYTES: usize = 1 << 20;

/// Writes a shard set of one stage whose weights have so many bytes.
///
/// # Errors
/// A folder that cannot be made or written.
pub fn make(dir: &Path, weights: u64) -> anyhow::Result<ShardSet> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let file = |name: &str, bytes: u64| {
        write(dir, name, bytes).with_context(|| format!("cannot write {name}"))
    };
    let stage = StageEntry {
        index: 0,
        first_layer: 0,
        end_layer: 1,
        cost_share: 1.0,
        xml: file("stage-0.xml", 100_000)?,
        bin: file("stage-0.bin", weights)?,
    };
    let mut manifest = Manifest {
        format_version: FORMAT_VERSION,
        model: "random".to_owned(),
        architecture: "none".to_owned(),
        fingerprint: String::new(),
        source: "random".to_owned(),
        weights: WeightMode::Exact,
        floats: None,
        form: Form::Stateful,
        dims: ModelDims {
            n_layers: 1,
            hidden_dim: 1,
            n_heads: 1,
            n_kv_heads: 1,
            head_dim: 1,
            vocab_size: 1,
            context_length: 1,
        },
        bos_id: None,
        eos_ids: Vec::new(),
        stages: vec![stage],
        text_files: vec![file("tokenizer.json", 1_000_000)?],
        head_tokens: None,
    };
    manifest.fingerprint = manifest.content_fingerprint();
    fs::write(dir.join(MANIFEST_FILE), serde_json::to_vec(&manifest)?)?;
    Ok(ShardSet::open(dir)?)
}

fn write(dir: &Path, name: &str, bytes: u64) -> io::Result<FileEntry> {
    let mut file = BufWriter::new(File::create(dir.join(name))?);
    let (mut dice, mut hash) = (Dice::new(bytes), Sha256::new());
    let mut block: Vec<u8> = (0..BLOCK_BYTES).map(|_| dice.below(256) as u8).collect();
    let mut left = bytes;
    while left > 0 {
        // The same bytes in another place each time: making them all anew takes longer than the rest.
        block.rotate_left(1 + dice.below(4096));
        let now = usize::try_from(left).unwrap_or(usize::MAX).min(BLOCK_BYTES);
        file.write_all(&block[..now])?;
        hash.update(&block[..now]);
        left -= now as u64;
    }
    file.flush()?;
    Ok(FileEntry { name: name.to_owned(), bytes, sha256: hex(&hash.finalize()) })
}
