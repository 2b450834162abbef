//! Memory does not grow with the model: pairs of models that differ only in their weights.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![expect(clippy::cast_possible_truncation, reason = "sizes of made-up models are small")]

#[path = "support/synthetic.rs"]
#[expect(dead_code, reason = "the models here are right")]
mod synthetic;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use stagebus_shards::{ShardRequest, shard};
use synthetic::Synthetic;
use tempfile::TempDir;

/// The peak is that of the process: one test measures at a time.
static MEASURING: Mutex<()> = Mutex::new(());

/// Peak resident bytes of sharding a model that is first written into a folder.
fn peak(write: impl FnOnce(&Path) -> PathBuf) -> u64 {
    let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = TempDir::new().unwrap();
    let source = write(dir.path());
    // Resets the peak to what is resident at this moment.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let request = ShardRequest::new(source, dir.path().join("set"), 2);
    shard(&request, &mut |_| {}).unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}

/// A made-up GGUF file of about this size.
fn gguf(n_bytes: u64) -> impl FnOnce(&Path) -> PathBuf {
    move |dir| {
        let source = dir.join("made-up.gguf");
        Synthetic::of_bytes(n_bytes).write(&source).unwrap();
        source
    }
}

/// An exported graph, one of whose constants has this many bytes.
fn ir(n_bytes: u64) -> impl FnOnce(&Path) -> PathBuf {
    move |dir| {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ir/llama");
        for name in ["openvino_model.bin", "config.json", "tokenizer.json"] {
            std::fs::copy(fixture.join(name), dir.join(name)).unwrap();
        }
        let bin = std::fs::File::options().write(true).open(dir.join("openvino_model.bin"));
        let bin = bin.unwrap();
        let offset = bin.metadata().unwrap().len();
        bin.set_len(offset + n_bytes).unwrap();
        let xml = std::fs::read_to_string(fixture.join("openvino_model.xml")).unwrap();
        let start = xml.find("element_type=\"f16\" shape=\"96, 64\"").unwrap();
        let end = start + xml[start..].find("/>").unwrap();
        let data = format!(
            "element_type=\"f16\" shape=\"{}, 64\" offset=\"{offset}\" size=\"{n_bytes}\"",
            n_bytes / 128
        );
        let xml = [&xml[..start], &*data, &xml[end..]];
        let path = dir.join("openvino_model.xml");
        std::fs::write(&path, xml.concat()).unwrap();
        path
    }
}

#[test]
fn copied_weights_pass_through() {
    let (small, large) = (peak(ir(12_800_000)), peak(ir(256_000_000)));
    assert!(large < small + 40_000_000, "{small} bytes, then {large}");
}

#[test]
fn peak_memory_follows_the_largest_tensor_not_the_model() {
    let (small, large) = (peak(gguf(150_000_000)), peak(gguf(450_000_000)));
    // The largest tensor is the table of 54 MB. The model grew by 300 MB; how many pages of the
    // map the system brings in along with those that are read differs from run to run.
    assert!(large < small + 40_000_000, "{small} bytes, then {large}");
    assert!(large < 200_000_000, "{large} bytes");
}
