//! What a hostile client of the broker stores and publishes in the name of a worker: snapshots that
//! are none, and numbers out of order. Neither is believed, and both are counted.

use std::collections::HashMap;

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::async_nats::Client;
use splitrail_event_plane::async_nats::jetstream::object_store::ObjectMetadata;
use splitrail_event_plane::async_nats::jetstream::{self, Context};
use splitrail_event_plane::names;
use splitrail_event_plane::snapshot::Label;
use splitrail_proto::v1;
use splitrail_tests::Client as Http;
use splitrail_tests::cluster::eventually;
use splitrail_tests::process_cluster::{Plan, ProcessCluster, ProcessKind};

use super::support::{metric, plan, say, some_traffic, stranger};

const SNAPSHOTS: &str = "splitrail_event_plane_snapshots_total";

/// What the shim of a worker says of itself, with the number of its last change.
async fn last_report(client: &Client, worker: &str) -> v1::PlaneReport {
    let mut reports = client.subscribe(names::load("sim", worker)).await.unwrap();
    loop {
        let report = reports.next().await.expect("a report");
        let report = v1::PlaneReport::decode(report.payload).unwrap();
        if report.sequence.is_some() {
            return report;
        }
    }
}

/// Stores this in the place of a worker's snapshot, with a label that fits unless there is none.
async fn forge(context: &Context, worker: &str, label: Option<&Label>, object: &[u8]) {
    let bucket = names::bucket("sim");
    let store = context.get_object_store(&bucket).await.unwrap();
    let metadata = label.map_or_else(HashMap::new, Label::to_metadata);
    let name = names::token(worker);
    let metadata = ObjectMetadata { name, metadata, ..ObjectMetadata::default() };
    let mut bytes = if object.is_empty() { &[0; 64][..] } else { object };
    let stored = store.put(metadata, &mut bytes).await.unwrap();
    if object.is_empty() {
        // The label alone stays.
        let stream = context.get_stream(format!("OBJ_{bucket}")).await.unwrap();
        stream.purge().filter(format!("$O.{bucket}.C.{}", stored.nuid)).await.unwrap();
    }
}

/// A part of so many bytes by what its length says, of which a few follow.
fn part_of(length: u32) -> Vec<u8> {
    [&length.to_be_bytes()[..], &[0; 64]].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_that_are_none_are_counted_and_replaced_by_the_shims() {
    let mut stand = ProcessCluster::start(Plan { routers: 1, decode: 3, ..plan() }).await;
    some_traffic(&stand, 21).await;
    stand.true_picture("requests").await;
    let client = stranger(&stand).await;
    let context = jetstream::new(client.clone());
    let mut stream = context.get_stream(names::stream("sim")).await.unwrap();
    let stream_sequence = stream.info().await.unwrap().state.last_sequence;
    let forged = [
        ("p0", true, Vec::new()),
        ("d0", true, part_of(1 << 20)),
        ("d1", true, part_of(u32::MAX)),
        ("d2", false, part_of(16)),
    ];
    for (worker, has_label, object) in &forged {
        let report = last_report(&client, worker).await;
        let (mirror_id, sequence) = (report.mirror_id, report.sequence.unwrap());
        let label = Label { mirror_id, sequence, stream_sequence };
        forge(&context, worker, has_label.then_some(&label), object).await;
    }
    let router = stand.place(ProcessKind::Router, "r0");
    stand.kill(router);
    stand.run(router).await;
    // Of the three with a label, each was tried; of the one without, another was asked for.
    for (result, at_least) in [("failed", 3.0), ("asked", 4.0), ("applied", 4.0)] {
        eventually(&format!("{result} is counted"), async || {
            metric(&stand, router, SNAPSHOTS, &[("result", result)]).await >= at_least
        })
        .await;
    }
    stand.true_picture("the shims have stored their snapshots again").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_from_the_past_change_nothing_and_those_with_a_gap_make_a_worker_distrusted() {
    let stand = ProcessCluster::start(plan()).await;
    some_traffic(&stand, 22).await;
    stand.true_picture("requests").await;
    let client = stranger(&stand).await;
    let report = last_report(&client, "p0").await;
    let last = report.sequence.unwrap();
    let made_up = |sequence: u64| {
        let stored = v1::Stored { parent: None, names: vec![7], hashes: vec![7], tier: 0 };
        let changes = vec![v1::Change { change: Some(v1::change::Change::Stored(stored)) }];
        v1::Events { sequence, rank: 0, engine_time_s: 0.0, changes }
    };
    let publish = async |numbers: &[u64]| {
        let events = v1::PlaneEvents {
            worker_id: "p0".to_owned(),
            instance_id: report.instance_id.clone(),
            mirror_id: report.mirror_id.clone(),
            events: numbers.iter().map(|number| made_up(*number)).collect(),
            snapshot_sequence: None,
        };
        say(&client, names::kv("sim", "p0"), events).await;
    };
    publish(&[1, last]).await;
    publish(&[last - 1]).await;
    some_traffic(&stand, 23).await;
    stand.true_picture("numbers from the past").await;

    // The shim does not come as far, so that what is forged is not the next change at any time.
    publish(&[last + 1_000_001, last + 1_000_000]).await;
    publish(&[last + 999_999]).await;
    for router in stand.of(ProcessKind::Router) {
        eventually("the gap is counted", async || {
            let labels = [("worker", "p0"), ("reason", "gap")];
            metric(&stand, router, "splitrail_index_resyncs_total", &labels).await >= 1.0
        })
        .await;
        eventually("the worker is distrusted", async || {
            let shown = Http::new(stand.posts[router].admin).get("/admin/workers").await.json();
            let workers = shown["workers"].as_array().unwrap();
            let worker = workers.iter().find(|worker| worker["id"] == "p0").unwrap();
            worker["events_current"] == false && worker["state"] == "serving"
        })
        .await;
    }
    some_traffic(&stand, 24).await;
}
