//! Reads the files of `deploy/observability`.

use std::path::PathBuf;

use serde_json::Value;

/// A file of `deploy/observability`.
pub(crate) fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/observability")).join(name)
}

/// The text of a file of `deploy/observability`.
pub(crate) fn text(name: &str) -> String {
    std::fs::read_to_string(path(name)).unwrap()
}

/// Copies of the files of rules in which alerts wait for no time: the lines `for: ...` are left out,
/// and nothing else is changed. Windows are the same; rates over them are computed from what there is.
#[cfg(feature = "prometheus")]
pub(crate) fn rules_at_once(folder: &std::path::Path) -> [PathBuf; 2] {
    ["recording.yaml", "alerts.yaml"].map(|name| {
        let is_kept = |line: &&str| !line.trim_start().starts_with("for: ");
        let lines = text(name).lines().filter(is_kept).map(|line| format!("{line}\n")).collect();
        let (file, rules): (_, String) = (folder.join(name), lines);
        std::fs::write(&file, rules).unwrap();
        file
    })
}

/// One rule: an alert, or a recorded series.
#[derive(Debug, Default)]
pub(crate) struct Rule {
    /// The name of the alert or of the series.
    pub(crate) name: String,
    pub(crate) is_alert: bool,
    pub(crate) expr: String,
    pub(crate) severity: String,
    pub(crate) summary: String,
    pub(crate) description: String,
    pub(crate) runbook_url: String,
}

/// The rules of a file in the form in which ours are written: a key a line, and expressions as
/// blocks. `promtool` checks that they are YAML.
pub(crate) fn rules(name: &str) -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    let mut in_expr = false;
    for line in text(name).lines() {
        let trimmed = line.trim_start();
        if let Some(name) = trimmed.strip_prefix("- alert: ") {
            rules.push(Rule { name: name.to_owned(), is_alert: true, ..Rule::default() });
        } else if let Some(name) = trimmed.strip_prefix("- record: ") {
            rules.push(Rule { name: name.to_owned(), ..Rule::default() });
        }
        let Some(rule) = rules.last_mut() else { continue };
        in_expr &= line.starts_with("          ");
        if in_expr {
            rule.expr.push_str(trimmed);
            rule.expr.push('\n');
        }
        in_expr |= trimmed == "expr: |";
        let value = |key: &str| Some(trimmed.strip_prefix(key)?.trim_matches('"').to_owned());
        for (key, field) in [
            ("severity: ", &mut rule.severity),
            ("summary: ", &mut rule.summary),
            ("description: ", &mut rule.description),
            ("runbook_url: ", &mut rule.runbook_url),
        ] {
            if let Some(value) = value(key) {
                *field = value;
            }
        }
    }
    rules
}

/// A panel of the dashboard with its queries, in which variables have values.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) description: String,
    pub(crate) queries: Vec<String>,
    /// The form of the names of its lines.
    pub(crate) legends: Vec<String>,
}

/// The panels of the dashboard.
pub(crate) fn panels() -> Vec<Panel> {
    let dashboard: Value = serde_json::from_str(&text("dashboards/splitrail.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let panels = panels.filter(|panel| panel["type"] != "row");
    let of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut all: Vec<Panel> = panels
        .map(|panel| Panel {
            title: of(&panel["title"]),
            description: of(&panel["description"]),
            queries: queries(&panel["targets"]),
            legends: legends(&panel["targets"]),
        })
        .collect();
    all.push(Panel {
        title: "annotations".to_owned(),
        description: "When a configuration was loaded.".to_owned(),
        queries: queries(&dashboard["annotations"]["list"]),
        legends: Vec::new(),
    });
    all
}

fn queries(targets: &Value) -> Vec<String> {
    let queries = targets.as_array().unwrap().iter();
    let queries = queries.map(|target| target["expr"].as_str().unwrap().to_owned());
    queries.map(|query| query.replace("$__rate_interval", "30s").replace("$model", ".*")).collect()
}

fn legends(targets: &Value) -> Vec<String> {
    let targets = targets.as_array().unwrap().iter();
    targets.filter_map(|target| target["legendFormat"].as_str().map(str::to_owned)).collect()
}
