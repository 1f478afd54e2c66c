//! Measures the time from an engine's event until two routers behind one shim find its blocks.

use std::time::{Duration, Instant};

use splitrail_kv::BlockHash;
use tokio::time::sleep;

use super::engine::{BLOCK_SIZE, Engine};
use super::events::Chain;
use super::options::Options;
use super::report::Report;
use super::router::Router;
use super::shim_process::ShimProcess;
use super::{Failure, block_on};
use crate::index::measure::Percentiles;

/// Number of prompts that the engine holds from the start.
const CHAINS: u64 = 32;
/// Number of blocks of each of these prompts.
const CHAIN_BLOCKS: usize = 512;
/// Number of blocks of an event.
const EVENT_BLOCKS: usize = 8;
/// Interval between two lookups in an index.
const POLL_INTERVAL: Duration = Duration::from_micros(20);
/// Pause between the arrival of an event and the next event.
const EVENT_PAUSE: Duration = Duration::from_millis(5);
/// Maximum time until an event has arrived in an index.
const EVENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the workload.
///
/// # Errors
/// A program cannot be started, or an event does not arrive in time.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    block_on(measure(options, report))
}

async fn measure(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let events = if options.quick { 1000 } else { 5000 };
    let folder = tempfile::tempdir()?;
    let engine = Engine::start(CHAINS, CHAIN_BLOCKS).await?;
    let (first, second) = (Router::start(BLOCK_SIZE).await?, Router::start(BLOCK_SIZE).await?);
    let mut shim = ShimProcess::start(options, folder.path(), &engine, &[&first, &second])?;
    shim.wait_until_synchronised(folder.path(), CHAINS as usize * CHAIN_BLOCKS, 2).await?;
    let mut delays = [Vec::new(), Vec::new(), Vec::new()];
    for number in CHAINS..CHAINS + events {
        let chain = Chain::new(number, EVENT_BLOCKS);
        let seed = first.served.pool.index().config().seed;
        let hashes = chain.hashes(seed);
        let start = Instant::now();
        engine.publish(&chain, None).await?;
        let (one, other) = tokio::join!(
            wait_until_found(&first, &hashes, start),
            wait_until_found(&second, &hashes, start)
        );
        let (one, other) = (one?, other?);
        for (delays, delay) in delays.iter_mut().zip([one, other, one.max(other)]) {
            delays.push(delay.as_nanos() as u64);
        }
        sleep(EVENT_PAUSE).await;
    }
    shim.process.check(folder.path())?;
    let names = [
        ["first router, p50", "first router, p99"],
        ["second router, p50", "second router, p99"],
        ["both, p50", "both, p99"],
    ];
    for ([p50, p99], delays) in names.into_iter().zip(&mut delays) {
        let delay_ns = Percentiles::of(delays);
        report.add("two_routers", p50, "us", delay_ns.p50 / 1e3)?;
        report.add("two_routers", p99, "us", delay_ns.p99 / 1e3)?;
    }
    Ok(())
}

/// Waits until the index of a router has all blocks. Returns the time since `start`.
async fn wait_until_found(
    router: &Router,
    hashes: &[BlockHash],
    start: Instant,
) -> Result<Duration, Failure> {
    let pool = &router.served.pool;
    let roster = pool.roster();
    let worker = roster.named("w").ok_or("the shim is not attached")?;
    while start.elapsed() < EVENT_TIMEOUT {
        if pool.indexed_blocks(worker, hashes) as usize == hashes.len() {
            return Ok(start.elapsed());
        }
        // Other tasks run in between. A timer cannot be used: its resolution is a millisecond.
        let looked_up = Instant::now();
        while looked_up.elapsed() < POLL_INTERVAL {
            tokio::task::yield_now().await;
        }
    }
    Err("an event does not arrive in time".into())
}
