//! A disk that is full.

#![cfg(unix)]

use std::path::Path;

use anyhow::{Result, ensure};
use stagebus_tests::setup;
use tokio::process::Command;

/// Cuts the model with a limit on the size of files, in blocks of 512 or 1,024 bytes, that the tokenizer fits and no stage does: writing
/// beyond it fails as on a disk that is full.
async fn shard(out: &Path, blocks: u32) -> Result<std::process::Output> {
    // The signal would end the program before it sees the failed write.
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
    let output = Command::new("sh")
        .args(["-c", &script, "sh"])
        .arg(setup::program()?)
        .args(["shard", "--stages", "2", "--out"])
        .arg(out)
        .arg(setup::model()?)
        .output()
        .await?;
    Ok(output)
}

#[tokio::test]
async fn a_full_disk_leaves_no_half_shard_set_and_names_the_file() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("set");
    let output = shard(&out, 20_000).await?;
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "{words}");
    ensure!(words.contains("stage-"), "{words}");
    let left = std::fs::read_dir(folder.path())?.count();
    ensure!(left == 0, "{left} entries are left beside {}", out.display());
    Ok(())
}
