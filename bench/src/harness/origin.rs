//! Where a result comes from.

use std::process::Command;

use serde::Serialize;
use stagebus_engine::Runtime;

/// What a result was measured with, how, and when.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Origin {
    /// Version of Stagebus.
    pub stagebus: &'static str,
    /// Version of OpenVINO, if it can be opened.
    pub openvino: Option<String>,
    /// What `nats-server --version` prints, if there is one.
    pub nats_server: Option<String>,
    /// The command line; the program without its folder.
    pub command: String,
    /// When the run ended, in universal time.
    pub date: String,
    /// Whether this program was built without optimisation of its own code.
    pub debug_build: bool,
}

impl Origin {
    /// Looks at this process and what it would use.
    #[must_use]
    pub fn look() -> Self {
        let library = stagebus_settings::find_openvino().ok();
        let runtime = library.and_then(|library| Runtime::load(library.path()).ok());
        let now = jiff::Timestamp::now();
        Self {
            stagebus: env!("CARGO_PKG_VERSION"),
            openvino: runtime.map(|runtime| runtime.build().to_owned()),
            nats_server: nats_server(),
            command: command(std::env::args().skip(1)),
            date: now.round(jiff::Unit::Second).unwrap_or(now).to_string(),
            debug_build: cfg!(debug_assertions),
        }
    }
}

fn nats_server() -> Option<String> {
    let server = stagebus_settings::find_nats_server().ok()?;
    let output = Command::new(server).arg("--version").output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn command(args: impl IntoIterator<Item = String>) -> String {
    let words = std::iter::once("stagebus".to_owned()).chain(args);
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_says_when_and_how_it_came_about() {
        let origin = Origin::look();
        assert!(origin.date.ends_with('Z') && origin.date.len() == 20, "{}", origin.date);
        let args = ["bench", "hop", "--json"].map(str::to_owned);
        assert_eq!(command(args), "stagebus bench hop --json");
    }
}
