//! Finds the model file that `cargo xtask setup` puts into the runtime folder.

use std::path::{Path, PathBuf};

/// The GGUF file of SmolLM2-135M-Instruct.
///
/// Panics if it is not there: a test that skips itself tests nothing.
#[expect(clippy::disallowed_methods, reason = "tests have no configuration to read it from")]
pub(crate) fn smollm2() -> PathBuf {
    const MODEL: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let found = match std::env::var_os("STAGEBUS_RUNTIME_DIR") {
        Some(folder) => Some(Path::new(&folder).join(MODEL)).filter(|path| path.is_file()),
        None => Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .map(|folder| folder.join(".runtime").join(MODEL))
            .find(|path| path.is_file()),
    };
    found.unwrap_or_else(|| panic!("{MODEL} is not in the runtime folder: run cargo xtask setup"))
}
