//! The checks that lints cannot make: file heads and lengths, which crate may use what, and figures in
//! the documents.

mod crates;
mod source;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::{cargo, figures, place};

/// Checks the whole repository.
///
/// # Errors
/// All objections in one message, or what kept the check from being made.
pub(crate) fn run() -> Result<()> {
    let root = place::root();
    let crates = crates::parse(&metadata()?)?;
    let mut objections = crates::check(&crates);
    objections.extend(figures::check(root)?);
    let architecture = read(&root.join("ARCHITECTURE.md"))?;
    let mut n_files = 0;
    for one in &crates {
        objections.extend(crates::check_manifest(&one.folder, &read(&one.manifest)?));
        objections.extend(crates::check_named(&one.folder, &architecture));
        for path in rust_files(&root.join(&one.folder))? {
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy();
            objections.extend(source::check(&name.replace('\\', "/"), &read(&path)?));
            n_files += 1;
        }
    }
    if objections.is_empty() {
        eprintln!("tidy: {} crates and {n_files} files in order", crates.len());
        return Ok(());
    }
    bail!("tidy has {} objections:\n  {}", objections.len(), objections.join("\n  "))
}

fn metadata() -> Result<String> {
    let output = cargo::cargo()
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run `cargo metadata`")?;
    if !output.status.success() {
        bail!("`cargo metadata` failed ({})", output.status);
    }
    String::from_utf8(output.stdout).context("`cargo metadata` wrote no UTF-8")
}

/// All Rust files below `folder`, in order.
fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let path = entry.with_context(|| format!("cannot list {}", folder.display()))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() && !name.starts_with('.') && name != "target" {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
