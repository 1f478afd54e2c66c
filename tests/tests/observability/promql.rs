//! Finds the metrics, labels and label values that a PromQL expression names, and compares them with
//! the table of metrics.

use std::collections::{BTreeMap, BTreeSet};

use splitrail_telemetry::Metrics;
use splitrail_telemetry::metrics::{Definition, MetricKind};

/// Labels that Prometheus adds, or that expressions of ours make.
const ADDED: [&str; 4] = ["instance", "job", "le", "hash"];

/// Series that are not ours: of Prometheus itself, and of the process.
const OTHERS: [&str; 6] = [
    "up",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_open_fds",
    "process_max_fds",
    "ALERTS",
];

/// A part of an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Name(String),
    Text(String),
    Sign(char),
}

fn tokens(expr: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut letters = expr.chars().peekable();
    while let Some(letter) = letters.next() {
        let in_name = |letter: &char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | ':');
        if letter == '#' {
            while letters.next_if(|letter| *letter != '\n').is_some() {}
        } else if letter == '"' {
            let mut text = String::new();
            while let Some(letter) = letters.next_if(|letter| *letter != '"') {
                text.push(letter);
            }
            letters.next();
            tokens.push(Token::Text(text));
        } else if in_name(&letter) {
            let mut name = String::from(letter);
            while let Some(letter) = letters.next_if(in_name) {
                name.push(letter);
            }
            tokens.push(Token::Name(name));
        } else if !letter.is_whitespace() {
            tokens.push(Token::Sign(letter));
        }
    }
    tokens
}

/// The line of the table for the name of a series; `None` if the router serves no such series.
fn definition(series: &str) -> Option<&'static Definition> {
    let name = series.strip_prefix("splitrail_")?;
    Metrics::definitions().iter().find(|metric| match metric.kind {
        MetricKind::Histogram => {
            let rest = name.strip_prefix(metric.name);
            rest.is_some_and(|rest| matches!(rest, "_bucket" | "_count" | "_sum"))
        }
        MetricKind::Counter | MetricKind::Gauge => name == metric.name,
    })
}

/// Checks an expression; `recorded` are the names of recorded series with their labels.
///
/// # Errors
/// What the router does not serve.
pub(crate) fn check(
    expr: &str,
    recorded: &BTreeMap<String, BTreeSet<String>>,
) -> Result<(), String> {
    let tokens = tokens(expr);
    let mut labels: BTreeSet<String> = ADDED.iter().map(|name| (*name).to_owned()).collect();
    let mut is_any = false;
    let mut at = 0;
    let mut grouped = Vec::new();
    while let Some(token) = tokens.get(at) {
        at += 1;
        let Token::Name(name) = token else { continue };
        if matches!(name.as_str(), "by" | "without" | "on" | "ignoring" | "group_left")
            && tokens.get(at) == Some(&Token::Sign('('))
        {
            let names = tokens[at + 1..].iter().take_while(|token| **token != Token::Sign(')'));
            grouped.extend(names.filter_map(|token| match token {
                Token::Name(name) => Some(name.clone()),
                _ => None,
            }));
            continue;
        }
        let known: BTreeSet<String>;
        let mut metric = None;
        if let Some(of_rule) = recorded.get(name) {
            known = of_rule.clone();
        } else if name.starts_with("splitrail") {
            let found = definition(name).ok_or_else(|| format!("no metric {name}: {expr}"))?;
            metric = Some(found);
            known = found.labels.iter().map(|label| label.name.to_owned()).collect();
        } else if OTHERS.contains(&name.as_str()) {
            known = BTreeSet::new();
        } else {
            continue;
        }
        is_any = true;
        if tokens.get(at) == Some(&Token::Sign('{')) {
            let inside = tokens[at + 1..].iter().take_while(|token| **token != Token::Sign('}'));
            let inside: Vec<_> = inside.cloned().collect();
            for matcher in inside.split(|token| *token == Token::Sign(',')) {
                let (Some(Token::Name(label)), Some(Token::Text(values))) =
                    (matcher.first(), matcher.last())
                else {
                    return Err(format!("a matcher that cannot be read: {expr}"));
                };
                if !known.contains(label) && !ADDED.contains(&label.as_str()) {
                    return Err(format!("{name} has no label {label}: {expr}"));
                }
                check_values(metric, label, values).map_err(|why| format!("{why}: {expr}"))?;
            }
        }
        labels.extend(known);
    }
    match grouped.iter().find(|label| !labels.contains(*label)) {
        Some(label) => Err(format!("no metric of it has the label {label}: {expr}")),
        None if !is_any => Err(format!("it names no metric: {expr}")),
        None => Ok(()),
    }
}

/// Whether the values of a matcher are known values of its label.
fn check_values(metric: Option<&Definition>, label: &str, values: &str) -> Result<(), String> {
    let found = metric.and_then(|metric| metric.labels.iter().find(|one| one.name == label));
    let Some(known) = found.and_then(|label| label.values) else { return Ok(()) };
    let unknown = values.split('|').find(|value| !value.contains('*') && !known.contains(value));
    unknown.map_or(Ok(()), |value| Err(format!("{label} is never {value:?}")))
}
