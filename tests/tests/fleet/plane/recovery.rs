//! After any loss of messages, the index becomes right again.

use splitrail_event_plane::{async_nats::jetstream, names};
use splitrail_tests::Client;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::process_cluster::{ProcessCluster, ProcessKind};

use super::support::{metric, plan, some_traffic, stranger};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_restarts_has_the_picture_from_snapshots_and_the_tail() {
    let mut stand = ProcessCluster::start(plan()).await;
    some_traffic(&stand, 5).await;
    let router = stand.place(ProcessKind::Router, "r0");
    stand.kill(router);
    stand.run(router).await;
    stand.true_picture("a router has restarted").await;
    some_traffic(&stand, 6).await;
    stand.true_picture("it serves").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_restarts_loses_nothing() {
    let mut stand = ProcessCluster::start(plan()).await;
    some_traffic(&stand, 7).await;
    let broker = stand.place(ProcessKind::Broker, "nats");
    stand.kill(broker);
    // Served, and told of by shims who cannot tell it now.
    some_traffic(&stand, 8).await;
    stand.run(broker).await;
    stand.true_picture("the broker has restarted").await;
    some_traffic(&stand, 9).await;
    stand.true_picture("it goes on").await;
}

/// An old number of pending messages would look like the present one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pending_messages_of_a_broker_that_is_away_are_not_shown() {
    let mut stand = ProcessCluster::start(plan()).await;
    let router = stand.place(ProcessKind::Router, "r0");
    let admin = Client::new(stand.posts[router].admin);
    let are_shown = async || {
        let text = admin.get("/metrics").await.text();
        text.contains("splitrail_event_plane_pending_messages{")
    };
    eventually("the stream is followed", are_shown).await;
    let broker = stand.place(ProcessKind::Broker, "nats");
    stand.kill(broker);
    eventually("the stream is not followed", async || !are_shown().await).await;
    stand.run(broker).await;
    eventually("the stream is followed again", are_shown).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_are_shown_behind_the_broker_also_while_it_is_away() {
    let mut stand = ProcessCluster::start(plan()).await;
    let router = stand.place(ProcessKind::Router, "r0");
    let admin = Client::new(stand.posts[router].admin);
    let through_broker = async |cut_off: bool| {
        let shown = admin.get("/admin/workers").await.json();
        let is_it = |worker: &serde_json::Value| {
            worker["events_origin"] == "broker" && worker["events_cut_off"] == cut_off
        };
        let workers = shown["workers"].as_array().unwrap();
        workers.len() == 2 && workers.iter().all(is_it)
    };
    let current = async |labels: &[(&str, &str)]| {
        let text = admin.get("/metrics").await.text();
        metric_in(&text, "splitrail_index_events_current", labels)
    };
    let origin = [("origin", "broker")];
    eventually("the events of both come through the broker", async || {
        through_broker(false).await && current(&origin).await == 2.0 && current(&[]).await == 2.0
    })
    .await;
    stand.kill(stand.place(ProcessKind::Broker, "nats"));
    eventually("they are cut off", async || {
        through_broker(true).await && current(&origin).await == 0.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_has_forgotten_everything_gets_it_again() {
    let mut stand = ProcessCluster::start(plan()).await;
    some_traffic(&stand, 10).await;
    let broker = stand.place(ProcessKind::Broker, "nats");
    stand.kill(broker);
    stand.lose_broker_store();
    stand.run(broker).await;
    some_traffic(&stand, 11).await;
    stand.true_picture("the broker is another").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_too_slow_for_the_stream_gets_a_snapshot() {
    let mut stand = ProcessCluster::start(plan()).await;
    let router = stand.place(ProcessKind::Router, "r0");
    let resyncs = metric(&stand, router, "splitrail_event_plane_snapshots_total", &[]).await;
    stand.pause(router);
    // What the broker has sent to it already is not in its hands any more either.
    let broker = stand.place(ProcessKind::Broker, "nats");
    stand.kill(broker);
    stand.run(broker).await;
    let context = jetstream::new(stranger(&stand).await);
    let mut stream = context.get_stream(names::stream("sim")).await.unwrap();
    let before = stream.info().await.unwrap().state.last_sequence;
    let others = stand.of(ProcessKind::Router).into_iter().filter(|at| *at != router);
    for at in others {
        let client = Client::new(stand.posts[at].http);
        for salt in ["a", "b", "c"] {
            let body = splitrail_tests::trial::chat(&splitrail_tests::trial::prompt(80, salt));
            assert_eq!(client.post(splitrail_tests::trial::CHAT, &body).await.status, 200);
        }
    }
    eventually("the shims have published", async || {
        stream.info().await.unwrap().state.last_sequence > before
    })
    .await;
    // What it has not read is gone, as if it were too old.
    stream.purge().await.unwrap();
    stand.go_on(router);
    stand.true_picture("messages aged out").await;
    let now = metric(&stand, router, "splitrail_event_plane_snapshots_total", &[]).await;
    assert!(now > resyncs, "it had to fetch: {now} of {resyncs}");
}
