//! Measures an index of a thousand workers with 16,384 blocks each. A quarter of the blocks belong
//! to prompts of 1,024 blocks, each of which 125 workers hold. The rest are continuations of these
//! prompts by 96 blocks, each of which one worker holds.

use std::io;

use super::super::check::check;
use super::super::goals::measure;
use super::super::measure::Percentiles;
use super::super::plan::{Chain, Model, Op, chain_of, store};
use super::super::report::Better;
use super::super::run::{Run, alternate, subjects};
use super::super::subject::{Deliver, Subject};
use super::memory::{IsolatedRuns, print_reading};
use crate::splitmix::mix;

const WORKERS: u32 = 1_000;
/// Number of common prompts.
const COMMON_CHAINS: usize = 32;
/// Number of common prompts per worker.
const COMMON_HELD: usize = 4;
/// Number of blocks of a continuation.
const PRIVATE_BLOCKS: usize = 96;
/// Number of queries, each of which is a common prompt with a continuation.
const QUERIES: usize = 4_000;

struct Fleet {
    chains: Vec<Chain>,
    ops: Vec<Op>,
    entries: usize,
    /// For each worker, the place of the chain of its first continuation.
    continuations: Vec<usize>,
}

/// The blocks of all workers, `blocks` per worker. A common prompt has a sixteenth of that number.
fn fleet(workers: u32, blocks: usize) -> Fleet {
    let common_blocks = blocks / 16;
    let common = |at: usize| (0..common_blocks as u64).map(move |b| mix((at as u64) << 32 | b));
    let mut fleet = Fleet {
        chains: (0..COMMON_CHAINS).map(|at| chain_of(common(at))).collect(),
        ops: Vec::new(),
        entries: 0,
        continuations: Vec::new(),
    };
    let private = (blocks - COMMON_HELD * common_blocks) / PRIVATE_BLOCKS;
    for worker in 0..workers {
        let held = |at: usize| (worker as usize * COMMON_HELD + at) % COMMON_CHAINS;
        for at in 0..COMMON_HELD {
            fleet.ops.push(store(worker, &fleet.chains, held(at), 0));
        }
        fleet.continuations.push(fleet.chains.len());
        for continuation in 0..private {
            let salt = 1 << 60 | u64::from(worker) << 40 | (continuation as u64) << 20;
            let tail = (0..PRIVATE_BLOCKS as u64).map(|b| mix(salt | b));
            let start = held(continuation % COMMON_HELD);
            // Only the continuation's own blocks are kept. Whole prompts would take ten times the
            // memory of the index.
            let blocks = chain_of(common(start).chain(tail)).split_off(common_blocks);
            let parent = fleet.chains[start].last().map(|block| block.engine);
            let chain = fleet.chains.len() as u32;
            let to = blocks.len() as u32;
            fleet.chains.push(blocks);
            fleet.ops.push(Op::Store { worker, parent, chain, from: 0, to });
        }
    }
    fleet.entries = fleet.ops.iter().map(Op::blocks).sum();
    fleet
}

/// Prompts that consist of a common prompt and a continuation of a random worker.
fn queries(fleet: &Fleet, workers: u32) -> Vec<Chain> {
    (0..QUERIES)
        .map(|at| {
            let worker = (mix(at as u64) % u64::from(workers)) as usize;
            let first = fleet.continuations[worker];
            let end = fleet.continuations.get(worker + 1).copied().unwrap_or(fleet.chains.len());
            let continuation = (mix(at as u64 ^ 0xF1EE7) as usize) % (end - first);
            let start = (worker * COMMON_HELD + continuation % COMMON_HELD) % COMMON_CHAINS;
            [&fleet.chains[start][..], &fleet.chains[first + continuation]].concat()
        })
        .collect()
}

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    let blocks = run.pick(2_048, 16_384);
    let workload = format!("fleet W={WORKERS} x {blocks}");
    let fleet = fleet(WORKERS, blocks);
    let queries = queries(&fleet, WORKERS);
    let mut model = Model::new(WORKERS);
    for op in &fleet.ops {
        if let Op::Store { worker, chain, .. } = op {
            model.store(*worker, &fleet.chains[*chain as usize]);
        }
    }
    let millions = fleet.entries as f64 / 1e6;
    let mut subjects = subjects();
    let [cpu] = alternate(&mut subjects, run.pick(2, 3), |subject, _| {
        subject.reset(WORKERS, blocks * 2);
        subject.prepare_events(&fleet.chains, &fleet.ops);
        [millions / subject.apply_prepared().cpu.as_secs_f64()]
    });
    run.row(&workload, (measure::APPLY_CPU, "M blocks/s", Better::More), cpu, None)?;
    subjects.iter_mut().for_each(|subject| subject.prepare_queries(&queries));
    check(run, &workload, &subjects, &queries, |chain| model.scores(chain))?;
    drop(model);
    let overhead_ns = run.overhead_ns;
    let [p50, p99] = alternate(&mut subjects, run.pick(5, 9), |subject, _| {
        let mut samples = Vec::with_capacity(QUERIES);
        subject.time_each(overhead_ns, Deliver::Result, &mut samples);
        let found = Percentiles::of(&mut samples);
        [found.p50, found.p99]
    });
    run.row(&workload, (measure::MATCH_P50, "ns", Better::Less), p50, None)?;
    run.row(&workload, (measure::MATCH_P99, "ns", Better::Less), p99, None)?;
    let [returned] = alternate(&mut subjects, 3, |subject, round| {
        [subject.remove_worker(round as u32, &[]).returned_ns as f64 / blocks as f64]
    });
    run.row(&workload, (measure::RETURNED, "ns", Better::Less), returned, None)?;
    drop(subjects);
    let isolated = IsolatedRuns::run(run, &format!("fleet {WORKERS} {blocks}"))?;
    isolated.row(run, &workload, measure::BYTES, "live", "entries")?;
    isolated.row(run, &workload, measure::BYTES_RSS, "rss", "entries")
}

/// Stores the blocks of all workers, and prints memory figures.
pub(super) fn child(subject: &mut dyn Subject, workers: u32, blocks: usize) -> io::Result<()> {
    let fleet = fleet(workers, blocks);
    subject.reset(workers, blocks * 2);
    subject.apply_in_parts(&fleet.chains, &fleet.ops);
    print_reading("", fleet.entries)
}
