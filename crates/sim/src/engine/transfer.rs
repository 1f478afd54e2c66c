//! Fetches KV from a prefill engine over its side channel.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use super::FOR_EVER;
use super::core::PullJob;
use super::hand_off::refused;
use crate::error::ApiError;

/// The path at which a prefill engine answers pulls.
pub(crate) const PULL_PATH: &str = "/sim/pull";
/// A prefill engine that does not answer within this time counts as gone.
const PULL_TIMEOUT: Duration = Duration::from_secs(30);
const REPLY_LIMIT_BYTES: usize = 64 * 1024;

/// Client for other engines' side channels.
#[derive(Debug, Clone)]
pub(crate) struct Puller {
    client: Client<HttpConnector, Full<Bytes>>,
    /// The ports of engines with which this one has registered before.
    known: Arc<Mutex<HashSet<u16>>>,
}

impl Puller {
    pub(crate) fn new() -> Self {
        // Idle connections are not kept: a restarted engine on the same port must not get an old
        // one.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http();
        Self { client, known: Arc::default() }
    }

    fn known(&self) -> MutexGuard<'_, HashSet<u16>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches one hand-off. `meeting` is the additional time for which the prefill engine may let
    /// it wait.
    pub(crate) async fn pull(&self, job: &PullJob, meeting: Duration) -> Result<(), ApiError> {
        let unreachable = || refused("hand_off_unreachable", "comes from an engine that is gone");
        let source = &job.source;
        let patience = match (source.is_found_by_id, source.waits) {
            (true, _) => FOR_EVER,
            (false, true) => PULL_TIMEOUT + meeting,
            (false, false) => PULL_TIMEOUT,
        };
        let body = serde_json::to_vec(&job.body).map_err(|_| unreachable())?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("http://{}:{}{PULL_PATH}", source.host, source.port))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|_| refused("hand_off_unknown", "names no usable address"))?;
        let exchange = async {
            let response = match self.client.request(request).await {
                Ok(response) => response,
                // A decode engine does not notice that an engine with which it registers, or has
                // registered before, has died.
                Err(error) if source.is_found_by_id => {
                    if error.is_connect() && !self.known().contains(&source.port) {
                        return Err(unreachable());
                    }
                    return std::future::pending().await;
                }
                Err(_) => return Err(unreachable()),
            };
            if source.is_found_by_id {
                self.known().insert(source.port);
            }
            if response.status().is_success() {
                return Ok(());
            }
            let status = response.status();
            let body = Limited::new(response.into_body(), REPLY_LIMIT_BYTES);
            let bytes = body.collect().await.map_err(|_| unreachable())?.to_bytes();
            let error: Value = serde_json::from_slice(&bytes).map_err(|_| unreachable())?;
            let error = &error["error"];
            let (Some(message), Some(code)) = (error["message"].as_str(), error["code"].as_str())
            else {
                return Err(unreachable());
            };
            let param = Some("kv_transfer_params");
            Err(ApiError { param, ..ApiError::new(status, message) }.with_code(code))
        };
        tokio::time::timeout(patience, exchange).await.unwrap_or_else(|_| Err(unreachable()))
    }
}
