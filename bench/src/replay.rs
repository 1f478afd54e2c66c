//! Compares our policies with published ones on a cluster in virtual time, and measures how long a
//! replay takes. All figures except times are exact: two runs give the same figures.

mod decision;
mod options;
mod placement;
mod reference;
mod report;
mod speed;
mod trace;

use std::error::Error;
use std::fs;

use serde_json::Value;
use splitrail_sim::cluster::Workload;

use self::options::Options;
use self::report::Report;

/// The reason why a run failed, as a message for people.
pub type Failure = Box<dyn Error + Send + Sync>;

/// The options of a run, and the rows of its workloads.
struct Run {
    /// The requests that are replayed.
    workload: Workload,
    /// Whether the trace is the one with reference figures.
    is_reference: bool,
    quick: bool,
    report: Report,
}

/// Runs one workload and adds its rows to the report.
type RunWorkload = fn(&mut Run) -> Result<(), Failure>;

/// All workloads with their names, in the order in which they run.
const WORKLOADS: [(&str, RunWorkload); 4] = [
    ("speed", speed::run),
    ("reference", reference::run),
    ("placement", placement::run),
    ("decision", decision::run),
];

/// Runs the workloads that the command line selects.
///
/// # Errors
/// The command line is wrong, the trace cannot be read, or the output cannot be written.
pub fn main() -> Result<(), Failure> {
    let options = Options::parse(std::env::args().skip(1))?;
    let (workload, is_reference) = trace::load(options.trace.as_deref())?;
    let report = Report::default();
    let mut run = Run { workload, is_reference, quick: options.quick, report };
    report::print_head()?;
    for (name, run_workload) in WORKLOADS {
        if options.only.as_ref().is_none_or(|only| only == name) {
            run_workload(&mut run)?;
        }
    }
    if let Some(path) = &options.json {
        let rows: Vec<Value> = run.report.rows.iter().map(report::Row::json).collect();
        fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}
