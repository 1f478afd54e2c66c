//! The cost of a request in the router: real processes on loopback in front of mock engines,
//! compared with nginx as a plain proxy.

mod access;
mod client;
mod engines;
mod feed;
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
use self::engines::{Engines, Fleet};
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
/// The workload of a router that gets KV events from engines and no requests.
const TOLD: &str = "CPU at 320 KV events/s, no requests";
/// Tokens per KV block.
const BLOCK_SIZE: usize = 16;

/// How much is measured.
struct Effort {
    rounds: usize,
    lasts: Duration,
    clients: Vec<usize>,
    memory: Duration,
}

impl Effort {
    fn new(quick: bool) -> Self {
        let seconds = Duration::from_secs;
        match quick {
            true => Self {
                rounds: 3,
                lasts: Duration::from_millis(1000),
                clients: vec![1, 16, 64],
                memory: seconds(20),
            },
            false => Self {
                rounds: 5,
                lasts: seconds(3),
                clients: vec![1, 4, 16, 64],
                memory: seconds(600),
            },
        }
    }
}

/// What all measurements need.
struct Bench<'a> {
    /// Where clients run.
    before: &'a Runtime,
    /// Where engines run.
    behind: &'a Runtime,
    effort: &'a Effort,
    options: &'a Options,
}

/// Runs what the command line asks for.
///
/// # Errors
/// A wrong command line, programs that are not there or end, an output that cannot be written.
pub fn main() -> Result<(), Failure> {
    let options = Options::parse(std::env::args().skip(1))?;
    process::allow_many_files()?;
    let mut effort = Effort::new(options.quick);
    effort.rounds = options.rounds.unwrap_or(effort.rounds);
    if let Some(clients) = options.clients {
        effort.clients = vec![clients];
    }
    // Engines and clients have a thread each; every router has two.
    let behind = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let before = Builder::new_current_thread().enable_all().build()?;
    let folder = tempfile::tempdir()?;
    print_line(&format!("load average at the start: {}", process::load_average()))?;
    let text = Text::new();
    let engines = behind.block_on(Engines::start())?;
    let (targets, fleet) = start(&options, (&behind, &text, &engines), folder.path())?;
    let mut cells = Vec::new();
    if ["aggregated", "pd", "kv_aware"].iter().any(|workload| options.wants(workload)) {
        for size in SIZES {
            let load = Arc::new(Load::new(&text.prompts(size), false));
            for clients in &effort.clients {
                let how = (*clients, false);
                cells.push(cell(&before, &effort, &targets, (size.name, &load), how)?);
            }
        }
    }
    if options.wants("stream") {
        let load = Arc::new(Load::new(&text.prompts(SIZES[0]), true));
        let targets: Vec<&Target> = targets.iter().filter(|target| target.is_plain()).collect();
        for clients in [1, 16].into_iter().filter(|c| options.clients.is_none_or(|o| o == *c)) {
            let how = (clients, true);
            cells.push(cell(&before, &effort, &targets, ("64 chunks", &load), how)?);
        }
    }
    let mut rows: Vec<Row> = cells.iter().flat_map(Cell::rows).collect();
    let bench = Bench { before: &before, behind: &behind, effort: &effort, options: &options };
    rows.extend(framings::framings(&bench, &engines, &text, folder.path())?);
    rows.extend(settings::logging(&bench, &engines, &text, folder.path())?);
    rows.extend(settings::threads(&bench, &engines, &text, folder.path())?);
    rows.extend(access::access(&bench, &engines, &text, folder.path())?);
    rows.extend(refusals::refusals(&bench, &engines, folder.path())?);
    rows.extend(watched::watched(&bench, &engines, &text, folder.path())?);
    rows.extend(tls::tls(&bench, &engines, &text, folder.path())?);
    rows.extend(slow::slow(&bench, &engines, &text, folder.path())?);
    if options.wants("memory") && (!options.quick || options.only.is_some()) {
        rows.extend(memory(&before, &effort, &targets, &text)?);
    }
    for target in targets.iter().filter(|target| target.name == "kv_aware") {
        rows.extend(idle(&before, target, TOLD)?);
    }
    fleet.iter().for_each(Fleet::hush);
    for target in &targets {
        rows.extend(idle(&before, target, "CPU when idle")?);
    }
    for target in targets.iter().filter(|target| target.name != "nginx") {
        rows.extend(peak(target)?);
    }
    print_line("\nwhat is wanted (ours, nginx, ratio)")?;
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

/// Starts what is to be measured; what cannot be had is said and left out.
fn start(
    options: &Options,
    (behind, text, engines): (&Runtime, &Text, &Engines),
    folder: &Path,
) -> Result<(Vec<Target>, Option<Fleet>), Failure> {
    let mut targets = vec![Target::direct(engines)];
    match behind.block_on(Target::nginx(engines, None, folder)) {
        Ok(nginx) => targets.push(nginx),
        Err(error) => print_line(&format!("without nginx: {error}"))?,
    }
    for split in [false, true] {
        let Some(program) = &options.vllm_router else { break };
        match behind.block_on(Target::vllm_router(split, engines, program, folder)) {
            Ok(router) => targets.push(router),
            Err(error) => print_line(&format!("without vllm-router: {error}"))?,
        }
    }
    let mut ours = |name, kind| {
        let programs = [
            Some((name, &options.splitrail)),
            options.beside.as_ref().map(|other| (Target::beside(name), other)),
        ];
        for (name, program) in programs.into_iter().flatten() {
            let how = (program.as_path(), options.program().1);
            targets.push(behind.block_on(Target::ours(name, kind, how, folder))?);
        }
        Ok::<_, Failure>(())
    };
    if options.wants("aggregated") || options.wants("stream") {
        ours("round_robin", Kind::Aggregated(engines))?;
    }
    if options.wants("pd") {
        ours("pd", Kind::Pd(engines))?;
    }
    let mut fleet = None;
    if options.wants("kv_aware") || options.wants("memory") {
        match behind.block_on(Fleet::start(options, text)) {
            Ok(started) => {
                let started = fleet.insert(started);
                ours("kv_aware", Kind::KvAware(started))?;
            }
            Err(error) => print_line(&format!("without kv_aware: {error}"))?,
        }
    }
    Ok((targets, fleet))
}

/// One load on all targets in turn, round by round, each round beginning with another.
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

/// What each target has done, and in each round.
type Rounds = Vec<(&'static str, Vec<Figures>)>;

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
            let measuring = measure(targets[at].borrow(), load, how, effort.lasts);
            rounds[at].1.push(runtime.block_on(measuring)?);
        }
    }
    Ok(rounds)
}

impl Cell {
    /// The medians, which are told at once.
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

/// Long prompts for long: memory must not grow.
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
        runtime.block_on(measure(target, &load, (16, false), effort.memory / PARTS))?;
        resident.push(process.resident_mb(Resident::Now)?);
    }
    let row = |measure, figure, goal| Row::alone("memory 64 KB c=16", measure, figure, Some(goal));
    let peak = process.resident_mb(Resident::Peak)?;
    // The first half fills what is bounded.
    let half = resident.len() / 2;
    let growth = resident[resident.len() - 1] - resident[half];
    Ok(vec![
        row("peak", (peak, "MB"), Goal::AtMost(150.0)),
        row("growth, second half", (growth, "MB"), Goal::AtMost(5.0)),
    ])
}

/// The most memory that a target's process has had.
fn peak(target: &Target) -> Result<Option<Row>, Failure> {
    let Some(process) = &target.process else { return Ok(None) };
    let figure = (process.resident_mb(Resident::Peak)?, "MB");
    Ok(Some(Row::alone(target.name, "peak memory", figure, None)))
}

/// What a target's process does while nobody asks it anything.
fn idle(runtime: &Runtime, target: &Target, measure: &'static str) -> Result<Option<Row>, Failure> {
    const LASTS: Duration = Duration::from_secs(5);
    let Some(process) = &target.process else { return Ok(None) };
    let before = process.cpu()?;
    runtime.block_on(async { tokio::time::sleep(LASTS).await });
    let percent = (process.cpu()? - before).as_secs_f64() / LASTS.as_secs_f64() * 100.0;
    let goal = (target.is_ours() && measure != TOLD).then_some(Goal::AtMost(0.5));
    Ok(Some(Row::alone(target.name, measure, (percent, "%"), goal)))
}
