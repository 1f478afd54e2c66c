//! A shim process, and functions to send it requests.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use splitrail_sim::{SimConfig, SimEngine};
use tempfile::TempDir;

use crate::fake_router::{FakeRouter, welcome};

/// A generous timeout that only a hang exceeds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Interval between two checks of a condition.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

pub(crate) const BLOCK_SIZE: u32 = 16;

/// A shim process. Dropping it kills the process.
pub(crate) struct Shim {
    child: Child,
    pub(crate) address: SocketAddr,
    _folder: TempDir,
}

impl Shim {
    /// Starts a shim and waits until it is ready.
    pub(crate) async fn start(engine: &str, router: &FakeRouter, more: &[&str]) -> Self {
        let router = router.address.to_string();
        let flags = ["--engine", engine, "--listen", "127.0.0.1:0", "--router", &router];
        let folder = tempfile::tempdir().unwrap();
        Self::run(folder, &[&flags[..], &["--id", "w0"], more].concat()).await
    }

    /// Starts a shim with a configuration file that contains these further keys.
    pub(crate) async fn start_by_file(engine: &str, router: &FakeRouter, keys: &str) -> Self {
        let router = router.address;
        let places = format!("engine: {engine}\nlisten: 127.0.0.1:0\nrouter: [\"{router}\"]\n");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shim.yaml");
        std::fs::write(&path, format!("{places}id: w0\n{keys}")).unwrap();
        Self::run(folder, &["--config", path.to_str().unwrap()]).await
    }

    async fn run(folder: TempDir, flags: &[&str]) -> Self {
        let ready = folder.path().join("ready.json");
        let child = Command::new(env!("CARGO_BIN_EXE_splitrail-shim"))
            .args(flags)
            .args(["--ready-file", ready.to_str().unwrap()])
            .env("SPLITRAIL_FLEET_TOKEN", "s3cret")
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let address = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut shim = Self { child, address, _folder: folder };
        until("a ready file", async || ready.exists() || shim.exit_code().is_some()).await;
        let text = std::fs::read_to_string(ready).unwrap();
        let said: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(said["id"], "w0");
        shim.address = said["http"].as_str().unwrap().parse().unwrap();
        shim
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The exit code, once there is one.
    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        self.child.try_wait().unwrap().map(|status| status.code().unwrap_or(-1))
    }

    pub(crate) async fn exited(&mut self) -> i32 {
        let mut code = None;
        until("an exit", async || {
            code = self.exit_code();
            code.is_some()
        })
        .await;
        code.unwrap()
    }

    pub(crate) async fn status(&self) -> Value {
        ask(self.address, "/splitrail/status", &[], None).await.1
    }

    /// Sends a completion request and returns the reply, which must have status 200.
    pub(crate) async fn complete(&self, headers: &[(&str, &str)], body: &Value) -> Value {
        let (status, reply) = ask(self.address, "/v1/completions", headers, Some(body)).await;
        assert_eq!(status, 200, "{reply}");
        reply
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _status = self.child.wait();
    }
}

/// A router with the engine's block size.
pub(crate) async fn router() -> FakeRouter {
    let router = FakeRouter::start(welcome(BLOCK_SIZE)).await;
    router.known().bearer = Some("Bearer s3cret".to_owned());
    router
}

pub(crate) async fn engine(config: SimConfig) -> SimEngine {
    SimEngine::start(config).await.unwrap()
}

/// A request for `max_tokens` tokens after a prompt of `tokens` tokens that begins with
/// `first`.
pub(crate) fn completion(first: u32, tokens: u32, max_tokens: u32) -> Value {
    let prompt: Vec<u32> = (first..first + tokens).collect();
    json!({ "model": "sim", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0 })
}

/// A prefill leg.
pub(crate) fn prefill() -> Value {
    let mut body = completion(100, 100, 1);
    body["kv_transfer_params"] = json!({ "do_remote_decode": true, "do_remote_prefill": false });
    body
}

/// Lets a decode engine fetch the hand-off in the reply to [`prefill`].
pub(crate) async fn fetch(decode_engine: &SimEngine, reply: &Value) {
    let mut body = completion(100, 100, 4);
    body["kv_transfer_params"] = reply["kv_transfer_params"].clone();
    let headers = [("x-request-id", "r1")];
    let address = decode_engine.http_addr();
    let (status, reply) = ask(address, "/v1/completions", &headers, Some(&body)).await;
    assert_eq!(status, 200, "{reply}");
}

/// Sends a request and waits for the head of the reply: GET, or POST if there is a body.
pub(crate) async fn begin(
    address: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<&Value>,
) -> http::Response<Incoming> {
    let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http();
    let method = if body.is_some() { "POST" } else { "GET" };
    let mut request = Request::builder().method(method).uri(format!("http://{address}{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = body.map(Value::to_string).unwrap_or_default();
    let request = request.body(Full::new(Bytes::from(body))).unwrap();
    tokio::time::timeout(PATIENCE, client.request(request)).await.unwrap().unwrap()
}

/// Sends a request and reads the whole reply. A body that is not JSON becomes a JSON string.
pub(crate) async fn ask(
    address: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<&Value>,
) -> (u16, Value) {
    let response = begin(address, path, headers, body).await;
    let status = response.status().as_u16();
    let body = tokio::time::timeout(PATIENCE, response.into_body().collect()).await;
    let body = body.unwrap().unwrap().to_bytes();
    let text = || Value::String(String::from_utf8_lossy(&body).into_owned());
    (status, serde_json::from_slice(&body).unwrap_or_else(|_| text()))
}

/// Waits until a condition holds. Panics if it does not hold in time.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !is_so().await {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, waiting).await.is_ok(), "never: {what}");
}
