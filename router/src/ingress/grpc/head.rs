//! Checks the head of a call, for every method; see the specification of gRPC over HTTP/2.

use std::time::{Duration, Instant};

use http::header::{CONTENT_TYPE, TE};
use http::{HeaderMap, Method, Request, Response, StatusCode, Version};
use tonic::Status;

/// Maximum number of digits of a `grpc-timeout`, by the specification.
const TIMEOUT_DIGITS_MAX: usize = 8;

/// The deadline of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Instant);

impl Deadline {
    /// Whether the deadline has passed.
    pub(super) fn is_over(self) -> bool {
        self.0 <= Instant::now()
    }

    /// When the deadline passes.
    pub(super) fn at(self) -> tokio::time::Instant {
        self.0.into()
    }

    /// The status of a call whose deadline has passed.
    pub(super) fn status() -> Status {
        Status::deadline_exceeded("the call's deadline (grpc-timeout) has passed")
    }
}

/// Why a head was refused.
#[derive(Debug)]
pub(super) enum HeadRefusal {
    /// The request is not a gRPC call, so the client may not understand a gRPC status.
    NoCall(StatusCode),
    /// The call is malformed.
    Wrong(Status),
}

impl HeadRefusal {
    /// The reply for the refusal.
    pub(super) fn into_response<B: Default>(self) -> Response<B> {
        match self {
            Self::NoCall(status) => {
                let mut response = Response::default();
                *response.status_mut() = status;
                response
            }
            Self::Wrong(status) => status.into_http(),
        }
    }
}

/// Checks the head of a call that arrived now; returns its deadline.
///
/// # Errors
/// 505 over HTTP/1, 405 for methods other than POST, 415 for content types other than gRPC's, and a
/// gRPC status for a missing `te: trailers` or an invalid `grpc-timeout`.
pub(super) fn check<B>(
    request: &Request<B>,
    now: Instant,
) -> Result<Option<Deadline>, Box<HeadRefusal>> {
    let no_call = |status| Err(Box::new(HeadRefusal::NoCall(status)));
    if request.version() < Version::HTTP_2 {
        return no_call(StatusCode::HTTP_VERSION_NOT_SUPPORTED);
    }
    if request.method() != Method::POST {
        return no_call(StatusCode::METHOD_NOT_ALLOWED);
    }
    let headers = request.headers();
    if !is_grpc(headers) {
        return no_call(StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }
    if !headers.get_all(TE).iter().any(|value| value == "trailers") {
        // A proxy that removes trailers would remove the status, too.
        let message = "the header `te: trailers` is missing";
        return Err(Box::new(HeadRefusal::Wrong(Status::internal(message))));
    }
    let wrong = |message| Box::new(HeadRefusal::Wrong(Status::invalid_argument(message)));
    let timeout = timeout(headers).map_err(wrong)?;
    Ok(timeout.and_then(|timeout| now.checked_add(timeout)).map(Deadline))
}

/// Whether the content type is gRPC's. Messages are protobuf, so `+proto` is optional.
pub(in super::super) fn is_grpc(headers: &HeaderMap) -> bool {
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let (Some(only), None) = (types.next(), types.next()) else { return false };
    let Some(subtype) = only.as_bytes().strip_prefix(b"application/grpc") else { return false };
    let subtype = subtype.strip_prefix(b"+proto").unwrap_or(subtype);
    matches!(subtype.first(), None | Some(b';'))
}

/// The timeout of a call, if its client sets one.
fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, &'static str> {
    const INVALID: &str = "`grpc-timeout` must be up to 8 digits and one of H, M, S, m, u, n";
    let mut values = headers.get_all("grpc-timeout").iter();
    let Some(value) = values.next() else { return Ok(None) };
    let (Some((unit, digits)), None) = (value.as_bytes().split_last(), values.next()) else {
        return Err(INVALID);
    };
    let is_number =
        (1..=TIMEOUT_DIGITS_MAX).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
    if !is_number {
        return Err(INVALID);
    }
    let number = digits.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    match unit {
        b'H' => Ok(Duration::from_secs(number * 3600)),
        b'M' => Ok(Duration::from_secs(number * 60)),
        b'S' => Ok(Duration::from_secs(number)),
        b'm' => Ok(Duration::from_millis(number)),
        b'u' => Ok(Duration::from_micros(number)),
        b'n' => Ok(Duration::from_nanos(number)),
        _ => Err(INVALID),
    }
    .map(Some)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn asked(value: &str) -> Result<Option<Duration>, &'static str> {
        timeout(&HeaderMap::from_iter([("grpc-timeout".parse().unwrap(), value.parse().unwrap())]))
    }

    #[test]
    fn a_timeout_that_violates_the_grpc_specification_is_refused() {
        assert_eq!(timeout(&HeaderMap::new()), Ok(None));
        for (value, nanoseconds) in [
            ("0n", 0),
            ("1n", 1),
            ("20u", 20_000),
            ("250m", 250_000_000),
            ("00000003S", 3_000_000_000),
            ("1M", 60_000_000_000),
            ("99999999H", 359_999_996_400_000_000_000),
        ] {
            assert_eq!(asked(value).unwrap().unwrap().as_nanos(), nanoseconds, "{value}");
        }
        for value in ["", "1", "S", "-1S", "1.5S", "100000000S", "1s", "1 S", " 1S"] {
            assert!(asked(value).is_err(), "{value:?}");
        }
    }

    #[test]
    fn a_call_must_be_a_post_of_protobuf_over_http2() {
        let call = |version, method, kind: &str| {
            let request = Request::builder().version(version).method(method);
            let request = request.header("content-type", kind).header("te", "trailers");
            check(&request.body(()).unwrap(), Instant::now()).map(|deadline| deadline.is_some())
        };
        let http2 = |kind| call(Version::HTTP_2, Method::POST, kind);
        for kind in ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"]
        {
            assert!(!http2(kind).unwrap(), "{kind}");
        }
        for kind in ["", "application/grpc-web", "application/grpc+json", "application/json"] {
            let refusal = *http2(kind).unwrap_err();
            assert!(matches!(refusal, HeadRefusal::NoCall(status) if status == 415), "{kind}");
        }
        assert!(call(Version::HTTP_11, Method::POST, "application/grpc").is_err());
        assert!(call(Version::HTTP_2, Method::GET, "application/grpc").is_err());
    }
}
