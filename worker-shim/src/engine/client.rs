//! The HTTP client for the shim's own requests to the engine.

use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Method, Request};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use splitrail_engine::identity::RANK_HEADER;

/// Maximum size of a reply in bytes. `/metrics` is about 60 kB per rank.
const REPLY_MAX_BYTES: usize = 16 << 20;

/// Idle connections are closed after this time, before vLLM closes them (5 s).
const IDLE_TIMEOUT: Duration = Duration::from_secs(3);

/// Timeout for connecting. The engine is nearby.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Sends requests to one engine. Cheap to clone.
#[derive(Clone)]
pub(super) struct EngineClient {
    http: Client<HttpConnector, Full<Bytes>>,
    /// `http://HOST:PORT`.
    url: String,
    authorization: Option<HeaderValue>,
}

/// The engine's reply.
pub(super) struct EngineReply {
    pub(super) status: u16,
    pub(super) body: Bytes,
}

/// Why a request to the engine has failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum QueryError {
    /// There is no connection, or it was closed early.
    #[error("the engine cannot be reached: {0}")]
    Unreachable(String),
    /// The reply did not arrive in time.
    #[error("the engine does not answer within {0:?}")]
    Late(Duration),
    /// The body is too long, or incomplete.
    #[error("the engine's reply cannot be read")]
    Body,
    /// The status is not 200.
    #[error("the engine answers with status {0}")]
    Status(u16),
}

impl EngineClient {
    pub(super) fn new(url: &str, authorization: Option<HeaderValue>) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let http = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .build(connector);
        Self { http, url: url.to_owned(), authorization }
    }

    /// Reads the text at `path`.
    pub(super) async fn text(&self, path: &str, timeout: Duration) -> Result<String, QueryError> {
        let body = self.get(path, timeout).await?;
        String::from_utf8(body.into()).map_err(|_| QueryError::Body)
    }

    /// Reads the body at `path`.
    pub(super) async fn get(&self, path: &str, timeout: Duration) -> Result<Bytes, QueryError> {
        let reply = self.send(Method::GET, path, None, Bytes::new(), timeout).await?;
        match reply.status {
            200 => Ok(reply.body),
            status => Err(QueryError::Status(status)),
        }
    }

    /// Posts a JSON body, pinned to `rank` if one is given. Returns the reply whatever its status.
    pub(super) async fn post(
        &self,
        path: &str,
        rank: Option<u32>,
        body: String,
        timeout: Duration,
    ) -> Result<EngineReply, QueryError> {
        self.send(Method::POST, path, rank, Bytes::from(body), timeout).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        rank: Option<u32>,
        body: Bytes,
        timeout: Duration,
    ) -> Result<EngineReply, QueryError> {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        let mut request = request
            .body(Full::new(body))
            .map_err(|error| QueryError::Unreachable(error.to_string()))?;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(rank) = rank {
            headers.insert(HeaderName::from_static(RANK_HEADER), rank.into());
        }
        if let Some(authorization) = &self.authorization {
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        let exchange = async {
            let response = self.http.request(request).await;
            let response = response.map_err(|error| {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                QueryError::Unreachable(cause.unwrap_or_else(|| error.to_string()))
            })?;
            let status = response.status().as_u16();
            let body = Limited::new(response.into_body(), REPLY_MAX_BYTES).collect().await;
            let body = body.map_err(|_| QueryError::Body)?.to_bytes();
            Ok(EngineReply { status, body })
        };
        tokio::time::timeout(timeout, exchange).await.unwrap_or(Err(QueryError::Late(timeout)))
    }
}
