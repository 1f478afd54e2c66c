//! Messages of a hostile client of the broker are checked before they are used.

use splitrail_event_plane::names;
use splitrail_proto::v1;
use splitrail_tests::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::process_cluster::{ProcessCluster, ProcessKind};

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
