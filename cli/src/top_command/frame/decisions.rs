//! The last decisions.

use super::{Paint, cell, figure, plain, styled};
use crate::safe_text::{columns, distinct, printable};
use crate::top_command::figures::{age, count};
use crate::top_command::grid::Line;
use crate::top_command::live::Decision;
use crate::top_command::view::View;

/// Width of the columns before the note, without that of the workers.
const FIXED_COLUMNS: usize = 57;

/// Minimum width of the workers of a decision, and of the note.
const WORKERS_COLUMNS: usize = 16;
const NOTE_COLUMNS: usize = 24;

pub(super) fn lines(view: &View<'_>, width: usize, paint: Paint) -> Vec<Line> {
    if view.decisions.is_empty() {
        return Vec::new();
    }
    let ways = ways(view, width);
    let ways_width = ways.iter().map(|way| columns(way)).max().unwrap_or(0).max(WORKERS_COLUMNS);
    let text = format!(
        "{} {} {} {}{} {} note",
        figure("age", 4),
        cell("request", 18),
        cell("workers", ways_width),
        figure("prompt", 8),
        figure("cached", 8),
        cell("outcome", 14)
    );
    let mut lines = vec![vec![styled(printable(&text, width), Paint::title())]];
    let room = width.saturating_sub(FIXED_COLUMNS + ways_width);
    for ((now, decision), way) in view.decisions.iter().zip(&ways) {
        let age_ms = now.saturating_sub(decision.decided_unix_ms);
        lines.push(line(age_ms, decision, (&cell(way, ways_width), room), paint));
    }
    lines
}

/// The workers of each decision, `p0>d1` or the only one, cut so that workers stay different.
fn ways(view: &View<'_>, width: usize) -> Vec<String> {
    let of = |decision: &Decision| {
        [&decision.prefill_worker, &decision.decode_worker]
            .map(|worker| worker.as_deref().unwrap_or_default().to_owned())
    };
    let ids: Vec<_> = view.decisions.iter().flat_map(|(_, decision)| of(decision)).collect();
    let ids: Vec<_> = ids.iter().map(String::as_str).collect();
    let room = width.saturating_sub(FIXED_COLUMNS + NOTE_COLUMNS).max(WORKERS_COLUMNS);
    let cut = distinct(&ids, (room - 1) / 2);
    let way = |(whole, cut): (&[&str], &[String])| match (whole, cut) {
        (["", ""], _) => "-".to_owned(),
        (["", decode], _) => printable(decode, room),
        ([_, ""], [prefill, _]) => format!("{prefill}>-"),
        (_, cut) => cut.join(">"),
    };
    ids.chunks(2).zip(cut.chunks(2)).map(way).collect()
}

/// A decision of this age, with its workers in exactly their columns, and a note in the room that is
/// left.
fn line(age_ms: u64, decision: &Decision, (way, room): (&str, usize), paint: Paint) -> Line {
    let known = |figure: Option<u64>| count(figure.map(|figure| figure as f64));
    let outcome = decision.outcome.as_deref().unwrap_or("running");
    let style = match outcome {
        "ok" => paint.good(),
        "running" => Default::default(),
        _ => paint.bad(),
    };
    let start = format!(
        "{} {} {} {}{} ",
        figure(&age(age_ms), 4),
        cell(&decision.request_id, 18),
        way,
        figure(&known(decision.prompt_tokens), 8),
        figure(&known(decision.cached_tokens), 8),
    );
    vec![
        plain(start),
        styled(cell(outcome, 14), style),
        plain(format!(" {}", printable(&note(decision), room))),
    ]
}

/// Why the prompt stayed, or by how much the choice was better than the next one.
fn note(decision: &Decision) -> String {
    let mut note = Vec::new();
    if decision.attempts > 1 {
        note.push(format!("attempt {}", decision.attempts));
    }
    if let Some(reason) = &decision.local_reason {
        note.push(reason.replace('_', " "));
    }
    if let (Some(runner_up), Some(margin)) = (&decision.runner_up, decision.margin) {
        let unit = decision.margin_unit.as_deref().unwrap_or_default();
        note.push(match margin == 0.0 {
            true => format!("as good as {runner_up}"),
            false => format!("{} {unit} before {runner_up}", count(Some(margin))),
        });
    }
    note.join("; ")
}
