//! A plain HTTP client for tests: what it sees is what came over the wire.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Nothing in a test takes longer, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// A client of one address.
#[derive(Clone, Debug)]
pub struct Client {
    address: SocketAddr,
    http: Hyper<HttpConnector, Full<Bytes>>,
}

/// A whole reply.
#[derive(Debug)]
pub struct Reply {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
}

impl Reply {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in {:?}", self.text()))
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// A header as text; empty if absent.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// One entry of the `x-splitrail-route` header.
    pub fn route(&self, key: &str) -> Option<&str> {
        let entries = self.header("x-splitrail-route").split("; ");
        entries.filter_map(|entry| entry.split_once('=')).find(|(k, _)| *k == key).map(|(_, v)| v)
    }
}

impl Client {
    /// A client of `address`.
    pub fn new(address: SocketAddr) -> Self {
        Self { address, http: Hyper::builder(TokioExecutor::new()).build(HttpConnector::new()) }
    }

    /// Sends a request as it is.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> http::Response<Incoming> {
        let sent = tokio::time::timeout(PATIENCE, self.http.request(request)).await;
        sent.expect("a reply in time").expect("a reply")
    }

    /// A request to this client's address; of JSON where it has a body, unless `headers` say
    /// otherwise.
    pub fn request(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Request<Full<Bytes>> {
        let mut request =
            Request::builder().method(&method).uri(format!("http://{}{path}", self.address));
        let is_typed = headers.iter().any(|(name, _)| *name == "content-type");
        if method == Method::POST && !is_typed {
            request = request.header("content-type", "application/json");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(Full::new(body.into())).expect("a request")
    }

    /// GET, whole.
    pub async fn get(&self, path: &str) -> Reply {
        whole(self.send(self.request(Method::GET, path, &[], Bytes::new())).await).await
    }

    /// GET with headers, whole.
    pub async fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> Reply {
        whole(self.send(self.request(Method::GET, path, headers, Bytes::new())).await).await
    }

    /// DELETE, whole.
    pub async fn delete(&self, path: &str) -> Reply {
        whole(self.send(self.request(Method::DELETE, path, &[], Bytes::new())).await).await
    }

    /// POST of JSON, whole.
    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_with(path, &[], body.to_string()).await
    }

    /// POST of bytes with headers, whole.
    pub async fn post_with(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Reply {
        whole(self.send(self.request(Method::POST, path, headers, body)).await).await
    }

    /// POST of JSON whose reply is read event by event.
    pub async fn stream(&self, path: &str, body: &Value) -> Events {
        self.stream_with(path, &[], body).await
    }

    /// The same with headers.
    pub async fn stream_with(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Events {
        self.stream_bytes(path, headers, body.to_string()).await
    }

    /// POST of bytes with headers whose reply is read event by event.
    pub async fn stream_bytes(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Events {
        let response = self.send(self.request(Method::POST, path, headers, body)).await;
        Events {
            status: response.status(),
            headers: response.headers().clone(),
            body: response.into_body(),
            buffer: BytesMut::new(),
        }
    }
}

/// Why there is no whole reply.
#[derive(Debug)]
pub enum Broken {
    /// The connection could not be had, or broke off.
    Connection(String),
    /// Nothing came for as long as nothing may take.
    Hang,
}

impl Client {
    /// The whole reply to a GET of a router that may have been stopped.
    ///
    /// # Errors
    /// The connection broke, or nothing came in time.
    pub async fn try_get(&self, path: &str) -> Result<Reply, Broken> {
        self.attempt(self.request(Method::GET, path, &[], Bytes::new())).await
    }

    /// The whole reply to a POST of JSON, likewise.
    ///
    /// # Errors
    /// The connection broke, or nothing came in time.
    pub async fn try_post(&self, path: &str, body: &Value) -> Result<Reply, Broken> {
        self.attempt(self.request(Method::POST, path, &[], body.to_string())).await
    }

    /// The same with headers.
    ///
    /// # Errors
    /// The connection broke, or nothing came in time.
    pub async fn try_post_with(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> Result<Reply, Broken> {
        self.attempt(self.request(Method::POST, path, headers, body.to_string())).await
    }

    async fn attempt(&self, request: Request<Full<Bytes>>) -> Result<Reply, Broken> {
        let call = async {
            let response = self.http.request(request).await;
            let response = response.map_err(|error| Broken::Connection(error.to_string()))?;
            let (status, headers) = (response.status(), response.headers().clone());
            let body = response.into_body().collect().await;
            let body = body.map_err(|error| Broken::Connection(error.to_string()))?.to_bytes();
            Ok(Reply { status, headers, body })
        };
        tokio::time::timeout(PATIENCE, call).await.unwrap_or(Err(Broken::Hang))
    }
}

async fn whole(response: http::Response<Incoming>) -> Reply {
    let status = response.status();
    let headers = response.headers().clone();
    let body = tokio::time::timeout(PATIENCE, response.into_body().collect()).await;
    let body = body.expect("a whole body in time").expect("a whole body").to_bytes();
    Reply { status, headers, body }
}

/// A stream of events. Dropping it closes the connection.
#[derive(Debug)]
pub struct Events {
    /// The reply's status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    body: Incoming,
    buffer: BytesMut,
}

impl Events {
    /// The next event's data (`[DONE]` included); `None` when the connection ends. Comments are
    /// skipped.
    pub async fn next(&mut self) -> Option<String> {
        loop {
            let lines = self.next_lines().await?;
            if !lines.starts_with(':') {
                return Some(lines.strip_prefix("data: ").expect("data").to_owned());
            }
        }
    }

    /// The lines of the next event or comment; `None` when the connection ends.
    pub async fn next_lines(&mut self) -> Option<String> {
        loop {
            let text = String::from_utf8_lossy(&self.buffer).into_owned();
            if let Some(end) = text.find("\n\n") {
                let event = self.buffer.split_to(end + 2);
                let event = String::from_utf8_lossy(&event).into_owned();
                return Some(event.trim_end().to_owned());
            }
            let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await;
            match frame.expect("an event in time") {
                Some(Ok(frame)) => self.buffer.extend_from_slice(frame.data_ref()?),
                Some(Err(_)) | None => return None,
            }
        }
    }

    /// Some bytes of the body, as they are.
    pub async fn first_bytes(&mut self) -> String {
        let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await.expect("bytes in time");
        let frame = frame.and_then(Result::ok).expect("a body");
        String::from_utf8_lossy(frame.data_ref().unwrap_or(&Bytes::new())).into_owned()
    }

    /// What is left of the body, as it is.
    pub async fn rest_text(&mut self) -> String {
        while let Some(Ok(frame)) =
            tokio::time::timeout(PATIENCE, self.body.frame()).await.expect("a body in time")
        {
            self.buffer.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new()));
        }
        String::from_utf8_lossy(&self.buffer).into_owned()
    }

    /// All events up to the end.
    pub async fn rest(&mut self) -> Vec<String> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }

    /// All events up to `[DONE]`, which must come, as JSON.
    pub async fn chunks(&mut self) -> Vec<Value> {
        let mut events = self.rest().await;
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "after {events:?}");
        events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
    }
}

/// The text of a choice in streamed chunks, of either endpoint.
pub fn streamed_text(chunks: &[Value], index: u64) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().into_iter().flatten());
    choices
        .filter(|choice| choice["index"] == index)
        .filter_map(|choice| choice["text"].as_str().or(choice["delta"]["content"].as_str()))
        .collect()
}

/// The text of a choice in a whole reply, of either endpoint.
pub fn whole_text(reply: &Value, index: usize) -> String {
    let choice = &reply["choices"][index];
    let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
    text.unwrap_or_else(|| panic!("no text in {reply}")).to_owned()
}
