//! Shims: who may speak for which worker, and what hostile events cost.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw::connect_from;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::shim::{Shim, hello, run};
use tokio::net::TcpStream;
use tonic::Code;
use tonic::transport::Endpoint;

use super::support::{Site, engine, yaml};

/// A router to which shims may attach under names of their own.
async fn open() -> Site {
    Site::start("", "    discovery: [{ kind: shim }]", tempfile::tempdir().unwrap()).await
}

async fn attach(site: &Site, token: Option<&str>, hello: v1::Hello) -> Result<Shim, Code> {
    let endpoint = Endpoint::from_shared(format!("http://{}", site.fleet_address)).unwrap();
    let attached = Shim::attach_over(endpoint.connect_lazy(), token, hello).await;
    attached.map_err(|status| status.code())
}

/// The same worker, said by another process.
fn thief(hello: &v1::Hello) -> v1::Hello {
    v1::Hello {
        instance_id: "thief".into(),
        instance_secret: b"the secret of the thief, its process".to_vec(),
        ..hello.clone()
    }
}

#[tokio::test]
async fn a_worker_that_is_written_down_is_not_taken_to_another_address() {
    for fleet in [open().await, Site::start("", "", tempfile::tempdir().unwrap()).await] {
        let elsewhere = engine().await;
        let refused = attach(&fleet, None, hello("w0", &elsewhere.url())).await.err();
        assert_eq!(refused, Some(Code::PermissionDenied));
        assert_eq!(fleet.worker("w0").await["url"], fleet.engine.url());
        fleet.prompts(6).await;
        assert!(elsewhere.heard().is_empty(), "prompts and the key go where the file says");
        assert!(fleet.engine.heard().iter().any(|heard| heard.is_inference()));
        // Where it is written down it may attach.
        let shim = attach(&fleet, None, hello("w0", &fleet.engine.url())).await.ok().unwrap();
        shim.load(0, 0).await;
        eventually("the shim leads", async || fleet.worker("w0").await["shim"] == true).await;
    }
}

#[tokio::test]
async fn a_live_worker_is_not_taken_over_without_the_proof_of_its_process() {
    let fleet = open().await;
    let (own, other) = (engine().await, engine().await);
    let hello = hello("s0", &own.url());
    let mut shim = attach(&fleet, None, hello.clone()).await.ok().unwrap();
    shim.snapshot("s0-mirror", 3, vec![run(None, 1..=3)]).await;
    shim.acked(3).await;
    shim.load(0, 0).await;
    eventually("the worker serves", async || fleet.worker("s0").await["state"] == "serving").await;
    let guessed = v1::Hello { instance_secret: vec![b'x'; 32], ..hello.clone() };
    let moved = v1::Hello { url: other.url(), ..guessed.clone() };
    let renamed = v1::Hello { worker_id: "s1".into(), ..thief(&hello) };
    for other in [thief(&hello), guessed, moved, renamed] {
        let refused = attach(&fleet, None, other.clone()).await.err();
        assert_eq!(refused, Some(Code::AlreadyExists), "{other:?}");
    }
    // The true one was not disturbed, and is believed.
    shim.stored(4, [4]).await;
    shim.acked(4).await;
    let shown = fleet.worker("s0").await;
    assert_eq!(shown["state"], "serving");
    assert_eq!(shown["index_blocks"]["device"], 4);
    // Its own process may open another stream at once: a connection can be dead on one side.
    let mut newer = attach(&fleet, None, hello).await.ok().unwrap();
    assert_eq!(shim.ended().await, Code::Aborted);
    assert_eq!(newer.welcome.known_sequence, Some(4));
    newer.stored(5, [5]).await;
    newer.acked(5).await;
}

#[tokio::test]
async fn a_seat_in_its_grace_is_kept_for_the_shim_that_held_it() {
    let fleet = open().await;
    let (own, other) = (engine().await, engine().await);
    let hello = hello("s0", &own.url());
    let moved = v1::Hello { url: other.url(), ..thief(&hello) };
    let shim = attach(&fleet, None, hello.clone()).await.ok().unwrap();
    shim.load(0, 0).await;
    eventually("the worker serves", async || fleet.worker("s0").await["state"] == "serving").await;
    drop(shim);
    // Whether or not the router has noticed that the stream is gone.
    let refused = attach(&fleet, None, moved.clone()).await.err();
    assert_eq!(refused, Some(Code::AlreadyExists));
    // A shim that was killed and started again has another secret and the same URL.
    let restarted = async || attach(&fleet, None, thief(&hello)).await;
    let mut again = restarted().await;
    while again.is_err() {
        again = restarted().await;
    }
    let mut again = again.ok().unwrap();
    // What has come by the URL alone neither takes the worker elsewhere, nor keeps its shim out.
    for at in [moved.clone(), v1::Hello { worker_id: "s1".into(), ..thief(&hello) }] {
        assert_eq!(attach(&fleet, None, at).await.err(), Some(Code::AlreadyExists));
    }
    let back = attach(&fleet, None, hello.clone()).await.ok().unwrap();
    assert_eq!(again.ended().await, Code::Aborted);
    back.load(0, 0).await;
    eventually("the shim is back", async || fleet.worker("s0").await["url"] == own.url()).await;
    fleet.prompts(4).await;
    assert!(!other.heard().iter().any(|heard| heard.is_inference()));
    // Once it has said that it leaves, its name is free.
    back.say(Message::Bye(v1::Bye::default())).await;
    drop(back);
    eventually("the worker has left", async || fleet.worker("s0").await.is_null()).await;
    attach(&fleet, None, moved).await.ok().unwrap();
}

#[tokio::test]
async fn a_token_speaks_only_for_the_workers_that_it_is_for() {
    let files = tempfile::tempdir().unwrap();
    for (name, token) in [("prefill", "token-of-prefill"), ("decode", "token-of-decode")] {
        std::fs::write(files.path().join(name), token).unwrap();
    }
    let top = "fleet:
  tokens:
    - { token: { kind: file, path: prefill }, workers: [\"p-*\", w0] }
    - { token: { kind: file, path: decode }, workers: [d-0] }";
    let fleet = Site::start(top, "    discovery: [{ kind: shim }]", files).await;
    let urls = [engine().await.url(), engine().await.url()];
    let say_hello = async |token: &str, id: &str, url: &str| {
        let token = Some(token).filter(|token| !token.is_empty());
        attach(&fleet, token, hello(id, url)).await
    };
    let (prefill, decode) = ("token-of-prefill", "token-of-decode");
    let kept = [
        say_hello(prefill, "p-0", &urls[0]).await.ok().unwrap(),
        say_hello(decode, "d-0", &urls[1]).await.ok().unwrap(),
    ];
    let written_down = fleet.engine.url();
    for (token, id, url, code) in [
        ("", "p-1", "http://127.0.0.1:9", Code::Unauthenticated),
        ("token-of-", "p-1", "http://127.0.0.1:9", Code::Unauthenticated),
        (decode, "p-1", "http://127.0.0.1:9", Code::PermissionDenied),
        (prefill, "d-1", "http://127.0.0.1:9", Code::PermissionDenied),
        (decode, "d-00", "http://127.0.0.1:9", Code::PermissionDenied),
        // Nor by a name of its own for the address of another worker.
        (decode, "d-0", &urls[0], Code::PermissionDenied),
        (decode, "d-0", &written_down, Code::PermissionDenied),
    ] {
        assert_eq!(say_hello(token, id, url).await.err(), Some(code), "{token} {id} {url}");
    }
    say_hello(prefill, "w0", &written_down).await.ok().unwrap();
    drop(kept);
}

#[tokio::test]
async fn a_token_with_models_speaks_for_no_worker_of_another_model() {
    let files = tempfile::tempdir().unwrap();
    for (name, token) in [("of-sim", "token-of-sim"), ("of-other", "token-of-other")] {
        std::fs::write(files.path().join(name), token).unwrap();
    }
    let top = "fleet:
  tokens:
    - { token: { kind: file, path: of-sim }, workers: [\"d-*\"], models: [sim] }
    - { token: { kind: file, path: of-other }, workers: [\"d-*\"], models: [other] }";
    let (own, others) = (engine().await, engine().await);
    let model = format!(
        "    discovery: [{{ kind: shim }}]
  - name: other
    aliases: [sim-of-others]
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
    policy: {{ kind: round_robin }}
    workers: [{{ id: w0, role: both, url: \"{}\" }}]
    discovery: [{{ kind: shim }}]",
        others.url()
    );
    let yaml = yaml(&own.url(), top, &model);
    let fleet = Site::serve(own, &yaml, files).await;
    let url = engine().await.url();
    let say_hello = async |token: &str, model: &str| {
        let hello = v1::Hello { model: model.into(), ..hello("d-0", &url) };
        attach(&fleet, Some(token), hello).await
    };
    for (token, model) in
        [("token-of-sim", "other"), ("token-of-sim", "sim-of-others"), ("token-of-other", "sim")]
    {
        let refused = say_hello(token, model).await.err();
        assert_eq!(refused, Some(Code::PermissionDenied), "{token} {model}");
    }
    let attached = say_hello("token-of-sim", "sim").await.ok().unwrap();
    drop(attached);
}

/// The host that takes as many places as it gets.
const GREEDY: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const ATTACH_CALLS: &str = "splitrail_attach_calls_total";

/// A shim of another host attaches, and its worker is told apart by its name.
async fn another_host_attaches(fleet: &Site, id: &str) -> Shim {
    let own = engine().await;
    let attached =
        tokio::time::timeout(Duration::from_secs(30), attach(fleet, None, hello(id, &own.url())));
    attached.await.expect("a place is free for another host").ok().unwrap()
}

#[tokio::test]
async fn silent_connections_of_one_host_leave_places_for_the_shims_of_others() {
    let fleet = Site::start(
        "fleet: { attach_max: 8 }",
        "    discovery: [{ kind: shim }]",
        tempfile::tempdir().unwrap(),
    )
    .await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(connect_from(GREEDY, fleet.fleet_address).await);
    }
    let _attached = another_host_attaches(&fleet, "s0").await;
    // The router greets each with its settings.
    let open = |socket: &TcpStream| match socket.try_read(&mut [0; 1024]) {
        Ok(bytes) => bytes > 0,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    };
    assert!(open(&silent[0]), "the shim has not waited for the end of the silent connections");
    let refused = fleet.metric(ATTACH_CALLS, &[("result", "resource_exhausted")]).await;
    assert!((35.0..50.0).contains(&refused), "{refused}");
    // They are closed in the end.
    for socket in &silent {
        eventually("it is closed", async || !open(socket)).await;
    }
}

#[tokio::test]
async fn connections_whose_hello_is_refused_are_closed_and_leave_places_for_others() {
    let fleet = Site::start(
        "fleet: { attach_max: 8 }",
        "    discovery: [{ kind: shim }]",
        tempfile::tempdir().unwrap(),
    )
    .await;
    let greedy = || {
        let endpoint = Endpoint::from_shared(format!("http://{}", fleet.fleet_address)).unwrap();
        endpoint.local_address(Some(GREEDY.into()))
    };
    let unknown = v1::Hello { model: "none".into(), ..hello("s1", "http://127.0.0.1:9") };
    let held = join_all((0..72).map(async |_| {
        let channel = greedy().connect().await.ok()?;
        let refused = Shim::attach_over(channel.clone(), None, unknown.clone()).await.err()?;
        (refused.code() == Code::NotFound).then_some(channel)
    }));
    let held: Vec<_> = held.await.into_iter().flatten().collect();
    assert!(held.len() >= 60, "{}", held.len());
    let mut attached = another_host_attaches(&fleet, "s0").await;
    eventually("the places of the refused are free again", async || {
        let Ok(channel) = greedy().connect().await else { return false };
        let refused = Shim::attach_over(channel, None, unknown.clone()).await.err();
        refused.is_some_and(|status| status.code() == Code::NotFound)
    })
    .await;
    drop(held);
    // An attached shim's connection stays.
    attached.snapshot("s0-mirror", 3, vec![run(None, 1..=3)]).await;
    attached.acked(3).await;
}

/// Ports in a row, each with the number of connections that came to it.
fn listening_ports(count: u16) -> (u16, Vec<Arc<AtomicUsize>>) {
    loop {
        let first = rand::random_range(12_000..32_000 - count);
        let bind = |port| TcpListener::bind(("127.0.0.1", port)).ok();
        let listeners: Option<Vec<_>> = (first..first + count).map(bind).collect();
        let Some(listeners) = listeners else { continue };
        let count = |listener: TcpListener| {
            let counter = Arc::new(AtomicUsize::new(0));
            let seen = Arc::clone(&counter);
            // Ends with the test's process.
            std::thread::spawn(move || {
                for connection in listener.incoming() {
                    seen.fetch_add(usize::from(connection.is_ok()), Relaxed);
                }
            });
            counter
        };
        return (first, listeners.into_iter().map(count).collect());
    }
}

#[tokio::test]
async fn an_engine_that_claims_256_ranks_does_not_make_the_router_try_the_ports_of_a_host() {
    let metrics: String = (0..256)
        .map(|rank| format!("vllm:num_requests_running{{engine=\"{rank}\"}} 0\n"))
        .collect();
    let claiming = ScriptedServer::start(move |heard| match heard.target.as_str() {
        "/metrics" => ScriptedReply::Bytes(
            format!("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{metrics}").into_bytes(),
        ),
        _ => ScriptedReply::json(200, r#"{"data":[{"id":"sim"}]}"#),
    })
    .await;
    let (first, ports) = listening_ports(40);
    let site = Site::start("", "", tempfile::tempdir().unwrap()).await;
    let events = format!("tcp://127.0.0.1:{first}");
    let worker = json!({"id": "x", "role": "both", "url": claiming.url(), "kv_events": events});
    let json = [("content-type", "application/json")];
    let body = json!({"worker": worker}).to_string();
    let added = site.admin.post_with("/admin/workers", &json, body).await;
    assert_eq!(added.status, 201, "{}", added.text());
    eventually("the ranks were said", async || {
        site.worker("x").await["ranks"].as_array().is_some_and(|ranks| ranks.len() == 256)
    })
    .await;
    // Nothing at the first port speaks as a publisher does: it is tried again.
    eventually("the first port was tried again", async || ports[0].load(Relaxed) >= 3).await;
    let tried: Vec<_> = ports.iter().skip(1).map(|port| port.load(Relaxed)).collect();
    assert!(tried.iter().all(|connections| *connections == 0), "{tried:?}");
}
