//! A shard set with a valid manifest and files that no runtime can load: enough for everything
//! that the test engine serves.

use std::path::Path;

use sha2::{Digest as _, Sha256};
use stagebus_shards::manifest::{FORMAT_VERSION, FileEntry, MANIFEST_FILE, ModelDims, StageEntry};
use stagebus_shards::{Form, Manifest, WeightMode};

/// Layers of each stage.
const LAYERS: usize = 3;

/// Writes a shard set of `n_stages` stages.
pub(crate) fn write_shard_set(dir: &Path, n_stages: usize) -> Manifest {
    let stages = (0..n_stages).map(|index| StageEntry {
        index,
        first_layer: index * LAYERS,
        end_layer: (index + 1) * LAYERS,
        cost_share: 1.0 / n_stages as f64,
        xml: write_file(dir, &format!("stage-{index}.xml")),
        bin: write_file(dir, &format!("stage-{index}.bin")),
    });
    let mut manifest = Manifest {
        format_version: FORMAT_VERSION,
        model: "toy".to_owned(),
        architecture: "llama".to_owned(),
        fingerprint: String::new(),
        source: "toy.gguf".to_owned(),
        weights: WeightMode::Exact,
        floats: None,
        form: Form::Stateful,
        dims: ModelDims {
            n_layers: LAYERS * n_stages,
            hidden_dim: 16,
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 8,
            vocab_size: 258,
            context_length: 512,
        },
        bos_id: None,
        eos_ids: vec![0],
        stages: stages.collect(),
        text_files: vec![write_file(dir, "tokenizer.json")],
        head_tokens: None,
    };
    manifest.fingerprint = manifest.content_fingerprint();
    let text = serde_json::to_vec(&manifest).expect("serialises");
    std::fs::write(dir.join(MANIFEST_FILE), text).expect("written");
    manifest
}

fn write_file(dir: &Path, name: &str) -> FileEntry {
    let content = format!("content of {name}");
    std::fs::write(dir.join(name), &content).expect("written");
    let digest = Sha256::digest(content.as_bytes());
    let sha256 = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    FileEntry { name: name.to_owned(), bytes: content.len() as u64, sha256 }
}
