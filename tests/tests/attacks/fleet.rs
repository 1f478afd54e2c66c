//! Shims and brokers: who may speak for which worker, and what hostile events cost.

use std::net::SocketAddr;

use serde_json::{Value, json};
use splitrail_proto::v1;
use splitrail_tests::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::post::ListeningPost;
use splitrail_tests::process::Process;
use splitrail_tests::side_car::{SideCar, hello, run};
use splitrail_tests::solo::whole_answer;
use tempfile::TempDir;
use tonic::Code;
use tonic::transport::Endpoint;

/// A router process with a fleet listener, in front of one engine that is written down as `w0`.
struct Fleet {
    engine: ListeningPost,
    door: SocketAddr,
    http: Client,
    admin: Client,
    _router: Process,
    _files: TempDir,
}

impl Fleet {
    /// `top` holds further lines of the file, `model` further lines of its model.
    async fn start(top: &str, model: &str, files: TempDir) -> Self {
        let engine = engine().await;
        let (key, config) = (files.path().join("key"), files.path().join("splitrail.yaml"));
        std::fs::write(key, "the-key-of-the-engine").unwrap();
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, fleet: 127.0.0.1:0, admin: 127.0.0.1:0 }}
{top}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
    policy: {{ kind: round_robin }}
    engine_api_key: {{ kind: file, path: key }}
    workers: [{{ id: w0, role: both, url: \"{}\" }}]
{model}
",
            engine.url()
        );
        std::fs::write(&config, yaml).unwrap();
        let args = ["serve".to_owned(), "--config".into(), config.display().to_string()];
        let router = Process::start("router", files.path(), &args).await;
        let door = router.told("fleet").parse().unwrap();
        let (http, admin) = (router.client("http"), router.client("admin"));
        let fleet = Self { engine, door, http, admin, _router: router, _files: files };
        eventually("the router is ready", async || fleet.http.get("/ready").await.status == 200)
            .await;
        fleet
    }

    /// The same with shims that attach under names of their own.
    async fn open() -> Self {
        Self::start("", "    discovery: [{ kind: shim }]", tempfile::tempdir().unwrap()).await
    }

    async fn attach(&self, hello: v1::Hello) -> Result<SideCar, Code> {
        self.attach_with(None, hello).await
    }

    async fn attach_with(&self, token: Option<&str>, hello: v1::Hello) -> Result<SideCar, Code> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.door)).unwrap();
        let attached = SideCar::attach_over(endpoint.connect_lazy(), token, hello).await;
        attached.map_err(|status| status.code())
    }

    /// What the router shows of a worker; null if it is not there.
    async fn worker(&self, id: &str) -> Value {
        let shown = self.admin.get("/admin/workers").await.json();
        let mut workers = shown["workers"].as_array().unwrap().iter();
        workers.find(|worker| worker["id"] == id).cloned().unwrap_or_default()
    }

    /// Sends prompts, all of which must be answered.
    async fn prompts(&self) {
        let body = json!({"model": "sim", "prompt": "once upon a time", "max_tokens": 2});
        for _ in 0..6 {
            let reply = self.http.post("/v1/completions", &body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
    }
}

/// An engine that answers everything.
async fn engine() -> ListeningPost {
    let models = r#"{"data":[{"id":"sim"}]}"#;
    ListeningPost::start(move |heard| match heard.is_inference() {
        true => whole_answer(),
        false => splitrail_tests::post::Answer::json(200, models),
    })
    .await
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
    for fleet in [Fleet::open().await, Fleet::start("", "", tempfile::tempdir().unwrap()).await] {
        let elsewhere = engine().await;
        let refused = fleet.attach(hello("w0", &elsewhere.url())).await.err();
        assert_eq!(refused, Some(Code::PermissionDenied));
        assert_eq!(fleet.worker("w0").await["url"], fleet.engine.url());
        fleet.prompts().await;
        assert!(elsewhere.heard().is_empty(), "prompts and the key go where the file says");
        assert!(fleet.engine.heard().iter().any(|heard| heard.is_inference()));
        // Where it is written down it may attach.
        let shim = fleet.attach(hello("w0", &fleet.engine.url())).await.ok().unwrap();
        shim.load(0, 0).await;
        eventually("the shim leads", async || fleet.worker("w0").await["shim"] == true).await;
    }
}

#[tokio::test]
async fn a_live_worker_is_not_taken_over_without_the_proof_of_its_process() {
    let fleet = Fleet::open().await;
    let (own, other) = (engine().await, engine().await);
    let hello = hello("s0", &own.url());
    let mut shim = fleet.attach(hello.clone()).await.ok().unwrap();
    shim.snapshot("s0-mirror", 3, vec![run(None, 1..=3)]).await;
    shim.acked(3).await;
    shim.load(0, 0).await;
    eventually("the worker serves", async || fleet.worker("s0").await["state"] == "serving").await;
    let unproven = v1::Hello { instance_secret: Vec::new(), ..hello.clone() };
    let guessed = v1::Hello { instance_secret: vec![b'x'; 32], ..hello.clone() };
    let moved = v1::Hello { url: other.url(), ..unproven.clone() };
    let renamed = v1::Hello { worker_id: "s1".into(), ..thief(&hello) };
    for other in [thief(&hello), unproven, guessed, moved, renamed] {
        let refused = fleet.attach(other.clone()).await.err();
        assert_eq!(refused, Some(Code::AlreadyExists), "{other:?}");
    }
    // The true one was not disturbed, and is believed.
    shim.stored(4, [4]).await;
    shim.acked(4).await;
    let shown = fleet.worker("s0").await;
    assert_eq!(shown["state"], "serving");
    assert_eq!(shown["index_blocks"]["device"], 4);
    // Its own process may open another stream at once: a connection can be dead on one side.
    let mut newer = fleet.attach(hello).await.ok().unwrap();
    assert_eq!(shim.ended().await, Code::Aborted);
    assert_eq!(newer.welcome.known_sequence, Some(4));
    newer.stored(5, [5]).await;
    newer.acked(5).await;
}

#[tokio::test]
async fn a_restarted_shim_and_one_of_the_previous_release_attach_once_the_stream_has_ended() {
    let fleet = Fleet::open().await;
    let url = engine().await.url();
    let previous = v1::Hello { instance_secret: Vec::new(), ..hello("s0", &url) };
    let first = fleet.attach(previous.clone()).await.ok().unwrap();
    assert_eq!(fleet.attach(previous.clone()).await.err(), Some(Code::AlreadyExists));
    drop(first);
    let mut next = None;
    eventually("it attaches again", async || {
        next = fleet.attach(previous.clone()).await.ok();
        next.is_some()
    })
    .await;
    let restarted = v1::Hello { instance_id: "second".into(), ..hello("s0", &url) };
    assert_eq!(fleet.attach(restarted.clone()).await.err(), Some(Code::AlreadyExists));
    drop(next);
    eventually("another process of it attaches", async || {
        fleet.attach(restarted.clone()).await.is_ok()
    })
    .await;
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
    let fleet = Fleet::start(top, "    discovery: [{ kind: shim }]", files).await;
    let urls = [engine().await.url(), engine().await.url()];
    let attach = async |token: &str, id: &str, url: &str| {
        let token = Some(token).filter(|token| !token.is_empty());
        fleet.attach_with(token, hello(id, url)).await
    };
    let (prefill, decode) = ("token-of-prefill", "token-of-decode");
    let kept = [
        attach(prefill, "p-0", &urls[0]).await.ok().unwrap(),
        attach(decode, "d-0", &urls[1]).await.ok().unwrap(),
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
        assert_eq!(attach(token, id, url).await.err(), Some(code), "{token} {id} {url}");
    }
    attach(prefill, "w0", &written_down).await.ok().unwrap();
    drop(kept);
}
