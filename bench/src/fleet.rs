//! Measures what many workers cost a router, and what a shim costs its engine: with real processes
//! on loopback, and scripted engines and shims in this process.

mod cold_start;
mod engine;
mod events;
pub(crate) mod http;
mod membership;
mod nginx;
mod options;
pub(crate) mod process;
pub(crate) mod report;
mod router;
mod scripted_shim;
mod shim;
mod shim_process;
mod traffic;
mod two_routers;
mod worker_cache;

use std::error::Error;
use std::fs;

use serde_json::Value;

use self::options::Options;
use self::report::{Report, print_line};

/// The reason why a run failed, as a message for people.
pub type Failure = Box<dyn Error + Send + Sync>;

/// Runs one workload and adds its rows to the report.
type Workload = fn(&Options, &mut Report) -> Result<(), Failure>;

/// All workloads with their names, in the order in which they run.
const WORKLOADS: [(&str, Workload); 4] = [
    ("cold_start", cold_start::run),
    ("membership", membership::run),
    ("shim", shim::run),
    ("two_routers", two_routers::run),
];

/// Runs the workloads that the command line selects.
///
/// # Errors
/// The command line is wrong, a program is missing or ends, or the output cannot be written.
pub fn main() -> Result<(), Failure> {
    let options = Options::parse(std::env::args().skip(1))?;
    process::allow_many_files()?;
    let mut report = Report::default();
    print_line(&format!("load average at the start: {}", process::load_average()))?;
    report::print_head()?;
    for (name, workload) in WORKLOADS {
        if options.only.as_ref().is_none_or(|only| only == name) {
            workload(&options, &mut report)?;
        }
    }
    print_line(&format!("load average at the end: {}", process::load_average()))?;
    if let Some(path) = &options.json {
        let rows: Vec<Value> = report.rows.iter().map(report::Row::json).collect();
        fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}

/// Runs a future to its end, on as many threads as there are processors.
fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}
