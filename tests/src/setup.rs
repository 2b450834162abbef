//! What `cargo xtask setup` and `cargo build` have made.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use stagebus_settings::environment;

/// The model that set-up fetches, below the runtime folder.
const MODEL: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

/// Layers of that model.
pub const N_LAYERS: usize = 30;

/// Tokens that it attends to.
pub const CONTEXT_LEN: usize = 8192;

/// Number of its token ids.
pub const VOCAB_SIZE: usize = 49152;

/// The token that ends its answers.
pub const EOS: u32 = 2;

/// The program `stagebus`: `STAGEBUS_BIN`, else the one that was built beside the running test.
///
/// # Errors
/// There is none.
pub fn program() -> Result<PathBuf> {
    let program = match environment::stagebus_bin() {
        Some(program) => program,
        None => {
            let file = format!("stagebus{}", std::env::consts::EXE_SUFFIX);
            target_dir()?.join(file)
        }
    };
    ensure!(
        program.is_file(),
        "{} is missing; run `cargo xtask test`, or `cargo build --package stagebus` first",
        program.display()
    );
    Ok(program)
}

/// An example in Rust, beside the running test: cargo builds both.
///
/// # Errors
/// It is not there.
pub fn example(name: &str) -> Result<PathBuf> {
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let program = target_dir()?.join("examples").join(file);
    ensure!(
        program.is_file(),
        "{} is missing; run the tests of the whole workspace, or `cargo build --example {name}`",
        program.display()
    );
    Ok(program)
}

/// The runtime folder.
///
/// # Errors
/// It is not set up.
pub fn runtime_dir() -> Result<PathBuf> {
    let runtime = stagebus_settings::runtime_dir()
        .context("there is no runtime folder; run cargo xtask setup")?;
    Ok(std::path::absolute(runtime)?)
}

/// The model file.
///
/// # Errors
/// It is not set up.
pub fn model() -> Result<PathBuf> {
    let model = runtime_dir()?.join(MODEL);
    ensure!(model.is_file(), "{} is missing; run cargo xtask setup", model.display());
    Ok(model)
}

/// The reference of the model, in the repository.
#[must_use]
pub fn reference() -> PathBuf {
    root().join("tests").join("fixtures").join("smollm2-135m.json")
}

/// The repository's root.
#[must_use]
pub fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// The folder of this build's programs, two above the running test.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let test = std::env::current_exe().context("the running test is not known")?;
    let dir = test.parent().and_then(Path::parent);
    Ok(dir.with_context(|| format!("{} has no parents", test.display()))?.to_owned())
}
