//! Formats reports as tables.

use std::fmt::Write;

use crate::report::PolicyReport;

/// One column of a table.
type Column = (&'static str, fn(&PolicyReport) -> String);

const COLUMNS: [Column; 16] = [
    ("policy", |r| r.policy.clone()),
    ("load", |r| r.load.map_or_else(|| "-".to_owned(), |load| format!("{load:.2}"))),
    ("hit %", |r| format!("{:.1}", r.hit_percent)),
    ("ceil %", |r| format!("{:.1}", r.ceiling_percent)),
    ("TTFT mean", |r| seconds(r.ttft.mean_s)),
    ("p50", |r| seconds(r.ttft.p50_s)),
    ("p90", |r| seconds(r.ttft.p90_s)),
    ("p99", |r| seconds(r.ttft.p99_s)),
    ("TBT p99", |r| seconds(r.tbt.p99_s)),
    ("good30 %", |r| format!("{:.1}", r.good30_percent)),
    ("good5 %", |r| format!("{:.1}", r.good5_percent)),
    ("good5/50ms %", |r| format!("{:.1}", r.good5_50ms_percent)),
    ("imb", |r| format!("{:.2}", r.imbalance)),
    ("util", |r| format!("{:.2}", r.utilisation)),
    ("local", |r| r.local.to_string()),
    ("refused", |r| r.rejected.to_string()),
];

fn seconds(s: f64) -> String {
    match s {
        ..1.0 => format!("{s:.3}"),
        ..100.0 => format!("{s:.2}"),
        _ => format!("{s:.0}"),
    }
}

/// Where hits were lost, in percent of the best possible hits.
const LOSSES: [Column; 9] = [
    ("policy", |r| r.policy.clone()),
    ("load", |r| r.load.map_or_else(|| "-".to_owned(), |load| format!("{load:.2}"))),
    ("hit", |r| of_best(r, r.loss.hit_blocks - r.loss.fetched_blocks)),
    ("fetched", |r| of_best(r, r.loss.fetched_blocks)),
    ("cold", |r| of_best(r, r.loss.cold_blocks)),
    ("evicted", |r| of_best(r, r.loss.evicted_blocks)),
    ("diverted", |r| of_best(r, r.loss.diverted_blocks)),
    ("stale", |r| of_best(r, r.loss.stale_blocks)),
    ("parity", |r| of_best(r, r.loss.parity_blocks)),
];

fn of_best(report: &PolicyReport, blocks: u64) -> String {
    format!("{:.1} %", 100.0 * blocks as f64 / report.loss.best_blocks.max(1) as f64)
}

/// One line per report, under a header; times in seconds.
pub fn table(reports: &[PolicyReport]) -> String {
    lines_of(&COLUMNS, reports)
}

/// The table of lost hits.
pub fn losses(reports: &[PolicyReport]) -> String {
    lines_of(&LOSSES, reports)
}

fn lines_of<const N: usize>(columns: &[Column; N], reports: &[PolicyReport]) -> String {
    let header = columns.map(|(name, _)| name.to_owned());
    let cells = reports.iter().map(|report| columns.map(|(_, cell)| cell(report)));
    let lines: Vec<[String; N]> = std::iter::once(header).chain(cells).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let mut text = String::new();
    for line in &lines {
        for (column, cell) in line.iter().enumerate() {
            let width = width(column).unwrap_or(0);
            let written = match column {
                0 => write!(text, "{cell:width$}"),
                _ => write!(text, "  {cell:>width$}"),
            };
            debug_assert!(written.is_ok(), "a string takes what is written");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let reports = ["a", "a_longer_name"].map(|name| PolicyReport {
            policy: name.to_owned(),
            load: Some(0.9),
            requests: 12_345,
            ..PolicyReport::default()
        });
        for text in [table(&reports), losses(&reports)] {
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!(lines.len(), 3);
            assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        }
    }
}
