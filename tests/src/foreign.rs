//! Clients that are not ours: Python with their libraries in a virtual environment.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use tokio::process::Command;

use crate::setup;

/// The libraries with everything that they need, each with its version.
const REQUIREMENTS: &str = include_str!("../clients/requirements.txt");

/// How Python may be called.
const PYTHONS: [&[&str]; 3] = [&["python3"], &["python"], &["py", "-3"]];

/// The Python of a virtual environment with the clients' libraries, made below the runtime folder
/// at the first call. pip's own configuration (mirror, proxy) holds.
///
/// # Errors
/// No Python with pip, or a library that cannot be downloaded.
pub async fn python() -> Result<PathBuf> {
    let folder = setup::runtime_dir()?.join("test-venv");
    let python = folder.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
    let stamp = folder.join("ready");
    if fs::read_to_string(&stamp).is_ok_and(|text| text == REQUIREMENTS) {
        return Ok(python);
    }
    let base = find().await?;
    // Without pip inside, which some systems' Python cannot install: the caller's does the work.
    run(base, &["-m", "venv", "--without-pip", "--clear"], Some(&folder)).await?;
    let script = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let found = Command::new(&python).args(["-c", script]).output().await?;
    ensure!(found.status.success(), "{} does not run", python.display());
    let packages = PathBuf::from(String::from_utf8(found.stdout)?.trim());
    let list = setup::root().join("tests").join("clients").join("requirements.txt");
    let list = list.to_string_lossy();
    let install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--requirement",
        &list,
        "--target",
    ];
    run(base, &install, Some(&packages)).await.context(
        "the tests of foreign clients need the packages of tests/clients/requirements.txt from a \
         package index (`PIP_INDEX_URL` names a mirror, `PIP_FIND_LINKS` a folder)",
    )?;
    fs::write(&stamp, REQUIREMENTS)?;
    Ok(python)
}

async fn find() -> Result<&'static [&'static str]> {
    for python in PYTHONS {
        if run(python, &["-m", "pip", "--version"], None).await.is_ok() {
            return Ok(python);
        }
    }
    bail!("the test of a foreign client needs Python 3 with pip (tried python3, python, py -3)")
}

async fn run(python: &[&str], args: &[&str], last: Option<&Path>) -> Result<()> {
    let (program, first) = python.split_first().context("no program")?;
    let output = Command::new(program)
        .args(first)
        .args(args)
        .args(last)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {} failed ({}):\n{}",
        args.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
