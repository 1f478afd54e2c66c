//! What policies reach on a cluster in virtual time, ours against the published ones, and how
//! long that takes. All figures but times are exact: two runs give the same.

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

/// What goes wrong in a run, as a person reads it.
pub type Failure = Box<dyn Error + Send + Sync>;

/// What a workload is given.
struct Run {
    workload: Workload,
    /// Whether the trace is the one that the reference figures are of.
    is_reference: bool,
    quick: bool,
    report: Report,
}

/// A workload by its name.
type Part = fn(&mut Run) -> Result<(), Failure>;

/// All of them, in the order in which they run.
const PARTS: [(&str, Part); 4] = [
    ("speed", speed::run),
    ("reference", reference::run),
    ("placement", placement::run),
    ("decision", decision::run),
];

/// Runs what the command line asks for.
///
/// # Errors
/// A wrong command line, a trace that cannot be read, an output that cannot be written.
pub fn main() -> Result<(), Failure> {
    let options = Options::parse(std::env::args().skip(1))?;
    let (workload, is_reference) = trace::load(options.trace.as_deref())?;
    let report = Report::default();
    let mut run = Run { workload, is_reference, quick: options.quick, report };
    report::print_head()?;
    for (name, part) in PARTS {
        if options.only.as_ref().is_none_or(|only| only == name) {
            part(&mut run)?;
        }
    }
    if let Some(path) = &options.json {
        let rows: Vec<Value> = run.report.rows.iter().map(report::Row::json).collect();
        fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}
