//! The rows of results, as a table for people and as JSON for tools.

use std::io::{self, Write};

use serde_json::{Value, json};

/// The goal of a row.
#[derive(Clone, Copy, Debug)]
pub(super) enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

impl Goal {
    fn met(self, figure: f64) -> bool {
        match self {
            Self::AtMost(goal) => figure <= goal,
            Self::AtLeast(goal) => figure >= goal,
        }
    }

    fn text(self) -> String {
        match self {
            Self::AtMost(goal) => format!("<= {goal}"),
            Self::AtLeast(goal) => format!(">= {goal}"),
        }
    }
}

/// One measure of one workload.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) workload: String,
    pub(super) measure: String,
    pub(super) unit: &'static str,
    pub(super) ours: f64,
    /// The best other policy and its figure.
    pub(super) peer: Option<(String, f64)>,
    pub(super) goal: Option<Goal>,
}

/// All results so far.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// The rows, in the order of the measurements.
    pub(super) rows: Vec<Row>,
}

impl Report {
    /// Prints a row and keeps it.
    ///
    /// # Errors
    /// Standard output is closed.
    pub(super) fn add(&mut self, row: Row) -> io::Result<()> {
        print_line(&row.line())?;
        self.rows.push(row);
        Ok(())
    }
}

impl Row {
    fn ratio(&self) -> Option<f64> {
        self.peer.as_ref().map(|(_, theirs)| self.ours / theirs).filter(|ratio| ratio.is_finite())
    }

    fn met(&self) -> Option<bool> {
        self.goal.map(|goal| goal.met(self.ours))
    }

    /// The row as JSON. Other tools depend on the members.
    pub(super) fn json(&self) -> Value {
        json!({
            "workload": self.workload,
            "measure": self.measure,
            "unit": self.unit,
            "ours": self.ours,
            "peer": self.peer.as_ref().map(|(name, _)| name),
            "theirs": self.peer.as_ref().map(|(_, figure)| figure),
            "ratio": self.ratio(),
            "goal": self.goal.map(Goal::text),
            "met": self.met(),
        })
    }

    fn line(&self) -> String {
        let Self { workload, measure, unit, ours, peer, .. } = self;
        let (peer, theirs) =
            peer.as_ref().map_or((String::new(), String::new()), |(name, figure)| {
                (name.clone(), format!("{figure:.2}"))
            });
        let ratio = self.ratio().map(|ratio| format!("{ratio:.2}")).unwrap_or_default();
        let goal = self.goal.map(Goal::text).unwrap_or_default();
        let met = match self.met() {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "",
        };
        format!(
            "{workload:<26} {measure:<32} {unit:<6} {ours:>10.2} {peer:<16} {theirs:>8} {ratio:>6} \
             {goal:<9} {met}"
        )
    }
}

/// Prints the head of the table.
///
/// # Errors
/// Standard output is closed.
pub(super) fn print_head() -> io::Result<()> {
    print_line(&format!(
        "{:<26} {:<32} {:<6} {:>10} {:<16} {:>8} {:>6} {:<9} met",
        "workload", "measure", "unit", "ours", "peer", "theirs", "ratio", "goal"
    ))
}

/// Prints a line and flushes it, because a run takes minutes.
///
/// # Errors
/// Standard output is closed.
pub(super) fn print_line(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}
