//! Text for people: numbers, sizes and small tables. JSON for programs.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::Outcome;

/// Writes lines to stdout and reports a closed pipe instead of panicking.
pub(crate) fn print(text: &str) -> Outcome {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    Ok(out.flush()?)
}

/// Writes one JSON object to stdout.
pub(crate) fn print_json(value: &impl Serialize) -> Outcome {
    let text = serde_json::to_string_pretty(value)?;
    print(&text)
}

/// A number with separators: `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of bytes with a unit: `12.3 KiB`.
pub(crate) fn bytes(number: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if number < 1024 {
        return format!("{number} B");
    }
    let mut value = number as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// `1 fragment`, `2 fragments`.
pub(crate) fn counted(number: u64, noun: &str) -> String {
    let s = if number == 1 { "" } else { "s" };
    format!("{} {noun}{s}", grouped(number))
}

/// Lines of `name  value`, with the values in one column.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    rows: Vec<(String, String)>,
}

impl Facts {
    pub(crate) fn add(&mut self, name: &str, value: impl Into<String>) {
        self.rows.push((name.to_string(), value.into()));
    }
}

impl std::fmt::Display for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = self
            .rows
            .iter()
            .map(|(name, _)| name.chars().count())
            .max()
            .unwrap_or(0);
        for (name, value) in &self.rows {
            writeln!(f, "{name:<width$}  {value}")?;
        }
        Ok(())
    }
}

/// Where the text of a column stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A small table without borders.
#[derive(Debug)]
pub(crate) struct Grid {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Grid {
    pub(crate) fn new(columns: &[(&str, Align)]) -> Self {
        Self {
            columns: columns
                .iter()
                .map(|(name, align)| ((*name).to_string(), *align))
                .collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row; missing cells are empty.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    fn width(&self, column: usize) -> usize {
        let header = self.columns.get(column).map(|(name, _)| name);
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        cells
            .chain(header)
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    }
}

impl std::fmt::Display for Grid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let header: Vec<_> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        let empty = String::new();
        for row in std::iter::once(&header).chain(&self.rows) {
            let mut line = String::new();
            for (i, (_, align)) in self.columns.iter().enumerate() {
                let width = self.width(i);
                let cell = row.get(i).unwrap_or(&empty);
                let cell = match align {
                    Align::Left => format!("{cell:<width$}"),
                    Align::Right => format!("{cell:>width$}"),
                };
                line.push_str("  ");
                line.push_str(&cell);
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(grouped(7), "7");
        assert_eq!(grouped(1234), "1,234");
        assert_eq!(grouped(1_000_000), "1,000,000");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
        assert_eq!(counted(1, "leaf"), "1 leaf");
        assert_eq!(counted(0, "node"), "0 nodes");
    }

    #[test]
    fn columns_line_up() {
        let mut grid = Grid::new(&[("name", Align::Left), ("n", Align::Right)]);
        grid.row(["a".to_string(), "10".to_string()]);
        grid.row(["long one".to_string()]);
        assert_eq!(
            grid.to_string(),
            "  name       n\n  a         10\n  long one\n"
        );
    }
}
