//! llama.cpp's `llama-bench` on the same file: a program that measures itself.

pub mod rpc;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::contender::on_path;

/// What one run of `llama-bench` says about decoding.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LlamaDecode {
    /// Milliseconds per token.
    pub token_ms: f64,
    /// Commit that it was built from.
    pub build: String,
}

/// One entry of its JSON output; other fields are not used.
#[derive(Debug, Deserialize)]
struct Entry {
    #[serde(default)]
    build_commit: String,
    n_gen: u32,
    avg_ts: f64,
}

/// Folder of the programs that `cargo xtask peers` builds, in the runtime folder.
const FOLDER: &str = "llama.cpp";

/// `llama-bench`: the named one, that of the set-up, or the one on `PATH`.
#[must_use]
pub fn find(named: Option<&Path>) -> Option<PathBuf> {
    if let Some(path) = named {
        return path.is_file().then(|| path.to_owned());
    }
    let file = format!("llama-bench{}", std::env::consts::EXE_SUFFIX);
    let built = stagebus_settings::runtime_dir().map(|runtime| runtime.join(FOLDER).join(file));
    built.filter(|path| path.is_file()).or_else(|| on_path("llama-bench"))
}

/// Generates `n_tokens` tokens with one thread, once.
///
/// # Errors
/// A program that does not run or prints something else.
pub async fn decode(
    program: &Path,
    model: &Path,
    n_tokens: usize,
    cpu: Option<usize>,
) -> anyhow::Result<LlamaDecode> {
    bench(program, model, n_tokens, &[], cpu.map(|cpu| cpu.to_string())).await
}

/// Runs `llama-bench` with more options, tied to cores.
async fn bench(
    program: &Path,
    model: &Path,
    n_tokens: usize,
    options: &[&str],
    cpus: Option<String>,
) -> anyhow::Result<LlamaDecode> {
    let mut command = match cpus {
        Some(cpus) => {
            let mut command = Command::new("taskset");
            command.args(["-c", &cpus]).arg(program);
            command
        }
        None => Command::new(program),
    };
    let n_tokens = n_tokens.to_string();
    let output = command
        .args(["-t", "1", "-p", "0", "-n", &n_tokens, "-r", "1", "-o", "json"])
        .args(options)
        .arg("-m")
        .arg(model)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .with_context(|| format!("cannot start {}", program.display()))?;
    anyhow::ensure!(
        output.status.success(),
        "llama-bench failed ({}): {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    parse(&output.stdout)
}

fn parse(json: &[u8]) -> anyhow::Result<LlamaDecode> {
    let entries: Vec<Entry> =
        serde_json::from_slice(json).context("llama-bench printed no JSON list")?;
    let entry = entries
        .into_iter()
        .find(|entry| entry.n_gen > 0 && entry.avg_ts > 0.0)
        .context("llama-bench reports no generation")?;
    Ok(LlamaDecode { token_ms: 1e3 / entry.avg_ts, build: entry.build_commit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generation_is_found_among_the_tests() {
        let json = br#"[{"n_prompt":8,"n_gen":0,"avg_ts":900.0},
            {"build_commit":"abc","n_prompt":0,"n_gen":64,"avg_ts":80.0,"stddev_ts":1.0}]"#;
        let decode = parse(json).expect("a generation");
        assert_eq!(decode, LlamaDecode { token_ms: 12.5, build: "abc".to_owned() });
        parse(b"[]").expect_err("no generation");
        parse(b"error").expect_err("no JSON");
    }
}
