//! The state of one run: its options, and the rows so far. Also measures the three indexes in
//! turns.

use std::io;

use super::adapters::chain::Chain;
use super::adapters::dynamo::Dynamo;
use super::adapters::none::NoIndex;
use super::adapters::ours::Ours;
use super::measure::median;
use super::report::{Better, NAMES, Row, print_line, print_row};
use super::subject::{Bench, Subject};

/// The options of a run, and the rows of its workloads.
pub struct Run {
    /// Whether to measure fewer sizes and rounds.
    pub quick: bool,
    /// The trace: block ids per request.
    pub requests: Vec<Vec<u32>>,
    /// The time of measuring one call, in nanoseconds.
    pub overhead_ns: u64,
    /// The arguments with which a child process uses the same trace.
    pub trace_args: Vec<String>,
    /// Indexes with wrong results in the current workload, in the order of [`NAMES`].
    pub wrong: [bool; 3],
    /// The rows so far.
    pub rows: Vec<Row>,
}

/// The figures of the three indexes, in the order of [`NAMES`].
pub type Figures = [Option<f64>; 3];

impl Run {
    /// The first value with `--quick`, otherwise the second one.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Prints a remark that is not a row.
    ///
    /// # Errors
    /// Standard output is closed.
    pub fn print_comment(&self, line: &str) -> io::Result<()> {
        print_line(&format!("# {line}"))
    }

    /// Prints a row and keeps it.
    ///
    /// # Errors
    /// Standard output is closed.
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

/// The three indexes, in the order of [`NAMES`].
pub fn subjects() -> [Box<dyn Subject>; 3] {
    [
        Box::new(Bench::<Ours>::new()),
        Box::new(Bench::<Dynamo>::new()),
        Box::new(Bench::<Chain>::new()),
    ]
}

/// The index with a name; with the name `none`, one that stores nothing.
pub fn subject(name: &str) -> Option<Box<dyn Subject>> {
    if name == "none" {
        return Some(Box::new(Bench::<NoIndex>::new()));
    }
    let at = NAMES.iter().position(|known| *known == name)?;
    subjects().into_iter().nth(at)
}

/// Measures all indexes in turns, `rounds` times; each round starts with another index. Returns the
/// median over the rounds of each figure, as `[figure][index]`.
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
