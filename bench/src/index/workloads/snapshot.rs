//! Compares loading the blocks of eight workers from snapshots with applying events: events with
//! hashes, as shims send them, and for one worker events with tokens, as its engine encodes them.

use std::io;

use super::super::check::check;
use super::super::measure::median;
use super::super::plan::{chains_of, without_eviction};
use super::super::report::Better;
use super::super::run::{Run, alternate, subjects};
use super::from_engine;
use super::trace::MAX_BLOCKS;

const EXPAND: u32 = 32;
const WORKERS: u32 = 8;

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    let workload = format!("snapshot E={EXPAND} W={WORKERS}");
    let chains = chains_of(&run.requests, EXPAND, 0);
    let (ops, model) = without_eviction(&chains, WORKERS);
    let entries = model.entries();
    let mut subjects = subjects();
    let [loaded, applied, missing] = alternate(&mut subjects, run.pick(2, 5), |subject, _| {
        subject.reset(WORKERS, MAX_BLOCKS);
        subject.prepare_events(&chains, &ops);
        let applied = entries as f64 / 1e6 / subject.apply_prepared().cpu.as_secs_f64();
        let Some((blocks, span)) = subject.reload_from_snapshots(WORKERS, MAX_BLOCKS) else {
            return [f64::NAN, applied, f64::NAN];
        };
        let missing = entries as f64 - blocks as f64;
        [blocks as f64 / 1e6 / span.cpu.as_secs_f64(), applied, missing]
    });
    // Of a peer's two rates, the better one counts.
    let peer = |at: usize| loaded[at].into_iter().chain(applied[at]).reduce(f64::max);
    let best = [loaded[0], peer(1), peer(2)];
    let note = "peers: the faster of snapshot and events".to_owned();
    let unit = "M blocks/s";
    run.row(&workload, ("load per CPU second", unit, Better::More), best, Some(note))?;
    run.row(&workload, ("events per CPU second", unit, Better::More), applied, None)?;
    let gain = std::array::from_fn(|at| Some(loaded[at]? / applied[at]?));
    run.row(&workload, ("snapshot over events", "x", Better::More), gain, None)?;
    run.row(&workload, ("blocks missing", "", Better::Less), missing, None)?;
    let payloads = from_engine::payloads(0, &chains, &ops)?;
    let mut rates = Vec::new();
    for _ in 0..run.pick(2, 5) {
        let (stored, span) = from_engine::apply(&payloads)?;
        rates.push(stored as f64 / 1e6 / span.cpu.as_secs_f64());
    }
    drop(payloads);
    let decoded = median(&rates);
    let ours = [Some(decoded), None, None];
    run.row(&workload, ("an engine's events per CPU second", unit, Better::More), ours, None)?;
    let gain = [loaded[0].map(|loaded| loaded / decoded), None, None];
    run.row(&workload, ("snapshot over an engine's events", "x", Better::More), gain, None)?;
    for (subject, loaded) in subjects.iter_mut().zip(loaded) {
        subject.prepare_queries(&chains);
        if loaded.is_none() {
            subject.prepare_events(&chains, &ops);
            subject.apply_prepared();
        }
    }
    check(run, &workload, &subjects, &chains, |chain| model.scores(chain))
}
