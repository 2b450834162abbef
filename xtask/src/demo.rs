//! The demo: from a fresh clone to an answer by a model cut into stages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{cargo, place, setup};

/// What is asked without `--prompt`.
const PROMPT: &str = "What is the capital of France? Answer in one sentence.";

/// What the demo is to do.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    /// What to ask.
    prompt: String,
    /// How many stages to cut the model into.
    n_stages: usize,
    /// Whether the last line of standard output is one JSON object.
    json: bool,
}

impl Options {
    /// Reads the arguments after `demo`.
    ///
    /// # Errors
    /// An unknown flag, a flag without its value, or a stage count that is no number.
    pub(crate) fn parse(args: &[String]) -> Result<Self> {
        let mut options = Self { prompt: PROMPT.to_owned(), n_stages: 2, json: false };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--json" => options.json = true,
                "--prompt" => options.prompt.clone_from(value()?),
                "--stages" => {
                    let text = value()?;
                    options.n_stages = text
                        .parse()
                        .with_context(|| format!("--stages {text} is no stage count"))?;
                }
                other => bail!("`demo` does not know `{other}`; try `cargo xtask help`"),
            }
        }
        Ok(options)
    }
}

/// Runs the demo.
///
/// # Errors
/// A part that cannot be set up, a build that fails, or `stagebus` refusing.
pub(crate) fn run(options: &Options) -> Result<()> {
    setup::run()?;
    eprintln!("demo: building stagebus (minutes the first time)");
    let stagebus = cargo::build_stagebus(cargo::Build::Release)?;
    let shards = shards(&stagebus, options.n_stages)?;
    eprintln!("demo: starting a local fleet of {} stages", options.n_stages);
    let mut ask = Command::new(&stagebus);
    ask.args(["ask", "--local", "--shards"]).arg(&shards);
    if options.json {
        ask.arg("--json");
    }
    ask.arg("--").arg(&options.prompt);
    ask.current_dir(place::root()).env(place::RUNTIME_DIR, absolute(&place::runtime_dir())?);
    cargo::run(ask.stdin(Stdio::null()))
}

/// The shard set for `n_stages`, made anew unless the one on disk has that many stages and is
/// newer than the program and the model it was made with.
fn shards(stagebus: &Path, n_stages: usize) -> Result<PathBuf> {
    let folder = place::runtime_dir().join("shards").join(format!("smollm2-135m-{n_stages}"));
    let model = setup::model_file();
    if is_current(&folder, n_stages, &[stagebus, &model]) {
        eprintln!("demo: using the shards in {}", folder.display());
        return Ok(folder);
    }
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
    }
    eprintln!("demo: cutting the model into {n_stages} stages");
    let mut shard = Command::new(stagebus);
    shard.arg("shard").arg(&model).args(["--stages", &n_stages.to_string(), "--force", "--out"]);
    shard.arg(&folder).stdin(Stdio::null()).stdout(std::io::stderr());
    cargo::run(&mut shard)?;
    Ok(folder)
}

fn is_current(folder: &Path, n_stages: usize, sources: &[&Path]) -> bool {
    let manifest = folder.join("manifest.json");
    let Ok(text) = fs::read_to_string(&manifest) else { return false };
    let fits = serde_json::from_str::<Value>(&text)
        .is_ok_and(|value| value["stages"].as_array().is_some_and(|all| all.len() == n_stages));
    let time = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    fits && sources.iter().all(|source| time(source).is_some() && time(source) <= time(&manifest))
}

pub(crate) fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot find {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Options> {
        Options::parse(&args.iter().map(|&arg| arg.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_read_and_checked() {
        let options = parse(&["--stages", "3", "--json", "--prompt", "Hi"]).expect("options");
        assert_eq!(options, Options { prompt: "Hi".to_owned(), n_stages: 3, json: true });
        for wrong in [&["--stages"][..], &["--stages", "x"], &["--jsn"]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn shards_of_another_count_or_older_than_the_program_are_not_current() {
        let folder = tempfile::tempdir().expect("folder");
        let program = folder.path().join("program");
        fs::write(&program, "").expect("file");
        assert!(!is_current(folder.path(), 2, &[&program]));
        fs::write(folder.path().join("manifest.json"), "{\"stages\":[{},{}]}").expect("file");
        assert!(is_current(folder.path(), 2, &[&program]));
        assert!(!is_current(folder.path(), 3, &[&program]));
        assert!(!is_current(folder.path(), 2, &[&folder.path().join("absent")]));
    }
}
