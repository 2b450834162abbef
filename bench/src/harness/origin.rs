//! Where a result comes from.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::Command;

use serde::Serialize;
use sha2::{Digest as _, Sha256};
use stagebus_engine::Runtime;

use super::machine;
use crate::genai;

/// What a result was measured with, how, and when.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Origin {
    /// Version of Stagebus.
    pub stagebus: &'static str,
    /// The commit that the measured program was built from, as `stagebus --version` tells it; it ends
    /// with `-dirty` if files had been changed.
    pub commit: Option<String>,
    /// Version of OpenVINO, if it can be opened.
    pub openvino: Option<String>,
    /// What `nats-server --version` prints, if there is one.
    pub nats_server: Option<String>,
    /// Version of `openvino_genai`, if there is a Python that has it.
    pub openvino_genai: Option<String>,
    /// The measured model; absent where none is.
    pub model: Option<ModelFile>,
    /// The command line; the program without its folder.
    pub command: String,
    /// When the run ended, in universal time.
    pub date: String,
    /// Whether this program was built without optimisation of its own code.
    pub debug_build: bool,
}

/// A model file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModelFile {
    /// Its name, without the folder.
    pub name: String,
    /// Its size, in bytes.
    pub bytes: u64,
    /// SHA-256 of its content, in hexadecimal.
    pub sha256: String,
}

impl ModelFile {
    /// Reads the file.
    ///
    /// # Errors
    /// What the system reports.
    pub fn look(path: &Path) -> io::Result<Self> {
        let mut hasher = Sha256::new();
        let bytes = io::copy(&mut File::open(path)?, &mut hasher)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let sha256 = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { name, bytes, sha256 })
    }
}

impl Origin {
    /// Looks at this process, what it would use, and the model that was measured.
    ///
    /// # Errors
    /// A model that cannot be read.
    pub fn look(model: Option<&Path>) -> io::Result<Self> {
        let library = stagebus_settings::find_openvino().ok();
        let runtime = library.and_then(|library| Runtime::load(library.path()).ok());
        let now = jiff::Timestamp::now();
        Ok(Self {
            stagebus: env!("CARGO_PKG_VERSION"),
            openvino: runtime.map(|runtime| runtime.build().to_owned()),
            commit: commit(),
            nats_server: nats_server(),
            openvino_genai: genai::version(),
            model: model.map(ModelFile::look).transpose()?,
            command: command(std::env::args().skip(1)),
            date: now.round(jiff::Unit::Second).unwrap_or(now).to_string(),
            debug_build: cfg!(debug_assertions),
        })
    }
}

/// What the program that scenarios start says of itself: `stagebus 0.1.0 (COMMIT)`.
fn commit() -> Option<String> {
    let output = Command::new(machine::this_program().ok()?).arg("--version").output().ok()?;
    commit_in(&String::from_utf8_lossy(&output.stdout))
}

fn commit_in(version: &str) -> Option<String> {
    let (_, commit) = version.trim().strip_suffix(')')?.split_once('(')?;
    Some(commit.to_owned())
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
        let folder = tempfile::tempdir().expect("folder");
        let model = folder.path().join("a.gguf");
        std::fs::write(&model, "abc").expect("file");
        let origin = Origin::look(Some(&model)).expect("readable");
        assert!(origin.date.ends_with('Z') && origin.date.len() == 20, "{}", origin.date);
        let args = ["bench", "hop", "--json"].map(str::to_owned);
        assert_eq!(command(args), "stagebus bench hop --json");
        let model = origin.model.expect("one was named");
        assert_eq!((model.name.as_str(), model.bytes), ("a.gguf", 3));
        assert!(model.sha256.starts_with("ba7816bf8f01cfea"), "{}", model.sha256);
        Origin::look(Some(&folder.path().join("b.gguf"))).expect_err("there is no such file");
    }

    #[test]
    fn the_commit_stands_behind_the_version() {
        assert_eq!(commit_in("stagebus 0.1.0 (12ab-dirty)\n").as_deref(), Some("12ab-dirty"));
        assert_eq!(commit_in("stagebus 0.1.0\n"), None);
    }
}
