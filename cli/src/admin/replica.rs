//! One replica, as commands ask it.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use rustls::ClientConfig;
use serde_json::Value;
use tokio::time::timeout;

use super::address::AdminAddress;
use super::ask_error::AskError;
use super::connection::open;

/// Maximum size of a reply in bytes. The largest is an explanation, which has one line per worker
/// and prompt; no reply is nearly as large.
const REPLY_MAX_BYTES: usize = 256 << 20;

/// One replica.
#[derive(Clone, Debug)]
pub(crate) struct Replica {
    pub(crate) address: AdminAddress,
    /// The address to connect to, if it is not to be looked up: of a host name that has several.
    pub(crate) resolved: Option<SocketAddr>,
    pub(crate) tls: Option<Arc<ClientConfig>>,
    pub(crate) key: Option<HeaderValue>,
    /// The time for a complete reply.
    pub(crate) time_max: Duration,
}

/// A complete reply.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
}

impl Replica {
    /// The name of the replica for people: its host and port.
    pub(crate) fn name(&self) -> String {
        match self.resolved {
            Some(resolved) => resolved.to_string(),
            None => self.address.authority().to_owned(),
        }
    }

    /// The same replica with more time for each reply, if that is longer than what it has.
    pub(crate) fn with_time(&self, time_max: Duration) -> Self {
        Self { time_max: self.time_max.max(time_max), ..self.clone() }
    }

    /// `GET`, for JSON.
    ///
    /// # Errors
    /// There is no reply in time, it is no success, or it is not JSON.
    pub(crate) async fn get(&self, path: &str) -> Result<Value, AskError> {
        self.json(self.ask(Method::GET, path, HeaderMap::new(), Bytes::new()).await?)
    }

    /// `GET`, for text.
    ///
    /// # Errors
    /// There is no reply in time, or it is no success.
    pub(crate) async fn get_text(&self, path: &str) -> Result<String, AskError> {
        let reply = self.ask(Method::GET, path, HeaderMap::new(), Bytes::new()).await?;
        Ok(String::from_utf8_lossy(&self.success(&reply)?.body).into_owned())
    }

    /// Another method than `GET`, for JSON; `body` is JSON or empty.
    ///
    /// # Errors
    /// As for [`Self::get`].
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        mut headers: HeaderMap,
        body: Bytes,
    ) -> Result<Value, AskError> {
        headers.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
        self.json(self.ask(method, path, headers, body).await?)
    }

    /// Whether the replica is ready; the reason if it is not.
    ///
    /// # Errors
    /// There is no reply in time, or it is neither of both.
    pub(crate) async fn readiness(&self) -> Result<Option<String>, AskError> {
        let reply = self.ask(Method::GET, "/ready", HeaderMap::new(), Bytes::new()).await?;
        let told: Value = serde_json::from_slice(&reply.body).unwrap_or_default();
        match (reply.status, told["reason"].as_str()) {
            (StatusCode::OK, _) if told["status"] == "ready" => Ok(None),
            (StatusCode::SERVICE_UNAVAILABLE, Some(reason)) => Ok(Some(reason.to_owned())),
            (status, _) => Err(AskError::refused(&self.address, status.as_u16(), &reply.body)),
        }
    }

    /// The error for a stream that has ended.
    pub(crate) fn ended(&self, why: &str) -> AskError {
        AskError::unreachable(format!("{}: {why}", self.name()), None)
    }

    /// The error for a reply of another form.
    pub(crate) fn unreadable(&self) -> AskError {
        AskError::unreadable(&self.address)
    }

    /// A member of a reply.
    ///
    /// # Errors
    /// There is none: what replied is not an admin listener of this release.
    pub(crate) fn member<'r>(&self, reply: &'r Value, name: &str) -> Result<&'r Value, AskError> {
        reply.get(name).ok_or_else(|| self.unreadable())
    }

    fn success<'r>(&self, reply: &'r Reply) -> Result<&'r Reply, AskError> {
        match reply.status.is_success() {
            true => Ok(reply),
            false => Err(AskError::refused(&self.address, reply.status.as_u16(), &reply.body)),
        }
    }

    fn json(&self, reply: Reply) -> Result<Value, AskError> {
        let body = &self.success(&reply)?.body;
        serde_json::from_slice(body).map_err(|_| AskError::unreadable(&self.address))
    }

    /// Sends a request on a connection of its own, and returns the complete reply.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Reply, AskError> {
        let address = &self.address;
        let exchange = async {
            let request = self.request(method, path, headers, body)?;
            let mut opened = open(address, self.resolved, self.tls.as_ref()).await?;
            let reply = opened.send(address, request).await?;
            let status = reply.status();
            let body = Limited::new(reply.into_body(), REPLY_MAX_BYTES).collect();
            let body = opened.serve(body).await.map_err(|_| AskError::unreadable(address))?;
            Ok(Reply { status, body: body.to_bytes() })
        };
        let ended = timeout(self.time_max, exchange).await;
        ended.unwrap_or_else(|_| Err(AskError::timeout(address, self.time_max)))
    }

    /// A request for this replica.
    pub(super) fn request(
        &self,
        method: Method,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, AskError> {
        // Without TLS and a key, a router may refuse names that it does not know.
        let host = match self.resolved {
            Some(resolved) if self.tls.is_none() => resolved.to_string(),
            _ => self.address.authority().to_string(),
        };
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, host)
            .header(ACCEPT, "*/*")
            .header(USER_AGENT, concat!("splitrail/", env!("CARGO_PKG_VERSION")))
            .body(Full::new(body))
            .map_err(|_| AskError::unreachable(format!("`{path}` is not a path"), None))?;
        request.headers_mut().extend(headers);
        if let Some(key) = &self.key {
            request.headers_mut().insert(AUTHORIZATION, key.clone());
        }
        Ok(request)
    }
}

/// A text in the encoding of paths and queries (RFC 3986, section 2.1), so that it is one segment or
/// one value.
pub(crate) fn percent_encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        // Writing to a string does not fail.
        let _written = match byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            true => write!(encoded, "{}", char::from(byte)),
            false => write!(encoded, "%{byte:02X}"),
        };
        encoded
    })
}
