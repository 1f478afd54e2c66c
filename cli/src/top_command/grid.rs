//! The cells of a screen, of which only those that have changed are written to the terminal.

use std::io::{self, Write};

use crossterm::cursor::MoveTo;
use crossterm::queue;
use crossterm::style::{Attribute, ContentStyle, Print, SetAttribute, SetStyle, StyledContent};
use crossterm::terminal::{Clear, ClearType};
use unicode_width::UnicodeWidthChar;

/// Maximum number of columns, and of rows, of a terminal that are used.
const SIDE_MAX: u16 = 1000;

/// A text of one style.
pub(super) type Span = StyledContent<String>;

/// The texts of one row, from the left.
pub(super) type Line = Vec<Span>;

/// One place of the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    /// `None` if the wide character before it covers the cell.
    pub(super) symbol: Option<char>,
    pub(super) style: ContentStyle,
}

/// Everything on a screen.
pub(super) struct Grid {
    size: (u16, u16),
    /// Row by row.
    cells: Vec<Cell>,
}

impl Grid {
    /// An empty screen with the given numbers of columns and rows.
    pub(super) fn new((columns, rows): (u16, u16)) -> Self {
        let size = (columns.min(SIDE_MAX), rows.min(SIDE_MAX));
        let blank = Cell { symbol: Some(' '), style: ContentStyle::new() };
        Self { size, cells: vec![blank; usize::from(size.0) * usize::from(size.1)] }
    }

    /// The numbers of columns and rows.
    pub(super) fn size(&self) -> (u16, u16) {
        self.size
    }

    /// The cells of each row.
    pub(super) fn rows(&self) -> impl Iterator<Item = &[Cell]> {
        self.cells.chunks_exact(usize::from(self.size.0).max(1))
    }

    /// Writes lines into the rows from the top, as far as there is room.
    pub(super) fn put(&mut self, lines: &[Line]) {
        let rows = self.cells.chunks_exact_mut(usize::from(self.size.0).max(1));
        for (row, line) in rows.zip(lines) {
            let mut x = 0;
            let symbols = line.iter().flat_map(|span| {
                let style = *span.style();
                span.content().chars().map(move |symbol| (symbol, style))
            });
            for (symbol, style) in symbols {
                // Characters without a width have no place of their own.
                let Some(width @ 1..) = symbol.width() else { continue };
                let Some(room) = row.get_mut(x..x + width) else { break };
                room.fill(Cell { symbol: None, style });
                room[0].symbol = Some(symbol);
                x += width;
            }
        }
    }

    /// Writes what a terminal needs to show this. It shows `shown`; without it, or if that has
    /// another size, the terminal may show anything.
    ///
    /// # Errors
    /// Those of `out`.
    pub(super) fn write_changes(
        &self,
        shown: Option<&Self>,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let blank = Self::new(self.size);
        let shown = match shown {
            Some(shown) if shown.size == self.size => shown,
            _ => {
                queue!(out, SetAttribute(Attribute::Reset), Clear(ClearType::All))?;
                &blank
            }
        };
        let mut style = ContentStyle::new();
        // Where the cursor is, if that is certain.
        let mut cursor = None;
        for (y, (row, old)) in (0..).zip(self.rows().zip(shown.rows())) {
            for (x, (cell, old)) in (0..).zip(row.iter().zip(old)) {
                let Some(symbol) = cell.symbol.filter(|_| cell != old) else { continue };
                if cursor != Some((x, y)) {
                    queue!(out, MoveTo(x, y))?;
                }
                if style != cell.style {
                    style = cell.style;
                    queue!(out, SetAttribute(Attribute::Reset), SetStyle(style))?;
                }
                queue!(out, Print(symbol))?;
                // Terminals differ in the widths of other characters.
                cursor = symbol.is_ascii().then_some((x + 1, y));
            }
        }
        if style != ContentStyle::new() {
            queue!(out, SetAttribute(Attribute::Reset))?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crossterm::style::{Color, Stylize};

    use super::*;

    fn grid(size: (u16, u16), lines: &[Line]) -> Grid {
        let mut grid = Grid::new(size);
        grid.put(lines);
        grid
    }

    fn plain(text: &str) -> Line {
        vec![ContentStyle::new().apply(text.to_owned())]
    }

    fn changes(grid: &Grid, shown: Option<&Grid>) -> String {
        let mut out = Vec::new();
        grid.write_changes(shown, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// A terminal that knows as much as is written to it. As on real ones, half of a wide character
    /// is blank once its other half is overwritten.
    struct Terminal {
        grid: Grid,
        cursor: (usize, usize),
        style: ContentStyle,
    }

    impl Terminal {
        fn write(&mut self, output: &str) {
            let mut rest = output;
            while let Some(c) = rest.chars().next() {
                rest = &rest[c.len_utf8()..];
                match rest.strip_prefix('[').filter(|_| c == '\u{1b}') {
                    None => self.print(c),
                    Some(sequence) => {
                        let end = sequence.find(|c: char| c.is_ascii_alphabetic()).unwrap();
                        self.obey(&sequence[..end], &sequence[end..=end]);
                        rest = &sequence[end + 1..];
                    }
                }
            }
        }

        fn obey(&mut self, arguments: &str, command: &str) {
            match (command, arguments) {
                ("H", place) => {
                    let (y, x) = place.split_once(';').unwrap();
                    let number = |text: &str| text.parse::<usize>().unwrap() - 1;
                    self.cursor = (number(x), number(y));
                }
                ("J", "2") => self.grid = Grid::new(self.grid.size),
                ("m", "0") => self.style = ContentStyle::new(),
                ("m", "1") => self.style = self.style.bold(),
                ("m", "2") => self.style = self.style.dim(),
                ("m", "38;5;1") => self.style = self.style.with(Color::DarkRed),
                other => panic!("{other:?}"),
            }
        }

        fn print(&mut self, symbol: char) {
            let columns = usize::from(self.grid.size.0);
            let (x, y) = self.cursor;
            let row = &mut self.grid.cells[y * columns..][..columns];
            let width = symbol.width().unwrap();
            if row[x].symbol.is_none() {
                row[x - 1].symbol = Some(' ');
            }
            if let Some(behind) = row.get_mut(x + width).filter(|cell| cell.symbol.is_none()) {
                behind.symbol = Some(' ');
            }
            row[x..x + width].fill(Cell { symbol: None, style: self.style });
            row[x].symbol = Some(symbol);
            self.cursor.0 += width;
        }
    }

    #[test]
    fn only_cells_that_have_changed_are_written() {
        let first = grid((8, 2), &[plain("abc"), plain("def")]);
        assert_eq!(changes(&first, None), "\u{1b}[0m\u{1b}[2J\u{1b}[1;1Habc\u{1b}[2;1Hdef");
        assert_eq!(changes(&first, Some(&first)), "");
        let next = grid((8, 2), &[plain("abc"), plain("dxyz")]);
        assert_eq!(changes(&next, Some(&first)), "\u{1b}[2;2Hxyz");
        let red = ContentStyle::new().with(Color::DarkRed);
        let styled = grid((8, 2), &[plain("abc"), vec![red.apply("d".to_owned())]]);
        assert_eq!(
            changes(&styled, Some(&first)),
            "\u{1b}[2;1H\u{1b}[0m\u{1b}[38;5;1md\u{1b}[0m  "
        );
        let larger = grid((9, 2), &[plain("abc")]);
        assert_eq!(changes(&larger, Some(&first)), "\u{1b}[0m\u{1b}[2J\u{1b}[1;1Habc");
    }

    #[test]
    fn a_line_is_cut_where_the_screen_ends() {
        let text = |size, text: &str| {
            let grid = grid(size, &[plain(text), plain("b")]);
            grid.cells.iter().filter_map(|cell| cell.symbol).collect::<String>()
        };
        assert_eq!(text((3, 1), "abcd"), "abc");
        assert_eq!(text((3, 1), "a模型"), "a模");
        assert_eq!(text((4, 1), "a模型"), "a模 ");
        assert_eq!(text((3, 2), "a\u{301}\u{7}b"), "ab b  ");
        assert_eq!(text((0, 5), "a"), "");
        assert_eq!(grid((u16::MAX, u16::MAX), &[]).size, (SIDE_MAX, SIDE_MAX));
    }

    #[test]
    fn after_any_change_the_terminal_shows_the_frame() {
        const SIZE: (u16, u16) = (5, 2);
        let texts = ["", "abcde", "a模b", "模型c", "ab模…", " 模型", "a c e", "…a模"];
        let bold = ContentStyle::new().bold();
        let styles = [ContentStyle::new(), bold, bold.with(Color::DarkRed)];
        let lines = || {
            texts.iter().flat_map(|text| {
                styles.map(|style| vec![style.apply((*text).to_owned()), plain("x")[0].clone()])
            })
        };
        for before in lines() {
            for after in lines() {
                let first = grid(SIZE, &[before.clone(), after.clone()]);
                let next = grid(SIZE, &[after, before.clone()]);
                let garbage = grid(SIZE, &[plain("型型x"), plain("yyyyy")]);
                let mut terminal =
                    Terminal { grid: garbage, cursor: (3, 1), style: ContentStyle::new() };
                terminal.write(&changes(&first, None));
                assert_eq!(terminal.grid.cells, first.cells);
                terminal.write(&changes(&next, Some(&first)));
                assert_eq!(terminal.grid.cells, next.cells);
            }
        }
    }
}
