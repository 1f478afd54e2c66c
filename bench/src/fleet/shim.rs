//! A shim with a large mirror: its processor time, its memory, and the latency that it adds to a
//! request. If nginx is installed, it forwards the same requests in the same run.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{interval, sleep};

use super::beside::Shim;
use super::engine::{BLOCK_SIZE, Engine};
use super::events::Chain;
use super::nginx::Nginx;
use super::options::Options;
use super::process::{Process, Resident};
use super::report::{Report, print_line};
use super::router::Router;
use super::traffic::{Form, Way, alternate};
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
/// A shim that cannot be started, or does not come to hold everything.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    block_on(measure(options, report))
}

async fn measure(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let span = Duration::from_secs(if options.quick { 20 } else { 60 });
    let folder = tempfile::tempdir()?;
    let engine = Engine::start(CHAINS, CHAIN_BLOCKS).await?;
    let router = Router::start(BLOCK_SIZE).await?;
    let mut shim = Shim::start(options, folder.path(), &engine, &[&router])?;
    let blocks = CHAINS as usize * CHAIN_BLOCKS;
    shim.until(folder.path(), blocks, 1).await?;
    let name = format!("shim blocks={blocks}");
    let nginx = Nginx::start(folder.path(), engine.http).await?;
    if nginx.is_none() {
        print_line("nginx is not installed: nothing to compare with")?;
    }
    sleep(WARM_UP).await;
    let idle = percent(&shim.process, sleep(IDLE)).await?;
    report.add(&name, "CPU without requests", "% of a core", idle)?;

    let mut feed = Feed { engine: &engine, next: CHAINS };
    // Until each further block stands for one that goes.
    feed.run(WARM_UP).await?;
    let told = percent(&shim.process, feed.run(span / 4)).await?;
    report.add(&name, "CPU at 100 KV events/s, no requests", "% of a core", told)?;

    let mut stand = Stand { name, span, folder: folder.path(), shim, nginx, feed, told };
    stand.measure(Form::Whole, report).await?;
    stand.measure(Form::Streamed, report).await?;
    stand.memory(report).await
}

/// The processor time of a process while something goes on, in percent of a core.
async fn percent<T>(process: &Process, meanwhile: impl Future<Output = T>) -> Result<f64, Failure> {
    let (before, start) = (process.cpu()?, Instant::now());
    meanwhile.await;
    let used = process.cpu()? - before;
    Ok(used.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0)
}

/// KV events as requests cause them.
struct Feed<'a> {
    engine: &'a Engine,
    next: u64,
}

impl Feed<'_> {
    async fn put(&mut self) -> Result<(), Failure> {
        let of = |number| Chain::new(number, REQUEST_BLOCKS);
        let evicted = (self.next >= CHAINS + KEPT).then(|| of(self.next - KEPT));
        self.engine.put(&of(self.next), evicted.as_ref()).await?;
        self.next += 1;
        Ok(())
    }

    async fn run(&mut self, span: Duration) -> Result<(), Failure> {
        let (start, mut tick) = (Instant::now(), interval(Duration::from_secs(1) / REQUESTS));
        while start.elapsed() < span {
            tick.tick().await;
            self.put().await?;
        }
        Ok(())
    }
}

/// What is measured.
struct Stand<'a> {
    name: String,
    span: Duration,
    folder: &'a Path,
    shim: Shim,
    nginx: Option<Nginx>,
    feed: Feed<'a>,
    /// What it takes, in percent, without requests.
    told: f64,
}

/// What the rows of one form of answers are called.
struct Names {
    rate: &'static str,
    percent: &'static str,
    each: &'static str,
    relay: &'static str,
    failed: &'static str,
    first: &'static str,
    whole: &'static str,
}

const WHOLE: Names = Names {
    rate: "requests, answers not streamed",
    percent: "not streamed: CPU",
    each: "not streamed: CPU per request",
    relay: "not streamed: the same without KV events",
    failed: "not streamed: failed, all ways",
    first: "not streamed: added until the first byte, p50",
    whole: "not streamed: added until the end, p50",
};
const STREAMED: Names = Names {
    rate: "requests, streams of 16 chunks",
    percent: "streams: CPU",
    each: "streams: CPU per request",
    relay: "streams: the same without KV events",
    failed: "streams: failed, all ways",
    first: "streams: added until the first chunk, p50",
    whole: "streams: added until the end, p50",
};

impl Stand<'_> {
    async fn measure(&mut self, form: Form, report: &mut Report) -> Result<(), Failure> {
        let name = self.name.as_str();
        let names = if form == Form::Streamed { &STREAMED } else { &WHOLE };
        let mut ways = vec![Way::to(self.feed.engine.http), Way::to(self.shim.address)];
        ways.extend(self.nginx.as_ref().map(|nginx| Way::to(nginx.address)));
        requests(&ways, form, WARM_UP, &mut self.feed).await?;
        ways.iter().for_each(|way| drop(way.take()));
        let nginx_cpu = || self.nginx.as_ref().map(|nginx| nginx.process.cpu()).transpose();
        let (before, nginx_before) = (self.shim.process.cpu()?, nginx_cpu()?);
        let start = Instant::now();
        requests(&ways, form, self.span, &mut self.feed).await?;
        let (used, took) = (self.shim.process.cpu()? - before, start.elapsed());
        let nginx_after = nginx_cpu()?;
        self.shim.process.check(self.folder)?;

        let mut times: Vec<_> = ways.iter().map(|way| way.take()).collect();
        let failed: u64 = times.iter().map(|times| times.failed).sum();
        let each = |used: Duration, way: usize| {
            used.as_secs_f64() * 1e6 / times[way].whole.len().max(1) as f64
        };
        let rate = times[1].whole.len() as f64 / took.as_secs_f64();
        report.add(name, names.rate, "1/s", rate)?;
        let percent = used.as_secs_f64() / took.as_secs_f64() * 100.0;
        report.add_bounded(name, names.percent, "% of a core", (percent, CPU_PERCENT))?;
        report.add(name, names.each, "us", each(used, 1))?;
        let told = took.mul_f64(self.told / 100.0);
        let relay = each(used.saturating_sub(told), 1);
        match nginx_before.zip(nginx_after) {
            Some((before, after)) => {
                let peer = ("nginx", each(after - before, 2));
                report.add_beside(name, names.relay, "us", relay, peer)?;
            }
            None => report.add(name, names.relay, "us", relay)?,
        }
        report.add(name, names.failed, "", failed as f64)?;
        let mut medians = times.iter_mut().map(|times| {
            (Percentiles::of(&mut times.first).p50, Percentiles::of(&mut times.whole).p50)
        });
        let (direct, ours, theirs) = (medians.next(), medians.next(), medians.next());
        let direct = direct.unwrap_or_default();
        let ours = ours.unwrap_or_default();
        let mut added = |measure, direct: f64, ours: f64, theirs: Option<f64>| match theirs {
            Some(theirs) => {
                let peer = ("nginx", (theirs - direct) / 1e3);
                report.add_beside(name, measure, "us", (ours - direct) / 1e3, peer)
            }
            None => report.add(name, measure, "us", (ours - direct) / 1e3),
        };
        added(names.first, direct.0, ours.0, theirs.map(|theirs| theirs.0))?;
        added(names.whole, direct.1, ours.1, theirs.map(|theirs| theirs.1))?;
        Ok(())
    }

    async fn memory(&self, report: &mut Report) -> Result<(), Failure> {
        let (name, process) = (self.name.as_str(), &self.shim.process);
        let now = process.resident_mb(Resident::Now)?;
        report.add_bounded(name, "RSS", "MB", (now, RESIDENT_MB))?;
        let peak = process.resident_mb(Resident::Peak)?;
        report.add(name, "peak RSS, the first copy for a router included", "MB", peak)?;
        let mirror = self.shim.metric("splitrail_shim_mirror_bytes").await?;
        Ok(report.add(name, "mirror, by its own count", "MB", mirror / 1e6)?)
    }
}

async fn requests(
    ways: &[Arc<Way>],
    form: Form,
    span: Duration,
    feed: &mut Feed<'_>,
) -> Result<(), Failure> {
    alternate(ways, form, REQUESTS, span, async |_| feed.put().await).await
}
