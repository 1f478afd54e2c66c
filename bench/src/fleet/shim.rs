//! Measures a shim with a large mirror: its processor time, its memory, and the latency that it
//! adds to a request. If nginx is installed, nginx forwards the same requests in the same run.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{interval, sleep};

use super::engine::{BLOCK_SIZE, Engine};
use super::events::Chain;
use super::nginx::Nginx;
use super::options::Options;
use super::process::{Process, Resident};
use super::report::{Report, print_line};
use super::router::Router;
use super::shim_process::ShimProcess;
use super::traffic::{ReplyForm, Route, alternate};
use super::{Failure, block_on};
use crate::index::measure::Percentiles;

/// Number of prompts that the engine holds from the start.
const CHAINS: u64 = 1954;
/// Number of blocks of each of these prompts.
const CHAIN_BLOCKS: usize = 512;
/// Number of requests per second over each route, and of KV events per second.
const REQUESTS_PER_S: u32 = 100;
/// Number of blocks that each KV event stores and, when the cache is full, removes.
const REQUEST_BLOCKS: usize = 8;
/// Number of prompts that are stored before the first of them is removed.
const KEPT_PROMPTS: u64 = 100;
/// Time before a measurement, in which connections are opened.
const WARM_UP: Duration = Duration::from_secs(3);
/// Time over which the processor time without requests is measured.
const IDLE_TIME: Duration = Duration::from_secs(5);
/// Goal for the shim's processor time, in percent of a core.
const CPU_GOAL_PERCENT: f64 = 2.0;
/// Goal for the shim's resident memory, in MB (10^6 bytes).
const RESIDENT_GOAL_MB: f64 = 100.0;

/// Runs the workload.
///
/// # Errors
/// The shim cannot be started, or its mirror is not complete in time.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    block_on(measure(options, report))
}

async fn measure(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let span = Duration::from_secs(if options.quick { 20 } else { 60 });
    let folder = tempfile::tempdir()?;
    let engine = Engine::start(CHAINS, CHAIN_BLOCKS).await?;
    let router = Router::start(BLOCK_SIZE).await?;
    let mut shim = ShimProcess::start(options, folder.path(), &engine, &[&router])?;
    let blocks = CHAINS as usize * CHAIN_BLOCKS;
    shim.wait_until_synchronised(folder.path(), blocks, 1).await?;
    let name = format!("shim blocks={blocks}");
    let nginx = Nginx::start(folder.path(), engine.http).await?;
    if nginx.is_none() {
        print_line("nginx is not installed: the shim is compared with no peer")?;
    }
    sleep(WARM_UP).await;
    let idle = percent(&shim.process, sleep(IDLE_TIME)).await?;
    report.add(&name, "CPU without requests", "% of a core", idle)?;

    let mut feed = EventFeed { engine: &engine, next: CHAINS };
    // From then on, each event also removes a prompt.
    feed.run(WARM_UP).await?;
    let events_percent = percent(&shim.process, feed.run(span / 4)).await?;
    report.add(&name, "CPU at 100 KV events/s, no requests", "% of a core", events_percent)?;

    let folder = folder.path();
    let mut setup = Setup { name, span, folder, shim, nginx, feed, events_percent };
    setup.measure(ReplyForm::Whole, report).await?;
    setup.measure(ReplyForm::Streamed, report).await?;
    setup.memory(report).await
}

/// The processor time of a process while a future runs, in percent of a core.
async fn percent<T>(process: &Process, work: impl Future<Output = T>) -> Result<f64, Failure> {
    let (before, start) = (process.cpu()?, Instant::now());
    work.await;
    let used = process.cpu()? - before;
    Ok(used.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0)
}

/// Publishes KV events as requests would cause them.
struct EventFeed<'a> {
    engine: &'a Engine,
    /// The number of the next prompt that is stored.
    next: u64,
}

impl EventFeed<'_> {
    async fn publish(&mut self) -> Result<(), Failure> {
        let chain = |number| Chain::new(number, REQUEST_BLOCKS);
        let is_full = self.next >= CHAINS + KEPT_PROMPTS;
        let removed = is_full.then(|| chain(self.next - KEPT_PROMPTS));
        self.engine.publish(&chain(self.next), removed.as_ref()).await?;
        self.next += 1;
        Ok(())
    }

    async fn run(&mut self, span: Duration) -> Result<(), Failure> {
        let (start, mut tick) = (Instant::now(), interval(Duration::from_secs(1) / REQUESTS_PER_S));
        while start.elapsed() < span {
            tick.tick().await;
            self.publish().await?;
        }
        Ok(())
    }
}

/// The processes that are measured.
struct Setup<'a> {
    /// The workload of the rows.
    name: String,
    /// How long each form of replies is measured.
    span: Duration,
    folder: &'a Path,
    shim: ShimProcess,
    nginx: Option<Nginx>,
    feed: EventFeed<'a>,
    /// The shim's processor time for KV events without requests, in percent of a core.
    events_percent: f64,
}

/// The measures of the rows of one form of replies.
struct Measures {
    rate: &'static str,
    percent: &'static str,
    per_request: &'static str,
    /// Processor time per request, less that of the KV events.
    without_events: &'static str,
    failed: &'static str,
    first: &'static str,
    whole: &'static str,
}

const WHOLE: Measures = Measures {
    rate: "requests, answers not streamed",
    percent: "not streamed: CPU",
    per_request: "not streamed: CPU per request",
    without_events: "not streamed: the same without KV events",
    failed: "not streamed: failed, all routes",
    first: "not streamed: added until the first byte, p50",
    whole: "not streamed: added until the end, p50",
};
const STREAMED: Measures = Measures {
    rate: "requests, streams of 16 chunks",
    percent: "streams: CPU",
    per_request: "streams: CPU per request",
    without_events: "streams: the same without KV events",
    failed: "streams: failed, all routes",
    first: "streams: added until the first chunk, p50",
    whole: "streams: added until the end, p50",
};

impl Setup<'_> {
    async fn measure(&mut self, form: ReplyForm, report: &mut Report) -> Result<(), Failure> {
        let name = self.name.as_str();
        let measures = if form == ReplyForm::Streamed { &STREAMED } else { &WHOLE };
        let mut routes = vec![Route::to(self.feed.engine.http), Route::to(self.shim.address)];
        routes.extend(self.nginx.as_ref().map(|nginx| Route::to(nginx.address)));
        requests(&routes, form, WARM_UP, &mut self.feed).await?;
        routes.iter().for_each(|route| drop(route.take()));
        let nginx_cpu = || self.nginx.as_ref().map(|nginx| nginx.process.cpu()).transpose();
        let (before, nginx_before) = (self.shim.process.cpu()?, nginx_cpu()?);
        let start = Instant::now();
        requests(&routes, form, self.span, &mut self.feed).await?;
        let (used, took) = (self.shim.process.cpu()? - before, start.elapsed());
        let nginx_after = nginx_cpu()?;
        self.shim.process.check(self.folder)?;

        let mut times: Vec<_> = routes.iter().map(|route| route.take()).collect();
        let failed: u64 = times.iter().map(|times| times.failed).sum();
        let per_request = |used: Duration, route: usize| {
            used.as_secs_f64() * 1e6 / times[route].whole.len().max(1) as f64
        };
        let rate = times[1].whole.len() as f64 / took.as_secs_f64();
        report.add(name, measures.rate, "1/s", rate)?;
        let percent = used.as_secs_f64() / took.as_secs_f64() * 100.0;
        report.add_bounded(name, measures.percent, "% of a core", (percent, CPU_GOAL_PERCENT))?;
        report.add(name, measures.per_request, "us", per_request(used, 1))?;
        let events = took.mul_f64(self.events_percent / 100.0);
        let without_events = per_request(used.saturating_sub(events), 1);
        match nginx_before.zip(nginx_after) {
            Some((before, after)) => {
                let peer = ("nginx", per_request(after - before, 2));
                report.add_beside(name, measures.without_events, "us", without_events, peer)?;
            }
            None => report.add(name, measures.without_events, "us", without_events)?,
        }
        report.add(name, measures.failed, "", failed as f64)?;
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
        added(measures.first, direct.0, ours.0, theirs.map(|theirs| theirs.0))?;
        added(measures.whole, direct.1, ours.1, theirs.map(|theirs| theirs.1))?;
        Ok(())
    }

    async fn memory(&self, report: &mut Report) -> Result<(), Failure> {
        let (name, process) = (self.name.as_str(), &self.shim.process);
        let now = process.resident_mb(Resident::Now)?;
        report.add_bounded(name, "RSS", "MB", (now, RESIDENT_GOAL_MB))?;
        let peak = process.resident_mb(Resident::Peak)?;
        report.add(name, "peak RSS, the first copy for a router included", "MB", peak)?;
        let mirror = self.shim.metric("splitrail_shim_mirror_bytes").await?;
        Ok(report.add(name, "mirror, by its own count", "MB", mirror / 1e6)?)
    }
}

/// Sends requests over all routes, with one KV event per round.
async fn requests(
    routes: &[Arc<Route>],
    form: ReplyForm,
    span: Duration,
    feed: &mut EventFeed<'_>,
) -> Result<(), Failure> {
    alternate(routes, form, REQUESTS_PER_S, span, async || feed.publish().await).await
}
