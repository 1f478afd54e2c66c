//! Measures memory and results after millions of evictions from full caches. The trace is repeated,
//! each time with different blocks.

use std::io;

use serde_json::json;

use super::super::check::compare;
use super::super::goals::measure;
use super::super::plan::{Caches, Evict, chains_of, worker_of};
use super::super::report::{Better, print_line};
use super::super::run::Run;
use super::super::subject::Subject;
use super::memory::{IsolatedRuns, print_reading};
use super::mixed::CACHE_BLOCKS;

const EXPAND: u32 = 4;
/// Number of workers. With caches of 16,384 blocks, there are 131,072 live entries.
const WORKERS: u32 = 8;
/// Number of requests whose events are prepared at a time.
const PART: usize = 256;

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    let removals = run.pick(2_000_000, 16_000_000);
    for (holes, workload) in [(0, "churn tail-first"), (1, "churn holes")] {
        let isolated = IsolatedRuns::run(run, &format!("churn {holes} {removals}"))?;
        let figures = |name: &str| std::array::from_fn(|at| isolated.indexes[at].get(name));
        let wrong: [Option<f64>; 3] = figures("wrong_queries");
        run.wrong = wrong.map(|wrong| wrong.is_some_and(|wrong| wrong > 0.0));
        isolated.row(run, workload, "bytes/live entry before", "live_before", "entries_before")?;
        isolated.row(run, workload, measure::BYTES_AFTER, "live_after", "entries_after")?;
        isolated.row(run, workload, "bytes/live entry after, RSS", "rss_after", "entries_after")?;
        let before = isolated.per_entry("live_before", "entries_before");
        let after = isolated.per_entry("live_after", "entries_after");
        let growth = std::array::from_fn(|at| Some(after[at]? / before[at]?));
        let note = Some(format!("{removals} removals between"));
        run.row(workload, (measure::GROWTH, "x", Better::Less), growth, note)?;
        let note = figures("queries")[0].map(|queries| format!("of {queries} queries"));
        run.wrong = [false; 3];
        let measures = [
            ("wrong_queries", "queries with a wrong answer"),
            ("over", "overlaps too long"),
            ("under", "overlaps too short"),
        ];
        for (name, measure) in measures {
            run.row(workload, (measure, "", Better::Less), figures(name), note.clone())?;
        }
    }
    Ok(())
}

/// Serves requests until `removals` blocks have been evicted. Prints memory figures when each entry
/// has been replaced about once, and at the end.
pub(super) fn child(
    subject: &mut dyn Subject,
    requests: &[Vec<u32>],
    holes: bool,
    removals: usize,
) -> io::Result<()> {
    let evict = if holes { Evict::Anywhere } else { Evict::TailFirst };
    let mut caches = Caches::new(WORKERS, CACHE_BLOCKS, evict);
    let live = CACHE_BLOCKS * WORKERS as usize;
    let mut settled = false;
    subject.reset(WORKERS, CACHE_BLOCKS * 2);
    for pass in 0.. {
        let chains = chains_of(requests, EXPAND, pass);
        for from in (0..chains.len()).step_by(PART) {
            let mut ops = Vec::new();
            for request in from..chains.len().min(from + PART) {
                caches.serve(worker_of(request, WORKERS), &chains, request, &mut ops);
            }
            subject.apply_in_parts(&chains, &ops);
            drop(ops);
            if !settled && caches.evicted >= live as u64 {
                settled = true;
                print_reading("_before", caches.entries())?;
            }
            if caches.evicted < removals as u64 {
                continue;
            }
            print_reading("_after", caches.entries())?;
            if subject.name() != "none" {
                subject.prepare_queries(&chains);
                let wrong = compare(subject, &chains, |chain| caches.scores(chain));
                let figures = json!({
                    "queries": wrong.queries, "wrong_queries": wrong.wrong_queries,
                    "over": wrong.over, "under": wrong.under,
                });
                print_line(&figures.to_string())?;
            }
            return Ok(());
        }
    }
    Ok(())
}
