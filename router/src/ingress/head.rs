//! Checks a request's head before the body is read: its host, and the number of its fields.

use axum::body::Body;
use http::header::{CONNECTION, EXPECT, HOST};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Version};

use super::grpc::is_grpc;
use super::reply::{error_dialect, error_in};
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::via;
use tonic::Status;

/// Paths that health checks request by address and not by host name.
const ANY_HOST: [&str; 2] = ["/health", "/ready"];

/// The limits on heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadLimits<'a> {
    /// Maximum number of fields of a head. For HTTP/1 the library checks it.
    pub(super) headers_max: usize,
    /// Maximum size of a head over HTTP/2 in bytes. Only calls of gRPC reach it: heads of other
    /// requests are refused by the library.
    pub(super) header_max_bytes: usize,
    /// Host names that requests may use; any if empty.
    pub(super) hosts: &'a [String],
}

/// Length up to which a body usually arrives with the head of its request.
const SHORT_BODY_BYTES: u64 = 4 << 10;

/// Whether the connection ends after a reply that is sent before the body of its request is read.
///
/// Over HTTP/1 it does, unless the library has the whole body already and can discard it. A client
/// that waits to be asked for its body has not sent it. A client must know that in advance:
/// otherwise it may send its next request on the connection, and lose it.
pub(super) fn early_reply_ends_connection<B: http_body::Body>(request: &Request<B>) -> bool {
    let body = request.body();
    let is_short = body.size_hint().upper().is_some_and(|bytes| bytes <= SHORT_BODY_BYTES);
    let has_arrived = is_short && !request.headers().contains_key(EXPECT);
    request.version() < Version::HTTP_2 && !body.is_end_stream() && !has_arrived
}

impl HeadLimits<'_> {
    /// The reply to a request whose head is refused.
    pub(super) fn refusal<B>(&self, request: &Request<B>) -> Option<Response<Body>> {
        let headers = request.headers();
        let is_large =
            headers.len() > self.headers_max || list_bytes(request) > self.header_max_bytes;
        if request.version() >= Version::HTTP_2 && is_large {
            if is_grpc(headers) {
                let message = "the metadata have too many fields, or are too large";
                return Some(Status::resource_exhausted(message).into_http());
            }
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
            return Some(response);
        }
        let error = via::passed(headers).and_then(|_| self.check_host(request)).err()?;
        if is_grpc(headers) {
            return Some(error.to_grpc().into_http());
        }
        let is_malformed = error.kind() == ErrorKind::InvalidRequest;
        let mut response = error_in(error_dialect(request.uri()), error);
        if is_malformed && request.version() < Version::HTTP_2 {
            // Others may have parsed the head, and what follows it, differently.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Some(response)
    }

    /// RFC 9112, section 3.2: HTTP/1.1 requires one `Host`. The host of the request is that of the
    /// target, if it has an authority (section 3.2.2), otherwise that of `Host`.
    fn check_host<B>(&self, request: &Request<B>) -> Result<(), Error> {
        let field = host_field(request.headers())?;
        if field.is_none() && request.version() == Version::HTTP_11 {
            return Err(malformed("the request has no `host` header"));
        }
        let named = request.uri().authority().map(http::uri::Authority::as_str);
        if named.is_some_and(|named| !is_host(named)) {
            return Err(malformed("the authority of the target is not a valid host"));
        }
        if request.version() >= Version::HTTP_2
            && let (Some(named), Some(field)) = (named, field)
            && !named.eq_ignore_ascii_case(field)
        {
            return Err(malformed("`host` and `:authority` differ"));
        }
        if self.hosts.is_empty() || ANY_HOST.contains(&request.uri().path()) {
            return Ok(());
        }
        let host = name_of(named.or(field).unwrap_or_default());
        match self.hosts.iter().any(|allowed| name_of(allowed).eq_ignore_ascii_case(host)) {
            true => Ok(()),
            false => {
                let message = "this host name is not allowed (listen.http_hosts)";
                Err(Error::new(ErrorKind::ForbiddenHost, message))
            }
        }
    }
}

/// The size of a head as HTTP/2 counts it (RFC 9113, section 6.5.2): each field has 32 bytes beside
/// its name and value. The fields of the request line are in the target.
fn list_bytes<B>(request: &Request<B>) -> usize {
    const FIELD_BYTES: usize = 32;
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let fields = request.headers().iter();
    let bytes = fields.map(|(name, value)| name.as_str().len() + value.len() + FIELD_BYTES);
    bytes.sum::<usize>() + target
}

/// The value of `Host`, if there is one.
fn host_field(headers: &HeaderMap) -> Result<Option<&str>, Error> {
    let mut fields = headers.get_all(HOST).iter();
    let Some(first) = fields.next() else { return Ok(None) };
    if fields.next().is_some() {
        return Err(malformed("the request has more than one `host` header"));
    }
    match first.to_str() {
        Ok(text) if is_host(text) => Ok(Some(text)),
        _ => Err(malformed("the `host` header is not a valid host")),
    }
}

/// Whether a text has only characters of names, addresses and ports (RFC 3986, section 3.2), and no
/// user: RFC 9110, section 4.2.4, and RFC 9113, section 8.3.1.
fn is_host(text: &str) -> bool {
    let passes = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=:[]".contains(byte);
    text.as_bytes().iter().all(passes)
}

fn malformed(message: &'static str) -> Error {
    Error::invalid("host", message)
}

/// A host without its port, brackets and final dot.
pub(crate) fn name_of(host: &str) -> &str {
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        // An IPv6 address without brackets has more than one colon.
        None => match host.rsplit_once(':') {
            Some((name, _)) if !name.contains(':') => name,
            _ => host,
        },
    };
    host.strip_suffix('.').unwrap_or(host)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn status(hosts: &[&str], version: Version, target: &str, fields: &[&str]) -> u16 {
        let mut request = Request::builder().version(version).uri(target);
        for field in fields {
            request = request.header(HOST, *field);
        }
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let heads = HeadLimits { headers_max: 1, header_max_bytes: 1 << 10, hosts: &hosts };
        let refusal = heads.refusal(&request.body(()).unwrap());
        refusal.map_or(200, |refusal| refusal.status().as_u16())
    }

    #[test]
    fn a_request_must_name_exactly_one_host() {
        let one = Version::HTTP_11;
        for (version, target, fields, expected) in [
            (one, "/", &["a.example:80"][..], 200),
            (one, "/", &[""], 200),
            (one, "/", &["[::1]:80"], 200),
            (one, "/", &[], 400),
            (one, "/", &["a", "a"], 400),
            (one, "/", &["a", "b"], 400),
            (one, "/", &["user@a"], 400),
            (one, "/", &["a b"], 400),
            (one, "/", &["a/b"], 400),
            (one, "http://a.example/", &["b.example"], 200),
            (one, "http://a.example/", &[], 400),
            (Version::HTTP_10, "/", &[], 200),
            (Version::HTTP_10, "/", &["a", "b"], 400),
            (Version::HTTP_2, "http://a.example/", &[], 200),
            (Version::HTTP_2, "http://a.example/", &["A.example"], 200),
            (Version::HTTP_2, "http://a.example/", &["b.example"], 400),
            (Version::HTTP_2, "http://user@a.example/", &[], 400),
            (Version::HTTP_2, "http://a.example:80@b.example/", &[], 400),
            (one, "http://a.example:80@b.example/", &["a.example"], 400),
        ] {
            assert_eq!(status(&[], version, target, fields), expected, "{target} {fields:?}");
        }
    }

    #[test]
    fn hosts_outside_the_configured_list_are_refused() {
        let hosts = ["llm.example", "10.0.0.5", "[::1]"];
        let call = |target: &str, field: &str| status(&hosts, Version::HTTP_11, target, &[field]);
        for host in ["llm.example", "LLM.example.:8000", "10.0.0.5:8000", "[::1]:8000", "[::1]"] {
            assert_eq!(call("/v1/models", host), 200, "{host}");
        }
        for host in ["evil.example", "llm.example.evil", "", "10.0.0.50", "[::2]", "::1:8000"] {
            assert_eq!(call("/v1/models", host), 403, "{host}");
        }
        assert_eq!(call("http://evil.example/v1/models", "llm.example"), 403, "the target's name");
        assert_eq!(call("http://llm.example/v1/models", "evil.example"), 200, "the target's name");
        assert_eq!(call("/ready", "10.1.2.3:8000"), 200, "a health check");
    }
}
