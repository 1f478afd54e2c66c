//! A Hugging Face hub with one model, as the public one replies: small files are redirected within the
//! hub, `tokenizer.json` is at another server, which knows no credential.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

pub(super) const COMMIT: &str = "9c925d64d72725edaf899c6cb9c377fd0709d9c5";
/// The token that may read the gated model.
pub(super) const TOKEN: &str = "hf_s3cret";
const LARGE: &str = "tokenizer.json";

/// What is wrong with the hub or its model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Fault {
    #[default]
    None,
    /// Files need the token of an account that has accepted the terms.
    Gated,
    /// The model has no `tokenizer.json`.
    NoTokenizer,
    /// The content of the large file is not what the hub announces.
    Corrupted,
    /// The large file is not to be had.
    Missing,
    /// Redirects lead in a circle.
    Circle,
}

type Reply = Response<Full<Bytes>>;

struct State {
    id: &'static str,
    files: BTreeMap<String, Vec<u8>>,
    fault: Fault,
    /// Where large files are.
    storage: SocketAddr,
    /// Which paths were asked for, with the credential.
    asked: Mutex<Vec<(String, Option<String>)>>,
}

/// The hub. Dropping it ends it.
pub(super) struct Hub {
    pub(super) address: SocketAddr,
    state: Arc<State>,
    _tasks: JoinSet<()>,
}

impl Hub {
    /// A hub whose model has the files of a folder, and weights.
    pub(super) async fn start(id: &'static str, folder: &Path, fault: Fault) -> Self {
        let mut files = BTreeMap::from([("model.safetensors".to_owned(), b"weights".to_vec())]);
        for file in std::fs::read_dir(folder).unwrap() {
            let file = file.unwrap();
            let name = file.file_name().into_string().unwrap();
            files.insert(name, std::fs::read(file.path()).unwrap());
        }
        if fault == Fault::NoTokenizer {
            files.remove(LARGE);
        }
        let hub = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let store = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, storage) = (hub.local_addr().unwrap(), store.local_addr().unwrap());
        let state = Arc::new(State { id, files, fault, storage, asked: Mutex::default() });
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(hub, Arc::clone(&state), State::hub));
        tasks.spawn(serve(store, Arc::clone(&state), State::storage));
        Self { address, state, _tasks: tasks }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The paths that were asked for so far, with the credentials.
    pub(super) fn asked(&self) -> Vec<(String, Option<String>)> {
        self.state.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn serve(listener: TcpListener, state: Arc<State>, reply: fn(&State, &str, bool) -> Reply) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let state = Arc::clone(&state);
        connections.spawn(async move {
            let service = service_fn(|request: Request<Incoming>| {
                let path = request.uri().path().to_owned();
                let credential = credential(request.headers());
                let is_known = credential.as_deref() == Some(&format!("Bearer {TOKEN}"));
                let mut asked = state.asked.lock().unwrap_or_else(PoisonError::into_inner);
                asked.push((path.clone(), credential));
                let reply = reply(&state, &path, is_known);
                async move { Ok::<_, Infallible>(reply) }
            });
            // The client may go away at any time.
            let _closed =
                http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

fn credential(headers: &HeaderMap) -> Option<String> {
    Some(headers.get("authorization")?.to_str().unwrap().to_owned())
}

impl State {
    fn hub(&self, path: &str, is_known: bool) -> Reply {
        let resolve = format!("/{}/resolve/{COMMIT}/", self.id);
        let cache = format!("/api/resolve-cache/models/{}/{COMMIT}/", self.id);
        if path == format!("/api/models/{}/revision/main", self.id) {
            let siblings: Vec<_> =
                self.files.keys().map(|name| json!({"rfilename": name})).collect();
            let body = json!({"id": self.id, "sha": COMMIT, "siblings": siblings}).to_string();
            return reply(200, &[], body);
        }
        let name = path.strip_prefix(&resolve).or(path.strip_prefix(&cache));
        let Some((name, content)) = name.and_then(|name| self.files.get_key_value(name)) else {
            // Strangers do not learn what exists.
            return reply(401, &[("x-error-code", "RepoNotFound")], "Repository not found");
        };
        if self.fault == Fault::Gated && !is_known {
            return reply(401, &[("x-error-code", "GatedRepo")], "Access is restricted");
        }
        if self.fault == Fault::Circle {
            return reply(307, &[("location", path)], "");
        }
        let commit = ("x-repo-commit", COMMIT);
        if path.starts_with(&cache) {
            let tag = format!("\"{}\"", git_name(content));
            return reply(200, &[commit, ("etag", &tag)], content.clone());
        }
        if name != LARGE {
            let location = format!("{cache}{name}?etag=%22{}%22", git_name(content));
            return reply(307, &[commit, ("location", &location)], "Temporary Redirect");
        }
        let tag = format!("\"{}\"", hexadecimal(digest(&SHA256, content).as_ref()));
        let length = content.len().to_string();
        let location = format!("http://{}/{name}?Signature=abc", self.storage);
        let headers = [
            commit,
            ("x-linked-etag", &*tag),
            ("x-linked-size", &*length),
            ("etag", "\"of-the-pointer\""),
            ("location", &*location),
        ];
        reply(302, &headers, format!("Found. Redirecting to {location}"))
    }

    fn storage(&self, path: &str, _is_known: bool) -> Reply {
        let content = self.files.get(path.trim_start_matches('/')).cloned().unwrap_or_default();
        match self.fault {
            Fault::Missing => reply(404, &[], "no such key"),
            Fault::Corrupted => reply(200, &[("etag", "\"1\"")], vec![b'x'; content.len()]),
            _ => reply(200, &[("etag", "\"1\"")], content),
        }
    }
}

fn reply(status: u16, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Full::new(body.into()));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap();
    for (name, value) in headers {
        let name: http::HeaderName = name.parse().unwrap();
        reply.headers_mut().insert(name, value.parse().unwrap());
    }
    reply
}

/// The name of a content as Git has it.
pub(super) fn git_name(content: &[u8]) -> String {
    let named = [format!("blob {}\0", content.len()).as_bytes(), content].concat();
    hexadecimal(digest(&SHA1_FOR_LEGACY_USE_ONLY, &named).as_ref())
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}
