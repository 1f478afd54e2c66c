//! Measures the removal of workers from a loaded index, one after the other, while a reader looks
//! up some of their prompts.

use std::io;

use super::super::goals::measure;
use super::super::plan::{chains_of, without_eviction, worker_of};
use super::super::report::Better;
use super::super::run::{Run, alternate, subjects};
use super::trace::MAX_BLOCKS;

const EXPAND: u32 = 32;
/// Number of workers that are removed.
const REMOVED: usize = 5;
/// Number of prompts of each of them that the reader looks up.
const WATCHED: usize = 4;

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    for &workers in run.pick(&[8, 512][..], &[8, 64, 512]) {
        run_case(run, workers)?;
    }
    Ok(())
}

fn run_case(run: &mut Run, workers: u32) -> io::Result<()> {
    let workload = format!("remove_worker E={EXPAND} W={workers}");
    let chains = chains_of(&run.requests, EXPAND, 0);
    let (ops, model) = without_eviction(&chains, workers);
    let mut subjects = subjects();
    for subject in &mut subjects {
        subject.reset(workers, MAX_BLOCKS);
        subject.prepare_events(&chains, &ops);
        subject.apply_prepared();
        subject.prepare_queries(&chains);
    }
    let [seen, unseen, returned, whole] = alternate(&mut subjects, REMOVED, |subject, round| {
        let worker = round as u32;
        let served: Vec<usize> =
            (0..chains.len()).filter(|&at| worker_of(at, workers) == worker).collect();
        let step = (served.len() / WATCHED).max(1);
        let watched: Vec<usize> = served.into_iter().step_by(step).take(WATCHED).collect();
        let removal = subject.remove_worker(worker, &watched);
        let entries = model.entries_of(worker).max(1) as f64;
        let returned_ns = removal.returned_ns as f64;
        let (seen_ns, unseen_ns) = (removal.last_seen_ns as f64, removal.unseen_ns as f64);
        [seen_ns / 1e3, unseen_ns / 1e3, returned_ns / entries, returned_ns / 1e3]
    });
    run.row(&workload, ("last seen after", "us", Better::Less), seen, None)?;
    run.row(&workload, (measure::UNSEEN, "us", Better::Less), unseen, None)?;
    run.row(&workload, (measure::RETURNED, "ns", Better::Less), returned, None)?;
    let note = format!("{} entries on average", model.entries() / workers as usize);
    run.row(&workload, ("until returned", "us", Better::Less), whole, Some(note))
}
