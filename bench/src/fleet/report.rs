//! The rows of results, as a table for people and as JSON for tools. Only few rows have a peer.

use std::io::{self, Write};

use serde_json::{Value, json};

/// One measure of one workload.
#[derive(Clone, Debug)]
pub(super) struct Row {
    workload: String,
    measure: &'static str,
    unit: &'static str,
    figure: f64,
    /// The maximum that the figure should have, in its unit.
    goal: Option<f64>,
    /// The name and the figure of a peer that was measured in the same run.
    peer: Option<(&'static str, f64)>,
}

/// All results so far.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// The rows, in the order of the measurements.
    pub(super) rows: Vec<Row>,
}

impl Report {
    /// Adds a row, and prints it.
    ///
    /// # Errors
    /// Standard output is closed.
    pub(super) fn add(
        &mut self,
        workload: &str,
        measure: &'static str,
        unit: &'static str,
        figure: f64,
    ) -> io::Result<()> {
        self.push(Row {
            workload: workload.to_owned(),
            measure,
            unit,
            figure,
            goal: None,
            peer: None,
        })
    }

    /// Adds and prints a row whose figure should be at most `goal`.
    ///
    /// # Errors
    /// Standard output is closed.
    pub(super) fn add_bounded(
        &mut self,
        workload: &str,
        measure: &'static str,
        unit: &'static str,
        (figure, goal): (f64, f64),
    ) -> io::Result<()> {
        let (workload, goal) = (workload.to_owned(), Some(goal));
        self.push(Row { workload, measure, unit, figure, goal, peer: None })
    }

    /// Adds and prints a row that is compared with a peer.
    ///
    /// # Errors
    /// Standard output is closed.
    pub(super) fn add_beside(
        &mut self,
        workload: &str,
        measure: &'static str,
        unit: &'static str,
        figure: f64,
        peer: (&'static str, f64),
    ) -> io::Result<()> {
        let (workload, peer) = (workload.to_owned(), Some(peer));
        self.push(Row { workload, measure, unit, figure, goal: None, peer })
    }

    fn push(&mut self, row: Row) -> io::Result<()> {
        print_line(&row.line())?;
        self.rows.push(row);
        Ok(())
    }
}

impl Row {
    fn ratio(&self) -> Option<f64> {
        self.peer.map(|(_, theirs)| self.figure / theirs)
    }

    fn met(&self) -> Option<bool> {
        self.goal.map(|goal| self.figure <= goal)
    }

    /// The row as JSON. Other tools depend on the members.
    pub(super) fn json(&self) -> Value {
        json!({
            "workload": self.workload,
            "measure": self.measure,
            "unit": self.unit,
            "ours": self.figure,
            "peer": self.peer.map(|(peer, _)| peer),
            "theirs": self.peer.map(|(_, theirs)| theirs),
            "ratio": self.ratio(),
            "goal": self.goal.map(|goal| format!("<= {goal}")),
            "met": self.met(),
        })
    }

    fn line(&self) -> String {
        let goal = self.goal.map(|goal| format!("<= {goal}")).unwrap_or_default();
        let met = match self.met() {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "",
        };
        let beside = match self.peer {
            Some((peer, theirs)) => {
                let decimals = decimals(theirs);
                let ratio = self.figure / theirs;
                format!("{peer} {theirs:.decimals$}, ratio {ratio:.2}")
            }
            None => String::new(),
        };
        let figure = format!("{:.*}", decimals(self.figure), self.figure);
        format!(
            "{:<32} {:<44} {figure:>10} {:<14} {goal:<9} {met}{beside}",
            self.workload, self.measure, self.unit
        )
    }
}

/// Number of decimals that gives about three significant digits.
fn decimals(figure: f64) -> usize {
    match figure.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 || size == 0.0 => 2,
        _ => 3,
    }
}

/// Prints the head of the table.
///
/// # Errors
/// Standard output is closed.
pub(super) fn print_head() -> io::Result<()> {
    print_line(&format!(
        "{:<32} {:<44} {:>10} {:<14} {:<9} met",
        "workload", "measure", "figure", "unit", "goal"
    ))
}

/// Prints a line and flushes it, because a run takes minutes.
///
/// # Errors
/// Standard output is closed.
pub(crate) fn print_line(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_row_says_whether_its_goal_is_met_and_names_a_peer_if_there_is_one() {
        let mut report = Report::default();
        report.add_bounded("w", "m", "s", (9.0, 10.0)).unwrap();
        report.add_bounded("w", "m", "s", (10.1, 10.0)).unwrap();
        report.add("w", "m", "s", 1.0).unwrap();
        let met: Vec<_> = report.rows.iter().map(|row| row.json()["met"].clone()).collect();
        assert_eq!(met, [json!(true), json!(false), Value::Null]);
        assert_eq!(report.rows[0].json()["peer"], Value::Null);
        report.add_beside("w", "m", "us", 30.0, ("p", 20.0)).unwrap();
        let beside = report.rows[3].json();
        assert_eq!((&beside["peer"], &beside["theirs"]), (&json!("p"), &json!(20.0)));
        assert_eq!(beside["ratio"], json!(1.5));
    }
}
