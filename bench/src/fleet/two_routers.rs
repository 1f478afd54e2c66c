//! One shim, two routers: how long from an engine's event until prompts find its blocks.

use std::time::{Duration, Instant};

use splitrail_kv::BlockHash;
use tokio::time::sleep;

use super::beside::Shim;
use super::engine::{BLOCK_SIZE, Engine};
use super::events::Chain;
use super::options::Options;
use super::report::Report;
use super::router::Router;
use super::{Failure, block_on};
use crate::index::measure::Percentiles;

/// What the engine holds from its beginning.
const CHAINS: u64 = 32;
const CHAIN_BLOCKS: usize = 512;
/// Blocks of one event.
const EVENT_BLOCKS: usize = 8;
/// Between two looks into an index, and between two events.
const GLANCE: Duration = Duration::from_micros(20);
const PAUSE: Duration = Duration::from_millis(5);
/// How long an event may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs the workload.
///
/// # Errors
/// Events that do not arrive.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    block_on(measure(options, report))
}

async fn measure(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let events = if options.quick { 1000 } else { 5000 };
    let folder = tempfile::tempdir()?;
    let engine = Engine::start(CHAINS, CHAIN_BLOCKS).await?;
    let (first, second) = (Router::start(BLOCK_SIZE).await?, Router::start(BLOCK_SIZE).await?);
    let mut shim = Shim::start(options, folder.path(), &engine, &[&first, &second])?;
    shim.until(folder.path(), CHAINS as usize * CHAIN_BLOCKS, 2).await?;
    let mut delays = [Vec::new(), Vec::new(), Vec::new()];
    for number in CHAINS..CHAINS + events {
        let chain = Chain::new(number, EVENT_BLOCKS);
        let seed = first.served.pool.index().config().seed;
        let hashes = chain.hashes(seed);
        let start = Instant::now();
        engine.put(&chain, None).await?;
        let (one, other) =
            tokio::join!(seen(&first, &hashes, start), seen(&second, &hashes, start));
        let (one, other) = (one?, other?);
        for (delays, delay) in delays.iter_mut().zip([one, other, one.max(other)]) {
            delays.push(delay.as_nanos() as u64);
        }
        sleep(PAUSE).await;
    }
    shim.process.check(folder.path())?;
    let names = [
        ["first router, p50", "first router, p99"],
        ["second router, p50", "second router, p99"],
        ["both, p50", "both, p99"],
    ];
    for ([p50, p99], delays) in names.into_iter().zip(&mut delays) {
        let Percentiles { p50: middle, p99: late } = Percentiles::of(delays);
        report.add("two_routers", p50, "us", middle / 1e3)?;
        report.add("two_routers", p99, "us", late / 1e3)?;
    }
    Ok(())
}

/// How long after `start` a router finds all blocks.
async fn seen(router: &Router, hashes: &[BlockHash], start: Instant) -> Result<Duration, Failure> {
    let pool = &router.served.pool;
    let roster = pool.roster();
    let worker = roster.named("w").ok_or("the shim is not attached")?;
    while start.elapsed() < PATIENCE {
        if pool.indexed_blocks(worker, hashes) as usize == hashes.len() {
            return Ok(start.elapsed());
        }
        // Lets others run; a timer is no finer than a millisecond.
        let glance = Instant::now();
        while glance.elapsed() < GLANCE {
            tokio::task::yield_now().await;
        }
    }
    Err("an event does not arrive".into())
}
