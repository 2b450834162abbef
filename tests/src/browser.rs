//! A real browser and what drives it: packages of the npm registry, each with its version and hash.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use tokio::process::Command;

use crate::setup;

/// What is installed.
const PACKAGES: &str = include_str!("../browser/package.json");
/// The same with everything below it, and the hashes.
const LOCK: &str = include_str!("../browser/package-lock.json");

/// npm as the system calls it.
const NPM: &str = if cfg!(windows) { "npm.cmd" } else { "npm" };

/// A folder with the packages, below the runtime folder; filled at the first call. npm's own
/// configuration (mirror, proxy) holds, and no package runs a program of its own.
///
/// # Errors
/// No Node.js with npm, or a package that cannot be downloaded.
pub async fn folder() -> Result<PathBuf> {
    let folder = setup::runtime_dir()?.join("test-browser");
    let stamp = folder.join("ready");
    if fs::read_to_string(&stamp).is_ok_and(|text| text == LOCK) {
        return Ok(folder);
    }
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("package.json"), PACKAGES)?;
    fs::write(folder.join("package-lock.json"), LOCK)?;
    let output = Command::new(NPM)
        .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"])
        .current_dir(&folder)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .context("the test of the page needs Node.js with npm")?;
    ensure!(
        output.status.success(),
        "npm cannot install the packages of tests/browser/package-lock.json ({}):\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    fs::write(&stamp, LOCK)?;
    Ok(folder)
}
