//! `openvino_genai` as a [contender](crate::contender): Python scripts of this crate.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::contender::Launch;

/// The script.
const SCRIPT: &str = include_str!("../reference/genai.py");

/// The script that answers lists of prompts.
const USERS_SCRIPT: &str = include_str!("../reference/genai_users.py");

/// Folder of the Python environment that `cargo xtask bench-setup` makes, in the runtime folder.
const VENV: &str = "bench-venv";

/// Which attention the pipeline runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GenaiBackend {
    /// What the pipeline chooses by itself.
    Default,
    /// One stateful model, as our stateful engine has it; the default is a paged one, as ours.
    Sdpa,
}

impl GenaiBackend {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Default, Self::Sdpa];

    /// Name of the contender.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "genai",
            Self::Sdpa => "genai-sdpa",
        }
    }

    const fn property(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Sdpa => "SDPA",
        }
    }
}

/// Who answers lists of prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GenaiUsers {
    /// `LLMPipeline`: one prompt after the other.
    One(GenaiBackend),
    /// `ContinuousBatchingPipeline`: all prompts at once.
    Batch,
}

impl GenaiUsers {
    /// Name of the contender.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::One(backend) => backend.name(),
            Self::Batch => "genai-batch",
        }
    }

    const fn mode(self) -> &'static str {
        match self {
            Self::One(backend) => backend.property(),
            Self::Batch => "batch",
        }
    }
}

/// An order to a process of [`launch_users`].
#[derive(Debug, Serialize)]
pub struct UsersOrder<'a> {
    /// Token ids of each prompt.
    pub prompts: Vec<&'a [u32]>,
    /// Tokens to generate for each, end tokens ignored.
    pub n_tokens: usize,
}

/// Its answer.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct UsersTurn {
    /// Generated tokens of each prompt.
    pub tokens: Vec<Vec<u32>>,
    /// When each of them was there, in milliseconds since the turn began.
    pub arrival_ms: Vec<Vec<f64>>,
}

/// The Python to run it with: the one named by the option, by `STAGEBUS_GENAI_PYTHON`, or of the
/// environment in the runtime folder; `None` if there is none of these. A named one is returned
/// whether it is there or not, so that its start says what is wrong.
#[must_use]
pub fn find_python(named: Option<&Path>) -> Option<PathBuf> {
    if let Some(path) = named {
        return Some(path.to_owned());
    }
    if let Some(path) = stagebus_settings::environment::genai_python() {
        return Some(path);
    }
    let venv = stagebus_settings::runtime_dir()?.join(VENV);
    let python = if cfg!(windows) {
        venv.join("Scripts").join("python.exe")
    } else {
        venv.join("bin").join("python")
    };
    python.is_file().then_some(python)
}

/// The installed version, if a Python of the environment or of the set-up has it.
#[must_use]
pub fn version() -> Option<String> {
    let code = "import importlib.metadata as m; print(m.version('openvino_genai'))";
    let output = Command::new(find_python(None)?).args(["-c", code]).output().ok()?;
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !version.is_empty()).then_some(version)
}

/// How to start the pipeline on a model.
#[must_use]
pub fn launch(
    python: &Path,
    backend: GenaiBackend,
    model: &Path,
    prompt: &[u32],
    cpu: Option<usize>,
) -> Launch {
    let args = vec![
        "-c".into(),
        SCRIPT.into(),
        model.into(),
        backend.property().into(),
        "1".into(),
        id_list(prompt).into(),
    ];
    Launch { name: backend.name().to_owned(), program: python.to_owned(), args, cpu }
}

/// How `stagebus bench users` starts it: a process that answers lists of prompts.
#[must_use]
pub fn launch_users(python: &Path, rival: GenaiUsers, model: &Path, cpu: Option<usize>) -> Launch {
    let args =
        vec!["-c".into(), USERS_SCRIPT.into(), model.into(), rival.mode().into(), "1".into()];
    Launch { name: rival.name().to_owned(), program: python.to_owned(), args, cpu }
}

/// Token ids as one argument.
#[must_use]
pub fn id_list(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use crate::contender::{Ready, Turn};

    use super::*;

    #[test]
    fn what_the_script_prints_is_read() {
        let ready = r#"{"ready": true, "version": "openvino_genai 2026.4", "load_ms": 812.4}"#;
        let ready: Ready = serde_json::from_str(ready).expect("a ready line");
        assert!(ready.ready && ready.error.is_none());
        let refusal = r#"{"ready": false, "error": "No module named 'openvino_genai'"}"#;
        let refusal: Ready = serde_json::from_str(refusal).expect("a ready line");
        assert!(!refusal.ready && refusal.error.is_some());
        let turn = r#"{"tokens": [504, 3575], "first_token_ms": 87.5, "token_ms": [11.25]}"#;
        let turn: Turn = serde_json::from_str(turn).expect("a turn");
        assert_eq!((turn.tokens, turn.token_ms), (vec![504, 3575], vec![11.25]));
    }

    #[test]
    fn the_script_gets_its_arguments_in_order() {
        let launch =
            launch(Path::new("py"), GenaiBackend::Sdpa, Path::new("m.gguf"), &[1, 22], Some(1));
        assert_eq!((launch.name.as_str(), launch.cpu), ("genai-sdpa", Some(1)));
        assert_eq!(launch.args[2..], ["m.gguf", "SDPA", "1", "1,22"]);
    }

    #[test]
    fn a_named_python_is_not_replaced_by_another() {
        assert_eq!(find_python(Some(Path::new("no/python"))), Some("no/python".into()));
    }
}
