//! Measures the lookup, the stores and the evictions of each request on one thread, with caches of
//! 16,384 blocks, until all events are visible.

use std::io;

use super::super::check::check;
use super::super::goals::measure;
use super::super::plan::{Caches, Evict, Op, Step, chains_of, worker_of};
use super::super::report::Better;
use super::super::run::{Run, alternate, subjects};

const EXPAND: u32 = 4;
/// Capacity of a worker's cache in blocks.
pub(super) const CACHE_BLOCKS: usize = 16_384;

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    for &workers in run.pick(&[8, 512][..], &[8, 64, 512]) {
        run_case(run, workers)?;
    }
    Ok(())
}

fn run_case(run: &mut Run, workers: u32) -> io::Result<()> {
    let workload = format!("mixed E={EXPAND} W={workers}");
    let chains = chains_of(&run.requests, EXPAND, 0);
    let mut caches = Caches::new(workers, CACHE_BLOCKS, Evict::TailFirst);
    let (mut ops, mut steps) = (Vec::new(), Vec::new());
    for request in 0..chains.len() {
        let before = ops.len();
        caches.serve(worker_of(request, workers), &chains, request, &mut ops);
        steps.push(Step { query: request as u32, events: (ops.len() - before) as u32 });
    }
    let looked_up: usize = chains.iter().map(Vec::len).sum();
    let written: usize = ops.iter().map(Op::blocks).sum();
    let millions = (looked_up + written) as f64 / 1e6;
    let mut subjects = subjects();
    subjects.iter_mut().for_each(|subject| subject.prepare_queries(&chains));
    let [wall, cpu] = alternate(&mut subjects, run.pick(3, 7), |subject, _| {
        subject.reset(workers, CACHE_BLOCKS * 2);
        subject.prepare_events(&chains, &ops);
        let span = subject.run_steps(&steps);
        [millions / span.wall.as_secs_f64(), millions / span.cpu.as_secs_f64()]
    });
    check(run, &workload, &subjects, &chains, |chain| caches.scores(chain))?;
    let note = format!("{} evicted", caches.evicted);
    run.row(&workload, (measure::MIXED, "M blocks/s", Better::More), wall, Some(note))?;
    run.row(&workload, ("block operations per CPU second", "M blocks/s", Better::More), cpu, None)
}
