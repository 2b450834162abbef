//! Standard output and standard error: results on the one, everything for people on the other.
//!
//! A reader that goes away (`stagebus status | head -1`) ends the output, not the program.

use std::io::{self, ErrorKind, Write as _};

use serde::Serialize;

/// Writes text to standard output at once, without adding a line end.
///
/// # Errors
/// What the system reports, except for a closed pipe.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    closed_is_fine(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Writes a line to standard output.
///
/// # Errors
/// As [`print()`].
pub fn print_line(text: &str) -> io::Result<()> {
    print(&format!("{text}\n"))
}

/// Writes a value as one line of JSON to standard output.
///
/// # Errors
/// As [`print()`]; a value that cannot be represented is an error of the same kind.
pub fn print_json(value: &impl Serialize) -> io::Result<()> {
    print_line(&serde_json::to_string(value)?)
}

/// Writes a line for people to standard error. Nobody is left to tell when that fails.
pub fn note(text: &str) {
    drop(writeln!(io::stderr().lock(), "{text}"));
}

/// A size for people.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

fn closed_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Lays out rows under a header, columns separated by two spaces; numbers go to the right.
#[must_use]
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(header.get(column).map(|cell| cell.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let header_row: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&header_row).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            let number = cell.starts_with(|c: char| c.is_ascii_digit());
            let (before, after) = if number { (pad, String::new()) } else { (String::new(), pad) };
            line.push_str(&format!("{before}{cell}{after}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned() {
        let rows =
            vec![vec!["w0-a".to_owned(), "1".to_owned()], vec!["w".to_owned(), "1000".to_owned()]];
        assert_eq!(table(&["worker", "kv"], &rows), "worker  kv\nw0-a       1\nw       1000\n");
    }

    #[test]
    fn a_closed_pipe_is_no_error_but_a_full_disk_is() {
        closed_is_fine(Err(ErrorKind::BrokenPipe.into())).expect("a closed pipe");
        closed_is_fine(Err(ErrorKind::StorageFull.into())).expect_err("a full disk");
    }
}
