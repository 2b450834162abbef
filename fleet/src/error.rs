//! What can go wrong with a local fleet.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use stagebus_keys::KeyError;
use stagebus_settings::RuntimeError;

/// Why a fleet, or a part of it, did not start or stop.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// The broker's program was not found.
    #[error("cannot start a broker")]
    Runtime(#[from] RuntimeError),
    /// A broker would be reached from other machines without TLS and keys.
    #[error(
        "a broker on {listen} is reached from other machines and needs TLS and keys: make them with \
         `stagebus keys new`, and name their folder with --keys"
    )]
    Insecure {
        /// The address.
        listen: IpAddr,
    },
    /// The folder of keys cannot be used.
    #[error("the keys cannot be used")]
    Keys(#[from] KeyError),
    /// The folder of keys has none for a part of the fleet.
    #[error(
        "{} has no key for a {role} of model {model}; add one with `stagebus keys add`",
        folder.display()
    )]
    NoKey {
        /// The folder of keys.
        folder: PathBuf,
        /// The part.
        role: &'static str,
        /// The model.
        model: String,
    },
    /// A child process could not be started.
    #[error("cannot start {name} with {}", program.display())]
    Spawn {
        /// The child's name.
        name: String,
        /// The program.
        program: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A child ended before it was ready.
    #[error("{name} ended before it was ready ({status}); its last lines:\n{last_lines}")]
    Exited {
        /// The child's name.
        name: String,
        /// How it ended.
        status: ExitStatus,
        /// The end of its log, one line each.
        last_lines: String,
    },
    /// A child was not ready in time.
    #[error("{name} was not ready within {} s; its last lines:\n{last_lines}", waited.as_secs_f32())]
    NotReady {
        /// The child's name.
        name: String,
        /// The time it had.
        waited: Duration,
        /// The end of its log, one line each.
        last_lines: String,
    },
    /// A child's first line was not the announcement that it is ready.
    #[error("{name} announced itself with something else than readiness: {line}")]
    Readiness {
        /// The child's name.
        name: String,
        /// What it wrote.
        line: String,
    },
    /// A file or folder that the fleet needs failed.
    #[error("cannot use {}", path.display())]
    File {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The manifest of the shard set names no stages.
    #[error("{} is no manifest of a shard set", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
    },
    /// A child could not be waited for, or killed.
    #[error("cannot stop {name}")]
    Stop {
        /// The child's name.
        name: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A process was asked to run on chosen processors, which this platform cannot do.
    #[error("processes can be tied to processors on Linux only")]
    PinUnsupported,
    /// There is no such member.
    #[error("the fleet has no running {name}")]
    NoMember {
        /// The name asked for.
        name: String,
    },
}
