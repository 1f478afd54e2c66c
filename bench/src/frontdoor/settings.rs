//! Measures what one setting of the router costs: routers with and without it, in turns.

use std::path::Path;
use std::sync::Arc;

use super::client::Load;
use super::engines::Engines;
use super::measure::Figures;
use super::report::{Cell, Goal, Measure, Row};
use super::targets::{Kind, Settings, Target};
use super::text::{SIZES, Text};
use super::{Bench, Failure, Rounds, rounds};

/// One of the routers that are compared.
#[derive(Clone, Copy)]
pub(super) struct Variant<'a> {
    pub(super) name: &'static str,
    /// Further members of the configuration, as lines of YAML.
    pub(super) further: &'a str,
    /// An environment variable.
    pub(super) variable: (&'a str, &'a str),
}

impl Variant<'_> {
    /// A router that differs from the others only in its environment.
    fn in_environment(name: &'static str, variable: (&'static str, &'static str)) -> Self {
        Self { name, further: "", variable }
    }
}

/// The requests of a comparison.
pub(super) struct Requests {
    pub(super) workload: &'static str,
    pub(super) clients: usize,
    pub(super) load: Load,
}

/// Compares a router that logs at level `info` with one that does not log.
///
/// # Errors
/// A router does not become ready, or a request gets no good reply.
pub(super) fn logging(
    bench: &Bench<'_>,
    engines: &Engines,
    text: &Text,
    folder: &Path,
) -> Result<Vec<Row>, Failure> {
    if !bench.options.wants("logging") {
        return Ok(Vec::new());
    }
    let variants = ["info", "off"].map(|level| Variant::in_environment(level, ("RUST_LOG", level)));
    let load = Load::new(&text.prompts(SIZES[0]), false);
    let requests = Requests { workload: "logging", clients: 16, load };
    let cell = compare(bench, engines, folder, requests, &variants)?;
    Ok(vec![row(&cell, "CPU per request", "us", |f| f.cpu_us, Some(Goal::RatioAtMost(1.05)))])
}

/// Compares two threads for requests with one. Contention would show in both measures.
///
/// # Errors
/// A router does not become ready, or a request gets no good reply.
pub(super) fn threads(
    bench: &Bench<'_>,
    engines: &Engines,
    text: &Text,
    folder: &Path,
) -> Result<Vec<Row>, Failure> {
    if !bench.options.wants("threads") {
        return Ok(Vec::new());
    }
    let variants = [("two threads", "2"), ("one thread", "1")]
        .map(|(name, count)| Variant::in_environment(name, ("TOKIO_WORKER_THREADS", count)));
    let load = Load::new(&text.prompts(SIZES[0]), false);
    let requests = Requests { workload: "threads", clients: 64, load };
    let cell = compare(bench, engines, folder, requests, &variants)?;
    Ok(vec![
        row(&cell, "requests", "1/s", |f| f.per_s, None),
        row(&cell, "CPU per request", "us", |f| f.cpu_us, None),
    ])
}

/// Number of times that each variant is started, per variant. Several starts are needed, because
/// processes of one build differ by more than some settings do.
const STARTS: usize = 2;

/// Measures routers that differ in one setting under the same load.
pub(super) fn compare(
    bench: &Bench<'_>,
    engines: &Engines,
    folder: &Path,
    requests: Requests,
    variants: &[Variant<'_>],
) -> Result<Cell, Failure> {
    compare_and(bench, engines, folder, requests, variants, |_| Ok(()))
}

/// Like [`compare`]; in addition, `check` is called for each router before it is stopped.
pub(super) fn compare_and(
    bench: &Bench<'_>,
    engines: &Engines,
    folder: &Path,
    Requests { workload, clients, load }: Requests,
    variants: &[Variant<'_>],
    mut check: impl FnMut(&Target) -> Result<(), Failure>,
) -> Result<Cell, Failure> {
    let load = Arc::new(load);
    let mut all: Rounds = variants.iter().map(|variant| (variant.name, Vec::new())).collect();
    for start in 0..STARTS * variants.len() {
        let mut targets = Vec::new();
        // The variants take turns in being the first.
        let order = variants.iter().cycle().skip(start % variants.len()).take(variants.len());
        for Variant { name, further, variable } in order.copied() {
            let settings = Settings { further, ..Kind::Aggregated(engines).into() };
            let program = &bench.options.splitrail;
            let variables = [variable];
            let starting = Target::ours_in(name, settings, program, folder, &variables);
            targets.push(bench.engine_runtime.block_on(starting)?);
        }
        let measured =
            rounds(bench.client_runtime, bench.effort, &targets, &load, (clients, false))?;
        targets.iter().try_for_each(&mut check)?;
        for (name, figures) in measured {
            all.iter_mut()
                .filter(|(known, _)| *known == name)
                .for_each(|(_, all)| all.extend(&figures));
        }
    }
    Cell::of(workload, (clients, false), all)
}

/// The row that compares the first variant with the second one.
fn row(
    cell: &Cell,
    measure: &str,
    unit: &'static str,
    figure: fn(&Figures) -> f64,
    goal: Option<Goal>,
) -> Row {
    let [first, second] = [0, 1].map(|at| cell.figures[at].0);
    let workload = format!("{} 1 KB c={}", cell.size, cell.clients);
    Row { workload, ..row_of(cell, (first, second), (measure, unit, figure), goal) }
}

/// The row that compares the variant `ours` with the variant `theirs`.
pub(super) fn row_of(
    cell: &Cell,
    (ours, theirs): (&'static str, &'static str),
    (measure, unit, figure): Measure<'_>,
    goal: Option<Goal>,
) -> Row {
    let figures: Vec<_> = cell.figures.iter().map(|(name, all)| (*name, figure(all))).collect();
    let of = |name| figures.iter().find(|(known, _)| *known == name).map_or(0.0, |(_, one)| *one);
    Row {
        workload: format!("{ours} 1 KB c={}", cell.clients),
        measure: measure.to_owned(),
        unit,
        ours: of(ours),
        theirs: Some((theirs, of(theirs))),
        goal,
        targets: figures,
    }
}
