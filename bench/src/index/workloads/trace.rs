//! Measures the conversation trace: each request stores on its worker the blocks that the worker
//! does not hold; then every request is looked up.

use std::io;

use super::super::check::check;
use super::super::goals::measure;
use super::super::measure::Percentiles;
use super::super::plan::{chains_of, without_eviction};
use super::super::report::Better;
use super::super::run::{Run, alternate, subjects};
use super::super::subject::{Deliver, Subject};

/// Maximum number of blocks of a worker, which no worker reaches.
pub(super) const MAX_BLOCKS: usize = 1 << 24;

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    let sizes: &[(u32, u32)] =
        run.pick(&[(32, 8), (32, 512)], &[(1, 8), (1, 512), (32, 8), (32, 64), (32, 512)]);
    for &(expand, workers) in sizes {
        run_case(run, expand, workers)?;
    }
    Ok(())
}

fn run_case(run: &mut Run, expand: u32, workers: u32) -> io::Result<()> {
    let workload = format!("trace E={expand} W={workers}");
    let chains = chains_of(&run.requests, expand, 0);
    let (ops, model) = without_eviction(&chains, workers);
    let mut subjects = subjects();
    let million_blocks = model.entries() as f64 / 1e6;
    let load_rounds = if expand == 1 { run.pick(3, 7) } else { run.pick(2, 5) };
    let [cpu, wall] = alternate(&mut subjects, load_rounds, |subject, _| {
        subject.reset(workers, MAX_BLOCKS);
        subject.prepare_events(&chains, &ops);
        let span = subject.apply_prepared();
        [million_blocks / span.cpu.as_secs_f64(), million_blocks / span.wall.as_secs_f64()]
    });
    run.row(&workload, (measure::APPLY_CPU, "M blocks/s", Better::More), cpu, None)?;
    run.row(&workload, (measure::APPLY_WALL, "M blocks/s", Better::More), wall, None)?;

    subjects.iter_mut().for_each(|subject| subject.prepare_queries(&chains));
    check(run, &workload, &subjects, &chains, |chain| model.scores(chain))?;
    let overhead_ns = run.overhead_ns;
    let pass = |subject: &mut dyn Subject, deliver| {
        let mut samples = Vec::with_capacity(chains.len());
        subject.time_each(overhead_ns, deliver, &mut samples);
        Percentiles::of(&mut samples)
    };
    let [p50, p99, read] = alternate(&mut subjects, run.pick(5, 9), |subject, _| {
        let found = pass(subject, Deliver::Result);
        [found.p50, found.p99, pass(subject, Deliver::AllScores).p50]
    });
    run.row(&workload, (measure::MATCH_P50, "ns", Better::Less), p50, None)?;
    run.row(&workload, (measure::MATCH_P99, "ns", Better::Less), p99, None)?;
    run.row(&workload, (measure::MATCH_READ_P50, "ns", Better::Less), read, None)
}
