//! Restricts who may use the admin listener.
//!
//! The listener requires no credential, so it must not be reachable by accident: hosts other than
//! loopback may not change anything, and web pages in a browser on an allowed host may not use it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{HOST, HeaderName, ORIGIN};
use http::uri::Authority;
use http::{Method, StatusCode};

use super::refusal::Refusal;
use crate::core::Core;
use crate::ingress::http::whole;
use crate::ingress::reply::reply_error;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Passes a request on when its body is complete, or refuses it. The body is bounded in size and
/// time like those of clients.
pub(super) async fn guard(
    bound: SocketAddr,
    core: Arc<Core>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Response {
    if let Err(why) = check(bound.ip(), peer.ip(), &request) {
        return Refusal::new(StatusCode::FORBIDDEN, "forbidden", why).into_response();
    }
    let (parts, body) = request.into_parts();
    match whole(body, &core).await {
        Ok((body, _held)) => next.run(Request::from_parts(parts, body.into())).await,
        Err(error) => reply_error(error),
    }
}

fn check<B>(bound: IpAddr, peer: IpAddr, request: &http::Request<B>) -> Result<(), &'static str> {
    // A web page may use a host name of its own that resolves to loopback (DNS rebinding).
    if bound.is_loopback() && !names_loopback(request) {
        return Err("the admin listener is on loopback: call it by `127.0.0.1`, `[::1]` or \
                    `localhost`");
    }
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(());
    }
    if !peer.to_canonical().is_loopback() {
        return Err("changes are accepted only from the router's own host");
    }
    let site = request.headers().get(SEC_FETCH_SITE);
    if request.headers().contains_key(ORIGIN) || site.is_some_and(|site| site != "none") {
        return Err("changes are not accepted from web pages");
    }
    Ok(())
}

/// Whether a request addresses this host by a loopback address or as `localhost`, if it names a
/// host.
fn names_loopback<B>(request: &http::Request<B>) -> bool {
    let header = || request.headers().get(HOST).map(|host| host.to_str().unwrap_or_default());
    let called = request.uri().authority().map(Authority::as_str).or_else(header);
    let Some(called) = called else { return true };
    let Ok(authority) = called.parse::<Authority>() else { return false };
    let host = authority.host();
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    bare.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn admitted(bound: &str, peer: &str, method: Method, headers: &[(&str, &str)]) -> bool {
        let mut request = http::Request::builder().method(method).uri("/admin/reload");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        check(bound.parse().unwrap(), peer.parse().unwrap(), &request).is_ok()
    }

    #[test]
    fn a_loopback_listener_admits_only_loopback_host_headers() {
        for (host, yes) in [
            ("127.0.0.1:9090", true),
            ("localhost:9090", true),
            ("LOCALHOST", true),
            ("[::1]:9090", true),
            ("attacker.example:9090", false),
            ("localhost.attacker.example", false),
            ("127.0.0.1.attacker.example", false),
            ("user@attacker.example", false),
            ("10.0.0.1:9090", false),
            ("", false),
        ] {
            let admitted = admitted("127.0.0.1", "127.0.0.1", Method::GET, &[("host", host)]);
            assert_eq!(admitted, yes, "{host}");
        }
        assert!(admitted("127.0.0.1", "127.0.0.1", Method::GET, &[]));
        assert!(admitted("0.0.0.0", "10.0.0.1", Method::GET, &[("host", "router:9090")]));
    }

    #[test]
    fn changes_are_admitted_only_from_this_host_and_not_from_web_pages() {
        let change = |peer, headers: &[_]| admitted("::", peer, Method::POST, headers);
        assert!(change("127.0.0.1", &[]));
        assert!(change("::1", &[("sec-fetch-site", "none")]));
        assert!(change("::ffff:127.0.0.1", &[]));
        assert!(!change("10.0.0.1", &[]));
        assert!(!change("127.0.0.1", &[("origin", "http://attacker.example")]));
        assert!(!change("127.0.0.1", &[("origin", "null")]));
        assert!(!change("127.0.0.1", &[("sec-fetch-site", "cross-site")]));
        assert!(!admitted("::", "10.0.0.1", Method::DELETE, &[]));
        assert!(admitted("::", "10.0.0.1", Method::GET, &[("origin", "http://a.example")]));
    }
}
