//! Restricts who may use the admin listener.
//!
//! With `listen.admin_access: open`, reading needs no credential, so the listener must not be
//! reachable by accident: hosts other than loopback may change something only with a credential of
//! the role `admin`. With `roles`, every request needs a credential. Web pages in a browser on an
//! allowed host may not use the listener.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::{ConnectInfo, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{HOST, HeaderName, ORIGIN};
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, Method, StatusCode};

use super::page::is_page;
use super::refusal::AdminError;
use super::{BODY_MAX_BYTES, EXPLAIN, METRICS, PLAYGROUND};
use crate::core::Core;
use crate::ingress::head::name_of;
use crate::ingress::http::whole;
use crate::ingress::identify::refused;
use crate::ingress::reply::reply_error;
use crate::ingress::request_body::BodyBound;
use splitrail_access::{OperatorRole, Refusal};
use splitrail_api::error::{Error, ErrorKind};
use splitrail_config::model::{AdminAccess, Listen};
use splitrail_ledger::audit::Change;
use splitrail_request_log::identity::X_REQUEST_ID;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Passes a request on when its body is complete, or refuses it. The body is bounded in time like
/// those of clients, and is charged to the share of its sender's address.
pub(super) async fn guard(
    bound: SocketAddr,
    core: Arc<Core>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Response {
    let operator = core.access.load().operator(request.headers(), SystemTime::now());
    let operator = match operator {
        Ok(operator) => operator,
        Err(refusal) => {
            let error = refused(&core, "admin", peer.ip(), request.headers(), refusal);
            return reply_error(error);
        }
    };
    let role = operator.as_ref().map(|operator| operator.role);
    let serving = core.serving();
    let listen = &serving.config.listen;
    let access = listen.admin_access;
    let names = Names::of(listen, bound.ip(), role);
    let refused = match check(names, peer.ip(), role, &request) {
        Err(forbidden) => Some(forbidden.into_response()),
        Ok(()) => check_role(access, role, &request).err().map(|refused_role| match refused_role {
            RoleRefusal::Missing => {
                let headers = request.headers();
                reply_error(refused(&core, "admin", peer.ip(), headers, Refusal::Missing))
            }
            RoleRefusal::ReadOnly => reply_error(Error::new(
                ErrorKind::NotPermitted,
                "changes need a credential of the role `admin`",
            )),
        }),
    };
    drop(serving);
    let change = is_change(&request).then(|| {
        let headers = request.headers();
        let request_id = headers.get(X_REQUEST_ID).and_then(|id| id.to_str().ok());
        let request_id = request_id.map(|id| id.chars().take(REQUEST_ID_MAX).collect::<String>());
        (request.method().clone(), request.uri().path().to_owned(), request_id)
    });
    let response = match refused {
        Some(refused) => refused,
        None => {
            let (parts, body) = request.into_parts();
            let bound = body_bound(&core, &parts);
            let memory = core.memory.of_client(core.admission.of_address(peer.ip()));
            match whole(body, &core, &memory, bound).await {
                Ok((body, _held)) => next.run(Request::from_parts(parts, body.into())).await,
                Err(error) => reply_error(error),
            }
        }
    };
    if let Some((method, path, request_id)) = &change {
        core.logs.audit.change(Change {
            key: operator.as_ref().map(|operator| &*operator.key),
            role: role.map(OperatorRole::name),
            address: peer.ip().to_canonical(),
            method: method.as_str(),
            path,
            status: response.status().as_u16(),
            request_id: request_id.as_deref(),
        });
    }
    response
}

/// The bound on a request's body. A request to be explained may be as long as one to be served.
fn body_bound(core: &Core, request: &Parts) -> BodyBound {
    match request.method {
        Method::GET | Method::HEAD => BodyBound::NONE,
        _ if request.uri.path() == EXPLAIN => BodyBound::of_clients(&core.serving().limits),
        _ => BodyBound { max_bytes: BODY_MAX_BYTES, of: "of the admin listener" },
    }
}

/// Maximum number of characters of a request id in the audit file.
const REQUEST_ID_MAX: usize = 128;

/// Whether a path needs no credential: it has no data.
fn is_public(path: &str) -> bool {
    matches!(path, "/health" | "/ready") || is_page(path)
}

/// Whether a request would change something.
fn is_change<B>(request: &http::Request<B>) -> bool {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    !reads && request.uri().path() != EXPLAIN
}

/// Why an operator's role does not suffice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RoleRefusal {
    /// The request has no credential and needs one.
    Missing,
    /// The credential is for reading only.
    ReadOnly,
}

/// Checks that the role of an operator is sufficient.
fn check_role<B>(
    access: AdminAccess,
    role: Option<OperatorRole>,
    request: &http::Request<B>,
) -> Result<(), RoleRefusal> {
    let needed = if is_change(request) { OperatorRole::Admin } else { OperatorRole::Read };
    match (access, role) {
        (_, Some(role)) if role >= needed => Ok(()),
        (_, Some(_)) => Err(RoleRefusal::ReadOnly),
        (AdminAccess::Open, None) => Ok(()),
        (AdminAccess::Roles, None) if is_public(request.uri().path()) => Ok(()),
        (AdminAccess::Roles, None) => Err(RoleRefusal::Missing),
    }
}

/// Whether the sender of a request that is still being answered may read now: its credential may
/// have expired or been revoked since.
pub(super) fn may_still_read(core: &Core, headers: &HeaderMap) -> bool {
    let operator = core.access.load().operator(headers, SystemTime::now());
    let access = core.serving().config.listen.admin_access;
    operator.is_ok_and(|operator| operator.is_some() || access == AdminAccess::Open)
}

/// Why a request may not use the listener, whatever its role.
struct ForbiddenReason {
    /// The error code of the reply.
    code: &'static str,
    message: &'static str,
}

impl ForbiddenReason {
    fn host(message: &'static str) -> Self {
        Self { code: "forbidden_host", message }
    }

    fn sender(message: &'static str) -> Self {
        Self { code: "forbidden", message }
    }
}

impl IntoResponse for ForbiddenReason {
    fn into_response(self) -> Response {
        AdminError::new(StatusCode::FORBIDDEN, self.code, self.message).into_response()
    }
}

/// The names by which a request may call the listener. A web page may use a name of its own that
/// resolves to the listener's address (DNS rebinding).
#[derive(Clone, Copy)]
enum Names<'a> {
    /// Loopback addresses, `localhost`, and `listen.admin_hosts`.
    Loopback(&'a [String]),
    /// The same, and all other addresses. For metrics and for paths without data: any name.
    Addresses(&'a [String]),
    /// Any name: the request has a credential or must have one, or its client has found the name in
    /// the listener's certificate.
    Any,
}

impl<'a> Names<'a> {
    fn of(listen: &'a Listen, bound: IpAddr, role: Option<OperatorRole>) -> Self {
        let is_encrypted = listen.admin.tls.as_ref().is_some_and(|tls| !tls.plain_text);
        match (bound.is_loopback(), listen.admin_access, role) {
            (true, _, _) => Self::Loopback(&listen.admin_hosts),
            (false, AdminAccess::Open, None) if !is_encrypted => {
                Self::Addresses(&listen.admin_hosts)
            }
            _ => Self::Any,
        }
    }

    /// Checks the name by which a request calls the listener, if it has one.
    ///
    /// # Errors
    /// The name is another one.
    fn check<B>(self, request: &http::Request<B>) -> Result<(), ForbiddenReason> {
        let path = request.uri().path();
        match self {
            Self::Loopback(hosts) if !calls_by(request, hosts, |ip| ip.is_loopback()) => {
                Err(ForbiddenReason::host(
                    "the admin listener is on loopback: call it by `127.0.0.1`, `[::1]` or \
                     `localhost`, or list its name under `listen.admin_hosts`",
                ))
            }
            Self::Addresses(hosts)
                if !is_public(path) && path != METRICS && !calls_by(request, hosts, |_| true) =>
            {
                Err(ForbiddenReason::host(
                    "without a key, the admin listener is called by its IP address, by `localhost` \
                     or by a name of `listen.admin_hosts`",
                ))
            }
            _ => Ok(()),
        }
    }
}

fn check<B>(
    names: Names<'_>,
    peer: IpAddr,
    role: Option<OperatorRole>,
    request: &http::Request<B>,
) -> Result<(), ForbiddenReason> {
    names.check(request)?;
    let site = request.headers().get(SEC_FETCH_SITE);
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        // A page of another site cannot read a reply, but could take the places of those who watch,
        // and make the router do costly work.
        let is_of_this_site = site.is_none_or(|site| site == "same-origin" || site == "none");
        return match is_of_this_site || is_public(request.uri().path()) {
            true => Ok(()),
            false => Err(ForbiddenReason::sender("other web pages may not read from this router")),
        };
    }
    if role.is_none() && !peer.to_canonical().is_loopback() {
        return Err(ForbiddenReason::sender(
            "changes are accepted only from the router's own host, or with a credential of \
             the role `admin`",
        ));
    }
    // Browsers set the header, and no page can forge it.
    let is_own_page =
        request.uri().path() == PLAYGROUND && site.is_some_and(|site| site == "same-origin");
    let is_of_page =
        request.headers().contains_key(ORIGIN) || site.is_some_and(|site| site != "none");
    if is_of_page && !is_own_page {
        return Err(ForbiddenReason::sender("changes are not accepted from web pages"));
    }
    Ok(())
}

/// Whether a request calls the listener by such an address, as `localhost` or by one of these names,
/// if it names a host.
fn calls_by<B>(
    request: &http::Request<B>,
    hosts: &[String],
    is_allowed: impl FnOnce(IpAddr) -> bool,
) -> bool {
    let header = || request.headers().get(HOST).map(|host| host.to_str().unwrap_or_default());
    let called = request.uri().authority().map(Authority::as_str).or_else(header);
    let Some(called) = called else { return true };
    let Ok(authority) = called.parse::<Authority>() else { return false };
    let host = authority.host();
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    bare.eq_ignore_ascii_case("localhost")
        || hosts.iter().any(|name| name_of(name).eq_ignore_ascii_case(name_of(bare)))
        || bare.parse::<IpAddr>().is_ok_and(|ip| is_allowed(ip.to_canonical()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_needed_for_all_data_but_health_if_it_is_needed_at_all() {
        let status = |access, role, method, path: &str| {
            let request = http::Request::builder().method(method).uri(path).body(()).unwrap();
            let checked = check_role(access, role, &request);
            match checked {
                Ok(()) => 200,
                Err(RoleRefusal::Missing) => 401,
                Err(RoleRefusal::ReadOnly) => 403,
            }
        };
        use AdminAccess::{Open, Roles};
        for (access, role, method, path, expected) in [
            (Open, None, Method::GET, "/metrics", 200),
            (Open, None, Method::POST, "/admin/reload", 200),
            (Open, Some(OperatorRole::Read), Method::POST, "/admin/reload", 403),
            (Roles, None, Method::GET, "/metrics", 401),
            (Roles, None, Method::POST, "/admin/explain", 401),
            (Roles, None, Method::GET, "/health", 200),
            (Roles, None, Method::GET, "/", 200),
            (Roles, None, Method::GET, "/page/main.js", 200),
            (Roles, None, Method::GET, "/page/", 401),
            (Roles, None, Method::GET, "/admin/live", 401),
            (Roles, None, Method::POST, "/admin/reload", 401),
            (Roles, Some(OperatorRole::Read), Method::GET, "/metrics", 200),
            (Roles, Some(OperatorRole::Read), Method::POST, "/admin/explain", 200),
            (Roles, Some(OperatorRole::Read), Method::DELETE, "/admin/workers/w", 403),
            (Roles, Some(OperatorRole::Admin), Method::DELETE, "/admin/workers/w", 200),
        ] {
            let found = status(access, role, method.clone(), path);
            assert_eq!(found, expected, "{access:?} {role:?} {method} {path}");
        }
    }

    #[test]
    fn a_remote_host_may_change_something_only_with_a_role() {
        let request = http::Request::builder().method(Method::POST).uri("/admin/reload");
        let request = request.body(()).unwrap();
        let peer = "10.0.0.1".parse().unwrap();
        assert!(check(Names::Any, peer, None, &request).is_err());
        assert!(check(Names::Any, peer, Some(OperatorRole::Admin), &request).is_ok());
    }

    fn admitted(bound: &str, peer: &str, method: Method, headers: &[(&str, &str)]) -> bool {
        let mut request = http::Request::builder().method(method).uri("/admin/reload");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        let listen = Listen::default();
        let names = Names::of(&listen, bound.parse().unwrap(), None);
        check(names, peer.parse().unwrap(), None, &request).is_ok()
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
    }

    #[test]
    fn a_listener_of_plain_http_beyond_loopback_is_called_by_address_unless_a_name_is_listed() {
        let bound = "0.0.0.0".parse().unwrap();
        let mut listen = Listen { admin_hosts: vec!["router".to_owned()], ..Listen::default() };
        let calls = |listen: &Listen, role, host: &str, path: &str| {
            let request = http::Request::builder().uri(path).header(HOST, host).body(()).unwrap();
            Names::of(listen, bound, role).check(&request).is_ok()
        };
        for (host, yes) in [
            ("127.0.0.1:9090", true),
            ("10.0.0.1:9090", true),
            ("[2001:db8::1]:9090", true),
            ("localhost:9090", true),
            ("Router:9090", true),
            ("evil.example:9090", false),
            ("router.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("", false),
        ] {
            assert_eq!(calls(&listen, None, host, "/admin/config"), yes, "{host}");
            assert_eq!(calls(&listen, None, host, "/admin/explain"), yes, "{host}");
            for path in ["/metrics", "/health", "/ready", "/"] {
                assert!(calls(&listen, None, host, path), "{host} {path}");
            }
            let operator = Some(OperatorRole::Read);
            assert!(calls(&listen, operator, host, "/admin/config"), "{host}, with a key");
        }
        listen.admin_access = AdminAccess::Roles;
        assert!(calls(&listen, None, "any.example", "/admin/config"), "it needs a key anyway");
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

    #[test]
    fn of_all_pages_only_the_live_page_sends_prompts_and_it_changes_nothing() {
        let sends = |site: &'static str, path: &str| {
            let request = http::Request::post(path).header(SEC_FETCH_SITE, site);
            let request = request.header(ORIGIN, "http://127.0.0.1:9090").body(()).unwrap();
            check(Names::Loopback(&[]), "127.0.0.1".parse().unwrap(), None, &request).is_ok()
        };
        assert!(sends("same-origin", PLAYGROUND));
        for site in ["same-site", "cross-site", "none"] {
            assert!(!sends(site, PLAYGROUND), "{site}");
        }
        assert!(!sends("same-origin", "/admin/reload"));
    }

    #[test]
    fn pages_of_other_sites_read_only_what_is_public() {
        let reads = |site: &'static str, path: &str| {
            let request = http::Request::builder().uri(path).header(SEC_FETCH_SITE, site);
            let ip = "127.0.0.1".parse().unwrap();
            check(Names::Loopback(&[]), ip, None, &request.body(()).unwrap()).is_ok()
        };
        for path in ["/admin/live", "/metrics", "/admin/workers/w/index"] {
            assert!(reads("same-origin", path) && reads("none", path), "{path}");
            assert!(!reads("cross-site", path) && !reads("same-site", path), "{path}");
        }
        assert!(reads("cross-site", "/health") && reads("cross-site", "/"));
    }
}
