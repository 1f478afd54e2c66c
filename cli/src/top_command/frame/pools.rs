//! The pools of workers, and what is wrong with workers.

use super::{Paint, cell, figure, plain, styled};
use crate::cluster::takes_work;
use crate::safe_text::{columns, cut, distinct, printable};
use crate::top_command::figures::{count, percent, time_ms};
use crate::top_command::grid::Line;
use crate::top_command::view::{Row, View, is_in_service};

/// Width of the columns around the id that are always there: its mark, a space, and the figures
/// from the state on.
const FIXED_COLUMNS: usize = 65;

/// Minimum and maximum width of the id.
const ID_COLUMNS: (usize, usize) = (6, 48);

/// Width of the lag, which is shown if there is room.
const LAG_COLUMNS: usize = 7;

/// Minimum and maximum width of the address, which is shown if there is room, and the space before
/// it.
const ADDRESS_COLUMNS: (usize, usize) = (14, 40);
const ADDRESS_SPACE: usize = 2;

/// Maximum width of a state or its cause.
const TEXT_COLUMNS: usize = 160;

/// Share of a KV cache from which it is nearly full.
const NEARLY_FULL: f64 = 0.9;

/// How many times as long as the usual worker one takes that is marked as slow.
const SLOW: f64 = 3.0;

pub(super) fn lines(view: &View<'_>, width: usize, paint: Paint) -> Vec<Line> {
    if view.rows.is_empty() {
        return vec![vec![plain("no workers are known yet")]];
    }
    let layout = Layout::new(view, width);
    let mut lines = vec![layout.titles()];
    let mut group = None;
    for (row, id) in view.rows.iter().zip(&layout.ids) {
        if group != Some((row.model, row.role)) {
            group = Some((row.model, row.role));
            lines.push(pool(view, row));
        }
        lines.push(worker(row, id, &layout, paint));
    }
    lines
}

/// Which columns a width has room for.
struct Layout {
    /// The ids, cut so that they stay different.
    ids: Vec<String>,
    id_width: usize,
    has_lag: bool,
    /// 0 without addresses.
    address_width: usize,
}

impl Layout {
    fn new(view: &View<'_>, width: usize) -> Self {
        let ids: Vec<_> = view.rows.iter().map(|row| row.id).collect();
        let longest = |texts: &[String]| texts.iter().map(|text| columns(text)).max().unwrap_or(0);
        let whole = longest(&distinct(&ids, ID_COLUMNS.1));
        let room = width.saturating_sub(FIXED_COLUMNS).max(ID_COLUMNS.0);
        let id_width = whole.clamp(ID_COLUMNS.0, room.min(ID_COLUMNS.1));
        let left = room - id_width;
        let has_lag = left >= LAG_COLUMNS;
        let left = left.saturating_sub(LAG_COLUMNS + ADDRESS_SPACE);
        let addresses: Vec<_> =
            view.rows.iter().map(|row| printable(address(row.url), left)).collect();
        let address_width = match longest(&addresses).min(ADDRESS_COLUMNS.1) {
            width if left >= ADDRESS_COLUMNS.0 => width,
            _ => 0,
        };
        Self { ids: distinct(&ids, id_width), id_width, has_lag, address_width }
    }

    fn titles(&self) -> Line {
        let figures = [
            ("req", 5),
            ("prefill", 8),
            ("run", 5),
            ("wait", 5),
            ("KV", 5),
            ("hit", 5),
            ("slow", 6),
            ("speed", 7),
            ("leg", 6),
        ];
        let figures =
            figures.iter().map(|(title, width)| figure(title, *width)).collect::<String>();
        let (id, state) = (cell("worker", self.id_width), cell("state", 10));
        let mut text = format!("  {id} {state}{figures}");
        if self.has_lag {
            text += &figure("lag", LAG_COLUMNS);
        }
        if self.address_width > 0 {
            text +=
                &format!("{}{}", " ".repeat(ADDRESS_SPACE), cell("address", self.address_width));
        }
        vec![styled(text, Paint::title())]
    }
}

/// An address without the usual scheme.
fn address(url: &str) -> &str {
    url.strip_prefix("http://").unwrap_or(url)
}

/// How fast a worker computes prompts, or makes a step of the tokens that it generates.
fn speed(row: &Row<'_>) -> String {
    let tokens = |per_s: f64| format!("{}/s", count(Some(per_s)));
    let step = || row.step_ms.map(|ms| time_ms(Some(ms)));
    let prefill = row.prefill_tokens_per_s.map(tokens);
    let speed = if row.role == "decode" { step() } else { prefill.or_else(step) };
    speed.unwrap_or("-".to_owned())
}

/// As many lines as there is room for, from `scroll` on. The titles stay.
pub(super) fn scrolled(mut lines: Vec<Line>, scroll: usize, room: usize) -> Vec<Line> {
    if lines.len() <= room || room < 3 {
        lines.truncate(room);
        return lines;
    }
    // One line for the titles, one that says how many are not shown.
    let shown = room - 2;
    let rest = lines.split_off(1);
    let first = scroll.min(rest.len().saturating_sub(shown));
    let below = rest.len() - first - shown;
    lines.extend(rest.into_iter().skip(first).take(shown));
    let more = format!("  {first} lines above, {below} below");
    lines.push(vec![styled(more, Paint::dim())]);
    lines
}

fn pool(view: &View<'_>, first: &Row<'_>) -> Line {
    let members = view.rows.iter().filter(|row| (row.model, row.role) == (first.model, first.role));
    let serving = members.clone().filter(|row| is_in_service(row.state)).count();
    let name = match first.role {
        "both" => "pool".to_owned(),
        role => format!("{} pool", printable(role, 12)),
    };
    let model = match view.models.len() {
        1 => String::new(),
        _ => format!("{}: ", printable(first.model, 40)),
    };
    let members = members.count();
    vec![styled(format!("{model}{name}, {serving} of {members} serving"), Paint::title())]
}

fn worker(row: &Row<'_>, id: &str, layout: &Layout, paint: Paint) -> Line {
    let whole = |figure: u64| count(Some(figure as f64));
    let known = |figure: Option<u64>| count(figure.map(|figure| figure as f64));
    let state = if row.is_mixed { format!("{}*", row.state) } else { row.state.to_owned() };
    let is_full = row.kv_used_ratio.is_some_and(|ratio| ratio >= NEARLY_FULL);
    let mark = match (takes_work(row.state), row.issues.is_empty()) {
        (true, true) => "  ",
        _ => "! ",
    };
    let space = " ".repeat(layout.id_width.saturating_sub(columns(id)) + 1);
    let mut line = vec![
        styled(mark, paint.bad()),
        plain(format!("{id}{space}")),
        styled(cell(&state, 10), paint.state(row.state)),
        plain(figure(&whole(row.requests), 5)),
        plain(figure(&whole(row.prefill_tokens), 8)),
        plain(figure(&known(row.engine_running), 5)),
        plain(figure(&known(row.engine_waiting), 5)),
        styled(
            figure(&percent(row.kv_used_ratio), 5),
            if is_full { paint.bad() } else { Default::default() },
        ),
        plain(figure(&percent(row.hit_ratio), 5)),
        styled(
            figure(&row.slowdown.map_or("-".to_owned(), |times| format!("{times:.1}x")), 6),
            if row.slowdown.is_some_and(|times| times >= SLOW) {
                paint.bad()
            } else {
                Default::default()
            },
        ),
        plain(figure(&speed(row), 7)),
        plain(figure(&time_ms(row.leg_ms), 6)),
    ];
    if layout.has_lag {
        line.push(plain(figure(&time_ms(row.event_lag_ms), LAG_COLUMNS)));
    }
    if layout.address_width > 0 {
        let address = cell(address(row.url), layout.address_width);
        line.push(styled(" ".repeat(ADDRESS_SPACE) + &address, Paint::dim()));
    }
    line
}

/// One line for each worker that gets no work or has another issue.
pub(super) fn warnings(view: &View<'_>, width: usize, paint: Paint) -> Vec<Line> {
    let mut lines = Vec::new();
    for row in &view.rows {
        let mut what = Vec::new();
        if !takes_work(row.state) {
            let on = if row.is_mixed { " on some routers" } else { "" };
            let (state, why) =
                (printable(row.state, TEXT_COLUMNS), printable(row.state_why, TEXT_COLUMNS));
            what.push(format!("{state}{on}: {why}"));
        }
        what.extend(row.issues.iter().map(|issue| printable(issue, TEXT_COLUMNS)));
        if !what.is_empty() {
            let text = format!("! {}: {}", printable(row.id, ID_COLUMNS.1), what.join("; "));
            lines.push(vec![styled(cut(&text, width), paint.state(row.state))]);
        }
    }
    lines
}
