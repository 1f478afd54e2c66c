//! Measures lookups while another thread applies events as fast as it can. One half of the trace is
//! loaded before; the other half is stored and removed again and again.

use std::io;

use super::super::goals::measure;
use super::super::measure::Percentiles;
use super::super::plan::{Chain, Op, chains_of, without_eviction};
use super::super::report::Better;
use super::super::run::{Run, alternate, subjects};
use super::trace::MAX_BLOCKS;

const WORKERS: u32 = 64;
/// Minimum number of blocks that the writer stores per round, which takes some tenths of a second.
const STORED_BLOCKS: usize = 4_000_000;

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    for expand in [4, 32] {
        run_case(run, expand)?;
    }
    Ok(())
}

fn run_case(run: &mut Run, expand: u32) -> io::Result<()> {
    let workload = format!("contended E={expand} W={WORKERS}");
    let chains = chains_of(&run.requests, expand, 0);
    let (ops, _) = without_eviction(&chains, WORKERS);
    let (loaded, stored) = ops.split_at(ops.len() / 2);
    let removed: Vec<Op> = stored.iter().rev().map(|op| evict(op, &chains)).collect();
    let blocks: usize = stored.iter().map(Op::blocks).sum();
    let mut writes = Vec::new();
    for _ in 0..STORED_BLOCKS.div_ceil(blocks.max(1)) {
        writes.extend_from_slice(stored);
        writes.extend_from_slice(&removed);
    }
    let written: usize = writes.iter().map(Op::blocks).sum();

    let mut subjects = subjects();
    for subject in &mut subjects {
        subject.reset(WORKERS, MAX_BLOCKS);
        subject.prepare_queries(&chains[..chains.len() / 2]);
        subject.prepare_events(&chains, loaded);
        subject.apply_prepared();
    }
    let overhead_ns = run.overhead_ns;
    let rounds = run.pick(3, 7);
    let [p50, p99, rate] = alternate(&mut subjects, rounds, |subject, _| {
        subject.prepare_events(&chains, &writes);
        let (mut samples, span) = subject.time_contended(overhead_ns);
        let found = Percentiles::of(&mut samples);
        [found.p50, found.p99, written as f64 / 1e6 / span.wall.as_secs_f64()]
    });
    run.row(&workload, (measure::MATCH_P50, "ns", Better::Less), p50, None)?;
    run.row(&workload, (measure::MATCH_P99, "ns", Better::Less), p99, None)?;
    run.row(&workload, ("apply beside a reader", "M blocks/s", Better::More), rate, None)
}

/// The operation that evicts the blocks of a store, the last one first.
fn evict(op: &Op, chains: &[Chain]) -> Op {
    match op {
        Op::Store { worker, chain, from, to, .. } => {
            let blocks = &chains[*chain as usize][*from as usize..*to as usize];
            let engines = blocks.iter().rev().map(|block| block.engine).collect();
            Op::Remove { worker: *worker, engines }
        }
        Op::Remove { .. } => op.clone(),
    }
}
