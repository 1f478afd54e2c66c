//! Messages of a hostile client of the broker are checked before they are used.

use prost::Message as _;
use splitrail_event_plane::names;
use splitrail_proto::v1;
use splitrail_tests::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::process_cluster::{Plan, ProcessCluster, ProcessKind};

use super::support::{metric, plan, report, say, some_traffic, stranger, terms};

/// Waits until every router has counted something.
async fn counted(stand: &ProcessCluster, name: &str, labels: &[(&str, &str)], at_least: f64) {
    for router in stand.of(ProcessKind::Router) {
        eventually(&format!("{name} {labels:?} is counted"), async || {
            metric(stand, router, name, labels).await >= at_least
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_the_broker_cannot_report_for_another_worker() {
    let stand = ProcessCluster::start(plan()).await;
    some_traffic(&stand, 12).await;
    stand.true_picture("requests").await;
    let client = stranger(&stand).await;
    let terms = terms(&client).await;
    let refused = "splitrail_event_plane_refused_messages_total";

    // Of another worker than the subject's.
    let spoofed = report("d0", "http://127.0.0.1:9", terms.clone());
    say(&client, names::load("sim", "p0"), spoofed).await;
    let events = v1::PlaneEvents { worker_id: "d0".to_owned(), ..v1::PlaneEvents::default() };
    say(&client, names::kv("sim", "p0"), events).await;
    counted(&stand, refused, &[("reason", "spoofed")], 2.0).await;

    // What is no message at all.
    client.publish(names::kv("sim", "p0"), vec![0xff; 40].into()).await.unwrap();
    client.publish(names::load("sim", "p0"), vec![0xff; 40].into()).await.unwrap();
    counted(&stand, refused, &[("reason", "nonsense")], 2.0).await;

    // From elsewhere, in the place of a shim that is there.
    let elsewhere = report("p0", "http://127.0.0.1:9", terms.clone());
    say(&client, names::load("sim", "p0"), elsewhere).await;
    counted(&stand, refused, &[("reason", "occupied")], 1.0).await;

    // Outside of the networks in which workers may be.
    let outside = report("far", "http://203.0.113.9:8000", terms.clone());
    say(&client, names::load("sim", "far"), outside).await;
    let attach = "splitrail_attach_calls_total";
    counted(&stand, attach, &[("result", "permission_denied")], 1.0).await;

    // Hashed in another way.
    let otherwise = v1::Welcome { hash_seed: terms.hash_seed + 1, ..terms };
    let otherwise = report("other", "http://127.0.0.1:9", otherwise);
    say(&client, names::load("sim", "other"), otherwise).await;
    counted(&stand, refused, &[("reason", "terms")], 1.0).await;

    for router in stand.of(ProcessKind::Router) {
        let shown = Client::new(stand.posts[router].admin).get("/admin/workers").await.json();
        let workers = shown["workers"].as_array().unwrap();
        let mut ids: Vec<_> = workers.iter().map(|worker| worker["id"].as_str().unwrap()).collect();
        ids.sort_unstable();
        assert_eq!(ids, ["d0", "p0"]);
    }
    stand.true_picture("nonsense was said").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_process_is_not_believed_while_a_worker_speaks() {
    let stand = ProcessCluster::start(plan()).await;
    some_traffic(&stand, 5).await;
    stand.true_picture("requests").await;
    let client = stranger(&stand).await;
    let terms = terms(&client).await;
    let admin = |router: usize| Client::new(stand.posts[router].admin);
    let shown = admin(stand.of(ProcessKind::Router)[0]).get("/admin/workers").await.json();
    let workers = shown["workers"].as_array().unwrap().clone();
    let p0 = workers.iter().find(|worker| worker["id"] == "p0").unwrap();
    // At the worker's own address: it is down, and stops.
    let mut thief = report("p0", p0["url"].as_str().unwrap(), terms);
    (thief.load, thief.bye) = (Some(v1::Load::default()), Some(v1::Bye::default()));
    for _ in 0..5 {
        say(&client, names::load("sim", "p0"), thief.clone()).await;
    }
    counted(&stand, "splitrail_event_plane_refused_messages_total", &[("reason", "occupied")], 5.0)
        .await;
    for router in stand.of(ProcessKind::Router) {
        let shown = admin(router).get("/admin/workers").await.json();
        for worker in shown["workers"].as_array().unwrap() {
            assert_eq!(worker["state"], "serving", "{worker}");
        }
    }
    stand.true_picture("another process spoke").await;
}

/// What the messages of a hostile client may make a router grow by.
const GROWTH_MAX_KIB: u64 = 64 << 10;

/// Publishes these messages, waits until a router has counted them all, and checks how much its
/// memory grew by them.
async fn cost_little(stand: &ProcessCluster, messages: Vec<(String, Vec<u8>)>) {
    let router = stand.of(ProcessKind::Router)[0];
    let pid = stand.posts[router].pid();
    let counted = async || {
        let refused = "splitrail_event_plane_refused_messages_total";
        metric(stand, router, "splitrail_event_plane_messages_total", &[("kind", "events")]).await
            + metric(stand, router, refused, &[("reason", "nonsense")]).await
    };
    let client = stranger(stand).await;
    let (before, counted_before) = (memory(pid), counted().await);
    reset_peak(pid);
    // A few at a time: what is still on its way to the router is not what it keeps.
    let mut expected = counted_before;
    for few in messages.chunks(10) {
        for (subject, message) in few {
            client.publish(subject.clone(), message.clone().into()).await.unwrap();
            client.flush().await.unwrap();
        }
        expected += few.len() as f64;
        eventually("all is counted", async || counted().await >= expected).await;
    }
    let grown_kib = memory(pid).peak_kib.saturating_sub(before.now_kib);
    assert!(grown_kib < GROWTH_MAX_KIB, "{grown_kib} KiB");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_that_wait_take_no_more_memory_than_on_the_wire() {
    let stand = ProcessCluster::start(Plan { routers: 1, ..plan() }).await;
    let cleared = Some(v1::change::Change::Cleared(v1::Cleared {}));
    // Of workers that no shim reports, so that they wait: some bytes of each change are many in
    // memory. There are too many in those of the first kind.
    for (id, change, count) in [("empty", None, 500_000), ("cleared", cleared, 90_000)] {
        let changes = vec![v1::Change { change }; count];
        let events = vec![v1::Events { sequence: 1, changes, ..v1::Events::default() }];
        let worker_id = id.to_owned();
        let message = v1::PlaneEvents { worker_id, events, ..v1::PlaneEvents::default() };
        let message = (names::kv("sim", id), message.encode_to_vec());
        cost_little(&stand, vec![message; 16]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_reports_are_not_kept() {
    let stand = ProcessCluster::start(Plan { routers: 1, ..plan() }).await;
    let terms = terms(&stranger(&stand).await).await;
    let message = |number: usize| {
        let id = format!("far-{number}");
        let mut report = report(&id, "http://203.0.113.9:8000", terms.clone());
        report.bye = Some(v1::Bye { reason: "x".repeat(900_000), grace_ms: 0 });
        (names::load("sim", &id), report.encode_to_vec())
    };
    cost_little(&stand, (0..150).map(message).collect()).await;
}
