//! The result of a check as text.

use splitrail_config::Model;
use splitrail_inspection::{Finding, Severity, WorkerFacts, confirmations};
use splitrail_settings::command::Paint;

use super::{CheckedConfig, InspectedModel};
use crate::safe_text::printable;

/// Maximum width of a line that contains texts of engines.
const LINE_MAX_COLUMNS: usize = 600;
/// Width of the first word of a line.
const WORD_COLUMNS: usize = 8;

/// Renders warnings, what was found out about workers, and a summary in the last line.
pub(super) fn render(checked: &CheckedConfig, paint: Paint) -> String {
    let mut lines: Vec<String> = Vec::new();
    let warnings = checked.warnings().iter().map(|warning| warning.painted(paint));
    for warning in warnings.chain(checked.notes.iter().cloned()) {
        lines.push(format!("{} {warning}", paint.warning("warning:")));
    }
    for note in checked.loaded.iter().flat_map(|loaded| &loaded.notes) {
        lines.push(format!("note: {}", printable(note, LINE_MAX_COLUMNS)));
    }
    if let (Some(inspected), Ok(loaded)) = (&checked.models, &checked.loaded) {
        for (inspected, model) in inspected.iter().zip(&loaded.config.models) {
            of_model(inspected, model, paint, &mut lines);
        }
    }
    let summary = summary(checked);
    lines.push(if checked.code() == 0 { paint.good(&summary) } else { paint.strong(&summary) });
    lines.join("\n")
}

fn of_model(inspected: &InspectedModel, model: &Model, paint: Paint, lines: &mut Vec<String>) {
    lines.push(format!("model {}", printable(&model.name, LINE_MAX_COLUMNS)));
    for worker in &inspected.facts.workers {
        let WorkerFacts { config, .. } = worker;
        let head = format!("{}  {}  {}", config.id, config.role.name(), config.url);
        lines.push(format!("  {}", printable(&head, LINE_MAX_COLUMNS)));
        for confirmation in confirmations(model, worker) {
            lines.push(line("ok", Paint::good, paint, &confirmation));
        }
        let is_own = |finding: &&Finding| finding.worker.as_deref() == Some(&config.id);
        inspected
            .findings
            .iter()
            .filter(is_own)
            .for_each(|finding| of_finding(finding, paint, lines));
    }
    let mut common =
        inspected.findings.iter().filter(|finding| finding.worker.is_none()).peekable();
    if common.peek().is_some() {
        lines.push("  all workers".to_owned());
    }
    common.for_each(|finding| of_finding(finding, paint, lines));
}

fn of_finding(finding: &Finding, paint: Paint, lines: &mut Vec<String>) {
    let what = format!("{}: {}", finding.kind.name(), finding.what);
    let colour = match finding.severity {
        Severity::Note => Paint::faint,
        Severity::Warning => Paint::warning,
        Severity::Fault => Paint::strong,
    };
    lines.push(line(finding.severity.name(), colour, paint, &what));
    lines.push(line("", Paint::hint, paint, &format!("remedy: {}", finding.remedy)));
}

/// A line with a first word that has a colour.
fn line(word: &str, colour: fn(Paint, &str) -> String, paint: Paint, text: &str) -> String {
    let word = colour(paint, &format!("{word:WORD_COLUMNS$}"));
    format!("    {word} {}", printable(text, LINE_MAX_COLUMNS))
}

fn summary(checked: &CheckedConfig) -> String {
    let file = &checked.file;
    if checked.unusable.is_some() {
        return format!("{file}: not usable");
    }
    let state = if checked.code() == 0 { "ok" } else { "not ok" };
    let warnings = count(checked.all_warnings(), "warning");
    match &checked.models {
        None if checked.code() == 0 => format!("{file}: ok"),
        None => format!("{file}: {state}: {warnings}, which --strict refuses"),
        Some(models) => {
            let workers = models.iter().map(|model| model.facts.workers.len()).sum();
            let faults = count(checked.faults(), "fault");
            format!("{file}: {state}: {}, {faults}, {warnings}", count(workers, "worker"))
        }
    }
}

fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}
