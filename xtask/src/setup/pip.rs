//! Downloading one wheel with pip, and checking its hash.

use std::fs;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::wheels::Wheel;

/// How Python may be called; the first that runs pip is taken.
const PYTHONS: [&[&str]; 3] = [&["python3"], &["python"], &["py", "-3"]];

/// Downloads `wheel` into a folder below `incoming` and returns the file.
pub(crate) fn download(wheel: &Wheel, incoming: &Path) -> Result<PathBuf> {
    let python = find_python()?;
    let requirements = incoming.join("requirements.txt");
    fs::write(
        &requirements,
        format!("{}=={} --hash=sha256:{}\n", wheel.package, wheel.version, wheel.sha256),
    )
    .context("cannot write the requirements file")?;
    let folder = incoming.join("wheels");
    // pip shows its progress bar where it can move.
    let loudness = if std::io::stderr().is_terminal() { "--progress-bar=on" } else { "--quiet" };
    let status = command(python)
        .args(["-m", "pip", "download", loudness, "--disable-pip-version-check"])
        .args(["--no-deps", "--only-binary=:all:", "--require-hashes"])
        .args(["--implementation", "cp", "--python-version", "311", "--abi", "cp311"])
        .args(["--platform", wheel.platform])
        .arg("--dest")
        .arg(&folder)
        .arg("--requirement")
        .arg(&requirements)
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .status()
        .with_context(|| format!("cannot run {}", python.join(" ")))?;
    if !status.success() {
        bail!(
            "pip could not download {} {} ({status}); its message is above. Without a network, \
             or behind a mirror, give pip the index (`PIP_INDEX_URL`, or `pip config set \
             global.index-url URL`) or a folder with the wheel (`PIP_FIND_LINKS`). If it says \
             that the hashes do not match, the index serves another file than the pinned one: \
             do not use it",
            wheel.package,
            wheel.version
        );
    }
    let file = only_entry(&folder)?;
    let found = sha256(&file)?;
    if found != wheel.sha256 {
        bail!(
            "{} has SHA-256 {found}, but {} is pinned: the index serves another file",
            file.display(),
            wheel.sha256
        );
    }
    Ok(file)
}

/// The SHA-256 of a file, in hexadecimal.
pub(super) fn sha256(path: &Path) -> Result<String> {
    let mut file =
        fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n_read =
            file.read(&mut buffer).with_context(|| format!("cannot read {}", path.display()))?;
        if n_read == 0 {
            break;
        }
        hasher.update(&buffer[..n_read]);
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The first Python that runs pip.
pub(super) fn find_python() -> Result<&'static [&'static str]> {
    let mut without_pip = None;
    for python in PYTHONS {
        if !answers(python, &["--version"]) {
            continue;
        }
        if answers(python, &["-m", "pip", "--version"]) {
            return Ok(python);
        }
        without_pip.get_or_insert(python);
    }
    match without_pip {
        Some(python) => bail!(
            "{0} has no pip; install it (`{0} -m ensurepip`, or the package python3-pip of your \
             system)",
            python.join(" ")
        ),
        None => bail!(
            "no Python found (tried python3, python and py -3); set-up downloads wheels with its \
             pip, into the runtime folder only. Install Python 3 with pip, of any version"
        ),
    }
}

fn answers(python: &[&str], args: &[&str]) -> bool {
    command(python)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// A call of Python.
pub(super) fn command(python: &[&str]) -> Command {
    let (program, args) = python.split_first().unwrap_or((&"python3", &[]));
    let mut command = Command::new(program);
    command.args(args);
    command
}

/// The one file or folder in a folder.
pub(super) fn only_entry(folder: &Path) -> Result<PathBuf> {
    let mut files = fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>())
        .with_context(|| format!("cannot list {}", folder.display()))?;
    match (files.pop(), files.is_empty()) {
        (Some(file), true) => Ok(file),
        _ => bail!("there is another number of files than one in {}", folder.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_file_is_its_sha256() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("abc");
        fs::write(&file, "abc").expect("file");
        assert_eq!(
            sha256(&file).expect("hash"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn exactly_one_file_is_expected() {
        let folder = tempfile::tempdir().expect("folder");
        assert!(only_entry(folder.path()).is_err());
        fs::write(folder.path().join("a"), "").expect("file");
        assert_eq!(only_entry(folder.path()).expect("one"), folder.path().join("a"));
        fs::write(folder.path().join("b"), "").expect("file");
        assert!(only_entry(folder.path()).is_err());
    }
}
