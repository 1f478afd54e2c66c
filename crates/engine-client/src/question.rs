//! Single questions to an engine, answered completely whatever their status: for a check, which
//! reports how an engine fails and does not count it.

use std::error::Error as StdError;
use std::io;
use std::net::IpAddr;
use std::time::SystemTime;

use bytes::Bytes;
use http::HeaderValue;
use tokio::time::{Instant, timeout_at};

use super::engine::Engine;
use crate::connections::{BegunReply, Class, Destination, Failure};
use crate::failure::io_cause;
use crate::framing::Malformed;
use crate::gather::{GatherError, gather};
use crate::wire::{EngineRequest, Peer, ReplyError};
use crate::{EngineClient, JSON, X_REQUEST_ID};
use splitrail_engine::identity::RANK_HEADER;

/// The class of connections for questions; none of them is kept.
const QUESTIONS: Class = 253;

/// A question to an engine.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// The path.
    pub path: &'a str,
    /// The JSON body of a `POST`; without it, a `GET` is sent.
    pub body: Option<Bytes>,
    /// The data-parallel rank that must take the request.
    pub rank: Option<u32>,
    /// The value of `x-request-id`, by which the engine's log shows the question.
    pub request_id: &'a HeaderValue,
    /// Maximum size of the reply in bytes.
    pub max_bytes: usize,
    /// When the question is given up.
    pub deadline: Instant,
}

/// A complete reply, of any status.
#[derive(Clone, Debug)]
pub struct WholeReply {
    /// The status code.
    pub status: u16,
    /// The time of the engine's host, from the field `date`.
    pub date: Option<SystemTime>,
    /// The address that answered, if known.
    pub peer: Option<IpAddr>,
    /// The body.
    pub body: Bytes,
}

/// Why a question has no reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoReply {
    /// The address cannot be connected to.
    Connect {
        /// The kind of the cause.
        kind: io::ErrorKind,
        /// The cause, in words of the operating system.
        cause: String,
    },
    /// The host name cannot be looked up.
    Name {
        /// The cause, in words of the resolver.
        cause: String,
    },
    /// The address is not in the allowed networks.
    Outside,
    /// The TLS handshake failed.
    Tls {
        /// The cause, worded to follow "the engine cannot be reached:".
        cause: String,
    },
    /// The connection was closed before a reply, or within it.
    Closed,
    /// The bytes are not HTTP/1.1.
    NotHttp(Malformed),
    /// The reply has more bytes than allowed.
    TooLong,
    /// There was no reply in time.
    Late,
}

impl EngineClient {
    /// Sends one question on a connection of its own, and reads the whole reply.
    ///
    /// # Errors
    /// There is no complete reply in time.
    pub async fn question(
        &self,
        worker: &dyn Engine,
        question: Question<'_>,
    ) -> Result<WholeReply, NoReply> {
        let Question { path, body, rank, request_id, max_bytes, deadline } = question;
        let method = if body.is_some() { "POST" } else { "GET" };
        let has_body = body.is_some();
        let body = body.unwrap_or_default().into();
        let mut request = EngineRequest::new(method, worker.authority(), path, body);
        if let Some(value) = &self.authorization {
            request.field("authorization", value);
        }
        if has_body {
            request.field("content-type", &JSON);
        }
        request.id(X_REQUEST_ID, request_id);
        request.via(None);
        if let Some(rank) = rank {
            request.number(RANK_HEADER, rank.into());
        }
        let (authority, process) = (worker.authority(), worker.process());
        let to = Destination { authority, process, class: QUESTIONS, engine: None, fresh: true };
        let exchange = async {
            let begun = self.connections(worker).request(to, &mut request.ended(), |_| false).await;
            let BegunReply { status, mut body, date, peer, .. } = begun.map_err(no_reply)?;
            // The body is not proven: its connection ends with it.
            let body = gather(&mut body, max_bytes, &self.memory, None).await;
            let body = body.map_err(|error| match error {
                GatherError::TooLong | GatherError::NoMemory | GatherError::NoRoom(_) => {
                    NoReply::TooLong
                }
                GatherError::Broken(ReplyError::Closed) => NoReply::Closed,
                GatherError::Broken(ReplyError::Malformed(malformed)) => {
                    NoReply::NotHttp(malformed)
                }
            })?;
            let date = date.and_then(|date| date.time());
            let peer = peer.map(|Peer(address)| address);
            Ok(WholeReply { status: status.as_u16(), date, peer, body })
        };
        timeout_at(deadline, exchange).await.unwrap_or(Err(NoReply::Late))
    }
}

fn no_reply(failure: Failure) -> NoReply {
    match failure {
        Failure::Connect(error) => unconnected(error.as_ref()),
        Failure::Malformed(malformed) => NoReply::NotHttp(malformed),
        Failure::Stale | Failure::Closed | Failure::Early | Failure::Withdrawn => NoReply::Closed,
    }
}

fn unconnected(error: &(dyn StdError + 'static)) -> NoReply {
    // The connector wraps its causes; a handshake fails with a plain error of input or output.
    if error.is::<io::Error>() {
        return NoReply::Tls { cause: error.to_string() };
    }
    let is_name = error.to_string().starts_with("dns error");
    match io_cause(error) {
        Some(cause) if is_name && cause.kind() == io::ErrorKind::PermissionDenied => {
            NoReply::Outside
        }
        Some(cause) if is_name => NoReply::Name { cause: cause.to_string() },
        Some(cause) => NoReply::Connect { kind: cause.kind(), cause: cause.to_string() },
        None => NoReply::Connect {
            kind: io::ErrorKind::TimedOut,
            cause: "no connection within the timeout".to_owned(),
        },
    }
}
