//! The rows of results, as a table for people and as JSON for tools.

use std::io::{self, Write};

use serde_json::{Map, Value, json};

use super::goals::goal_of;

/// The indexes, in the order of their figures in a row.
pub const NAMES: [&str; 3] = ["ours", "dynamo", "chain"];

/// Which of two figures is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// The smaller one, as for times, bytes and failures.
    Less,
    /// The larger one, as for rates.
    More,
}

/// One measure of one workload.
#[derive(Clone, Debug)]
pub struct Row {
    /// The workload with its parameters.
    pub workload: String,
    /// The name of the measure.
    pub measure: &'static str,
    /// The unit of the figures.
    pub unit: &'static str,
    /// Which figures are better.
    pub better: Better,
    /// The figures in the order of [`NAMES`]; `None` if an index has none.
    pub figures: [Option<f64>; 3],
    /// Indexes with wrong results in this workload. Their figures are shown, but they do not count
    /// as the better peer.
    pub wrong: [bool; 3],
    /// A remark that a reader needs to understand the row.
    pub note: Option<String>,
}

impl Row {
    /// The better peer and its figure.
    pub fn theirs(&self) -> Option<(&'static str, f64)> {
        let right = |(at, figure): (usize, &Option<f64>)| {
            figure.filter(|_| !self.wrong[at]).map(|figure| (NAMES[at], figure))
        };
        let peers = self.figures.iter().enumerate().skip(1).filter_map(right);
        let order = |a: &f64, b: &f64| match self.better {
            Better::Less => a.total_cmp(b),
            Better::More => b.total_cmp(a),
        };
        peers.min_by(|(_, a), (_, b)| order(a, b))
    }

    /// Our figure divided by the better peer's.
    pub fn ratio(&self) -> Option<f64> {
        let (_, theirs) = self.theirs()?;
        (theirs != 0.0).then_some(self.figures[0]? / theirs)
    }

    fn met(&self) -> Option<bool> {
        goal_of(&self.workload, self.measure)?.met(self.figures[0], self.ratio())
    }

    /// The row as JSON. Other tools depend on the members.
    pub fn json(&self) -> Value {
        let theirs = self.theirs();
        let goal = goal_of(&self.workload, self.measure);
        let mut row = Map::new();
        let mut put = |key: &str, value: Value| row.insert(key.to_owned(), value);
        put("workload", json!(self.workload));
        put("measure", json!(self.measure));
        put("unit", json!(self.unit));
        put("ours", json!(self.figures[0]));
        put("peer", json!(theirs.map(|(name, _)| name)));
        put("theirs", json!(theirs.map(|(_, figure)| figure)));
        put("ratio", json!(self.ratio()));
        put("goal", json!(goal.map(|goal| goal.text())));
        put("met", json!(self.met()));
        put("peers", json!({ "dynamo": self.figures[1], "chain": self.figures[2] }));
        let wrong = NAMES.iter().zip(self.wrong).filter(|(_, wrong)| *wrong);
        put("wrong_answers", json!(wrong.map(|(name, _)| name).collect::<Vec<_>>()));
        if let Some(note) = &self.note {
            put("note", json!(note));
        }
        Value::Object(row)
    }

    fn line(&self) -> String {
        let [ours, dynamo, chain]: [String; 3] = std::array::from_fn(|at| {
            let mark = if self.wrong[at] { "!" } else { "" };
            self.figures[at].map_or("-".into(), |figure| short(figure) + mark)
        });
        let ratio = self.ratio().map_or("-".into(), |ratio| format!("{ratio:.2}"));
        let goal = goal_of(&self.workload, self.measure).map(|goal| goal.text());
        let met = match (goal.is_some(), self.met()) {
            (false, _) => "",
            (true, Some(true)) => "met",
            (true, Some(false)) => "MISSED",
            (true, None) => "?",
        };
        format!(
            "{:<30} {:<36} {:>10} {:>10} {:>10} {:<12} {ratio:>6}  {:<9} {met}{}",
            self.workload,
            self.measure,
            ours,
            dynamo,
            chain,
            self.unit,
            goal.unwrap_or_default(),
            self.note.as_ref().map(|note| format!("  ({note})")).unwrap_or_default(),
        )
    }
}

/// A figure with about four significant digits and without an exponent.
fn short(figure: f64) -> String {
    match figure.abs() {
        size if size >= 1000.0 => format!("{figure:.0}"),
        size if size >= 100.0 => format!("{figure:.1}"),
        size if size >= 1.0 || size == 0.0 => format!("{figure:.2}"),
        _ => format!("{figure:.4}"),
    }
}

/// Prints the head of the table.
///
/// # Errors
/// Standard output is closed.
pub fn print_head() -> io::Result<()> {
    print_line(&format!(
        "{:<30} {:<36} {:>10} {:>10} {:>10} {:<12} {:>6}  {:<9} met",
        "workload", "measure", "ours", "dynamo", "chain", "unit", "ratio", "goal"
    ))
}

/// Prints one row.
///
/// # Errors
/// Standard output is closed.
pub fn print_row(row: &Row) -> io::Result<()> {
    print_line(&row.line())
}

/// Prints a line and flushes it, because a run takes minutes.
///
/// # Errors
/// Standard output is closed.
pub fn print_line(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn row(better: Better, figures: [Option<f64>; 3]) -> Row {
        let workload = "trace E=32 W=8".to_owned();
        Row {
            workload,
            measure: "match p50",
            unit: "ns",
            better,
            figures,
            wrong: [false; 3],
            note: None,
        }
    }

    #[test]
    fn the_ratio_is_to_the_better_peer() {
        let less = row(Better::Less, [Some(50.0), Some(400.0), Some(100.0)]);
        assert_eq!((less.theirs(), less.ratio()), (Some(("chain", 100.0)), Some(0.5)));
        let more = row(Better::More, [Some(50.0), Some(400.0), Some(100.0)]);
        assert_eq!(more.theirs(), Some(("dynamo", 400.0)));
        let alone = row(Better::Less, [Some(50.0), None, Some(100.0)]);
        assert_eq!(alone.json()["met"], json!(true));
        assert_eq!(alone.json()["peer"], json!("chain"));
    }

    #[test]
    fn a_peer_with_wrong_answers_is_not_the_better_one() {
        let mut row = row(Better::Less, [Some(50.0), Some(10.0), Some(100.0)]);
        row.wrong[1] = true;
        assert_eq!(row.theirs(), Some(("chain", 100.0)));
    }

    #[test]
    fn without_peers_there_is_no_verdict() {
        let row = row(Better::Less, [Some(50.0), None, None]);
        assert_eq!(
            (row.json()["ratio"].clone(), row.json()["met"].clone()),
            (Value::Null, Value::Null)
        );
    }
}
