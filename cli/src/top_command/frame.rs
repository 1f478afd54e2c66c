//! One frame: the lines of the screen.

use crossterm::style::{Color, ContentStyle, Stylize};

use super::grid::{Grid, Line, Span};
use super::options::Options;
use super::view::View;
use crate::safe_text::{columns, printable};

mod decisions;
mod head;
mod pools;

/// Maximum number of lines about what is wrong.
const WARNINGS_MAX: usize = 4;

/// Maximum number of routers that have lines of their own.
const ROUTERS_MAX: usize = 4;

/// How a frame is drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paint {
    /// Whether colours are used (<https://no-color.org>).
    pub(super) has_colour: bool,
}

impl Paint {
    fn colour(self, colour: Color) -> ContentStyle {
        let plain = ContentStyle::new();
        if self.has_colour { plain.with(colour) } else { plain }
    }

    fn good(self) -> ContentStyle {
        self.colour(Color::DarkGreen)
    }

    fn changing(self) -> ContentStyle {
        self.colour(Color::DarkYellow)
    }

    fn bad(self) -> ContentStyle {
        self.colour(Color::DarkRed).bold()
    }

    fn title() -> ContentStyle {
        ContentStyle::new().bold()
    }

    fn dim() -> ContentStyle {
        ContentStyle::new().dim()
    }

    fn state(self, state: &str) -> ContentStyle {
        match state {
            "serving" => self.good(),
            "joining" | "warming" | "draining" => self.changing(),
            _ => self.bad(),
        }
    }
}

/// A text in an exact number of columns, cut or filled with spaces.
fn cell(text: &str, width: usize) -> String {
    let text = printable(text, width);
    let space = width.saturating_sub(columns(&text));
    text + &" ".repeat(space)
}

/// A figure at the right of an exact number of columns.
fn figure(text: &str, width: usize) -> String {
    let text = printable(text, width);
    " ".repeat(width.saturating_sub(columns(&text))) + &text
}

fn plain(text: impl Into<String>) -> Span {
    styled(text, ContentStyle::new())
}

fn styled(text: impl Into<String>, style: ContentStyle) -> Span {
    style.apply(text.into())
}

/// The lines of a frame. On a screen, there are exactly `height`, with the keys at the bottom;
/// without a height, there are as many as there is something to say.
pub(super) fn lines(
    view: &View<'_>,
    options: &Options,
    width: usize,
    height: Option<usize>,
    paint: Paint,
) -> Vec<Line> {
    let mut top = head::lines(view, options, width, paint);
    let warnings = pools::warnings(view, width, paint);
    let pools = pools::lines(view, width, paint);
    let decisions = decisions::lines(view, width, paint);
    let Some(height) = height else {
        return [top, pools, warnings, decisions].concat();
    };
    let keys = 1;
    let left = height.saturating_sub(top.len() + keys);
    let warnings_shown = warnings.len().min(WARNINGS_MAX).min(left / 3);
    let left = left - warnings_shown;
    // Workers come first; decisions get a third, and what workers do not need.
    let decisions_shown = decisions.len().min((left / 3).max(left.saturating_sub(pools.len())));
    let pools_shown = left - decisions_shown;
    top.extend(pools::scrolled(pools, options.scroll, pools_shown));
    top.extend(warnings.into_iter().take(warnings_shown));
    // A title without a decision says nothing.
    if decisions_shown > 1 {
        top.extend(decisions.into_iter().take(decisions_shown));
    }
    top.resize(height.saturating_sub(keys), Line::new());
    top.push(head::keys(options, width));
    top.truncate(height);
    top
}

/// The screen of a frame, in columns and rows.
pub(super) fn draw(size: (u16, u16), view: &View<'_>, options: &Options, paint: Paint) -> Grid {
    let mut grid = Grid::new(size);
    let (columns, rows) = grid.size();
    grid.put(&lines(view, options, columns.into(), Some(rows.into()), paint));
    grid
}

/// The lines of a frame as text.
pub(super) fn text(view: &View<'_>, options: &Options, width: u16) -> String {
    let all = lines(view, options, width.into(), None, Paint { has_colour: false });
    let texts = all.iter().map(|line| {
        let text: String = line.iter().map(|span| span.content().as_str()).collect();
        text.trim_end().to_owned()
    });
    texts.collect::<Vec<_>>().join("\n")
}
