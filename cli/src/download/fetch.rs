//! One file over HTTP, across the redirects of the hub. Each request has a connection of its own.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, HOST, LOCATION, USER_AGENT};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use rustls::ClientConfig;
use tokio::time::timeout;

use super::download_error::DownloadError;
use super::location::Location;
use crate::admin::{AskError, OpenConnection, open};

/// Maximum number of redirects. The hub's own take two.
const REDIRECTS_MAX: usize = 5;
/// Maximum time for a connection and the head of the reply.
const HEAD_TIME_MAX: Duration = Duration::from_secs(30);
/// Maximum time in which nothing of a body comes.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// What all requests to a hub have.
pub(super) struct Fetcher {
    pub(super) tls: Option<Arc<ClientConfig>>,
    /// The server to which alone the credential is sent.
    pub(super) endpoint: Location,
    pub(super) authorization: Option<HeaderValue>,
}

/// A reply whose body has not been read.
pub(super) struct FetchReply {
    pub(super) status: StatusCode,
    /// The headers of the hub about the file: those of the first reply that does not lead to another
    /// place of the hub. The server to which large files are redirected does not know them.
    pub(super) about: HeaderMap,
    /// Whether the hub itself replied, and not another server to which it redirects.
    pub(super) is_of_hub: bool,
    opened: OpenConnection,
    body: Incoming,
    at: Location,
}

impl Fetcher {
    /// Sends a GET, and follows redirects.
    ///
    /// # Errors
    /// A server cannot be reached or does not reply in time, or a redirect leads nowhere.
    pub(super) async fn get(&self, location: Location) -> Result<FetchReply, DownloadError> {
        let mut at = location;
        let mut about = None;
        for _ in 0..=REDIRECTS_MAX {
            let (opened, reply) = self.send(&at).await?;
            let (head, body) = reply.into_parts();
            let next = match head.status.as_u16() {
                301 | 302 | 303 | 307 | 308 => {
                    let next = head.headers.get(LOCATION).and_then(|value| value.to_str().ok());
                    let next = next.and_then(|next| at.redirected(next));
                    Some(next.ok_or_else(|| {
                        let why = format!("{} redirects to no place that is followed", at.shown());
                        DownloadError::unavailable(why)
                    })?)
                }
                _ => None,
            };
            let leaves = next.as_ref().is_none_or(|next| !next.is_same_server(&self.endpoint));
            if leaves && about.is_none() {
                about = Some(head.headers);
            }
            match next {
                Some(next) => at = next,
                None => {
                    let about = about.unwrap_or_default();
                    let is_of_hub = at.is_same_server(&self.endpoint);
                    let status = head.status;
                    return Ok(FetchReply { status, about, is_of_hub, opened, body, at });
                }
            }
        }
        let why = format!("{} redirects more than {REDIRECTS_MAX} times", self.endpoint.shown());
        Err(DownloadError::unavailable(why))
    }

    async fn send(
        &self,
        at: &Location,
    ) -> Result<(OpenConnection, Response<Incoming>), DownloadError> {
        let mut request = Request::get(&at.target)
            .header(HOST, &at.host)
            .header(ACCEPT, "*/*")
            // A compressed file would have another digest.
            .header(ACCEPT_ENCODING, "identity")
            .header(USER_AGENT, concat!("splitrail/", env!("CARGO_PKG_VERSION")))
            .body(Full::<Bytes>::default())
            .map_err(|_| DownloadError::unavailable(format!("{} is no URL", at.shown())))?;
        if let Some(authorization) = &self.authorization
            && at.is_same_server(&self.endpoint)
        {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        let tls = self.tls.as_ref().filter(|_| at.address.is_tls());
        let exchange = async {
            let mut opened = open(&at.address, None, tls).await?;
            let reply = opened.send(&at.address, request).await?;
            Ok::<_, AskError>((opened, reply))
        };
        match timeout(HEAD_TIME_MAX, exchange).await {
            Ok(Ok(exchanged)) => Ok(exchanged),
            Ok(Err(error)) => Err(DownloadError::unavailable(error.message())),
            Err(_) => {
                let seconds = HEAD_TIME_MAX.as_secs();
                let why = format!("{} did not reply within {seconds} s", at.host);
                Err(DownloadError::unavailable(why))
            }
        }
    }
}

impl FetchReply {
    /// The host that replied.
    pub(super) fn host(&self) -> &str {
        &self.at.host
    }

    /// Reads the body.
    ///
    /// # Errors
    /// The body is larger than `max_bytes`, breaks off, or stops arriving.
    pub(super) async fn read(mut self, max_bytes: usize) -> Result<Vec<u8>, DownloadError> {
        let place = self.at.shown();
        let too_large = || {
            let mib = max_bytes >> 20;
            DownloadError::unavailable(format!("{place} is larger than {mib} MiB"))
        };
        let declared = self.body_length();
        if declared.is_some_and(|length| length > max_bytes) {
            return Err(too_large());
        }
        let mut read = Vec::with_capacity(declared.unwrap_or_default());
        loop {
            let frame = self.opened.serve(self.body.frame());
            let frame = timeout(SILENCE_MAX, frame).await.map_err(|_| {
                let seconds = SILENCE_MAX.as_secs();
                DownloadError::unavailable(format!("nothing of {place} came for {seconds} s"))
            })?;
            let Some(frame) = frame else { return Ok(read) };
            let broken = |error| DownloadError::unavailable(format!("{place} broke off: {error}"));
            let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
            if read.len() + data.len() > max_bytes {
                return Err(too_large());
            }
            read.extend_from_slice(&data);
        }
    }

    fn body_length(&self) -> Option<usize> {
        let exact = hyper::body::Body::size_hint(&self.body).exact()?;
        usize::try_from(exact).ok()
    }
}
