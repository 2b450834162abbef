//! What comes from a model's maker, or from whoever copied a shard set.

use std::fs;
use std::path::Path;

use stagebus_shards::{Manifest, ShardRequest, shard};
use tempfile::TempDir;

/// A manifest: what is valid stays valid, whoever writes it again.
pub fn manifest(data: &[u8]) {
    let Ok(mut manifest) = serde_json::from_slice::<Manifest>(data) else { return };
    // Nobody guesses a hash; what lies behind it must be reached too.
    manifest.fingerprint = manifest.content_fingerprint();
    if manifest.validate().is_err() {
        return;
    }
    assert_eq!(manifest.stages.len(), manifest.n_stages(), "a stage is lost");
    let again = serde_json::to_vec(&manifest).map(|text| serde_json::from_slice(&text));
    match again {
        Ok(Ok(again)) => assert_eq!(manifest, again, "it changed on the way"),
        other => panic!("our own manifest is refused: {other:?}"),
    }
}

/// A GGUF file, up to the shard set that is made of it.
pub fn gguf(data: &[u8]) {
    let folder = scratch();
    let file = folder.path().join("model.gguf");
    write(&file, data);
    sharded(&file, folder.path(), 1);
}

/// A folder with `config.json`, `tokenizer.json` and `model.safetensors`, up to the shard set that
/// is made of it. The first two stand before the third, each after its length in two bytes.
pub fn folder(data: &[u8]) {
    let Some((config, rest)) = part(data) else { return };
    let Some((tokenizer, weights)) = part(rest) else { return };
    let folder = scratch();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap_or_else(|error| panic!("no room to work in: {error}"));
    write(&model.join("config.json"), config);
    write(&model.join("tokenizer.json"), tokenizer);
    write(&model.join("model.safetensors"), weights);
    sharded(&model, folder.path(), 1);
}

/// A folder with an OpenVINO model, up to the shard set that is made of it. The graph stands before
/// the weights, after its length in two bytes; the other files are sound.
pub fn graph(data: &[u8]) {
    const CONFIG: &[u8] = br#"{"max_position_embeddings": 16, "eos_token_id": 1}"#;
    const TOKENIZER: &[u8] = br#"{"version": "1.0", "decoder": {"type": "ByteLevel"}, "model":
        {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}"#;
    let Some((xml, weights)) = part(data) else { return };
    let folder = scratch();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap_or_else(|error| panic!("no room to work in: {error}"));
    write(&model.join("config.json"), CONFIG);
    write(&model.join("tokenizer.json"), TOKENIZER);
    write(&model.join("openvino_model.bin"), weights);
    write(&model.join("openvino_model.xml"), xml);
    sharded(&model, folder.path(), 1);
    sharded(&model, folder.path(), 2);
}

/// Cuts a model into stages; refusing it must leave nothing behind.
fn sharded(source: &Path, folder: &Path, n_stages: usize) {
    let n_before = n_entries(folder);
    let request = ShardRequest {
        force: true,
        ..ShardRequest::new(source.to_owned(), folder.join("set"), n_stages)
    };
    match shard(&request, &mut |_| {}) {
        Ok(manifest) => {
            manifest.validate().unwrap_or_else(|error| panic!("our manifest: {error}"));
        }
        Err(_) => assert_eq!(n_entries(folder), n_before, "a refused model left files"),
    }
}

fn part(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = data.split_first_chunk()?;
    rest.split_at_checked(usize::from(u16::from_le_bytes(*len)))
}

fn n_entries(folder: &Path) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

fn scratch() -> TempDir {
    tempfile::tempdir().unwrap_or_else(|error| panic!("no room to work in: {error}"))
}

fn write(path: &Path, data: &[u8]) {
    fs::write(path, data).unwrap_or_else(|error| panic!("no room to work in: {error}"));
}
