//! A subscriber to a router's live stream.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::Value;

use crate::client::Client;

/// The path of the stream.
pub const LIVE: &str = "/admin/live";

/// An event of the stream.
#[derive(Debug)]
pub struct LiveEvent {
    /// `snapshot` or `end`.
    pub name: String,
    /// Its data.
    pub data: Value,
    /// Its length on the wire, in bytes.
    pub bytes: usize,
}

/// A subscriber. Dropping it closes its connection.
pub struct LiveStream {
    /// The reply's status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    body: Incoming,
    buffer: BytesMut,
}

impl LiveStream {
    /// Subscribes, with these headers.
    pub async fn open(admin: &Client, headers: &[(&str, &str)]) -> Self {
        let request = admin.request(Method::GET, LIVE, headers, Bytes::new());
        let (head, body) = admin.send(request).await.into_parts();
        Self { status: head.status, headers: head.headers, body, buffer: BytesMut::new() }
    }

    /// The next event; `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<LiveEvent> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\n\n") {
                let event = self.buffer.split_to(end + 2);
                return Some(parse(&event));
            }
            let frame = self.body.frame().await?.ok()?;
            self.buffer.extend_from_slice(frame.data_ref()?);
        }
    }

    /// The next snapshot, which must come.
    pub async fn snapshot(&mut self) -> Value {
        let event = self.next().await.expect("an event");
        assert_eq!(event.name, "snapshot", "{}", event.data);
        event.data
    }

    /// The first snapshot that meets a condition.
    pub async fn until(&mut self, condition: impl Fn(&Value) -> bool) -> Value {
        loop {
            let snapshot = self.snapshot().await;
            if condition(&snapshot) {
                return snapshot;
            }
        }
    }
}

fn parse(event: &[u8]) -> LiveEvent {
    let text = std::str::from_utf8(event).expect("UTF-8");
    let mut lines = text.trim_end().lines();
    let mut field = |name: &str| lines.next().and_then(|line| line.strip_prefix(name));
    let (name, data) = (field("event: ").expect("a name"), field("data: ").expect("data"));
    assert_eq!(lines.next(), None, "an event has one line of data");
    let data = serde_json::from_str(data).expect("JSON");
    LiveEvent { name: name.to_owned(), data, bytes: event.len() }
}
