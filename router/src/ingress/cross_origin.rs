//! Lets pages of other sites read replies (CORS, as the Fetch standard defines it). Browsers ask for
//! this; without it, they refuse the reply to the page.

use std::sync::Arc;

use axum::body::Body;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderMap, ORIGIN, VARY,
};
use http::{HeaderValue, Method, Request, Response, StatusCode};

/// Headers of replies that a page may read.
const EXPOSED: &str = "x-request-id, request-id, retry-after, retry-after-ms, server-timing, \
                       x-splitrail-route, x-splitrail-removed-fields";

/// How long a browser may keep the answer to a preflight request, in seconds: the longest time that
/// Chromium takes.
const MAX_AGE_S: &str = "7200";

/// The origins whose pages may use the listener (`listen.http_origins`); `*` stands for all.
#[derive(Clone, Debug, Default)]
pub(super) struct AllowedOrigins(Arc<[String]>);

impl AllowedOrigins {
    pub(super) fn new(origins: &[String]) -> Self {
        Self(origins.into())
    }

    /// The permission of the page that has sent a request, if a page has and may.
    pub(super) fn grant<B>(&self, request: &Request<B>) -> Option<OriginGrant> {
        if self.0.is_empty() {
            return None;
        }
        let origin = request.headers().get(ORIGIN)?;
        let is = |allowed: &String| allowed == "*" || allowed.as_bytes() == origin.as_bytes();
        self.0.iter().any(is).then(|| OriginGrant(origin.clone()))
    }
}

/// The permission of a page of this origin.
#[derive(Clone, Debug)]
pub(super) struct OriginGrant(HeaderValue);

impl OriginGrant {
    /// The answer to a request with which a browser asks whether the page may send another one. It has
    /// no credential, so it is answered without one.
    pub(super) fn preflight<B>(&self, request: &Request<B>) -> Option<Response<Body>> {
        let headers = request.headers();
        if request.method() != Method::OPTIONS
            || !headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        {
            return None;
        }
        let mut reply = Response::new(Body::empty());
        *reply.status_mut() = StatusCode::NO_CONTENT;
        let methods = HeaderValue::from_static("GET, POST, DELETE");
        let granted = reply.headers_mut();
        granted.insert(ACCESS_CONTROL_ALLOW_METHODS, methods);
        granted.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE_S));
        if let Some(asked) = headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
            granted.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
        }
        Some(reply)
    }

    /// Puts the permission into the head of a reply.
    pub(super) fn put(self, headers: &mut HeaderMap) {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, self.0);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        headers.append(VARY, HeaderValue::from_static("origin"));
    }
}
