//! `stagebus man`: manual pages, made from the same descriptions as `--help`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory as _};
use clap_mangen::Man;
use serde::Serialize;

use crate::command::Cli;
use crate::console;
use crate::exit::Outcome;

/// Arguments of `stagebus man`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus man | man -l -
  stagebus man --out ~/.local/share/man/man1

With --out there is a page for the program and one for each command, such as stagebus-ask.1; pages
that are there are replaced.")]
pub struct ManArgs {
    /// Write a page for every command into this folder, which is made if it is missing
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// With --out: print one JSON object with the names of the files
    #[arg(long, requires = "out")]
    json: bool,
}

/// A page that was not written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
pub struct PageError {
    /// The page or its folder.
    path: PathBuf,
    /// The system's reason.
    #[source]
    source: io::Error,
}

/// What `stagebus man --out DIR --json` prints.
#[derive(Serialize)]
struct Written {
    pages: Vec<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// [`PageError`], or standard output that cannot be written.
pub fn run(args: &ManArgs) -> anyhow::Result<Outcome> {
    let pages = pages();
    let Some(folder) = &args.out else {
        let text = pages.into_iter().next().map(|page| page.text).unwrap_or_default();
        console::print(&text)?;
        return Ok(Outcome::Good);
    };
    let written = write(folder, &pages)?;
    if args.json {
        console::print_json(&Written { pages: written })?;
    } else {
        for path in written {
            console::print_line(&path.display().to_string())?;
        }
    }
    Ok(Outcome::Good)
}

/// One manual page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Name of its file.
    pub file: String,
    /// Its text in roff.
    pub text: String,
}

/// The page of the program, then those of all commands and of theirs; hidden ones have none.
#[must_use]
pub fn pages() -> Vec<Page> {
    let mut program = Cli::command().disable_help_subcommand(true);
    program.build();
    let mut pages = Vec::new();
    collect(&program, &mut pages);
    pages
}

fn collect(command: &Command, pages: &mut Vec<Page>) {
    let man = Man::new(command.clone());
    let mut text = Vec::new();
    // A page in memory: nothing can fail.
    drop(man.render(&mut text));
    pages
        .push(Page { file: man.get_filename(), text: String::from_utf8_lossy(&text).into_owned() });
    for sub in command.get_subcommands().filter(is_visible) {
        collect(sub, pages);
    }
}

fn is_visible(command: &&Command) -> bool {
    !command.is_hide_set() && command.get_name() != "help"
}

fn write(folder: &Path, pages: &[Page]) -> Result<Vec<PathBuf>, PageError> {
    let failed = |path: &Path, source| PageError { path: path.to_owned(), source };
    fs::create_dir_all(folder).map_err(|source| failed(folder, source))?;
    let mut written = Vec::new();
    for page in pages {
        let path = folder.join(&page.file);
        fs::write(&path, &page.text).map_err(|source| failed(&path, source))?;
        written.push(path);
    }
    Ok(written)
}
