//! Fuzzing with libFuzzer, on the pinned toolchain.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{cargo, place};

/// The programs of the package `stagebus-fuzz`.
const TARGETS: [&str; 6] = ["message", "request", "manifest", "gguf", "folder", "graph"];

/// Seconds for each target when nothing else is said.
const SECONDS: u64 = 60;

/// Seconds for each target among the checks of a change.
const SHORT_SECONDS: u64 = 10;

/// Coverage counters and traced comparisons for libFuzzer: what its driver asks of LLVM.
const INSTRUMENTATION: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1 --cfg=fuzzing";

/// Options of `cargo xtask fuzz`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    targets: Vec<String>,
    seconds: u64,
    /// How much the targets are optimised, 0 to 3: more takes longer to build and finds more in a
    /// long run.
    opt_level: u8,
    /// Where the made-up inputs begin; by chance when absent.
    seed: Option<u32>,
}

impl Options {
    /// A short run of all targets that begins with the same inputs every time.
    pub(crate) fn short() -> Self {
        Self { targets: all(), seconds: SHORT_SECONDS, opt_level: 1, seed: Some(1) }
    }

    /// Reads the command line after `fuzz`.
    ///
    /// # Errors
    /// An unknown target or option.
    pub(crate) fn parse(args: &[String]) -> Result<Self> {
        let mut options = Self { targets: Vec::new(), seconds: SECONDS, opt_level: 3, seed: None };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            if arg == "--seconds" {
                let text = args.next().context("--seconds needs a number")?;
                options.seconds =
                    text.parse().with_context(|| format!("{text} is no number of seconds"))?;
            } else if TARGETS.contains(&arg.as_str()) {
                options.targets.push(arg.clone());
            } else {
                bail!("unknown fuzz target `{arg}`, known: {}", TARGETS.join(", "));
            }
        }
        if options.targets.is_empty() {
            options.targets = all();
        }
        Ok(options)
    }
}

fn all() -> Vec<String> {
    TARGETS.iter().map(|&name| name.to_owned()).collect()
}

/// Builds the targets and runs each for its time, beginning with the kept inputs. New inputs that
/// reach new code are gathered in `target/fuzz/corpus`.
///
/// # Errors
/// A build that fails, or an input that does harm: it is left in `fuzz/artifacts`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let programs = build(options.opt_level)?;
    let root = place::root();
    let artifacts = root.join("fuzz").join("artifacts");
    fs::create_dir_all(&artifacts)?;
    let work = root.join("target").join("fuzz");
    let golden = work.join("golden");
    write_golden(&root.join("schemas/tests/fixtures/golden.txt"), &golden)?;
    for name in &options.targets {
        let gathered = work.join("corpus").join(name);
        fs::create_dir_all(&gathered)?;
        let mut fuzzer = Command::new(programs.join(name));
        fuzzer.current_dir(root).arg(&gathered);
        let kept = root.join("fuzz").join("corpus").join(name);
        if kept.is_dir() {
            fuzzer.arg(kept);
        }
        if name == "message" {
            fuzzer.arg(&golden);
        }
        fuzzer.arg(format!("-max_total_time={}", options.seconds));
        if let Some(seed) = options.seed {
            fuzzer.arg(format!("-seed={seed}"));
        }
        fuzzer.arg(format!("-artifact_prefix={}/{name}-", artifacts.display()));
        fuzzer.args(["-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1", "-verbosity=0"]);
        eprintln!("fuzz: {name} for {} s", options.seconds);
        cargo::run(&mut fuzzer)?;
    }
    Ok(())
}

/// Builds all targets, optimised and with the checks of a debug build; returns their folder.
fn build(opt_level: u8) -> Result<PathBuf> {
    let host = host()?;
    let target_dir = place::root().join("target").join("fuzz");
    let mut build = cargo::cargo();
    build.args(["build", "--release", "--package", "stagebus-fuzz", "--features", "libfuzzer"]);
    // A named target keeps the instrumentation out of build scripts.
    build.args(["--bins", "--locked", "--target", &host, "--target-dir"]).arg(&target_dir);
    build.env("RUSTFLAGS", INSTRUMENTATION);
    let opt_level = opt_level.to_string();
    for (key, value) in [
        ("OPT_LEVEL", opt_level.as_str()),
        ("LTO", "off"),
        ("DEBUG", "line-tables-only"),
        ("DEBUG_ASSERTIONS", "true"),
        ("OVERFLOW_CHECKS", "true"),
    ] {
        build.env(format!("CARGO_PROFILE_RELEASE_{key}"), value);
    }
    cargo::run(&mut build)?;
    Ok(target_dir.join(host).join("release"))
}

/// The platform that the compiler runs on.
fn host() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output().context("cannot run rustc")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("rustc does not name its host")
}

/// Writes the wire's golden messages as inputs, one file each.
fn write_golden(fixtures: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let text = fs::read_to_string(fixtures)
        .with_context(|| format!("cannot read {}", fixtures.display()))?;
    for line in text.lines() {
        let (name, hex) = line.split_once(' ').context("a golden message has no name")?;
        let byte = |at: usize| hex.get(at..at + 2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
        let bytes: Option<Vec<u8>> = (0..hex.len()).step_by(2).map(byte).collect();
        fs::write(folder.join(name), bytes.context("a golden message is not hexadecimal")?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Options> {
        Options::parse(&words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn targets_and_seconds_are_read() {
        let all = parse(&[]).expect("all targets");
        assert_eq!((all.targets.len(), all.seconds), (TARGETS.len(), SECONDS));
        let one = parse(&["gguf", "--seconds", "5"]).expect("one target");
        let gguf = vec!["gguf".to_owned()];
        assert_eq!(one, Options { targets: gguf, seconds: 5, opt_level: 3, seed: None });
        for wrong in [&["gguff"][..], &["--seconds"], &["--seconds", "many"], &["--quick"]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn every_target_is_a_program_of_the_package() {
        let manifest = fs::read_to_string(place::root().join("fuzz/Cargo.toml")).expect("there");
        for name in TARGETS {
            assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name}");
        }
        assert_eq!(manifest.matches("[[bin]]").count(), TARGETS.len());
    }
}
