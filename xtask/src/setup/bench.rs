//! Set-up for `stagebus bench`: a Python environment with `openvino_genai`, in the runtime folder.
//!
//! It is for comparison only; no part of Stagebus needs it. The environment is Python's own `venv`,
//! so nothing goes into the user's Python.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::{pip, python_in, remove_if_there};
use crate::{cargo, place};

/// Folder of the environment, in the runtime folder; `stagebus bench` looks there.
const FOLDER: &str = "bench-venv";

/// What is installed. It brings the `openvino` of the same release.
const REQUIREMENT: &str = "openvino-genai==2026.4.1.0";

/// Makes the environment; quick when it is there.
///
/// # Errors
/// No Python with pip and venv, a download that fails, a package that cannot be imported.
pub(crate) fn run() -> Result<()> {
    let runtime = place::runtime_dir();
    let (folder, stamp) = (runtime.join(FOLDER), runtime.join("stamps").join(FOLDER));
    let python = python_in(&folder);
    if python.is_file() && fs::read_to_string(&stamp).is_ok_and(|text| text == REQUIREMENT) {
        eprintln!("bench-setup: {REQUIREMENT} is in place");
        return Ok(());
    }
    fs::create_dir_all(runtime.join("stamps"))
        .with_context(|| format!("cannot create {}", runtime.join("stamps").display()))?;
    remove_if_there(&stamp)?;
    eprintln!("bench-setup: making {}", folder.display());
    let mut venv = pip::command(pip::find_python()?);
    venv.args(["-m", "venv", "--clear"]).arg(&folder).stdin(Stdio::null());
    cargo::run(venv.stdout(std::io::stderr())).context(
        "Python cannot make an environment; on Debian and Ubuntu install the package python3-venv",
    )?;
    eprintln!("bench-setup: installing {REQUIREMENT} (250 MB on disk with what it needs)");
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--disable-pip-version-check", "--only-binary=:all:"]);
    install.arg(REQUIREMENT).stdin(Stdio::null());
    cargo::run(install.stdout(std::io::stderr())).with_context(|| {
        format!(
            "pip could not install {REQUIREMENT}; its message is above. The package is made for \
             Python 3.10 to 3.13"
        )
    })?;
    let mut check = Command::new(&python);
    if !cargo::succeeds(check.args(["-c", "import openvino_genai"]).stdin(Stdio::null())) {
        bail!("{} cannot import openvino_genai", python.display());
    }
    fs::write(&stamp, REQUIREMENT).context("cannot write the stamp")?;
    eprintln!("bench-setup: ready, {}", python.display());
    Ok(())
}
