//! Where things are: the repository, the runtime folder, and what the environment says of them.

use std::path::{Path, PathBuf};

/// Names the OpenVINO C library or its folder; then set-up installs none.
pub(crate) const OPENVINO: &str = "STAGEBUS_OPENVINO";
/// Names the `nats-server` program; then set-up installs none.
pub(crate) const NATS_SERVER: &str = "STAGEBUS_NATS_SERVER";
/// Names the runtime folder.
pub(crate) const RUNTIME_DIR: &str = "STAGEBUS_RUNTIME_DIR";

/// The repository's root.
pub(crate) fn root() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask)
}

/// The runtime folder that set-up fills.
pub(crate) fn runtime_dir() -> PathBuf {
    variable(RUNTIME_DIR).unwrap_or_else(|| root().join(".runtime"))
}

/// The path in an environment variable; an empty one counts as absent.
#[expect(
    clippy::disallowed_methods,
    reason = "xtask builds without the settings crate, so that set-up starts in seconds"
)]
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
