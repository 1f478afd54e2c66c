//! One frame: the lines of the screen.

use ratatui::layout::{Rect, Size};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

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
    fn colour(self, colour: Color) -> Style {
        if self.has_colour { Style::new().fg(colour) } else { Style::new() }
    }

    fn good(self) -> Style {
        self.colour(Color::Green)
    }

    fn changing(self) -> Style {
        self.colour(Color::Yellow)
    }

    fn bad(self) -> Style {
        self.colour(Color::Red).add_modifier(Modifier::BOLD)
    }

    fn title() -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    fn dim() -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    fn state(self, state: &str) -> Style {
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

fn plain(text: impl Into<String>) -> Line<'static> {
    Line::from(text.into())
}

fn styled(text: impl Into<String>, style: Style) -> Line<'static> {
    Line::from(Span::styled(text.into(), style))
}

/// The lines of a frame. On a screen, there are exactly `size.height`, with the keys at the bottom;
/// with `is_whole`, there are as many as there is something to say.
pub(super) fn lines(
    view: &View<'_>,
    options: &Options,
    size: Size,
    paint: Paint,
    is_whole: bool,
) -> Vec<Line<'static>> {
    let width = usize::from(size.width);
    let mut top = head::lines(view, options, width, paint);
    let warnings = pools::warnings(view, width, paint);
    let pools = pools::lines(view, width, paint);
    let decisions = decisions::lines(view, width, paint);
    if is_whole {
        return [top, pools, warnings, decisions].concat();
    }
    let height = usize::from(size.height);
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
    top.resize(height.saturating_sub(keys), Line::default());
    top.push(head::keys(options, width));
    top.truncate(height);
    top
}

/// Draws the lines of a frame.
pub(super) fn draw(
    frame: &mut ratatui::Frame<'_>,
    view: &View<'_>,
    options: &Options,
    paint: Paint,
) {
    let area: Rect = frame.area();
    let all = lines(view, options, area.as_size(), paint, false);
    let buffer = frame.buffer_mut();
    for (row, line) in (area.top()..area.bottom()).zip(&all) {
        buffer.set_line(area.left(), row, line, area.width);
    }
}

/// The lines of a frame as text.
pub(super) fn text(view: &View<'_>, options: &Options, width: u16) -> String {
    let size = Size { width, height: u16::MAX };
    let all = lines(view, options, size, Paint { has_colour: false }, true);
    let texts = all.iter().map(|line| {
        let text: String = line.spans.iter().map(|span| &*span.content).collect();
        text.trim_end().to_owned()
    });
    texts.collect::<Vec<_>>().join("\n")
}
