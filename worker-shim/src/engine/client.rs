//! HTTP towards the engine, for the shim's own questions.

use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Method, Request};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use splitrail_engine::vllm::identity::RANK_HEADER;

/// No answer to a question of ours is longer; `/metrics` is about 60 kB a rank.
const ANSWER_MAX_BYTES: usize = 16 << 20;

/// vLLM closes idle connections after 5 s; ours end earlier.
const IDLE: Duration = Duration::from_secs(3);

/// To connect to a neighbour.
const CONNECT: Duration = Duration::from_secs(2);

/// Asks one engine. Cheap to clone.
#[derive(Clone)]
pub(super) struct EngineClient {
    http: Client<HttpConnector, Full<Bytes>>,
    /// `http://HOST:PORT`.
    url: String,
    authorization: Option<HeaderValue>,
}

/// An engine's answer.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Bytes,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// No connection, or it broke off.
    #[error("it cannot be reached: {0}")]
    Unreachable(String),
    /// Too late.
    #[error("it does not answer within {0:?}")]
    Late(Duration),
    /// Too long, or it broke off.
    #[error("its answer cannot be read")]
    Body,
    /// Another status than 200.
    #[error("it answers with status {0}")]
    Status(u16),
}

impl EngineClient {
    pub(super) fn new(url: &str, authorization: Option<HeaderValue>) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT));
        let http = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .build(connector);
        Self { http, url: url.to_owned(), authorization }
    }

    /// The text at a path.
    pub(super) async fn text(&self, path: &str, patience: Duration) -> Result<String, AskError> {
        let body = self.get(path, patience).await?;
        String::from_utf8(body.into()).map_err(|_| AskError::Body)
    }

    /// What is at a path.
    pub(super) async fn get(&self, path: &str, patience: Duration) -> Result<Bytes, AskError> {
        let answer = self.ask(Method::GET, path, None, Bytes::new(), patience).await?;
        match answer.status {
            200 => Ok(answer.body),
            status => Err(AskError::Status(status)),
        }
    }

    /// What the engine answers to a JSON body, pinned to a rank if one is given.
    pub(super) async fn post(
        &self,
        path: &str,
        rank: Option<u32>,
        body: String,
        patience: Duration,
    ) -> Result<Answer, AskError> {
        self.ask(Method::POST, path, rank, Bytes::from(body), patience).await
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        rank: Option<u32>,
        body: Bytes,
        patience: Duration,
    ) -> Result<Answer, AskError> {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        let mut request = request
            .body(Full::new(body))
            .map_err(|error| AskError::Unreachable(error.to_string()))?;
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
                AskError::Unreachable(cause.unwrap_or_else(|| error.to_string()))
            })?;
            let status = response.status().as_u16();
            let body = Limited::new(response.into_body(), ANSWER_MAX_BYTES).collect().await;
            let body = body.map_err(|_| AskError::Body)?.to_bytes();
            Ok(Answer { status, body })
        };
        tokio::time::timeout(patience, exchange).await.unwrap_or(Err(AskError::Late(patience)))
    }
}
