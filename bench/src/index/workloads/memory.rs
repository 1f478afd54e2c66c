//! Measures all memory of an index per entry, which is a block of a worker. Each index is loaded
//! alone in a child process. The memory of the workload is measured in a child without an index,
//! and subtracted.

use std::io;
use std::time::Duration;

use serde_json::json;

use super::super::alloc::live_bytes;
use super::super::check::compare;
use super::super::child::{Outcome, run_alone};
use super::super::goals::measure;
use super::super::measure::resident_bytes;
use super::super::plan::{chains_of, without_eviction};
use super::super::report::{Better, NAMES, print_line};
use super::super::run::{Figures, Run, subject};
use super::super::subject::Subject;
use super::trace::MAX_BLOCKS;
use super::{churn, fleet, roots};

/// Maximum time for a child process.
const CHILD_TIMEOUT: Duration = Duration::from_secs(600);

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    let cases = [
        ("memory trace E=32 W=8", "trace 32 8 20000"),
        ("memory trace E=32 W=512", "trace 32 512 20000"),
        ("memory small E=1 W=8", "trace 1 8 20000"),
        ("memory small E=1 W=512", "trace 1 512 20000"),
        ("memory small E=1 W=8, 1/10", "trace 1 8 1200"),
    ];
    for (workload, case) in cases {
        let isolated = IsolatedRuns::run(run, case)?;
        isolated.row(run, workload, measure::BYTES, "live", "entries")?;
        isolated.row(run, workload, measure::BYTES_RSS, "rss", "entries")?;
    }
    Ok(())
}

/// The results of one case in child processes.
pub(super) struct IsolatedRuns {
    /// The result without an index.
    none: Outcome,
    /// The results of the indexes, in the order of `NAMES`.
    pub(super) indexes: [Outcome; NAMES.len()],
}

impl IsolatedRuns {
    pub(super) fn run(run: &Run, case: &str) -> io::Result<Self> {
        let none = run_alone(run, "none", case, CHILD_TIMEOUT)?;
        let mut indexes = <[Outcome; NAMES.len()]>::default();
        for (at, name) in NAMES.iter().enumerate() {
            indexes[at] = run_alone(run, name, case, CHILD_TIMEOUT)?;
            if let Some(failure) = &indexes[at].failure {
                run.print_comment(&format!("{case}: {name} FAILED: {failure}"))?;
            }
        }
        Ok(Self { none, indexes })
    }

    /// Bytes per entry, without those of the workload. `bytes` and `entries` are names of figures.
    pub(super) fn per_entry(&self, bytes: &str, entries: &str) -> Figures {
        std::array::from_fn(|at| {
            let index = &self.indexes[at];
            Some((index.get(bytes)? - self.none.get(bytes)?) / index.get(entries)?)
        })
    }

    pub(super) fn row(
        &self,
        run: &mut Run,
        workload: &str,
        measure: &'static str,
        bytes: &str,
        entries: &str,
    ) -> io::Result<()> {
        let note = self.none.get(entries).map(|entries| format!("{entries} entries"));
        let figures = self.per_entry(bytes, entries);
        run.row(workload, (measure, "bytes", Better::Less), figures, note)
    }
}

/// Runs a case in a child process.
///
/// # Errors
/// The index or the case is unknown, or standard output is closed.
pub fn child(index: &str, case: &str, requests: &[Vec<u32>]) -> Result<(), String> {
    let unknown = || format!("there is no case {case} of an index {index}");
    let mut subject = subject(index).ok_or_else(unknown)?;
    let mut words = case.split(' ');
    let name = words.next().unwrap_or_default();
    let numbers: Vec<usize> = words.filter_map(|word| word.parse().ok()).collect();
    let subject = subject.as_mut();
    match (name, numbers.as_slice()) {
        ("trace", &[expand, workers, first]) => {
            let requests = &requests[..requests.len().min(first)];
            trace(subject, requests, expand as u32, workers as u32)
        }
        ("churn", &[holes, removals]) => churn::child(subject, requests, holes == 1, removals),
        ("fleet", &[workers, blocks]) => fleet::child(subject, workers as u32, blocks),
        ("roots", &[roots]) => roots::child(subject, roots),
        _ => return Err(unknown()),
    }
    .map_err(|e| e.to_string())
}

fn trace(
    subject: &mut dyn Subject,
    requests: &[Vec<u32>],
    expand: u32,
    workers: u32,
) -> io::Result<()> {
    let chains = chains_of(requests, expand, 0);
    let (ops, model) = without_eviction(&chains, workers);
    subject.reset(workers, MAX_BLOCKS);
    subject.apply_in_parts(&chains, &ops);
    print_reading("", model.entries())?;
    if subject.name() != "none" {
        subject.prepare_queries(&chains);
        let wrong = compare(subject, &chains, |chain| model.scores(chain));
        print_line(&json!({ "wrong_queries": wrong.wrong_queries }).to_string())?;
    }
    Ok(())
}

/// Prints the allocated bytes `live`, the resident bytes `rss` and the number of `entries`, with a
/// suffix on each name.
pub(super) fn print_reading(suffix: &str, entries: usize) -> io::Result<()> {
    let (live, rss) = (live_bytes(), resident_bytes());
    let reading = json!({
        format!("live{suffix}"): live,
        format!("rss{suffix}"): rss,
        format!("entries{suffix}"): entries,
    });
    print_line(&reading.to_string())
}
