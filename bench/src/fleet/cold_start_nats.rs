//! Measures the same restart as `cold_start`, with an event plane over a broker: the new router
//! reads all snapshots, and the changes after them, from the broker.

use std::path::Path;
use std::time::{Duration, Instant};

use splitrail_event_plane::Broker;
use splitrail_event_plane::config::BrokerConfig;
use splitrail_sim::write_tokenizer;
use tokio::time::{sleep, timeout};

use super::cold_start::{
    BLOCKS, FIRST_REPLY_GOAL_MS, FillTimes, MOST_BLOCKS_GOAL_S, RECOVERY_TIMEOUT,
    RestartableRouter, WORKERS, engines,
};
use super::event_plane::{self, ScriptedPublishers, TAIL_BLOCKS};
use super::options::Options;
use super::process::{Process, Resident, free_ports};
use super::report::{Report, print_line};
use super::router::yaml_nats;
use super::{Failure, block_on, broker, http};
use crate::index::measure::cpu_time;

/// Interval between two reads of the router's metrics. Each read costs the router some
/// milliseconds, because it has the metrics of a thousand workers.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Runs the workload if `nats-server` is installed; otherwise prints that it is left out.
///
/// # Errors
/// A program cannot be started, or the router's index is not complete in time.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let Some(server) = broker::nats_server() else {
        let missing = "cold_start_nats is left out: nats-server is not installed; the variable \
                       NATS_SERVER can name its path";
        return Ok(print_line(missing)?);
    };
    block_on(measure(options, &server, report))
}

async fn measure(options: &Options, server: &Path, report: &mut Report) -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    let [http, admin, at] = free_ports()?;
    let (program, folder) = (options.splitrail.as_path(), folder.path());
    write_tokenizer(folder)?;
    std::fs::write(folder.join("router.yaml"), yaml_nats([http, admin], at, 16))?;
    let restartable = RestartableRouter { program, folder, http, admin };
    let mut nats = broker::start(server, folder, at).await?;
    let (engines, _serving) = engines(WORKERS).await?;
    let all = WORKERS * (BLOCKS + TAIL_BLOCKS);
    let name = format!("cold_start_nats W={WORKERS} x {}", BLOCKS + TAIL_BLOCKS);

    let mut router = restartable.start("first")?;
    let config = BrokerConfig { servers: vec![format!("nats://{at}")], login: None, tls_ca: None };
    let broker = Broker::connect(&config, "shims").await?;
    let publishers = ScriptedPublishers::connect(broker.clone(), &engines, BLOCKS).await?;
    let started = Instant::now();
    publishers.publish().await?;
    let published = started.elapsed();
    let _heartbeats = publishers.run();
    wait_until_filled(&restartable, &mut router, all, started).await?;
    router.kill();
    drop(router);
    event_plane::wait_until_no_router(&broker.client).await?;

    let requested_before = publishers.snapshots_requested();
    let (own_cpu, broker_cpu) = (cpu_time(), nats.cpu()?);
    let started = Instant::now();
    let mut router = restartable.start("again")?;
    let (serving, filled) = tokio::join!(restartable.wait_until_serving(started), async {
        let filled = wait_until_filled(&restartable, &mut router, all, started).await?;
        Ok::<_, Failure>((filled, router.cpu()?, nats.cpu()? - broker_cpu, cpu_time() - own_cpu))
    });
    let (serving, (filled, cpu, broker_cpu, own_cpu)) = (serving?, filled?);
    router.check(folder)?;
    nats.check(folder)?;
    let requested = publishers.snapshots_requested() - requested_before;

    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    report.add(&name, "/ready after", "ms", ms(serving.ready))?;
    let first = (ms(serving.first_reply), FIRST_REPLY_GOAL_MS);
    report.add_bounded(&name, "first request answered after", "ms", first)?;
    let most = (filled.most.as_secs_f64(), MOST_BLOCKS_GOAL_S);
    report.add_bounded(&name, "95 % of the blocks after", "s", most)?;
    report.add(&name, "all blocks after", "s", filled.all.as_secs_f64())?;
    report.add(&name, "all workers believed after", "s", filled.believed.as_secs_f64())?;
    report.add(&name, "router's CPU until then", "s", cpu.as_secs_f64())?;
    report.add(&name, "broker's CPU until then", "s", broker_cpu.as_secs_f64())?;
    report.add(&name, "shims' CPU until then (this process)", "s", own_cpu.as_secs_f64())?;
    report.add(&name, "snapshots asked for anew", "", requested as f64)?;
    report.add(&name, "router's peak RSS", "MB", router.resident_mb(Resident::Peak)?)?;
    report.add(&name, "broker's peak RSS", "MB", nats.resident_mb(Resident::Peak)?)?;
    report.add(&name, "publishing all of it took", "s", published.as_secs_f64())?;
    Ok(())
}

/// Waits until the router's metrics say that the index has `all` blocks and that the events of all
/// workers are current.
async fn wait_until_filled(
    restartable: &RestartableRouter<'_>,
    router: &mut Process,
    all: usize,
    started: Instant,
) -> Result<FillTimes, Failure> {
    let (mut most, mut complete) = (None, None);
    let mut seen = (0.0, 0.0);
    let filling = async {
        loop {
            sleep(POLL_INTERVAL).await;
            router.check(restartable.folder)?;
            let names = ["splitrail_index_blocks", "splitrail_index_events_current"];
            let Ok([held, believed]) = http::metrics(restartable.admin, "/metrics", names).await
            else {
                continue;
            };
            seen = (held, believed);
            let after = started.elapsed();
            if held >= all as f64 * 0.95 {
                most.get_or_insert(after);
            }
            if held >= all as f64 {
                complete.get_or_insert(after);
            }
            if held > all as f64 {
                return Err(format!("the index holds {held} blocks of {all}").into());
            }
            if let (Some(most), Some(all)) = (most, complete)
                && believed >= WORKERS as f64
            {
                return Ok::<_, Failure>(FillTimes { most, all, believed: after });
            }
        }
    };
    match timeout(RECOVERY_TIMEOUT, filling).await {
        Ok(filled) => filled,
        Err(_) => {
            let (held, believed) = seen;
            let seen = format!(
                "{held} blocks of {all}, and current events of {believed} workers of {WORKERS}"
            );
            Err(format!("the index has {seen}").into())
        }
    }
}
