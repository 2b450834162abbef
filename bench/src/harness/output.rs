//! Results on standard output, remarks on standard error.

use std::io::{self, Write as _};
use std::path::Path;

use serde::Serialize;

use super::origin::Origin;

/// Writes text to standard output at once.
///
/// # Errors
/// What the system reports.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes a value as one line of JSON to standard output.
///
/// # Errors
/// As [`print()`].
pub fn print_json(value: &impl Serialize) -> io::Result<()> {
    print(&format!("{}\n", serde_json::to_string(value)?))
}

/// Writes what a scenario found: its tables, its claims and, with `json`, the whole report as one line
/// of JSON last, with where it comes from under `origin`. `model` is the file that was measured.
///
/// # Errors
/// As [`print()`]; a model that cannot be read.
pub fn print_report(
    report: &impl Serialize,
    text: &str,
    claims: &str,
    model: Option<&Path>,
    json: bool,
) -> io::Result<()> {
    #[derive(Serialize)]
    struct Dated<'a, R> {
        origin: Origin,
        #[serde(flatten)]
        report: &'a R,
    }
    print(text)?;
    print(claims)?;
    if json {
        print_json(&Dated { origin: Origin::look(model)?, report })?;
    }
    Ok(())
}

/// Writes a remark to standard error unless `quiet`. Nobody is left to tell when that fails.
pub fn note(quiet: bool, text: &str) {
    if !quiet {
        drop(writeln!(io::stderr().lock(), "{text}"));
    }
}
