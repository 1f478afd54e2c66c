//! The same as `cold_start` where shims speak over a broker: a router is killed and started
//! again, and reads all snapshots and what follows them from there.

use std::path::Path;
use std::time::{Duration, Instant};

use splitrail_sim::write_tokenizer;
use splitrail_event_plane::Broker;
use splitrail_event_plane::config::BrokerConfig;
use tokio::time::{sleep, timeout};

use super::cold_start::{BLOCKS, Filled, MOST_S, PATIENCE, SERVES_MS, Subject, WORKERS, engines};
use super::options::Options;
use super::plane::{self, Publishers, TAIL_BLOCKS};
use super::process::{Process, Resident, free_ports};
use super::report::{Report, print_line};
use super::router::yaml_nats;
use super::{Failure, block_on, broker, http};
use crate::index::measure::cpu_time;

/// Between two looks at how much the index holds: to show a thousand workers' metrics costs
/// the router some milliseconds.
const LOOK: Duration = Duration::from_millis(200);

/// Runs the workload, where there is a broker.
///
/// # Errors
/// Programs that cannot be started, or a router that does not come to hold everything.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let Some(server) = broker::nats_server() else {
        let missing = "cold_start_nats: left out, as nats-server is not installed (NATS_SERVER \
                       names it elsewhere)";
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
    let subject = Subject { program, folder, http, admin };
    let mut nats = broker::start(server, folder, at).await?;
    let (engines, _serving) = engines(WORKERS).await?;
    let all = WORKERS * (BLOCKS + TAIL_BLOCKS);
    let name = format!("cold_start_nats W={WORKERS} x {}", BLOCKS + TAIL_BLOCKS);

    let mut router = subject.start("first")?;
    let config = BrokerConfig { servers: vec![format!("nats://{at}")], login: None, tls_ca: None };
    let broker = Broker::connect(&config, "shims").await?;
    let publishers = Publishers::greet(broker.clone(), &engines, BLOCKS).await?;
    let started = Instant::now();
    publishers.publish().await?;
    let published = started.elapsed();
    let _living = publishers.live();
    fill(&subject, &mut router, all, started).await?;
    router.kill();
    drop(router);
    plane::gone(&broker.client).await?;

    let asked = publishers.asked();
    let (ours, theirs) = (cpu_time(), nats.cpu()?);
    let started = Instant::now();
    let mut router = subject.start("again")?;
    let (ready, filled) = tokio::join!(subject.serves(started), async {
        let filled = fill(&subject, &mut router, all, started).await?;
        Ok::<_, Failure>((filled, router.cpu()?, nats.cpu()? - theirs, cpu_time() - ours))
    });
    let (ready, (filled, cpu, theirs, ours)) = (ready?, filled?);
    router.check(folder)?;
    nats.check(folder)?;
    let asked = publishers.asked() - asked;

    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    report.add(&name, "/ready after", "ms", ms(ready.ready))?;
    let first = (ms(ready.answers), SERVES_MS);
    report.add_bounded(&name, "first request answered after", "ms", first)?;
    let most = (filled.most.as_secs_f64(), MOST_S);
    report.add_bounded(&name, "95 % of the blocks after", "s", most)?;
    report.add(&name, "all blocks after", "s", filled.all.as_secs_f64())?;
    report.add(&name, "all workers believed after", "s", filled.believed.as_secs_f64())?;
    report.add(&name, "router's CPU until then", "s", cpu.as_secs_f64())?;
    report.add(&name, "broker's CPU until then", "s", theirs.as_secs_f64())?;
    report.add(&name, "shims' CPU until then (this process)", "s", ours.as_secs_f64())?;
    report.add(&name, "snapshots asked for anew", "", asked as f64)?;
    report.add(&name, "router's peak RSS", "MB", router.resident_mb(Resident::Peak)?)?;
    report.add(&name, "broker's peak RSS", "MB", nats.resident_mb(Resident::Peak)?)?;
    report.add(&name, "publishing all of it took", "s", published.as_secs_f64())?;
    Ok(())
}

/// Waits until the index holds everything and all workers are believed, by the router's metrics.
async fn fill(
    subject: &Subject<'_>,
    router: &mut Process,
    all: usize,
    started: Instant,
) -> Result<Filled, Failure> {
    let (mut most, mut whole) = (None, None);
    let mut seen = (0.0, 0.0);
    let filling = async {
        loop {
            sleep(LOOK).await;
            router.check(subject.folder)?;
            let names = ["splitrail_index_blocks", "splitrail_index_events_current"];
            let Ok([held, believed]) = http::metrics(subject.admin, "/metrics", names).await else {
                continue;
            };
            seen = (held, believed);
            let after = started.elapsed();
            if held >= all as f64 * 0.95 {
                most.get_or_insert(after);
            }
            if held >= all as f64 {
                whole.get_or_insert(after);
            }
            if held > all as f64 {
                return Err(format!("the index holds {held} blocks of {all}").into());
            }
            if let (Some(most), Some(all)) = (most, whole)
                && believed >= WORKERS as f64
            {
                return Ok::<_, Failure>(Filled { most, all, believed: after });
            }
        }
    };
    match timeout(PATIENCE, filling).await {
        Ok(filled) => filled,
        Err(_) => Err(format!("the index has {seen:?} of {all} blocks and {WORKERS}").into()),
    }
}
