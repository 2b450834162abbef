//! Errors of loading settings and of finding the runtime.

use std::path::PathBuf;

use crate::environment;

/// Why the settings could not be loaded. Every variant names what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The configuration file could not be read or is no TOML.
    #[error("cannot read the configuration file {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the reader found; names the line.
        #[source]
        source: Box<config::ConfigError>,
    },
    /// A value was found that does not fit its key.
    #[error("wrong value for {key}: {value} (from {origin})")]
    WrongValue {
        /// Dotted key, table first.
        key: String,
        /// The value as written, or a placeholder for a secret.
        value: String,
        /// File, variable or flag.
        origin: String,
        /// What was expected.
        #[source]
        source: Box<config::ConfigError>,
    },
    /// A key that no table has.
    #[error("unknown key {key} (from {origin}); known here: {}", known.join(", "))]
    UnknownKey {
        /// Dotted key, table first.
        key: String,
        /// File, variable or flag.
        origin: String,
        /// The keys of that table.
        known: Vec<String>,
    },
    /// A variable with our prefix that means nothing.
    #[error(
        "unknown variable {name}; settings are {}<TABLE>__<KEY> with a table of {}, besides {}",
        environment::PREFIX,
        crate::load::SECTIONS.join(", "),
        environment::RESERVED.join(", ")
    )]
    UnknownVariable {
        /// Its name.
        name: String,
    },
    /// A `--set` without `=`, or whose key has no table.
    #[error("cannot read --set {text}: expected TABLE.KEY=VALUE")]
    Assignment {
        /// What followed `--set`.
        text: String,
    },
    /// A key was given without its partner.
    #[error("{key} is set but {needs} is not")]
    Incomplete {
        /// The key that is set.
        key: &'static str,
        /// The key that is missing.
        needs: &'static str,
    },
    /// Keys that exclude each other are set.
    #[error("only one of {} may be set", keys.join(", "))]
    Conflict {
        /// The keys.
        keys: Vec<&'static str>,
    },
    /// The defaults of a process cannot be represented, a mistake in the program.
    #[error("the defaults of [{section}] cannot be represented")]
    Defaults {
        /// The table.
        section: String,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
}

/// Why a part of the runtime was not found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// Nothing at any of the usual places.
    #[error(
        "{what} not found; run `cargo xtask setup`, or set {variable}; looked at: {}",
        if looked_at.is_empty() { "nothing, as no folder for it is known".to_owned() } else { join(looked_at) }
    )]
    NotFound {
        /// What was wanted.
        what: &'static str,
        /// The variable that names it.
        variable: &'static str,
        /// The places, in order.
        looked_at: Vec<PathBuf>,
    },
    /// A variable names a place where the thing is not.
    #[error("{variable} is {}, but there is no {what} there", path.display())]
    WrongOverride {
        /// What was wanted.
        what: &'static str,
        /// The variable.
        variable: &'static str,
        /// Its value.
        path: PathBuf,
    },
}

fn join(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}
