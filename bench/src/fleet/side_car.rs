//! A side-car beside its engine, with a large mirror: processor time, memory, and what it adds
//! to a request's way.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::beside::SideCar;
use super::engine::{BLOCK_SIZE, Engine};
use super::events::Chain;
use super::options::Options;
use super::process::Resident;
use super::report::Report;
use super::router::Router;
use super::traffic::{Way, alternate};
use super::{Failure, block_on};
use crate::index::measure::Percentiles;

/// What the engine holds from its beginning: so many prompts of so many blocks.
const CHAINS: u64 = 1954;
const CHAIN_BLOCKS: usize = 512;
/// Requests a second, and blocks that each of them stores and, as the cache is full, evicts.
const REQUESTS: u32 = 100;
const REQUEST_BLOCKS: usize = 8;
/// Prompts that stay until they are evicted.
const KEPT: u64 = 100;
/// Before anything is measured.
const WARM_UP: Duration = Duration::from_secs(3);
const IDLE: Duration = Duration::from_secs(5);
/// What it may take.
const CPU_PERCENT: f64 = 2.0;
const RESIDENT_MB: f64 = 100.0;

/// Runs the workload.
///
/// # Errors
/// A side-car that cannot be started, or does not come to hold everything.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    block_on(measure(options, report))
}

async fn measure(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let span = Duration::from_secs(if options.quick { 20 } else { 60 });
    let folder = tempfile::tempdir()?;
    let engine = Engine::start(CHAINS, CHAIN_BLOCKS).await?;
    let router = Router::start(BLOCK_SIZE).await?;
    let mut side_car = SideCar::start(options, folder.path(), &engine, &[&router])?;
    let blocks = CHAINS as usize * CHAIN_BLOCKS;
    side_car.until(folder.path(), blocks, 1).await?;
    let name = format!("side_car blocks={blocks}");
    let cpu = async |side_car: &SideCar, span: Duration| {
        let (before, start) = (side_car.process.cpu()?, Instant::now());
        sleep(span).await;
        let used = side_car.process.cpu()? - before;
        Ok::<_, Failure>(used.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0)
    };
    sleep(WARM_UP).await;
    let idle = cpu(&side_car, IDLE).await?;
    report.add(&name, "CPU without requests", "% of a core", idle)?;

    let ways = [Way::to(engine.http), Way::to(side_car.address)];
    let mut next = CHAINS;
    let mut events = async |_: u64| {
        let of = |number| Chain::new(number, REQUEST_BLOCKS);
        let evicted = (next >= CHAINS + KEPT).then(|| of(next - KEPT));
        engine.put(&of(next), evicted.as_ref()).await?;
        next += 1;
        Ok(())
    };
    alternate(&ways, REQUESTS, WARM_UP, &mut events).await?;
    ways.iter().for_each(|way| drop(way.take()));
    let (before, start) = (side_car.process.cpu()?, Instant::now());
    alternate(&ways, REQUESTS, span, &mut events).await?;
    let (used, took) = (side_car.process.cpu()? - before, start.elapsed());
    side_car.process.check(folder.path())?;
    let percent = used.as_secs_f64() / took.as_secs_f64() * 100.0;
    let [mut direct, mut proxied] = [ways[0].take(), ways[1].take()];
    let rate = proxied.whole.len() as f64 / took.as_secs_f64();
    report.add(&name, "requests through it", "1/s", rate)?;
    report.add_bounded(&name, "CPU at that", "% of a core", (percent, CPU_PERCENT))?;
    let per_request = used.as_secs_f64() * 1e6 / proxied.whole.len() as f64;
    report.add(&name, "CPU per request", "us", per_request)?;
    let now = side_car.process.resident_mb(Resident::Now)?;
    report.add_bounded(&name, "RSS", "MB", (now, RESIDENT_MB))?;
    let peak = side_car.process.resident_mb(Resident::Peak)?;
    report.add(&name, "peak RSS, the first copy for a router included", "MB", peak)?;
    let mirror = side_car.metric("splitrail_shim_mirror_bytes").await?;
    report.add(&name, "mirror, by its own count", "MB", mirror / 1e6)?;
    report.add(
        &name,
        "requests that failed, both ways",
        "",
        (direct.failed + proxied.failed) as f64,
    )?;
    let mut added = |measure, direct: &mut Vec<u64>, proxied: &mut Vec<u64>| {
        let added = Percentiles::of(proxied).p50 - Percentiles::of(direct).p50;
        report.add(&name, measure, "us", added / 1e3)
    };
    added("added until the first chunk, p50", &mut direct.first, &mut proxied.first)?;
    added("added until the end, p50", &mut direct.whole, &mut proxied.whole)?;
    Ok(())
}
