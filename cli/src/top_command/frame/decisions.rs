//! The last decisions.

use super::{Paint, cell, figure, plain, styled};
use crate::safe_text::printable;
use crate::top_command::figures::{age, count};
use crate::top_command::grid::Line;
use crate::top_command::live::Decision;
use crate::top_command::view::View;

/// Width of the columns before the note.
const FIXED_COLUMNS: usize = 73;

pub(super) fn lines(view: &View<'_>, width: usize, paint: Paint) -> Vec<Line> {
    if view.decisions.is_empty() {
        return Vec::new();
    }
    let text = format!(
        "{} {} {} {}{} {} note",
        figure("age", 4),
        cell("request", 18),
        cell("workers", 16),
        figure("prompt", 8),
        figure("cached", 8),
        cell("outcome", 14)
    );
    let mut lines = vec![vec![styled(printable(&text, width), Paint::title())]];
    let shown = view.decisions.iter();
    lines.extend(shown.map(|(now, decision)| line(*now, decision, width, paint)));
    lines
}

fn line(now_unix_ms: u64, decision: &Decision, width: usize, paint: Paint) -> Line {
    let known = |figure: Option<u64>| count(figure.map(|figure| figure as f64));
    let outcome = decision.outcome.as_deref().unwrap_or("running");
    let style = match outcome {
        "ok" => paint.good(),
        "running" => Default::default(),
        _ => paint.bad(),
    };
    let start = format!(
        "{} {} {} {}{} ",
        figure(&age(now_unix_ms.saturating_sub(decision.decided_unix_ms)), 4),
        cell(&decision.request_id, 18),
        cell(&workers(decision), 16),
        figure(&known(decision.prompt_tokens), 8),
        figure(&known(decision.cached_tokens), 8),
    );
    let room = width.saturating_sub(FIXED_COLUMNS);
    vec![
        plain(start),
        styled(cell(outcome, 14), style),
        plain(format!(" {}", printable(&note(decision), room))),
    ]
}

/// The workers: `p0>d1`, or the only one.
fn workers(decision: &Decision) -> String {
    let decode = decision.decode_worker.as_deref().unwrap_or("-");
    match &decision.prefill_worker {
        Some(prefill) => format!("{prefill}>{decode}"),
        None => decode.to_owned(),
    }
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
