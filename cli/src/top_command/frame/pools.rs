//! The pools of workers, and what is wrong with workers.

use super::{Paint, cell, figure, plain, styled};
use crate::safe_text::{columns, cut, printable};
use crate::top_command::figures::{count, percent, time_ms};
use crate::top_command::grid::Line;
use crate::top_command::view::{Row, View, is_in_service, takes_work};

/// Width of the columns at the right of the worker's id.
const FIGURES_COLUMNS: usize = 59;

/// Width of the id in a narrow terminal, and its maximum.
const ID_COLUMNS: (usize, usize) = (18, 48);

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
    let ids = view.rows.iter().map(|row| columns(&printable(row.id, ID_COLUMNS.1))).max();
    let room = width.saturating_sub(FIGURES_COLUMNS).clamp(ID_COLUMNS.0, ID_COLUMNS.1);
    let id_width = ids.unwrap_or_default().clamp(ID_COLUMNS.0, room);
    let mut lines = vec![titles(id_width)];
    let mut group = None;
    for row in &view.rows {
        if group != Some((row.model, row.role)) {
            group = Some((row.model, row.role));
            lines.push(pool(view, row));
        }
        lines.push(worker(row, id_width, paint));
    }
    lines
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

fn titles(id_width: usize) -> Line {
    let figures =
        [("req", 5), ("prefill", 8), ("run", 5), ("wait", 5), ("KV", 5), ("hit", 5), ("slow", 6)];
    let figures: String = figures.iter().map(|(title, width)| figure(title, *width)).collect();
    let text = format!(
        "  {} {}{figures}{}",
        cell("worker", id_width),
        cell("state", 10),
        figure("lag", 7)
    );
    vec![styled(text, Paint::title())]
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

fn worker(row: &Row<'_>, id_width: usize, paint: Paint) -> Line {
    let whole = |figure: u64| count(Some(figure as f64));
    let known = |figure: Option<u64>| count(figure.map(|figure| figure as f64));
    let state = if row.is_mixed { format!("{}*", row.state) } else { row.state.to_owned() };
    let is_full = row.kv_used_ratio.is_some_and(|ratio| ratio >= NEARLY_FULL);
    let mark = match (takes_work(row.state), row.issues.is_empty()) {
        (true, true) => "  ",
        _ => "! ",
    };
    vec![
        styled(mark, paint.bad()),
        plain(cell(row.id, id_width) + " "),
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
        plain(figure(&time_ms(row.event_lag_ms), 7)),
    ]
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
