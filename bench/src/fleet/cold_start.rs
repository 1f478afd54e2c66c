//! Measures the restart of a router to which a thousand shims are attached: the time until the new
//! process serves requests, and until its index is complete again.

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
use super::scripted_shim::{ScriptedShim, SnapshotAck, attach_all};
use super::worker_cache::WorkerCache;
use super::{Failure, block_on, http};
use crate::index::measure::cpu_time;

/// Number of workers.
pub(super) const WORKERS: usize = 1000;
/// Number of KV blocks of each worker.
pub(super) const BLOCKS: usize = 16_384;
/// Goal for the first good reply: at most this many milliseconds after the start of the process.
pub(super) const FIRST_REPLY_GOAL_MS: f64 = 1000.0;
/// Goal for 95 % of the blocks: at most this many seconds after the start of the process.
pub(super) const MOST_BLOCKS_GOAL_S: f64 = 10.0;
/// Maximum time until the router serves requests, and until its index is complete.
pub(super) const RECOVERY_TIMEOUT: Duration = Duration::from_secs(300);
/// Time over which the processor time of the idle router is measured.
const IDLE_TIME: Duration = Duration::from_secs(5);
/// Interval at which the router's process is checked while no acknowledgement arrives.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between two requests to a router that does not serve yet.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Runs the workload.
///
/// # Errors
/// The router cannot be started, or its index is not complete in time.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    block_on(measure(options, report))
}

/// A router that can be started several times with the same configuration and addresses.
pub(super) struct RestartableRouter<'a> {
    /// The router's program.
    pub(super) program: &'a Path,
    /// The folder of `router.yaml` and of the logs.
    pub(super) folder: &'a Path,
    /// The address of the HTTP listener.
    pub(super) http: SocketAddr,
    /// The address of the admin listener.
    pub(super) admin: SocketAddr,
}

async fn measure(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    let [http, admin, fleet] = free_ports()?;
    let (program, folder) = (options.splitrail.as_path(), folder.path());
    write_tokenizer(folder)?;
    std::fs::write(folder.join("router.yaml"), yaml([http, admin, fleet], 16))?;
    let restartable = RestartableRouter { program, folder, http, admin };
    let (engines, _serving) = engines(WORKERS).await?;
    let (acks, mut received) = mpsc::channel(WORKERS);
    let shims = engines.iter().zip(0..).map(|(&engine, worker)| ScriptedShim {
        router: fleet,
        engine,
        cache: WorkerCache { worker, blocks: BLOCKS },
        acks: acks.clone(),
    });
    let mut router = restartable.start("first")?;
    let attached = attach_all(shims);
    let mut previous = String::new();
    wait_until_filled((&mut router, folder), &mut received, &mut previous, Instant::now()).await?;
    router.kill();
    drop(router);

    let own_cpu = cpu_time();
    let started = Instant::now();
    let mut router = restartable.start("again")?;
    let (serving, filled) = tokio::join!(restartable.wait_until_serving(started), async {
        let filled =
            wait_until_filled((&mut router, folder), &mut received, &mut previous, started).await?;
        Ok::<_, Failure>((filled, router.cpu()?, cpu_time() - own_cpu))
    });
    let (serving, (filled, cpu, own_cpu)) = (serving?, filled?);
    router.check(folder)?;
    let held = http::metric(admin, "/metrics", "splitrail_index_blocks").await?;
    if held != (WORKERS * BLOCKS) as f64 {
        return Err(format!("the index holds {held} blocks of {}", WORKERS * BLOCKS).into());
    }
    let name = format!("cold_start W={WORKERS} x {BLOCKS}");
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    report.add(&name, "accepts connections after", "ms", ms(serving.healthy))?;
    report.add(&name, "/ready after", "ms", ms(serving.ready))?;
    let first = (ms(serving.first_reply), FIRST_REPLY_GOAL_MS);
    report.add_bounded(&name, "first request answered after", "ms", first)?;
    let most = (filled.most.as_secs_f64(), MOST_BLOCKS_GOAL_S);
    report.add_bounded(&name, "95 % of the blocks after", "s", most)?;
    report.add(&name, "all blocks after", "s", filled.all.as_secs_f64())?;
    report.add(&name, "router's CPU until then", "s", cpu.as_secs_f64())?;
    report.add(&name, "shims' CPU until then (this process)", "s", own_cpu.as_secs_f64())?;
    let peak = router.resident_mb(Resident::Peak)?;
    report.add(&name, "router's peak RSS", "MB", peak)?;
    report.add(&name, "router's RSS per block", "bytes", peak * 1e6 / held)?;
    let before = router.cpu()?;
    sleep(IDLE_TIME).await;
    let idle = (router.cpu()? - before).as_secs_f64() / IDLE_TIME.as_secs_f64() * 100.0;
    report.add(&name, "router's CPU, attached and idle", "% of a core", idle)?;
    drop(attached);
    Ok(())
}

/// Times from the start of a router's process.
pub(super) struct FillTimes {
    /// Until the index has 95 % of the blocks.
    pub(super) most: Duration,
    /// Until the index has all blocks.
    pub(super) all: Duration,
    /// Until the index has all blocks and the events of all workers count as current.
    pub(super) believed: Duration,
}

/// Waits until a router has acknowledged all blocks of all workers. Acknowledgements of the process
/// `previous` are ignored; afterwards `previous` is the id of the new process.
async fn wait_until_filled(
    (router, folder): (&mut Process, &Path),
    acks: &mut mpsc::Receiver<SnapshotAck>,
    previous: &mut String,
    started: Instant,
) -> Result<FillTimes, Failure> {
    let mut current = String::new();
    let (mut blocks, mut most) = (0, None);
    let all = WORKERS * BLOCKS;
    let filling = async {
        loop {
            let Ok(ack) = timeout(CHECK_INTERVAL, acks.recv()).await else {
                router.check(folder)?;
                continue;
            };
            let ack = ack.ok_or("no shim is left")?;
            if ack.router_id == *previous {
                continue;
            }
            current = ack.router_id;
            blocks += ack.blocks;
            let after = ack.at - started;
            if blocks >= all / 20 * 19 {
                most.get_or_insert(after);
            }
            if blocks >= all {
                return Ok::<_, Failure>(after);
            }
        }
    };
    let after = timeout(RECOVERY_TIMEOUT, filling).await;
    let all = after.map_err(|_| "the index is not complete in time")??;
    *previous = current;
    // The events of a worker are current as soon as its snapshot is acknowledged.
    Ok(FillTimes { most: most.unwrap_or(all), all, believed: all })
}

/// Times from the start of a router's process until a path is answered with status 200.
pub(super) struct ServingTimes {
    /// `/health`.
    healthy: Duration,
    /// `/ready`.
    pub(super) ready: Duration,
    /// `/v1/completions`.
    pub(super) first_reply: Duration,
}

impl RestartableRouter<'_> {
    /// Starts a process, whose log is `NAME.log`.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(super) fn start(&self, name: &str) -> Result<Process, Failure> {
        let config = self.folder.join("router.yaml").display().to_string();
        Process::start(self.program, name, self.folder, &["serve", "--config", &config], "warn")
    }

    /// Waits until the router serves requests.
    ///
    /// # Errors
    /// The router does not serve requests in time.
    pub(super) async fn wait_until_serving(
        &self,
        started: Instant,
    ) -> Result<ServingTimes, Failure> {
        let healthy = self.wait_until_ok(started, "GET", "/health", "").await?;
        let body = r#"{"model": "sim", "prompt": "Where are the maps?", "max_tokens": 1}"#;
        let (first_reply, ready) = tokio::join!(
            self.wait_until_ok(started, "POST", "/v1/completions", body),
            self.wait_until_ok(started, "GET", "/ready", ""),
        );
        Ok(ServingTimes { healthy, ready: ready?, first_reply: first_reply? })
    }

    /// Repeats a request until its reply has status 200. Returns the time since `started`.
    async fn wait_until_ok(
        &self,
        started: Instant,
        method: &str,
        path: &str,
        body: &str,
    ) -> Result<Duration, Failure> {
        while started.elapsed() < RECOVERY_TIMEOUT {
            if let Ok((200, _)) = http::request(self.http, method, path, body).await {
                return Ok(started.elapsed());
            }
            sleep(POLL_INTERVAL).await;
        }
        Err(format!("{path} is not answered with 200 in time").into())
    }
}

/// Starts engines that reply at once, each on its own port, because each worker needs its own URL.
///
/// # Errors
/// No port is free.
pub(super) async fn engines(count: usize) -> Result<(Vec<SocketAddr>, JoinSet<()>), Failure> {
    let reply = r#"{"id": "c", "object": "text_completion", "created": 0, "model": "sim",
        "choices": [{"index": 0, "text": "a", "finish_reason": "length", "logprobs": null}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}}"#;
    let json = [("content-type", "application/json")];
    let routes = Router::new().route("/v1/completions", post(async move || (json, reply)));
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
