//! Discovery by DNS: which addresses become workers, how long they are kept, and how often a
//! resolver is asked.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::Mutex;

use proptest::prelude::*;
use tokio::sync::mpsc;

use super::*;
use splitrail_config::model::UrlScheme;
use splitrail_telemetry::Metrics;

const KEEP: Duration = Duration::from_secs(300);

fn config() -> DnsDiscovery {
    serde_json::from_str(
        r#"{"name": "decode.engines.svc", "port": 8000, "role": "decode", "kv_events_port": 5557}"#,
    )
    .unwrap()
}

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn tally() -> (Metrics, Tally) {
    let metrics = Metrics::new().unwrap();
    let tally = Tally::new(&metrics, "m", "s");
    (metrics, tally)
}

fn no_such_name() -> io::Error {
    io::Error::other("failed to lookup address information: Name or service not known")
}

fn no_reply() -> io::Error {
    io::Error::other("failed to lookup address information: Temporary failure in name resolution")
}

#[test]
fn a_worker_is_named_by_its_address_and_reached_there() {
    let worker = worker(&config(), "10.0.0.7".parse().unwrap());
    assert_eq!(worker.id, "decode-10.0.0.7-8000");
    assert_eq!(worker.url, "http://10.0.0.7:8000");
    assert_eq!(worker.kv_events.as_deref(), Some("tcp://10.0.0.7:5557"));
    assert_eq!((worker.kv_replay, worker.bootstrap), (None, None));
    let worker = super::worker(&config(), "fd00::7".parse().unwrap());
    assert_eq!(
        (worker.id.as_str(), worker.url.as_str()),
        ("decode-fd00::7-8000", "http://[fd00::7]:8000")
    );
    let secured = DnsDiscovery { scheme: UrlScheme::Https, ..config() };
    let worker = super::worker(&secured, "10.0.0.7".parse().unwrap());
    assert_eq!(worker.url, "https://10.0.0.7:8000");
    assert_eq!(worker.kv_events.as_deref(), Some("tcp://10.0.0.7:5557"));
}

#[test]
fn an_engine_with_two_addresses_is_one_worker() {
    let both = || ips(&["fd00::7", "10.0.0.7", "10.0.0.7", "::ffff:10.0.0.8", "0.0.0.0"]);
    assert_eq!(chosen(AddressFamily::Auto, both()), ips(&["10.0.0.7", "10.0.0.8"]));
    assert_eq!(chosen(AddressFamily::Ipv4, both()), ips(&["10.0.0.7", "10.0.0.8"]));
    assert_eq!(chosen(AddressFamily::Ipv6, both()), ips(&["fd00::7"]));
    assert_eq!(chosen(AddressFamily::Auto, ips(&["fd00::7"])), ips(&["fd00::7"]));
}

#[test]
fn a_name_without_addresses_keeps_its_last_ones_for_a_while() {
    let start = Instant::now();
    let after = |s| start + Duration::from_secs(s);
    let mut known = KnownAddresses::default();
    let some = || Lookup::Addresses(ips(&["10.0.0.7"]));
    assert_eq!(known.take(some(), start, KEEP), Some(ips(&["10.0.0.7"])));
    assert_eq!(known.take(some(), after(10), KEEP), None);
    assert_eq!(known.take(Lookup::NoSuchName, after(20), KEEP), None);
    // The address came back, so the time starts again.
    assert_eq!(known.take(some(), after(30), KEEP), None);
    assert_eq!(known.take(Lookup::NoSuchName, after(40), KEEP), None);
    assert_eq!(known.take(Lookup::NoSuchName, after(339), KEEP), None);
    assert_eq!(known.take(Lookup::NoSuchName, after(340), KEEP), Some(Vec::new()));
    assert_eq!(known.take(Lookup::NoSuchName, after(350), KEEP), None);
    assert_eq!(known.take(some(), after(360), KEEP), Some(ips(&["10.0.0.7"])));
}

proptest! {
    #[test]
    fn a_resolver_that_is_silent_never_changes_anything(
        silences in prop::collection::vec(0_u64..1_000_000, 0..20),
        known_before in any::<bool>(),
    ) {
        let start = Instant::now();
        let mut known = KnownAddresses::default();
        if known_before {
            known.take(Lookup::Addresses(ips(&["10.0.0.7"])), start, KEEP);
        }
        for s in silences {
            prop_assert_eq!(known.take(Lookup::None, start + Duration::from_secs(s), KEEP), None);
        }
        prop_assert_eq!(known.has_reported(), known_before);
    }

    #[test]
    fn ids_are_unique_and_of_the_form_that_written_ones_have(
        addresses in prop::collection::btree_set(any::<u128>(), 1..20), v4 in any::<bool>(),
    ) {
        let ip = |bits: &u128| match v4 {
            true => IpAddr::from((*bits as u32).to_be_bytes()),
            false => IpAddr::from(bits.to_be_bytes()),
        };
        let found = chosen(AddressFamily::Auto, addresses.iter().map(ip).collect());
        let mut config = config();
        config.name = "a_b.c".to_owned();
        let mut ids: Vec<_> = found.iter().map(|ip| worker(&config, *ip).id).collect();
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._:-".contains(c);
        prop_assert!(ids.iter().all(|id| id.len() <= 128 && id.chars().all(allowed)));
        ids.sort();
        ids.dedup();
        prop_assert_eq!(ids.len(), found.len());
    }
}

/// Runs with scripted answers and none after them. Returns what was found and the number of errors.
async fn scripted(
    answers: Vec<io::Result<Vec<IpAddr>>>,
    keep: Duration,
) -> (Vec<Vec<String>>, u64) {
    let (metrics, tally) = tally();
    let config =
        DnsDiscovery { empty_grace: keep, refresh_interval: Duration::from_millis(1), ..config() };
    let (sink, mut found) = mpsc::channel(16);
    let answers = Mutex::new(VecDeque::from(answers));
    let (ended, mut end) = mpsc::channel::<()>(1);
    let lookup = || {
        let answer = answers.lock().unwrap().pop_front();
        let ended = ended.clone();
        async move {
            match answer {
                Some(answer) => answer,
                None => {
                    ended.send(()).await.unwrap();
                    std::future::pending().await
                }
            }
        }
    };
    tokio::select! {
        () = follow(&config, &sink, &tally, lookup) => panic!("it follows without end"),
        _ = end.recv() => {}
    }
    let mut all = Vec::new();
    while let Ok(FoundWorkers { workers }) = found.try_recv() {
        all.push(workers.into_iter().map(|worker| worker.id).collect());
    }
    (all, metrics.discovery_errors.with_label_values(&["m", "s"]).get())
}

#[tokio::test]
async fn found_addresses_are_reported_when_they_change_and_faults_are_counted() {
    let answers = vec![
        Err(no_reply()),
        Ok(ips(&["10.0.0.8", "10.0.0.7"])),
        Ok(ips(&["10.0.0.7", "10.0.0.8"])),
        Err(no_reply()),
        Err(no_such_name()),
        Ok(ips(&["10.0.0.8"])),
    ];
    let (told, errors) = scripted(answers, KEEP).await;
    let both = vec!["decode-10.0.0.7-8000".to_owned(), "decode-10.0.0.8-8000".to_owned()];
    assert_eq!(told, [both.clone(), both[1..].to_vec()]);
    assert_eq!(errors, 3);
}

#[tokio::test]
async fn a_name_that_never_had_an_address_reports_no_workers() {
    let (told, _) = scripted(vec![Err(no_such_name()), Err(no_such_name())], KEEP).await;
    assert_eq!(told, [Vec::<String>::new()]);
    let gone = vec![Ok(ips(&["10.0.0.7"])), Err(no_such_name())];
    let (told, _) = scripted(gone, Duration::ZERO).await;
    assert_eq!(told.len(), 2);
    assert!(told[1].is_empty());
}

#[tokio::test]
async fn a_resolver_that_takes_long_is_counted_and_not_asked_again() {
    let (metrics, tally) = tally();
    let errors = metrics.discovery_errors.with_label_values(&["m", "s"]);
    // The one lookup answers once two faults have been counted.
    let lookup = async {
        while errors.get() < 2 {
            tokio::task::yield_now().await;
        }
        Ok(ips(&["10.0.0.7"]))
    };
    let answer = ask("s", &tally, &LogThrottle::default(), Duration::from_millis(1), lookup).await;
    assert_eq!(answer, Lookup::Addresses(ips(&["10.0.0.7"])));
}

#[tokio::test]
async fn the_systems_resolver_is_asked() {
    let (metrics, tally) = tally();
    let config = DnsDiscovery { name: "localhost".to_owned(), ..config() };
    let (sink, mut found) = mpsc::channel(1);
    let told = tokio::select! {
        () = run(config, sink, tally) => panic!("it follows without end"),
        told = found.recv() => told.unwrap(),
    };
    let [worker] = told.workers.as_slice() else { panic!("{told:?}") };
    assert!(worker.id.starts_with("localhost-") && worker.url.ends_with(":8000"), "{worker:?}");
    assert_eq!(metrics.discovery_workers.with_label_values(&["m", "s"]).get(), 1);
}
