//! Tables, as plain text and as Markdown.

/// Lays out rows under a header, columns separated by two spaces.
#[must_use]
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(header.get(column).map(|cell| cell.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let header: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&header).chain(rows) {
        let line: String =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}  ")).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Lays out rows under a header as Markdown, padded so that it reads well as it is.
#[must_use]
pub fn markdown(header: &[&str], rows: &[Vec<String>]) -> String {
    let cells = |row: &[String]| {
        let row = (0..header.len()).map(|column| row.get(column).map_or("", String::as_str));
        row.map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>()
    };
    let header_row: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    let mut lines = vec![cells(&header_row)];
    lines.extend(rows.iter().map(|row| cells(row)));
    let width = |column: usize| {
        lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0).max(3)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let rule = widths.iter().map(|&width| "-".repeat(width)).collect();
    lines.insert(1, rule);
    let mut text = String::new();
    for line in lines {
        for (cell, &width) in line.iter().zip(&widths) {
            text.push_str(&format!("| {cell:width$} "));
        }
        text.push_str("|\n");
    }
    text
}

/// A number for a table cell with that many digits after the point; a dash without a value.
#[must_use]
pub fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

/// Milliseconds for a table cell; a dash without a value.
#[must_use]
pub fn ms(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![vec!["a".to_owned(), "1".to_owned()], vec!["abc".to_owned()]];
        assert_eq!(table(&["x", "y"], &rows), "x    y\na    1\nabc\n");
        let expected = "| x   | y   |\n| --- | --- |\n| a   | 1   |\n| abc |     |\n";
        assert_eq!(markdown(&["x", "y"], &rows), expected);
        assert_eq!(number(Some(1.26), 1), "1.3");
        assert_eq!(ms(Some(1.239)), "1.24");
        assert_eq!(ms(None), "-");
    }
}
