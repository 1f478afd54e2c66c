//! A screen as a picture.

use std::fmt::Write as _;

use crossterm::style::{Attribute, Color};

use super::{Cell, Grid};

/// Width and height of a cell, in pixels.
const CELL: (u16, u16) = (8, 17);

/// Space around the screen, in pixels.
const MARGIN: u16 = 14;

const GROUND: &str = "#0f141a";
const TEXT: &str = "#e6ebf1";

/// How the cells of a run are drawn.
#[derive(Clone, Copy, PartialEq)]
struct Look {
    colour: &'static str,
    is_bold: bool,
    is_dim: bool,
}

impl Look {
    fn of(cell: &Cell) -> Self {
        let colour = match cell.style.foreground_color {
            Some(Color::DarkGreen) => "#5ec9a8",
            Some(Color::DarkYellow) => "#e2b04c",
            Some(Color::DarkRed) => "#ff9270",
            _ => TEXT,
        };
        let is = |attribute| cell.style.attributes.has(attribute);
        Self { colour, is_bold: is(Attribute::Bold), is_dim: is(Attribute::Dim) }
    }
}

/// The picture of a screen, for people who cannot see the screen with this description.
pub(super) fn svg(screen: &Grid, description: &str) -> String {
    let (columns, rows) = screen.size();
    let size = (columns * CELL.0 + 2 * MARGIN, rows * CELL.1 + 2 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" width=\"{0}\" height=\"{1}\" \
         role=\"img\">\n<title>{}</title>\n<rect width=\"100%\" height=\"100%\" rx=\"8\" \
         fill=\"{GROUND}\"/>\n<g font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', \
         monospace\" font-size=\"13\">\n",
        size.0,
        size.1,
        escaped(description)
    );
    for (y, row) in (0..).zip(screen.rows()) {
        let mut x = 0;
        for run in row.chunk_by(|one, next| Look::of(one) == Look::of(next)) {
            let text: String = run.iter().filter_map(|cell| cell.symbol).collect();
            put_run(&mut svg, &text, (x, y), Look::of(&run[0]));
            x += u16::try_from(run.len()).unwrap();
        }
    }
    svg + "</g>\n</svg>\n"
}

/// Draws the text of a run of cells, which all have a width of one column.
fn put_run(svg: &mut String, run: &str, (x, y): (u16, u16), look: Look) {
    let text = run.trim_start();
    let before = run.chars().count() - text.chars().count();
    let text = text.trim_end();
    if text.is_empty() {
        return;
    }
    let columns = u16::try_from(text.chars().count()).unwrap();
    let x = MARGIN + (x + u16::try_from(before).unwrap()) * CELL.0;
    // The base line is above the bottom of the cell.
    let (y, width) = (MARGIN + (y + 1) * CELL.1 - 4, columns * CELL.0);
    let weight = if look.is_bold { " font-weight=\"700\"" } else { "" };
    let opacity = if look.is_dim { " opacity=\"0.7\"" } else { "" };
    writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" textLength=\"{width}\" fill=\"{}\"{weight}{opacity}>{}</text>",
        look.colour,
        // Browsers draw several spaces as one.
        escaped(text).replace(' ', "\u{a0}")
    )
    .unwrap();
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
