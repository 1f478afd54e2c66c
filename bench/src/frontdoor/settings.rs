//! What one setting of the router costs: with and without it, in turn.

use std::path::Path;
use std::sync::Arc;

use super::client::Load;
use super::engines::Engines;
use super::measure::Figures;
use super::report::{Cell, Goal, Row};
use super::targets::{Kind, Target};
use super::text::{SIZES, Text};
use super::{Bench, Failure, Rounds, rounds};

/// Logging at `info`, against none.
///
/// # Errors
/// A router that does not become ready.
pub(super) fn logging(
    bench: &Bench<'_>,
    engines: &Engines,
    text: &Text,
    folder: &Path,
) -> Result<Vec<Row>, Failure> {
    if !bench.options.wants("logging") {
        return Ok(Vec::new());
    }
    let variants = [("info", ("RUST_LOG", "info")), ("off", ("RUST_LOG", "off"))];
    let cell = compare(bench, engines, (text, folder), ("logging", 16), variants)?;
    Ok(vec![row(&cell, "CPU per request", "us", |f| f.cpu_us, Some(Goal::RatioAtMost(1.05)))])
}

/// Two threads, against one: what they hold against each other would show in both.
///
/// # Errors
/// A router that does not become ready.
pub(super) fn threads(
    bench: &Bench<'_>,
    engines: &Engines,
    text: &Text,
    folder: &Path,
) -> Result<Vec<Row>, Failure> {
    if !bench.options.wants("threads") {
        return Ok(Vec::new());
    }
    let threads = |count| ("TOKIO_WORKER_THREADS", count);
    let variants = [("two threads", threads("2")), ("one thread", threads("1"))];
    let cell = compare(bench, engines, (text, folder), ("threads", 64), variants)?;
    Ok(vec![
        row(&cell, "requests", "1/s", |f| f.per_s, None),
        row(&cell, "CPU per request", "us", |f| f.cpu_us, None),
    ])
}

/// Processes of one build differ by more than some settings do: each variant is started so often.
const STARTS: usize = 4;

/// Two routers that differ in one variable of their environment, under the same load.
fn compare(
    bench: &Bench<'_>,
    engines: &Engines,
    (text, folder): (&Text, &Path),
    (workload, clients): (&'static str, usize),
    variants: [(&'static str, (&str, &str)); 2],
) -> Result<Cell, Failure> {
    let load = Arc::new(Load::new(&text.prompts(SIZES[0]), false));
    let mut all: Rounds = variants.iter().map(|(name, _)| (*name, Vec::new())).collect();
    for start in 0..STARTS {
        let mut targets = Vec::new();
        // Whoever starts first is not always the same.
        let order = if start % 2 == 0 { [0, 1] } else { [1, 0] };
        for (name, variable) in order.map(|at| variants[at]) {
            let kind = Kind::Aggregated(engines);
            let program = &bench.options.splitrail;
            let variables = [variable];
            let starting = Target::ours_in(name, kind, program, folder, &variables);
            targets.push(bench.behind.block_on(starting)?);
        }
        let seen = rounds(bench.before, bench.effort, &targets, &load, (clients, false))?;
        for (name, seen) in seen {
            all.iter_mut()
                .filter(|(known, _)| *known == name)
                .for_each(|(_, all)| all.extend(&seen));
        }
    }
    Cell::of(workload, (clients, false), all)
}

/// The first variant against the second.
fn row(
    cell: &Cell,
    measure: &str,
    unit: &'static str,
    figure: fn(&Figures) -> f64,
    goal: Option<Goal>,
) -> Row {
    let figures: Vec<_> = cell.figures.iter().map(|(name, all)| (*name, figure(all))).collect();
    Row {
        workload: format!("{} 1 KB c={}", cell.size, cell.clients),
        measure: measure.to_owned(),
        unit,
        ours: figures[0].1,
        theirs: Some(figures[1]),
        goal,
        targets: figures,
    }
}
