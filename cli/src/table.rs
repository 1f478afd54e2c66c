//! Tables of text for terminals and pipes.

use crate::safe_text::{columns, printable};

/// Space between two columns.
const GAP: &str = "  ";

/// A column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    title: &'static str,
    /// Numbers stand at the right.
    is_right: bool,
    /// Maximum width of a cell.
    columns_max: usize,
}

impl Column {
    /// A column of text, whose cells are cut to a number of columns of the terminal.
    pub(crate) const fn text(title: &'static str, columns_max: usize) -> Self {
        Self { title, is_right: false, columns_max }
    }

    /// A column of figures.
    pub(crate) const fn figure(title: &'static str) -> Self {
        Self { title, is_right: true, columns_max: 20 }
    }
}

/// The lines of a table, the titles first, with columns as wide as their cells. Control characters in
/// cells are escaped.
pub(crate) fn lines(titles: &[Column], rows: &[Vec<String>]) -> Vec<String> {
    let mut cells: Vec<Vec<String>> =
        vec![titles.iter().map(|column| column.title.to_owned()).collect()];
    cells.extend(rows.iter().map(|row| {
        let pairs = row.iter().zip(titles);
        pairs.map(|(cell, column)| printable(cell, column.columns_max)).collect()
    }));
    let widths: Vec<usize> = (0..titles.len())
        .map(|at| cells.iter().map(|row| columns(&row[at])).max().unwrap_or_default())
        .collect();
    let line = |row: &Vec<String>| {
        let padded = row.iter().zip(titles).zip(&widths).map(|((cell, column), width)| {
            let space = " ".repeat(width.saturating_sub(columns(cell)));
            if column.is_right { space + cell } else { cell.clone() + &space }
        });
        padded.collect::<Vec<_>>().join(GAP).trim_end().to_owned()
    };
    cells.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_cells_and_no_wider_than_they_may() {
        let titles = [Column::text("id", 6), Column::figure("requests"), Column::text("why", 10)];
        let row = |id: &str, count: &str, why: &str| vec![id.into(), count.into(), why.into()];
        let table = lines(&titles, &[row("模型模型", "3", ""), row("d0", "12", "line\nbreak")]);
        assert_eq!(
            table,
            ["id     requests  why", "模型…         3", "d0           12  line\\nbre…"]
        );
    }
}
