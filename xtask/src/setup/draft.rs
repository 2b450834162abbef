//! Puts the repository's draft models where programs look for them.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::{INCOMING, replace};

/// Copies every folder of `models` to the runtime folder's models, unless it is there with the
/// same content. A folder appears there complete or not at all.
///
/// # Errors
/// A file that cannot be read or written.
pub(super) fn install(models: &Path, runtime: &Path) -> Result<()> {
    let entries =
        fs::read_dir(models).with_context(|| format!("cannot list {}", models.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {}", models.display()))?;
        if !entry.path().is_dir() {
            continue;
        }
        let name = entry.file_name();
        let target = runtime.join("models").join(&name);
        if holds_same(&entry.path(), &target)? {
            eprintln!("setup: {} is in place", name.display());
            continue;
        }
        let incoming = tempfile::Builder::new()
            .prefix(INCOMING)
            .tempdir_in(runtime)
            .context("cannot create a temporary folder")?;
        let prepared = incoming.path().join("prepared");
        fs::create_dir(&prepared).context("cannot create a temporary folder")?;
        for (file, content) in files(&entry.path())? {
            fs::write(prepared.join(&file), content)
                .with_context(|| format!("cannot copy {}", file.display()))?;
        }
        replace(&prepared, &target, &incoming.path().join("replaced"))?;
        eprintln!("setup: {}: ready", name.display());
    }
    Ok(())
}

/// Whether all files of `source` are in `target` with the same content.
fn holds_same(source: &Path, target: &Path) -> Result<bool> {
    let same = |(file, content): &(std::ffi::OsString, Vec<u8>)| {
        fs::read(target.join(file)).is_ok_and(|found| found == *content)
    };
    Ok(files(source)?.iter().all(same))
}

/// The plain files of a folder.
fn files(folder: &Path) -> Result<Vec<(std::ffi::OsString, Vec<u8>)>> {
    let failed = || format!("cannot read {}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(failed)? {
        let entry = entry.with_context(failed)?;
        if entry.path().is_file() {
            let content = fs::read(entry.path())
                .with_context(|| format!("cannot read {}", entry.path().display()))?;
            files.push((entry.file_name(), content));
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_copied_once_and_renewed_when_they_change() {
        let (repository, runtime) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let source = repository.path().join("small");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("config.json"), "1").unwrap();
        install(repository.path(), runtime.path()).unwrap();
        let target = runtime.path().join("models").join("small");
        assert!(holds_same(&source, &target).unwrap());
        fs::write(source.join("config.json"), "2").unwrap();
        fs::write(source.join("more"), "3").unwrap();
        assert!(!holds_same(&source, &target).unwrap());
        install(repository.path(), runtime.path()).unwrap();
        assert_eq!(fs::read_to_string(target.join("more")).unwrap(), "3");
        let left: Vec<_> = fs::read_dir(runtime.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary folder is left");
    }
}
