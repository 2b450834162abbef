//! llama.cpp's `llama-bench` on the same file: a program that measures itself.

use std::path::Path;
use std::process::Stdio;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::contender::Launch;

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
    let n_tokens = n_tokens.to_string();
    let args = ["-t", "1", "-p", "0", "-n", &n_tokens, "-r", "1", "-o", "json", "-m"];
    let mut args: Vec<_> = args.iter().map(Into::into).collect();
    args.push(model.into());
    let name = "llama-bench".to_owned();
    let launch = Launch { name, program: program.to_owned(), args, cpu };
    let output = launch
        .command()
        .stdin(Stdio::null())
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
