//! A router is killed and started again under a whole fleet of shims: how long until it
//! serves, and until its index is what it was.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::post;
use splitrail_sim::write_tokenizer;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::options::Options;
use super::process::{Process, Resident, free_ports};
use super::report::Report;
use super::router::yaml;
use super::script::{Shim, Whole, attach_all};
use super::shape::Cache;
use super::{Failure, block_on, http};
use crate::index::measure::cpu_time;

/// Workers, and KV blocks of each.
pub(super) const WORKERS: usize = 1000;
pub(super) const BLOCKS: usize = 16_384;
/// The first request that is answered, and 95 % of the blocks, may take so long.
pub(super) const SERVES_MS: f64 = 1000.0;
pub(super) const MOST_S: f64 = 10.0;
/// How long all blocks may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);
/// Over which idle time is measured.
const IDLE: Duration = Duration::from_secs(5);
/// Between two looks at whether the router is there, and at whether it serves.
const LOOK: Duration = Duration::from_secs(1);
const GLANCE: Duration = Duration::from_millis(10);

/// Runs the workload.
///
/// # Errors
/// A router that cannot be started, or does not come to hold everything.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    block_on(measure(options, report))
}

/// A router's process, and where it is.
pub(super) struct Subject<'a> {
    /// What runs.
    pub(super) program: &'a Path,
    /// Where its configuration and its log lie.
    pub(super) folder: &'a Path,
    /// Where it serves.
    pub(super) http: SocketAddr,
    /// Where it shows its metrics.
    pub(super) admin: SocketAddr,
}

async fn measure(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    let [http, admin, fleet] = free_ports()?;
    let (program, folder) = (options.splitrail.as_path(), folder.path());
    write_tokenizer(folder)?;
    std::fs::write(folder.join("router.yaml"), yaml([http, admin, fleet], 16))?;
    let subject = Subject { program, folder, http, admin };
    let (engines, _serving) = engines(WORKERS).await?;
    let (wholes, mut seen) = mpsc::channel(WORKERS);
    let shims = engines.iter().zip(0..).map(|(&engine, worker)| Shim {
        router: fleet,
        engine,
        cache: Cache { worker, blocks: BLOCKS },
        wholes: wholes.clone(),
    });
    let mut router = subject.start("first")?;
    let attached = attach_all(shims);
    let mut former = String::new();
    fill((&mut router, folder), &mut seen, &mut former, Instant::now()).await?;
    router.kill();
    drop(router);

    let ours = cpu_time();
    let started = Instant::now();
    let mut router = subject.start("again")?;
    let (ready, filled) = tokio::join!(subject.serves(started), async {
        let filled = fill((&mut router, folder), &mut seen, &mut former, started).await?;
        Ok::<_, Failure>((filled, router.cpu()?, cpu_time() - ours))
    });
    let (ready, (filled, cpu, ours)) = (ready?, filled?);
    router.check(folder)?;
    let held = http::metric(admin, "/metrics", "splitrail_index_blocks").await?;
    if held != (WORKERS * BLOCKS) as f64 {
        return Err(format!("the index holds {held} blocks of {}", WORKERS * BLOCKS).into());
    }
    let name = format!("cold_start W={WORKERS} x {BLOCKS}");
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    report.add(&name, "accepts connections after", "ms", ms(ready.accepts))?;
    report.add(&name, "/ready after", "ms", ms(ready.ready))?;
    let first = (ms(ready.answers), SERVES_MS);
    report.add_bounded(&name, "first request answered after", "ms", first)?;
    let most = (filled.most.as_secs_f64(), MOST_S);
    report.add_bounded(&name, "95 % of the blocks after", "s", most)?;
    report.add(&name, "all blocks after", "s", filled.all.as_secs_f64())?;
    report.add(&name, "router's CPU until then", "s", cpu.as_secs_f64())?;
    report.add(&name, "shims' CPU until then (this process)", "s", ours.as_secs_f64())?;
    let peak = router.resident_mb(Resident::Peak)?;
    report.add(&name, "router's peak RSS", "MB", peak)?;
    report.add(&name, "router's RSS per block", "bytes", peak * 1e6 / held)?;
    let before = router.cpu()?;
    sleep(IDLE).await;
    let idle = (router.cpu()? - before).as_secs_f64() / IDLE.as_secs_f64() * 100.0;
    report.add(&name, "router's CPU, attached and idle", "% of a core", idle)?;
    drop(attached);
    Ok(())
}

/// Until a router has all blocks.
pub(super) struct Filled {
    /// 95 % of them.
    pub(super) most: Duration,
    /// All of them.
    pub(super) all: Duration,
    /// All, and all workers believed.
    pub(super) believed: Duration,
}

/// Waits until a router other than the former has everything.
async fn fill(
    (router, folder): (&mut Process, &Path),
    seen: &mut mpsc::Receiver<Whole>,
    former: &mut String,
    started: Instant,
) -> Result<Filled, Failure> {
    let mut present = String::new();
    let (mut blocks, mut most) = (0, None);
    let all = WORKERS * BLOCKS;
    let filling = async {
        loop {
            let Ok(whole) = timeout(LOOK, seen.recv()).await else {
                router.check(folder)?;
                continue;
            };
            let whole = whole.ok_or("no shim is left")?;
            if whole.router_id == *former {
                continue;
            }
            present = whole.router_id;
            blocks += whole.blocks;
            let after = whole.at - started;
            if blocks >= all / 20 * 19 {
                most.get_or_insert(after);
            }
            if blocks >= all {
                return Ok::<_, Failure>(after);
            }
        }
    };
    let after = timeout(PATIENCE, filling).await;
    let all = after.map_err(|_| "the index does not fill in time")??;
    *former = present;
    // What is acknowledged is believed.
    Ok(Filled { most: most.unwrap_or(all), all, believed: all })
}

/// From the start of a process.
pub(super) struct Serves {
    accepts: Duration,
    /// Until `/ready` is good.
    pub(super) ready: Duration,
    /// Until a request is answered.
    pub(super) answers: Duration,
}

impl Subject<'_> {
    /// Starts it.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(super) fn start(&self, name: &str) -> Result<Process, Failure> {
        let config = self.folder.join("router.yaml").display().to_string();
        Process::start(self.program, name, self.folder, &["serve", "--config", &config], "warn")
    }

    /// Waits until it serves.
    ///
    /// # Errors
    /// If it never does.
    pub(super) async fn serves(&self, started: Instant) -> Result<Serves, Failure> {
        let accepts = self.until(started, "GET", "/health", "").await?;
        let body = r#"{"model": "sim", "prompt": "Where are the maps?", "max_tokens": 1}"#;
        let (answers, ready) = tokio::join!(
            self.until(started, "POST", "/v1/completions", body),
            self.until(started, "GET", "/ready", ""),
        );
        Ok(Serves { accepts, ready: ready?, answers: answers? })
    }

    /// Asks until the answer is good.
    async fn until(
        &self,
        started: Instant,
        method: &str,
        path: &str,
        body: &str,
    ) -> Result<Duration, Failure> {
        while started.elapsed() < PATIENCE {
            if let Ok((200, _)) = http::ask(self.http, method, path, body).await {
                return Ok(started.elapsed());
            }
            sleep(GLANCE).await;
        }
        Err(format!("{path} does not get good").into())
    }
}

/// Engines that answer at once, each at an address of its own: no two workers share one.
///
/// # Errors
/// Ports that cannot be had.
pub(super) async fn engines(count: usize) -> Result<(Vec<SocketAddr>, JoinSet<()>), Failure> {
    let answer = r#"{"id": "c", "object": "text_completion", "created": 0, "model": "sim",
        "choices": [{"index": 0, "text": "a", "finish_reason": "length", "logprobs": null}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}}"#;
    let json = [("content-type", "application/json")];
    let routes = Router::new().route("/v1/completions", post(async move || (json, answer)));
    let (mut addresses, mut serving) = (Vec::new(), JoinSet::new());
    for _ in 0..count {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        addresses.push(listener.local_addr()?);
        let routes = routes.clone();
        serving.spawn(async move {
            let _never = axum::serve(listener, routes).await;
        });
    }
    Ok((addresses, serving))
}
