//! Workers whose URLs lead back to the router.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use splitrail_tests::cluster::metric_in;
use splitrail_tests::process::Process;
use splitrail_tests::trial::{COMPLETIONS, completion};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::support::{Site, arguments, engine, yaml};

/// A way to a router that the router cannot recognise as its own address.
struct Detour {
    address: SocketAddr,
    target: Arc<OnceLock<SocketAddr>>,
    _tasks: JoinSet<()>,
}

impl Detour {
    async fn open() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let target = Arc::new(OnceLock::<SocketAddr>::new());
        let (to, mut tasks) = (Arc::clone(&target), JoinSet::new());
        tasks.spawn(async move {
            let mut ways = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let Some(target) = to.get().copied() else { continue };
                ways.spawn(async move {
                    let mut router = TcpStream::connect(target).await.unwrap();
                    let _end = copy_bidirectional(&mut client, &mut router).await;
                });
            }
        });
        Self { address, target, _tasks: tasks }
    }
}

#[tokio::test]
async fn a_request_that_comes_back_to_its_router_ends_with_a_508() {
    // The router itself, and two that are each other's worker.
    for routers in [1, 2] {
        let (mut detours, mut processes, mut folders) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..routers {
            detours.push(Detour::open().await);
        }
        for place in 0..routers {
            let next = &detours[(place + 1) % routers];
            let folder = tempfile::tempdir().unwrap();
            let url = format!("http://{}", next.address);
            let args = arguments(folder.path(), &yaml(&url, "", ""));
            processes.push(Process::start("router", folder.path(), &args).await);
            folders.push(folder);
        }
        for (detour, process) in detours.iter().zip(&processes) {
            detour.target.set(process.told("http").parse().unwrap()).unwrap();
        }
        let reply = processes[0].client("http").post(COMPLETIONS, &completion("a")).await;
        assert_eq!(reply.status, 508, "{}", reply.text());
        assert_eq!(reply.json()["error"]["code"], "loop_detected");
        for process in &processes {
            let metrics = process.client("admin").get("/metrics").await.text();
            let asked = [("endpoint", "completions")];
            let count = metric_in(&metrics, "splitrail_requests_total", &asked);
            assert!(count <= 1.0, "{count} requests of one");
        }
    }
}

#[tokio::test]
async fn no_worker_is_added_at_a_listener_of_the_router_or_at_another_worker_s_address() {
    let top = "fleet: { networks: [127.0.0.0/8, \"::1/128\"] }";
    let site = Site::start(top, "", tempfile::tempdir().unwrap()).await;
    let (beside, free) = (engine().await, engine().await);
    let add = async |id: &str, url: &str| {
        let json = [("content-type", "application/json")];
        let body = json!({"worker": {"id": id, "role": "both", "url": url}}).to_string();
        site.admin.post_with("/admin/workers", &json, body).await
    };
    for own in [site.admin_at, site.fleet_address] {
        for host in ["127.0.0.1", "localhost", "[::1]", "0.0.0.0"] {
            let refused = add("x", &format!("http://{host}:{}", own.port())).await;
            assert_eq!(refused.status, 409, "{host}: {}", refused.text());
            assert!(refused.text().contains("listener of this router"), "{}", refused.text());
        }
    }
    assert_eq!(site.worker("x").await, Value::Null);
    assert_eq!(add("x", &beside.url()).await.status, 201);
    // Under any name of the loopback, one engine is one worker.
    let named = |url: &str| url.replace("127.0.0.1", "localhost");
    for url in [beside.url(), named(&beside.url())] {
        let moved = add("w0", &url).await;
        assert_eq!(moved.status, 409, "{}", moved.text());
        assert!(moved.text().contains("the address of worker x"), "{}", moved.text());
        assert_eq!(add("y", &url).await.json()["worker"]["id"], "x");
    }
    assert_eq!(site.worker("w0").await["url"], site.engine.url());
    assert_eq!(site.worker("x").await["url"], beside.url());
    assert_eq!(site.worker("y").await, Value::Null);
    // To an address of its own, a worker may be moved.
    assert_eq!(add("x", &free.url()).await.status, 200);
    assert_eq!(site.worker("x").await["url"], free.url());
}
