//! Measures repeated lookups of one prompt. All workers hold the whole prompt, or each worker
//! another number of leading blocks. The index also holds a million blocks that are never looked
//! up.

use std::io;

use super::super::check::check;
use super::super::goals::measure;
use super::super::measure::Percentiles;
use super::super::plan::{Chain, Model, Op, chain_of};
use super::super::report::Better;
use super::super::run::{Run, alternate, subjects};
use super::super::subject::{Deliver, Subject};
use super::trace::MAX_BLOCKS;
use crate::splitmix::mix;

const DEPTHS: [usize; 4] = [8, 64, 512, 4096];
const BACKGROUND_CHAINS: usize = 16_384;
const BACKGROUND_BLOCKS: usize = 64;
/// Number of lookups per sample. All of them are of the same prompt, so the mean hides no
/// difference.
const BATCH: u32 = 16;
const SAMPLES: u32 = 400;

struct Query {
    depth: usize,
    shape: &'static str,
}

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    for workers in [8, 512] {
        run_case(run, workers)?;
    }
    Ok(())
}

fn run_case(run: &mut Run, workers: u32) -> io::Result<()> {
    let shapes = ["full", "staggered"];
    let queries: Vec<Query> =
        shapes.iter().flat_map(|shape| DEPTHS.map(|depth| Query { depth, shape })).collect();
    let mut chains: Vec<Chain> = queries
        .iter()
        .enumerate()
        .map(|(at, query)| chain((at as u64 + 1) << 40, query.depth))
        .collect();
    let mut ops = Vec::new();
    let mut model = Model::new(workers);
    for (at, query) in queries.iter().enumerate() {
        for worker in 0..workers {
            let held = match query.shape {
                "full" => query.depth,
                _ => (query.depth * (worker as usize + 1)).div_ceil(workers as usize),
            };
            ops.push(first(worker, at, held));
            model.store(worker, &chains[at][..held]);
        }
    }
    for private in 0..BACKGROUND_CHAINS {
        ops.push(first(private as u32 % workers, chains.len(), BACKGROUND_BLOCKS));
        chains.push(chain((private as u64 + 1) << 20, BACKGROUND_BLOCKS));
    }
    let mut subjects = subjects();
    for subject in &mut subjects {
        subject.reset(workers, MAX_BLOCKS);
        subject.prepare_events(&chains, &ops);
        subject.apply_prepared();
        subject.prepare_queries(&chains[..queries.len()]);
    }
    check(run, &format!("depth W={workers}"), &subjects, &chains[..queries.len()], |chain| {
        model.scores(chain)
    })?;
    for (at, query) in queries.iter().enumerate() {
        let workload = format!("depth W={workers} D={} {}", query.depth, query.shape);
        let rounds = run.pick(5, 9);
        let batches = |subject: &mut dyn Subject, deliver| {
            let mut samples = subject.time_batches(at, BATCH, SAMPLES, deliver);
            Percentiles::of(&mut samples)
        };
        let [p50, p99, read] = alternate(&mut subjects, rounds, |subject, _| {
            let found = batches(subject, Deliver::Result);
            let read = batches(subject, Deliver::AllScores);
            [found.p50 / 1e3, found.p99 / 1e3, read.p50 / 1e3]
        });
        run.row(&workload, (measure::MATCH_P50, "ns", Better::Less), p50, None)?;
        run.row(&workload, (measure::MATCH_P99, "ns", Better::Less), p99, None)?;
        run.row(&workload, (measure::MATCH_READ_P50, "ns", Better::Less), read, None)?;
    }
    Ok(())
}

fn chain(salt: u64, blocks: usize) -> Chain {
    chain_of((0..blocks as u64).map(|at| mix(salt | at)))
}

fn first(worker: u32, chain: usize, blocks: usize) -> Op {
    Op::Store { worker, parent: None, chain: chain as u32, from: 0, to: blocks as u32 }
}
