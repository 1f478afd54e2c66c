//! Measures hundreds of thousands of prompts without a common prefix: they are stored, looked up
//! and removed one block at a time while a reader runs, and then once more while a thread only
//! reads a clock. Each index runs in a child process with a time limit, because peers panic or
//! hang.

use std::io;
use std::time::Duration;

use serde_json::json;

use super::super::child::{Outcome, run_alone};
use super::super::goals::measure;
use super::super::measure::{Percentiles, Span, timer_overhead_ns};
use super::super::plan::{Chain, Op, chain_of};
use super::super::report::{Better, NAMES, print_line};
use super::super::run::Run;
use super::super::stall::Stall;
use super::super::subject::{Deliver, Reading, Subject};
use super::trace::MAX_BLOCKS;
use crate::splitmix::mix;

const WORKERS: u32 = 8;

pub(super) fn run(run: &mut Run) -> io::Result<()> {
    let limit = Duration::from_secs(run.pick(30, 240));
    // With the smaller number, no peer panics.
    for &roots in run.pick(&[400_000][..], &[150_000, 400_000]) {
        let workload = format!("roots {roots}");
        let mut outcomes = <[Outcome; NAMES.len()]>::default();
        for (at, name) in NAMES.iter().enumerate() {
            outcomes[at] = run_alone(run, name, &format!("roots {roots}"), limit)?;
            if let Some(failure) = &outcomes[at].failure {
                run.print_comment(&format!("{workload}: {name} FAILED: {failure}"))?;
            }
        }
        let failed = std::array::from_fn(|at| Some(f64::from(outcomes[at].failure.is_some())));
        run.row(&workload, (measure::FAILED, "", Better::Less), failed, None)?;
        for (name, measure, unit) in [
            ("load_ns", "load, per block", "ns"),
            ("match_ns", measure::MATCH_P50, "ns"),
            ("remove_ns", "remove, per block", "ns"),
            ("stall_us", measure::STALL, "us"),
            ("running_us", "the same, less waiting for a processor", "us"),
            ("clock_us", "longest stall of a reader of clocks", "us"),
            ("clock_running_us", "the same of clocks, less waiting", "us"),
        ] {
            let figures = std::array::from_fn(|at| outcomes[at].get(name));
            run.row(&workload, (measure, unit, Better::Less), figures, None)?;
        }
    }
    Ok(())
}

/// Stores, looks up and removes the prompts. Prints each figure at once.
pub(super) fn child(subject: &mut dyn Subject, roots: usize) -> io::Result<()> {
    let chains: Vec<Chain> =
        (0..roots).map(|root| chain_of(std::iter::once(mix(root as u64)))).collect();
    let worker = |root: usize| root as u32 % WORKERS;
    let store =
        |root| Op::Store { worker: worker(root), parent: None, chain: root as u32, from: 0, to: 1 };
    let remove =
        |root: usize| Op::Remove { worker: worker(root), engines: vec![chains[root][0].engine] };
    let stores: Vec<Op> = (0..roots).map(store).collect();
    let removes: Vec<Op> = (0..roots).map(remove).collect();

    subject.prepare_queries(&chains);
    let mut pass = |reading: Reading, names: [&str; 4]| -> io::Result<()> {
        subject.reset(WORKERS, MAX_BLOCKS);
        subject.prepare_events(&chains, &stores);
        let (loaded, load_stall) = subject.longest_stall(reading);
        let figures = |span: Span, stall: Stall| {
            let stalled = [stall.longest_ns, stall.running_ns].map(|ns| ns as f64 / 1e3);
            [span.wall.as_secs_f64() * 1e9 / roots as f64, stalled[0], stalled[1]]
        };
        let [load_ns, stall_us, running_us] = figures(loaded, load_stall);
        print_line(
            &json!({ names[0]: load_ns, names[2]: stall_us, names[3]: running_us }).to_string(),
        )?;
        if reading == Reading::Index {
            let mut samples = Vec::with_capacity(roots);
            subject.time_each(timer_overhead_ns(), Deliver::Result, &mut samples);
            print_line(&json!({ "match_ns": Percentiles::of(&mut samples).p50 }).to_string())?;
        }
        subject.prepare_events(&chains, &removes);
        let (removed, stall) = subject.longest_stall(reading);
        let [remove_ns, stall_us, running_us] = figures(removed, load_stall.max(stall));
        print_line(
            &json!({ names[1]: remove_ns, names[2]: stall_us, names[3]: running_us }).to_string(),
        )
    };
    pass(Reading::Index, ["load_ns", "remove_ns", "stall_us", "running_us"])?;
    // The same once more, to measure the delays that the machine causes.
    pass(Reading::Clock, ["clock_load_ns", "clock_remove_ns", "clock_us", "clock_running_us"])
}
