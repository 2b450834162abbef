//! Memory does not grow with the model: two made-up models that differ only in layers.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![expect(clippy::cast_possible_truncation, reason = "sizes of made-up models are small")]

#[path = "support/synthetic.rs"]
#[expect(dead_code, reason = "the models here are right")]
mod synthetic;

use stagebus_shards::{ShardRequest, shard};
use synthetic::Synthetic;
use tempfile::TempDir;

/// Peak resident bytes of sharding a model of about this size.
fn peak(n_bytes: u64) -> u64 {
    let dir = TempDir::new().unwrap();
    let source = dir.path().join("made-up.gguf");
    Synthetic::of_bytes(n_bytes).write(&source).unwrap();
    // Resets the peak to what is resident at this moment.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let request = ShardRequest::new(source, dir.path().join("set"), 2);
    shard(&request, &mut |_| {}).unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}

#[test]
fn peak_memory_follows_the_largest_tensor_not_the_model() {
    let (small, large) = (peak(150_000_000), peak(450_000_000));
    // The largest tensor is the table of 54 MB. The model grew by 300 MB; how many pages of the
    // map the system brings in along with those that are read differs from run to run.
    assert!(large < small + 40_000_000, "{small} bytes, then {large}");
    assert!(large < 200_000_000, "{large} bytes");
}
