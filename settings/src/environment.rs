//! The environment: every variable that Stagebus reads, and the only code that reads them.
//!
//! | variable | meaning |
//! |---|---|
//! | `STAGEBUS_<TABLE>__<KEY>` | any setting, for example `STAGEBUS_BROKER__URL` |
//! | `STAGEBUS_CONFIG` | the TOML file, when `--config` is absent |
//! | `STAGEBUS_LOG` | short for `STAGEBUS_LOG__LEVEL` |
//! | `STAGEBUS_OPENVINO` | the OpenVINO C library, or a folder that holds it |
//! | `STAGEBUS_NATS_SERVER` | the `nats-server` program |
//! | `STAGEBUS_RUNTIME_DIR` | the runtime folder, instead of the nearest `.runtime` |
//! | `STAGEBUS_DRAFT_DIR` | a draft model's folder, or a folder of such folders |
//! | `STAGEBUS_BIN` | the `stagebus` program that a local fleet starts |
//! | `STAGEBUS_GENAI_PYTHON` | a Python with `openvino_genai`, for `stagebus bench` |
//! | `OTEL_EXPORTER_OTLP_ENDPOINT` | short for `STAGEBUS_TELEMETRY__OTLP_ENDPOINT`, which wins |
//!
//! An empty value counts as absent. Besides these, `PATH`, the loader's search path and
//! `OPENVINO_INSTALL_DIR` are read to find programs and libraries.

use std::ffi::OsString;
use std::path::PathBuf;

/// What the names of all our variables start with.
pub const PREFIX: &str = "STAGEBUS_";
/// Names the configuration file.
pub const CONFIG: &str = "STAGEBUS_CONFIG";
/// Short for the key `log.level`.
pub const LOG: &str = "STAGEBUS_LOG";
/// Names the OpenVINO C library or its folder.
pub const OPENVINO: &str = "STAGEBUS_OPENVINO";
/// Names the `nats-server` program.
pub const NATS_SERVER: &str = "STAGEBUS_NATS_SERVER";
/// Names the runtime folder.
pub const RUNTIME_DIR: &str = "STAGEBUS_RUNTIME_DIR";
/// Names a folder of draft models.
pub const DRAFT_DIR: &str = "STAGEBUS_DRAFT_DIR";
/// Names the `stagebus` program.
pub const BIN: &str = "STAGEBUS_BIN";
/// Names a Python with `openvino_genai`.
pub const GENAI_PYTHON: &str = "STAGEBUS_GENAI_PYTHON";
/// The variable of OpenTelemetry for the key `telemetry.otlp_endpoint`.
pub const OTLP_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// Variables with our prefix that are no settings.
pub const RESERVED: [&str; 8] =
    [CONFIG, LOG, OPENVINO, NATS_SERVER, RUNTIME_DIR, DRAFT_DIR, BIN, GENAI_PYTHON];

/// The configuration file named by [`CONFIG`].
#[must_use]
pub fn config_file() -> Option<PathBuf> {
    read(CONFIG).map(PathBuf::from)
}

/// The OpenVINO C library or folder named by [`OPENVINO`].
#[must_use]
pub fn openvino() -> Option<PathBuf> {
    read(OPENVINO).map(PathBuf::from)
}

/// The `nats-server` program named by [`NATS_SERVER`].
#[must_use]
pub fn nats_server() -> Option<PathBuf> {
    read(NATS_SERVER).map(PathBuf::from)
}

/// The folder of draft models named by [`DRAFT_DIR`].
#[must_use]
pub fn draft_dir() -> Option<PathBuf> {
    read(DRAFT_DIR).map(PathBuf::from)
}

/// The runtime folder named by [`RUNTIME_DIR`].
#[must_use]
pub fn runtime_dir() -> Option<PathBuf> {
    read(RUNTIME_DIR).map(PathBuf::from)
}

/// The `stagebus` program named by [`BIN`].
#[must_use]
pub fn stagebus_bin() -> Option<PathBuf> {
    read(BIN).map(PathBuf::from)
}

/// The Python with `openvino_genai` named by [`GENAI_PYTHON`].
#[must_use]
pub fn genai_python() -> Option<PathBuf> {
    read(GENAI_PYTHON).map(PathBuf::from)
}

/// The installation folder that OpenVINO's own set-up script exports.
#[must_use]
pub fn openvino_install_dir() -> Option<PathBuf> {
    read("OPENVINO_INSTALL_DIR").map(PathBuf::from)
}

/// The folders of `PATH`.
#[must_use]
pub fn program_folders() -> Vec<PathBuf> {
    folders("PATH")
}

/// [`OTLP_ENDPOINT`] as it stands there, whether it is an address for us or for other programs.
#[must_use]
pub fn otlp_endpoint() -> Option<OsString> {
    read(OTLP_ENDPOINT)
}

/// The folders of the loader's search path, as far as the environment names them.
#[must_use]
pub fn library_folders() -> Vec<PathBuf> {
    folders(if cfg!(windows) {
        "PATH"
    } else if cfg!(target_os = "macos") {
        "DYLD_LIBRARY_PATH"
    } else {
        "LD_LIBRARY_PATH"
    })
}

/// All variables with our prefix and [`OTLP_ENDPOINT`], in the order of their names.
///
/// A value that is not Unicode is passed on with replacement characters, so that it is refused as
/// a wrong value instead of being overlooked.
#[must_use]
pub fn variables() -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter(|(name, _)| name.starts_with(PREFIX) || name == OTLP_ENDPOINT)
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| (name, value.to_string_lossy().into_owned()))
        .collect();
    found.sort();
    found
}

fn folders(name: &str) -> Vec<PathBuf> {
    read(name).map(|value| std::env::split_paths(&value).collect()).unwrap_or_default()
}

#[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
fn read(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}
