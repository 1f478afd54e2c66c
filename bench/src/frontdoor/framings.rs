//! Compares protocols: the same chats over HTTP/1.1, HTTP/2 and gRPC, in turns, through one router.

use std::path::Path;
use std::sync::Arc;

use super::client::{Framing, Load};
use super::engines::Engines;
use super::measure::{Figures, measure};
use super::report::{Cell, Row};
use super::targets::{Kind, Target};
use super::text::{SIZES, Size, Text};
use super::{Bench, Failure};

/// Number of concurrent clients.
const CLIENTS: usize = 16;

/// A framing with its name in rows.
type Named = (&'static str, Framing);

const HTTP: [Named; 2] = [("HTTP/1.1", Framing::Http1), ("HTTP/2", Framing::Http2)];
const ALL: [Named; 4] =
    [HTTP[0], HTTP[1], ("gRPC", Framing::Grpc), ("gRPC, 1 socket", Framing::GrpcShared)];

/// A kind of requests, and the framings in which it is measured.
struct Shape {
    name: &'static str,
    size: Size,
    /// The framings; without gRPC if replies are whole, because gRPC has only streams.
    framings: &'static [Named],
    /// Whether replies are streams.
    streams: bool,
    /// Number of tokens of a reply.
    tokens: u32,
}

const SHAPES: [Shape; 5] = [
    Shape { name: "1 KB whole", size: SIZES[0], framings: &HTTP, streams: false, tokens: 16 },
    Shape { name: "64 KB whole", size: SIZES[1], framings: &HTTP, streams: false, tokens: 16 },
    Shape { name: "1 KB, 1 token", size: SIZES[0], framings: &ALL, streams: true, tokens: 1 },
    Shape { name: "64 KB, 1 token", size: SIZES[1], framings: &ALL, streams: true, tokens: 1 },
    Shape { name: "1 KB, 64 tokens", size: SIZES[0], framings: &ALL, streams: true, tokens: 64 },
];

/// Measures each shape in each of its framings. Ratios are to HTTP/1.1.
///
/// # Errors
/// The router does not become ready, or a request gets no good reply.
pub(super) fn framings(
    bench: &Bench<'_>,
    engines: &Engines,
    text: &Text,
    folder: &Path,
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    if !bench.options.wants("grpc") {
        return Ok(rows);
    }
    let starting =
        Target::ours("framings", Kind::Aggregated(engines), bench.options.program(), folder);
    let target = bench.engine_runtime.block_on(starting)?;
    for shape in &SHAPES {
        let cell = cell(bench, &target, text, shape)?;
        cell.print()?;
        rows.extend(shape.framings[1..].iter().map(|(name, _)| row(&cell, name)));
    }
    Ok(rows)
}

fn cell(bench: &Bench<'_>, target: &Target, text: &Text, shape: &Shape) -> Result<Cell, Failure> {
    let Shape { size, streams, tokens, .. } = *shape;
    let prompts = text.prompts(size);
    let load = |framing| {
        Arc::new(Load::framed(framing, &prompts, |prompt| match framing {
            Framing::Http1 | Framing::Http2 => prompt.limited(streams, tokens).into(),
            Framing::Grpc | Framing::GrpcShared => prompt.message(tokens),
        }))
    };
    let loads: Vec<_> = shape.framings.iter().map(|(_, framing)| load(*framing)).collect();
    let mut rounds = vec![Vec::new(); loads.len()];
    for round in 0..bench.effort.rounds {
        for turn in 0..loads.len() {
            let at = (round + turn) % loads.len();
            let measuring =
                measure(target, &loads[at], (CLIENTS, streams), bench.effort.round_time);
            rounds[at].push(bench.client_runtime.block_on(measuring)?);
        }
    }
    let names = shape.framings.iter().map(|(name, _)| *name);
    let figures = names.zip(rounds.iter().map(|rounds| Figures::median(rounds))).collect();
    Ok(Cell { size: shape.name, clients: CLIENTS, streams, figures })
}

/// The row that compares a framing with HTTP/1.1.
fn row(cell: &Cell, framing: &str) -> Row {
    let targets: Vec<_> = cell.figures.iter().map(|(name, all)| (*name, all.cpu_us)).collect();
    let ours = targets.iter().find(|(name, _)| *name == framing).map_or(0.0, |(_, cpu)| *cpu);
    Row {
        workload: format!("{framing} {} c={}", cell.size, cell.clients),
        measure: "CPU per request".to_owned(),
        unit: "us",
        ours,
        theirs: Some(targets[0]),
        goal: None,
        targets,
    }
}
