//! The rows of results, as tables for people and as JSON for tools.

use std::io;

use serde_json::{Map, Value, json};

use super::measure::Figures;
use crate::fleet::report::print_line;

/// The figures of all targets under one load.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    /// The size of the prompts, such as `1 KB`; of streams, `64 chunks`; of some workloads, their
    /// name.
    pub(super) size: &'static str,
    /// Number of concurrent clients.
    pub(super) clients: usize,
    /// Whether replies were streams.
    pub(super) streams: bool,
    /// The figures with the names of the targets.
    pub(super) figures: Vec<(&'static str, Figures)>,
}

/// The name of a figure, its unit, and the function that reads it.
pub(super) type Measure<'a> = (&'a str, &'static str, fn(&Figures) -> f64);

/// The measures of a cell.
const MEASURES: [Measure<'static>; 5] = [
    ("requests", "1/s", |f| f.per_s),
    ("p50", "ms", |f| f.p50_ms),
    ("p99", "ms", |f| f.p99_ms),
    ("CPU per request", "us", |f| f.cpu_us),
    ("of it the system's", "us", |f| f.system_us),
];

/// The targets that are this router, with the workloads of their rows.
const OURS: [(&str, &str); 4] =
    [("round_robin", "aggregated"), ("pd", "pd"), ("kv_aware", "kv_aware"), ("tls", "tls")];
/// The targets to which ratios are formed. A cell has at most one of them.
const PEERS: [&str; 2] = ["nginx", "nginx tls"];

/// The goal of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Goal {
    /// The ratio is to be at most this.
    RatioAtMost(f64),
    /// The ratio is to be at least this.
    RatioAtLeast(f64),
    /// The figure is to be at most this.
    AtMost(f64),
}

/// One figure, and the figure with which it is compared.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) workload: String,
    pub(super) measure: String,
    pub(super) unit: &'static str,
    pub(super) ours: f64,
    /// The name and the figure of the target with which it is compared.
    pub(super) theirs: Option<(&'static str, f64)>,
    pub(super) goal: Option<Goal>,
    /// The figures of all targets.
    pub(super) targets: Vec<(&'static str, f64)>,
}

impl Goal {
    fn text(self) -> String {
        match self {
            Self::RatioAtMost(goal) => format!("<= {goal} x"),
            Self::RatioAtLeast(goal) => format!(">= {goal} x"),
            Self::AtMost(goal) => format!("<= {goal}"),
        }
    }
}

impl Row {
    /// A row that is not compared with another target.
    pub(super) fn alone(
        workload: &str,
        measure: &str,
        (ours, unit): (f64, &'static str),
        goal: Option<Goal>,
    ) -> Self {
        let (workload, measure) = (workload.to_owned(), measure.to_owned());
        Self { workload, measure, unit, ours, theirs: None, goal, targets: Vec::new() }
    }

    fn ratio(&self) -> Option<f64> {
        self.theirs.filter(|(_, figure)| *figure > 0.0).map(|(_, figure)| self.ours / figure)
    }

    fn met(&self) -> Option<bool> {
        match self.goal? {
            Goal::RatioAtMost(goal) => Some(self.ratio()? <= goal),
            Goal::RatioAtLeast(goal) => Some(self.ratio()? >= goal),
            Goal::AtMost(goal) => Some(self.ours <= goal),
        }
    }

    /// The row as JSON. Other tools depend on the members.
    pub(super) fn json(&self) -> Value {
        let targets: Map<String, Value> =
            self.targets.iter().map(|(name, figure)| ((*name).to_owned(), json!(figure))).collect();
        json!({
            "workload": self.workload,
            "measure": self.measure,
            "unit": self.unit,
            "ours": self.ours,
            "peer": self.theirs.map(|(peer, _)| peer),
            "theirs": self.theirs.map(|(_, figure)| figure),
            "ratio": self.ratio(),
            "goal": self.goal.map(Goal::text),
            "met": self.met(),
            "targets": targets,
        })
    }

    /// The row as a line of the table of goals.
    pub(super) fn line(&self) -> String {
        let met = match self.met() {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "",
        };
        let text = |figure: Option<f64>| figure.map_or("-".to_owned(), |f| format!("{f:.2}"));
        format!(
            "{:<26} {:<22} {:>10} {:>10} {:<5} {:>6}  {:<10} {met}",
            self.workload,
            self.measure,
            text(Some(self.ours)),
            text(self.theirs.map(|(_, figure)| figure)),
            self.unit,
            text(self.ratio()),
            self.goal.map(Goal::text).unwrap_or_default(),
        )
    }
}

impl Cell {
    /// The rows of this router's targets.
    pub(super) fn rows(&self) -> Vec<Row> {
        let theirs = self.figures.iter().find(|(name, _)| PEERS.contains(name));
        let mut rows = Vec::new();
        for (target, workload) in OURS {
            let Some((_, ours)) = self.figures.iter().find(|(name, _)| *name == target) else {
                continue;
            };
            let workload = if self.streams { "stream" } else { workload };
            for (measure, unit, figure) in MEASURES {
                rows.push(Row {
                    workload: format!("{workload} {} c={}", self.size, self.clients),
                    measure: measure.to_owned(),
                    unit,
                    ours: figure(ours),
                    theirs: theirs.map(|(peer, theirs)| (*peer, figure(theirs))),
                    goal: goal(workload, self.size, self.clients, measure),
                    targets: self.figures.iter().map(|(name, f)| (*name, figure(f))).collect(),
                });
            }
            if workload == "kv_aware" {
                rows.push(Row::alone(
                    &format!("{workload} {} c={}", self.size, self.clients),
                    "wrong worker",
                    (ours.misplaced_percent, "%"),
                    Some(Goal::AtMost(0.0)),
                ));
            }
        }
        rows
    }

    /// Prints the figures of all targets.
    ///
    /// # Errors
    /// Standard output is closed.
    pub(super) fn print(&self) -> io::Result<()> {
        print_line(&format!("\n{}, {} at once", self.size, self.clients))?;
        print_line(&format!(
            "  {:<15} {:>10} {:>9} {:>9} {:>10} {:>10} {:>11}",
            "target", "answers/s", "p50 ms", "p99 ms", "CPU us", "system us", "foreign %"
        ))?;
        for (name, figures) in &self.figures {
            let Figures { per_s, p50_ms, p99_ms, foreign_percent, .. } = figures;
            let [cpu, system] = [figures.cpu_us, figures.system_us].map(|us| match us > 0.0 {
                true => format!("{us:.1}"),
                false => "-".to_owned(),
            });
            print_line(&format!(
                "  {name:<15} {per_s:>10.0} {p50_ms:>9.3} {p99_ms:>9.3} {cpu:>10} {system:>10} \
                 {foreign_percent:>11.1}"
            ))?;
        }
        Ok(())
    }
}

/// The goal of a measure, if it has one. Goals are for 16 clients, except for the latency of one
/// client.
fn goal(workload: &str, size: &str, clients: usize, measure: &str) -> Option<Goal> {
    let small = size == "1 KB";
    Some(match (workload, clients, measure) {
        ("aggregated" | "tls", 16, "CPU per request") => {
            Goal::RatioAtMost(if small { 1.5 } else { 1.3 })
        }
        ("pd", 16, "CPU per request") => Goal::RatioAtMost(if small { 3.0 } else { 2.5 }),
        ("kv_aware", 16, "CPU per request") => Goal::RatioAtMost(if small { 4.5 } else { 6.0 }),
        ("stream", 1, "p50") => Goal::RatioAtMost(1.2),
        ("stream", 16, "requests") => Goal::RatioAtLeast(0.85),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_ratios_to_nginx_in_the_same_cell() {
        let figures = |cpu_us| Figures { cpu_us, ..Figures::default() };
        let cell = Cell {
            size: "1 KB",
            clients: 16,
            streams: false,
            figures: vec![("nginx", figures(20.0)), ("round_robin", figures(29.0))],
        };
        let rows = cell.rows();
        let cpu = rows.iter().find(|row| row.measure == "CPU per request").map(Row::json);
        let cpu = cpu.unwrap_or_default();
        assert_eq!(cpu["workload"], "aggregated 1 KB c=16");
        assert_eq!((cpu["ratio"].clone(), cpu["met"].clone()), (json!(1.45), json!(true)));
        assert_eq!(rows[0].json()["goal"], Value::Null);
    }
}
