//! Workers from the addresses of a DNS name.
//!
//! The system's resolver is asked (`getaddrinfo`: A and AAAA, `/etc/hosts`, search domains).
//! It returns no time to live, so the name is resolved at a configured interval.

use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;
use tokio::time::{sleep, timeout};

mod known;

use super::{FoundWorkers, Tally, address, bounded};
use known::{KnownAddresses, Lookup};
use splitrail_config::model::{AddressFamily, Discovery, DnsDiscovery, WorkerConfig};
use splitrail_settings::log_throttle::LogThrottle;

/// Time after which a lookup counts as failed.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum interval between lookups until the first list has been reported.
const FIRST_INTERVAL_MAX: Duration = Duration::from_secs(1);

/// Follows a name until the task is aborted or the receiver is gone.
pub async fn run(config: DnsDiscovery, sink: Sender<FoundWorkers>, tally: Tally) {
    let (name, port) = (config.name.clone(), config.port);
    let lookup = || {
        let name = name.clone();
        async move {
            let found = tokio::net::lookup_host((name.as_str(), port)).await?;
            Ok(found.map(|address| address.ip()).collect())
        }
    };
    follow(&config, &sink, &tally, lookup).await;
}

/// Looks the name up once, and returns the workers at its addresses.
///
/// # Errors
/// DNS does not answer, or says that there is no such name.
pub async fn find_once(config: &DnsDiscovery) -> io::Result<Vec<WorkerConfig>> {
    let found = tokio::net::lookup_host((config.name.as_str(), config.port)).await?;
    let addresses = chosen(config.family, found.map(|address| address.ip()).collect());
    let source = Discovery::Dns(config.clone()).name();
    Ok(bounded(&source, addresses).into_iter().map(|address| worker(config, address)).collect())
}

/// Like `run`, with any resolver.
async fn follow<F>(
    config: &DnsDiscovery,
    sink: &Sender<FoundWorkers>,
    tally: &Tally,
    lookup: impl Fn() -> F,
) where
    F: Future<Output = io::Result<Vec<IpAddr>>>,
{
    let source = Discovery::Dns(config.clone()).name();
    let log = LogThrottle::default();
    let mut known = KnownAddresses::default();
    loop {
        let result = match ask(&source, tally, &log, LOOKUP_TIMEOUT, lookup()).await {
            Lookup::Addresses(found) => match chosen(config.family, found) {
                none if none.is_empty() => Lookup::NoSuchName,
                some => {
                    tally.succeeded();
                    Lookup::Addresses(bounded(&source, some))
                }
            },
            other => other,
        };
        if let Lookup::NoSuchName = result {
            tally.failed();
            if log.may_log() {
                tracing::warn!(source, "DNS says that the name has no address");
            }
        }
        if let Some(addresses) = known.take(result, Instant::now(), config.empty_grace) {
            let mut workers: Vec<_> =
                addresses.iter().map(|address| worker(config, *address)).collect();
            workers.sort_by(|left, right| left.id.cmp(&right.id));
            tracing::info!(source, workers = workers.len(), "found by DNS");
            tally.found(workers.len());
            if sink.send(FoundWorkers { workers }).await.is_err() {
                return;
            }
        }
        let period = if known.has_reported() {
            config.refresh_interval
        } else {
            config.refresh_interval.min(FIRST_INTERVAL_MAX)
        };
        // The random part keeps routers from querying DNS at the same time.
        sleep(period + period.mul_f64(rand::random::<f64>() / 10.0)).await;
    }
}

/// Runs one lookup to its end. There are never two at a time: `getaddrinfo` cannot be cancelled and
/// occupies a thread until it returns.
async fn ask(
    source: &str,
    tally: &Tally,
    log: &LogThrottle,
    patience: Duration,
    asked: impl Future<Output = io::Result<Vec<IpAddr>>>,
) -> Lookup {
    let mut asked = pin!(asked);
    loop {
        match timeout(patience, &mut asked).await {
            Ok(Ok(found)) => return Lookup::Addresses(found),
            Ok(Err(error)) if says_no_such_name(&error) => return Lookup::NoSuchName,
            Ok(Err(error)) => {
                tally.failed();
                if log.may_log() {
                    tracing::warn!(source, %error, "the DNS lookup failed: the known addresses are kept");
                }
                return Lookup::None;
            }
            Err(_) => {
                tally.failed();
                tracing::warn!(source, "the DNS lookup takes long: the known addresses are kept");
            }
        }
    }
}

/// Whether DNS answered that the name has no address, as opposed to no reply.
fn says_no_such_name(error: &io::Error) -> bool {
    // The standard library keeps only `gai_strerror`'s text of EAI_NONAME and EAI_NODATA: those of
    // glibc, musl and macOS. Any other text counts as no reply, which is the harmless mistake: the
    // known addresses are kept.
    const TEXTS: [&str; 5] = [
        "Name or service not known",
        "No address associated with hostname",
        "Name does not resolve",
        "Name has no usable address",
        "nodename nor servname provided",
    ];
    let text = error.to_string();
    TEXTS.iter().any(|known| text.contains(known))
}

/// The addresses of the configured family, sorted and without duplicates.
fn chosen(family: AddressFamily, found: Vec<IpAddr>) -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = found.into_iter().map(|ip| ip.to_canonical()).collect();
    found.retain(|ip| !ip.is_unspecified() && !ip.is_multicast());
    let ipv4 = match family {
        AddressFamily::Auto => found.iter().any(IpAddr::is_ipv4),
        AddressFamily::Ipv4 => true,
        AddressFamily::Ipv6 => false,
    };
    found.retain(|ip| ip.is_ipv4() == ipv4);
    found.sort_unstable();
    found.dedup();
    found
}

/// The worker at an address. Its id depends only on the configuration and the address.
fn worker(config: &DnsDiscovery, ip: IpAddr) -> WorkerConfig {
    let host = config.name.split('.').next().unwrap_or_default().replace('_', "-");
    let at = |scheme, port: Option<u16>| port.map(|port| address(scheme, ip, port));
    WorkerConfig {
        id: format!("{host}-{ip}-{}", config.port),
        role: config.role,
        url: address(config.scheme.name(), ip, config.port),
        kv_events: at("tcp", config.kv_events_port),
        kv_replay: at("tcp", config.kv_replay_port),
        bootstrap: at("http", config.bootstrap_port),
        shim: config.shim,
        supports_cache_hit_threshold: config.supports_cache_hit_threshold,
        costs: None,
        data_parallel_ranks: None,
        transfer_group: None,
        location: None,
        takes_rank_header: None,
    }
}

#[cfg(test)]
mod tests;
