//! One run: its options, the three subjects, the rows so far.

use std::io;

use super::adapters::chain::Chain;
use super::adapters::dynamo::Dynamo;
use super::adapters::none::Nothing;
use super::adapters::ours::Ours;
use super::measure::median;
use super::report::{Better, NAMES, Row, print_line, print_row};
use super::subject::{Bench, Subject};

/// What workloads need and where they report.
pub struct Run {
    /// Fewer sizes and rounds.
    pub quick: bool,
    /// The trace: block ids per request.
    pub requests: Vec<Vec<u32>>,
    /// What timing one call costs.
    pub overhead_ns: u64,
    /// Arguments by which a child process finds the same trace.
    pub trace_args: Vec<String>,
    /// Whose answers were wrong in the workload at hand.
    pub wrong: [bool; 3],
    /// What was measured.
    pub rows: Vec<Row>,
}

/// Figures of the three indexes, by [`NAMES`].
pub type Figures = [Option<f64>; 3];

impl Run {
    /// One of two, by `--quick`.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Says what is being done.
    ///
    /// # Errors
    /// Where standard output is closed.
    pub fn say(&self, line: &str) -> io::Result<()> {
        print_line(&format!("# {line}"))
    }

    /// Prints and keeps a row.
    ///
    /// # Errors
    /// Where standard output is closed.
    pub fn row(
        &mut self,
        workload: &str,
        (measure, unit, better): (&'static str, &'static str, Better),
        figures: Figures,
        note: Option<String>,
    ) -> io::Result<()> {
        let workload = workload.to_owned();
        let wrong = self.wrong;
        let row = Row { workload, measure, unit, better, figures, wrong, note };
        print_row(&row)?;
        self.rows.push(row);
        Ok(())
    }
}

/// The three, in the order of [`NAMES`].
pub fn subjects() -> [Box<dyn Subject>; 3] {
    [
        Box::new(Bench::<Ours>::new()),
        Box::new(Bench::<Dynamo>::new()),
        Box::new(Bench::<Chain>::new()),
    ]
}

/// One by its name, `none` included.
pub fn subject(name: &str) -> Option<Box<dyn Subject>> {
    if name == "none" {
        return Some(Box::new(Bench::<Nothing>::new()));
    }
    let at = NAMES.iter().position(|known| *known == name)?;
    subjects().into_iter().nth(at)
}

/// Runs a measurement on all subjects in turn, `rounds` times, each round
/// starting with another; returns the median over the rounds of each of its
/// figures, as `[figure][subject]`.
pub fn alternate<const FIGURES: usize>(
    subjects: &mut [Box<dyn Subject>; 3],
    rounds: usize,
    mut measure: impl FnMut(&mut dyn Subject, usize) -> [f64; FIGURES],
) -> [Figures; FIGURES] {
    let mut seen: Vec<Vec<[f64; FIGURES]>> = vec![Vec::new(); NAMES.len()];
    for round in 0..rounds {
        for turn in 0..NAMES.len() {
            let at = (round + turn) % NAMES.len();
            seen[at].push(measure(subjects[at].as_mut(), round));
        }
    }
    std::array::from_fn(|figure| {
        std::array::from_fn(|at| {
            let figures: Vec<f64> = seen[at].iter().map(|figures| figures[figure]).collect();
            Some(median(&figures)).filter(|middle| middle.is_finite())
        })
    })
}
