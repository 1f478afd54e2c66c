//! Compares the prefix index with two public indexes, in one process and in turns.

pub mod adapters;
pub mod alloc;
mod check;
mod child;
mod goals;
pub(crate) mod measure;
mod options;
mod plan;
mod report;
mod run;
mod stall;
mod subject;
mod trace;
mod workloads;

pub(crate) use trace::generate;

use std::error::Error;
use std::fs;
use std::path::Path;

use serde_json::Value;

use self::measure::timer_overhead_ns;
use self::options::Options;
use self::report::print_head;
use self::run::Run;
use self::workloads::WORKLOADS;

/// Runs the workloads that the command line selects.
///
/// # Errors
/// The command line is wrong, the trace cannot be read, or the output cannot be written.
pub fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    if options.child.is_some() {
        alloc::start_counting();
    }
    let requests = match &options.trace {
        Some(path) => trace::load(Path::new(path))?,
        None => generate(),
    };
    if let Some((index, case)) = &options.child {
        return Ok(workloads::child(index, case, &requests)?);
    }
    let trace_args = options.trace.iter().flat_map(|path| ["--trace".into(), path.clone()]);
    let mut run = Run {
        quick: options.quick,
        requests,
        overhead_ns: timer_overhead_ns(),
        trace_args: trace_args.collect(),
        wrong: [false; 3],
        rows: Vec::new(),
    };
    let trace = options.trace.as_deref().unwrap_or("generated");
    run.print_comment(&format!(
        "trace: {trace}, {} requests; timer overhead of {} ns subtracted{}",
        run.requests.len(),
        run.overhead_ns,
        if run.quick { "; --quick: fewer sizes, fewer rounds" } else { "" },
    ))?;
    print_head()?;
    for (name, workload) in WORKLOADS {
        if options.only.as_ref().is_none_or(|only| only == name) {
            run.wrong = [false; 3];
            workload(&mut run)?;
        }
    }
    if let Some(path) = &options.json {
        let rows: Vec<Value> = run.rows.iter().map(report::Row::json).collect();
        fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}
