//! Streams of server-sent events.

use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, Method};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use tokio::time::timeout;

use super::address::AdminAddress;
use super::ask_error::AskError;
use super::connection::{OpenConnection, open};
use super::replica::Replica;

/// Maximum size of an event in bytes. Snapshots are bounded by their pace and are nowhere near.
const EVENT_MAX_BYTES: usize = 16 << 20;

/// Maximum size of the body of a refusal in bytes.
const REFUSAL_MAX_BYTES: usize = 1 << 20;

/// One server-sent event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Its name; `message` if it has none.
    pub(crate) name: String,
    /// Its data.
    pub(crate) data: Bytes,
}

/// An open stream of events. Dropping it closes the connection.
pub(crate) struct EventStream {
    address: AdminAddress,
    opened: OpenConnection,
    body: Incoming,
    reader: EventReader,
}

impl Replica {
    /// Opens a stream of events.
    ///
    /// # Errors
    /// There is no stream.
    pub(crate) async fn follow(&self, path: &str) -> Result<EventStream, AskError> {
        let address = self.address.clone();
        let request = self.request(Method::GET, path, HeaderMap::new(), Bytes::new())?;
        let opening = async {
            let mut opened = open(&address, self.resolved, self.tls.as_ref()).await?;
            let reply = opened.send(&address, request).await?;
            let (status, body) = (reply.status(), reply.into_body());
            if status.is_success() {
                return Ok((opened, body));
            }
            let body = opened.serve(Limited::new(body, REFUSAL_MAX_BYTES).collect()).await;
            let body = body.map(|body| body.to_bytes()).unwrap_or_default();
            Err(AskError::refused(&address, status.as_u16(), &body))
        };
        let opening = timeout(self.time_max, opening).await;
        let opening = opening.map_err(|_| AskError::timeout(&address, self.time_max))?;
        opening.map(|(opened, body)| EventStream {
            address: address.clone(),
            opened,
            body,
            reader: EventReader::default(),
        })
    }
}

impl EventStream {
    /// The next event; `None` at the end of the stream.
    ///
    /// # Errors
    /// The stream breaks, an event is too large, or nothing comes for `silence_max`.
    pub(crate) async fn next(&mut self, silence_max: Duration) -> Result<Option<Event>, AskError> {
        loop {
            if let Some(event) = self.reader.next() {
                return Ok(Some(event));
            }
            if self.reader.held_bytes() > EVENT_MAX_BYTES {
                return Err(AskError::unreadable(&self.address));
            }
            let frame = timeout(silence_max, self.opened.serve(self.body.frame())).await;
            let frame = frame.map_err(|_| AskError::timeout(&self.address, silence_max))?;
            let Some(frame) = frame else { return Ok(None) };
            let frame = frame.map_err(|error| AskError::exchange(&self.address, &error))?;
            self.reader.push(frame.into_data().unwrap_or_default());
        }
    }
}

/// Divides bytes into events.
#[derive(Default)]
struct EventReader {
    held: BytesMut,
}

impl EventReader {
    fn push(&mut self, bytes: Bytes) {
        self.held.extend_from_slice(&bytes);
    }

    fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// The next complete event. Events without data, which keep a connection open, are left out.
    fn next(&mut self) -> Option<Event> {
        loop {
            let end = self.held.windows(2).position(|two| two == b"\n\n")?;
            let block = self.held.split_to(end).freeze();
            self.held.advance(2);
            let mut event = Event { name: "message".to_owned(), data: Bytes::new() };
            for line in block.split(|byte| *byte == b'\n') {
                if let Some(name) = line.strip_prefix(b"event:") {
                    event.name = String::from_utf8_lossy(name).trim().to_owned();
                } else if let Some(data) = line.strip_prefix(b"data:") {
                    event.data = block.slice_ref(data);
                }
            }
            if !event.data.is_empty() {
                return Some(event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_however_their_bytes_are_divided() {
        let text = b"event: snapshot\ndata: {\"a\":1}\n\n: still here\n\ndata: x\n\nevent: end\nda";
        for size in 1..text.len() {
            let mut reader = EventReader::default();
            let mut events = Vec::new();
            for piece in text.chunks(size) {
                reader.push(Bytes::copy_from_slice(piece));
                events.extend(std::iter::from_fn(|| reader.next()));
            }
            let events: Vec<_> =
                events.iter().map(|event| (&*event.name, event.data.trim_ascii())).collect();
            assert_eq!(events, [("snapshot", &b"{\"a\":1}"[..]), ("message", &b"x"[..])]);
            assert_eq!(reader.held_bytes(), b"event: end\nda".len());
        }
    }
}
