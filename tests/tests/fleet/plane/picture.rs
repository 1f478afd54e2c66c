//! Two routers that share only a broker have the same index.

use splitrail_tests::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::process_cluster::{Plan, ProcessCluster, ProcessKind};
use splitrail_tests::trial::{CHAT, chat, prompt};

use super::support::{plan, some_traffic};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_routers_have_one_picture_and_see_each_others_load() {
    let secrets = tempfile::tempdir().unwrap();
    let password = secrets.path().join("password");
    std::fs::write(&password, "s3cret\n").unwrap();
    let login = format!(
        ", login: {{ kind: user, name: fleet, password: {{ kind: file, path: \"{}\" }} }}",
        password.display()
    );
    let stand = ProcessCluster::start(Plan {
        broker_config: "authorization { user: fleet, password: s3cret }".to_owned(),
        login,
        ..plan()
    })
    .await;
    some_traffic(&stand, 3).await;
    // Of every worker, every router's index holds exactly what the engine holds.
    stand.true_picture("requests").await;

    let routers = stand.of(ProcessKind::Router);
    let text = prompt(60, "shared");
    let first = Client::new(stand.posts[routers[0]].http);
    assert_eq!(first.post(CHAT, &chat(&text)).await.status, 200);
    stand.true_picture("one request").await;
    // The same prompt, the same overlap, whichever router is asked.
    let mut overlaps = Vec::new();
    for router in &routers {
        let reply = Client::new(stand.posts[*router].http).post(CHAT, &chat(&text)).await;
        overlaps.push(reply.route("overlap_blocks").map(str::to_owned));
        stand.true_picture("the same prompt").await;
    }
    assert!(overlaps[0].as_deref().is_some_and(|blocks| blocks != "0"), "{overlaps:?}");
    assert_eq!(overlaps[0], overlaps[1]);

    // A long request through one router keeps a worker busy in the other's eyes.
    let mut long = chat(&prompt(30, "long"));
    long["max_tokens"] = 250.into();
    let second = Client::new(stand.posts[routers[1]].admin);
    let (reply, ()) = tokio::join!(
        first.post(CHAT, &long),
        eventually("the other router sees the load", async || {
            let shown = second.get("/admin/workers").await.json();
            let workers = shown["workers"].as_array().unwrap();
            workers.iter().any(|worker| {
                worker["engine_running"].as_u64() > Some(0) && worker["requests"] == 0
            })
        })
    );
    assert_eq!(reply.status, 200);
    stand.true_picture("the load is gone").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shim_that_stops_takes_its_worker_away_without_a_failed_request() {
    let mut stand = ProcessCluster::start(Plan { prefill: 2, decode: 1, ..plan() }).await;
    let shim = stand.place(ProcessKind::Shim, "p1");
    stand.stop(shim).await;
    for router in stand.of(ProcessKind::Router) {
        let admin = Client::new(stand.posts[router].admin);
        eventually("the worker has left", async || {
            let shown = admin.get("/admin/workers").await.json();
            shown["workers"].as_array().unwrap().iter().all(|worker| worker["id"] != "p1")
        })
        .await;
    }
    stand.run(shim).await;
    stand.true_picture("the shim is back").await;
}
