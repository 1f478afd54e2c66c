//! The reference of all metrics, as docs/metrics.md has it.

use super::Metrics;

/// A label with its values, and the metrics that have it.
struct Line {
    label: &'static str,
    values: &'static [&'static str],
    metrics: Vec<&'static str>,
}

impl Metrics {
    /// The reference of all metrics, as a table in Markdown.
    pub fn reference_markdown() -> String {
        let mut table = String::from("| name | type | labels | meaning |\n|---|---|---|---|\n");
        for metric in Self::definitions() {
            let labels: Vec<&str> = metric.labels.iter().map(|label| label.name).collect();
            let (name, kind, labels) = (metric.name, metric.kind.name(), labels.join(", "));
            table.push_str(&format!(
                "| `splitrail_{name}` | {kind} | {labels} | {} |\n",
                metric.help
            ));
        }
        table
    }

    /// The known values of labels, as a table in Markdown. Metrics with the same values share a line.
    pub fn values_markdown() -> String {
        let mut lines: Vec<Line> = Vec::new();
        for metric in Self::definitions() {
            for label in metric.labels {
                let Some(values) = label.values else { continue };
                let is_same = |line: &&mut Line| (line.label, line.values) == (label.name, values);
                match lines.iter_mut().find(is_same) {
                    Some(line) => line.metrics.push(metric.name),
                    None => {
                        lines.push(Line { label: label.name, values, metrics: vec![metric.name] });
                    }
                }
            }
        }
        let quoted = |names: &[&str]| {
            names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
        };
        let mut table = String::from("| label | of | values |\n|---|---|---|\n");
        for Line { label, values, metrics } in lines {
            let (metrics, values) = (quoted(&metrics), quoted(values));
            table.push_str(&format!("| `{label}` | {metrics} | {values} |\n"));
        }
        table
    }
}
