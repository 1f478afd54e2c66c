//! A cluster with a broker.

use std::time::Duration;

use prost::Message;
use splitrail_event_plane::async_nats::{self, Client};
use splitrail_proto::v1;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::process_cluster::{Plan, ProcessCluster, ProcessKind};
use splitrail_tests::traffic::Traffic;

/// One engine for each leg, two routers.
pub(crate) fn plan() -> Plan {
    Plan { broker: true, prefill: 1, decode: 1, ..Plan::default() }
}

/// A connection of somebody else to the broker.
pub(crate) async fn stranger(stand: &ProcessCluster) -> Client {
    let broker = &stand.posts[stand.place(ProcessKind::Broker, "nats")];
    async_nats::connect(format!("nats://{}", broker.http)).await.expect("a connection")
}

/// Says something there.
pub(crate) async fn say(client: &Client, subject: String, message: impl Message) {
    client.publish(subject, message.encode_to_vec().into()).await.expect("it is taken");
    client.flush().await.expect("it is there");
}

/// Requests to all routers for a moment.
pub(crate) async fn some_traffic(stand: &ProcessCluster, seed: u64) {
    let routers: Vec<_> =
        stand.of(ProcessKind::Router).into_iter().map(|at| stand.posts[at].http).collect();
    let traffic = Traffic::start(&routers, 4, seed).await;
    eventually("some requests are answered", async || {
        traffic.tally.right.load(std::sync::atomic::Ordering::Relaxed) >= 20
    })
    .await;
    traffic.pause().await;
    traffic.check();
}

/// The sum of a metric of one router.
pub(crate) async fn metric(
    stand: &ProcessCluster,
    at: usize,
    name: &str,
    labels: &[(&str, &str)],
) -> f64 {
    let client = splitrail_tests::Client::new(stand.posts[at].admin);
    metric_in(&client.get("/metrics").await.text(), name, labels)
}

/// A report of a worker that does both.
pub(crate) fn report(worker_id: &str, url: &str, terms: v1::Welcome) -> v1::PlaneReport {
    let hello = splitrail_tests::shim::hello(worker_id, url);
    v1::PlaneReport {
        worker_id: worker_id.to_owned(),
        instance_id: hello.instance_id.clone(),
        mirror_id: hello.mirror_id.clone(),
        sequence: Some(0),
        load: Some(v1::Load { up: true, ..v1::Load::default() }),
        hello: Some(hello),
        terms: Some(terms),
        bye: None,
    }
}

/// How the routers hash.
pub(crate) async fn terms(client: &Client) -> v1::Welcome {
    let ask = v1::PlaneAsk { model: "sim".to_owned(), ..v1::PlaneAsk::default() };
    let subject = splitrail_event_plane::names::terms("sim");
    let asked = client.request(subject, ask.encode_to_vec().into());
    let reply = tokio::time::timeout(Duration::from_secs(10), asked).await.unwrap().unwrap();
    v1::Welcome::decode(reply.payload).unwrap()
}
