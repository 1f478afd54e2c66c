//! Measures what a request costs the router, compared with nginx as a plain proxy: real processes
//! on loopback in front of mock engines.

mod access;
mod client;
mod engine_events;
mod engines;
mod framings;
mod http2;
mod measure;
mod mock;
mod options;
mod peers;
mod plot;
mod refusals;
mod report;
mod settings;
mod slow;
mod targets;
mod text;
mod tls;
mod watched;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use self::client::Load;
use self::engines::{Engines, KvEngines};
use self::measure::{Figures, measure};
use self::options::Options;
use self::report::{Cell, Goal, Row};
use self::targets::{Kind, Target};
use self::text::{SIZES, Text};
use crate::fleet::process::{self, Resident};
use crate::fleet::report::print_line;

pub use crate::fleet::Failure;

/// The model's name.
const MODEL: &str = "bench";
/// The measure of a router that gets KV events from engines and no requests.
const EVENTS_ONLY: &str = "CPU at 320 KV events/s, no requests";
/// Number of tokens per KV block.
const BLOCK_SIZE: usize = 16;

/// How long and how often the router is measured.
struct Effort {
    /// Number of rounds, over which medians are taken.
    rounds: usize,
    /// Time for which one target is measured in one round.
    round_time: Duration,
    /// Numbers of concurrent clients.
    clients: Vec<usize>,
    /// Time for which the workload `memory` sends requests.
    memory_time: Duration,
}

impl Effort {
    fn new(quick: bool) -> Self {
        let seconds = Duration::from_secs;
        match quick {
            true => Self {
                rounds: 3,
                round_time: Duration::from_millis(1000),
                clients: vec![1, 16, 64],
                memory_time: seconds(20),
            },
            false => Self {
                rounds: 5,
                round_time: seconds(3),
                clients: vec![1, 4, 16, 64],
                memory_time: seconds(600),
            },
        }
    }
}

/// What all workloads need.
struct Bench<'a> {
    /// The runtime of the clients.
    client_runtime: &'a Runtime,
    /// The runtime of the engines, which also starts the targets.
    engine_runtime: &'a Runtime,
    effort: &'a Effort,
    options: &'a Options,
}

/// Runs the workloads that the command line selects.
///
/// # Errors
/// The command line is wrong, a program is missing or ends, or the output cannot be written.
pub fn main() -> Result<(), Failure> {
    let options = Options::parse(std::env::args().skip(1))?;
    process::allow_many_files()?;
    let mut effort = Effort::new(options.quick);
    effort.rounds = options.rounds.unwrap_or(effort.rounds);
    if let Some(clients) = options.clients {
        effort.clients = vec![clients];
    }
    // The engines have one thread, and so have the clients; each target has two.
    let engine_runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let client_runtime = Builder::new_current_thread().enable_all().build()?;
    let folder = tempfile::tempdir()?;
    print_line(&format!("load average at the start: {}", process::load_average()))?;
    let text = Text::new();
    let engines = engine_runtime.block_on(Engines::start())?;
    let (targets, kv_engines) =
        start_targets(&options, (&engine_runtime, &text, &engines), folder.path())?;
    let bench = Bench {
        client_runtime: &client_runtime,
        engine_runtime: &engine_runtime,
        effort: &effort,
        options: &options,
    };
    let cells = measure_cells(&bench, &targets, &text)?;
    let mut rows: Vec<Row> = cells.iter().flat_map(Cell::rows).collect();
    rows.extend(framings::framings(&bench, &engines, &text, folder.path())?);
    rows.extend(settings::logging(&bench, &engines, &text, folder.path())?);
    rows.extend(settings::threads(&bench, &engines, &text, folder.path())?);
    rows.extend(access::access(&bench, &engines, &text, folder.path())?);
    rows.extend(refusals::refusals(&bench, &engines, folder.path())?);
    rows.extend(watched::watched(&bench, &engines, &text, folder.path())?);
    rows.extend(tls::tls(&bench, &engines, &text, folder.path())?);
    rows.extend(slow::slow(&bench, &engines, &text, folder.path())?);
    if options.wants("memory") && (!options.quick || options.only.is_some()) {
        rows.extend(memory(&client_runtime, &effort, &targets, &text)?);
    }
    for target in targets.iter().filter(|target| target.name == "kv_aware") {
        rows.extend(idle(&client_runtime, target, EVENTS_ONLY)?);
    }
    kv_engines.iter().for_each(KvEngines::stop_conversations);
    for target in &targets {
        rows.extend(idle(&client_runtime, target, "CPU when idle")?);
    }
    for target in targets.iter().filter(|target| target.name != "nginx") {
        rows.extend(peak(target)?);
    }
    print_line("\nresults with goals (ours, peer, ratio)")?;
    for row in rows.iter().filter(|row| row.goal.is_some()) {
        print_line(&row.line())?;
    }
    print_line(&format!("load average at the end: {}", process::load_average()))?;
    if let Some(path) = &options.json {
        let rows: Vec<Value> = rows.iter().map(Row::json).collect();
        fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    if let Some(path) = &options.svg {
        fs::write(path, plot::draw(&cells))?;
    }
    Ok(())
}

/// Measures the workloads `aggregated`, `pd`, `kv_aware` and `stream`, as far as they are selected.
fn measure_cells(bench: &Bench<'_>, targets: &[Target], text: &Text) -> Result<Vec<Cell>, Failure> {
    let Bench { client_runtime: runtime, effort, options, .. } = *bench;
    let mut cells = Vec::new();
    if ["aggregated", "pd", "kv_aware"].iter().any(|workload| options.wants(workload)) {
        for size in SIZES {
            let load = Arc::new(Load::new(&text.prompts(size), false));
            for clients in &effort.clients {
                let how = (*clients, false);
                cells.push(cell(runtime, effort, targets, (size.name, &load), how)?);
            }
        }
    }
    if options.wants("stream") {
        let load = Arc::new(Load::new(&text.prompts(SIZES[0]), true));
        let targets: Vec<&Target> = targets.iter().filter(|target| target.is_plain()).collect();
        for clients in [1, 16].into_iter().filter(|c| options.clients.is_none_or(|o| o == *c)) {
            let how = (clients, true);
            cells.push(cell(runtime, effort, &targets, ("64 chunks", &load), how)?);
        }
    }
    Ok(cells)
}

/// Starts the targets. A peer that cannot be started is reported and left out, and so is `kv_aware`
/// if its engines cannot be started.
fn start_targets(
    options: &Options,
    (runtime, text, engines): (&Runtime, &Text, &Engines),
    folder: &Path,
) -> Result<(Vec<Target>, Option<KvEngines>), Failure> {
    let mut targets = vec![Target::direct(engines)];
    match runtime.block_on(Target::nginx(engines, None, folder)) {
        Ok(nginx) => targets.push(nginx),
        Err(error) => print_line(&format!("nginx is left out: {error}"))?,
    }
    for split in [false, true] {
        let Some(program) = &options.vllm_router else { break };
        match runtime.block_on(Target::vllm_router(split, engines, program, folder)) {
            Ok(router) => targets.push(router),
            Err(error) => print_line(&format!("vllm-router is left out: {error}"))?,
        }
    }
    let mut ours = |name, kind| {
        let programs = [
            Some((name, &options.splitrail)),
            options.beside.as_ref().map(|other| (Target::beside_name(name), other)),
        ];
        for (name, program) in programs.into_iter().flatten() {
            let how = (program.as_path(), options.program().1);
            targets.push(runtime.block_on(Target::ours(name, kind, how, folder))?);
        }
        Ok::<_, Failure>(())
    };
    if options.wants("aggregated") || options.wants("stream") {
        ours("round_robin", Kind::Aggregated(engines))?;
    }
    if options.wants("pd") {
        ours("pd", Kind::Pd(engines))?;
    }
    let mut kv_engines = None;
    if options.wants("kv_aware") || options.wants("memory") {
        match runtime.block_on(KvEngines::start(options, text)) {
            Ok(started) => {
                let started = kv_engines.insert(started);
                ours("kv_aware", Kind::KvAware(started))?;
            }
            Err(error) => print_line(&format!("kv_aware is left out: {error}"))?,
        }
    }
    Ok((targets, kv_engines))
}

/// Measures all targets under one load, and prints the medians over the rounds.
fn cell<T: std::borrow::Borrow<Target>>(
    runtime: &Runtime,
    effort: &Effort,
    targets: &[T],
    (size, load): (&'static str, &Arc<Load>),
    (clients, streams): (usize, bool),
) -> Result<Cell, Failure> {
    let rounds = rounds(runtime, effort, targets, load, (clients, streams))?;
    Cell::of(size, (clients, streams), rounds)
}

/// The figures of each target, by its name, in each round.
type Rounds = Vec<(&'static str, Vec<Figures>)>;

/// Measures the targets in turns. Each round starts with another target.
fn rounds<T: std::borrow::Borrow<Target>>(
    runtime: &Runtime,
    effort: &Effort,
    targets: &[T],
    load: &Arc<Load>,
    how: (usize, bool),
) -> Result<Rounds, Failure> {
    let mut rounds: Rounds =
        targets.iter().map(|target| (target.borrow().name, Vec::new())).collect();
    for round in 0..effort.rounds {
        for turn in 0..targets.len() {
            let at = (round + turn) % targets.len();
            let measuring = measure(targets[at].borrow(), load, how, effort.round_time);
            rounds[at].1.push(runtime.block_on(measuring)?);
        }
    }
    Ok(rounds)
}

impl Cell {
    /// The medians over the rounds, which are also printed.
    fn of(
        size: &'static str,
        (clients, streams): (usize, bool),
        rounds: Rounds,
    ) -> Result<Self, Failure> {
        let medians = rounds.iter().map(|(name, rounds)| (*name, Figures::median(rounds)));
        let cell = Self { size, clients, streams, figures: medians.collect() };
        cell.print()?;
        Ok(cell)
    }
}

/// Sends long prompts to `kv_aware` for a long time. The router's memory must not grow.
fn memory(
    runtime: &Runtime,
    effort: &Effort,
    targets: &[Target],
    text: &Text,
) -> Result<Vec<Row>, Failure> {
    const PARTS: u32 = 10;
    let Some(target) = targets.iter().find(|target| target.name == "kv_aware") else {
        return Ok(Vec::new());
    };
    let Some(process) = &target.process else { return Ok(Vec::new()) };
    let load = Arc::new(Load::new(&text.prompts(SIZES[1]), false));
    let mut resident = Vec::new();
    for _ in 0..PARTS {
        runtime.block_on(measure(target, &load, (16, false), effort.memory_time / PARTS))?;
        resident.push(process.resident_mb(Resident::Now)?);
    }
    let row = |measure, figure, goal| Row::alone("memory 64 KB c=16", measure, figure, Some(goal));
    let peak = process.resident_mb(Resident::Peak)?;
    // In the first half, bounded caches fill up.
    let half = resident.len() / 2;
    let growth = resident[resident.len() - 1] - resident[half];
    Ok(vec![
        row("peak", (peak, "MB"), Goal::AtMost(150.0)),
        row("growth, second half", (growth, "MB"), Goal::AtMost(5.0)),
    ])
}

/// The maximum resident memory of a target's process.
fn peak(target: &Target) -> Result<Option<Row>, Failure> {
    let Some(process) = &target.process else { return Ok(None) };
    let figure = (process.resident_mb(Resident::Peak)?, "MB");
    Ok(Some(Row::alone(target.name, "peak memory", figure, None)))
}

/// The processor time of a target's process while it gets no requests.
fn idle(runtime: &Runtime, target: &Target, measure: &'static str) -> Result<Option<Row>, Failure> {
    const IDLE_TIME: Duration = Duration::from_secs(5);
    let Some(process) = &target.process else { return Ok(None) };
    let before = process.cpu()?;
    runtime.block_on(async { tokio::time::sleep(IDLE_TIME).await });
    let percent = (process.cpu()? - before).as_secs_f64() / IDLE_TIME.as_secs_f64() * 100.0;
    let goal = (target.is_ours() && measure != EVENTS_ONLY).then_some(Goal::AtMost(0.5));
    Ok(Some(Row::alone(target.name, measure, (percent, "%"), goal)))
}
