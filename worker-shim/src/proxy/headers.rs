//! Removes headers that concern one connection only, and headers that a router addresses to the
//! shim. All others are forwarded unchanged.

use http::header::{
    CONNECTION, HeaderMap, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRANSFER_ENCODING, UPGRADE,
};

/// The number of prompt tokens that the engine has to compute according to the router's
/// booking.
pub const X_PREFILL_TOKENS: HeaderName = HeaderName::from_static("x-splitrail-prefill-tokens");

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

static HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    KEEP_ALIVE,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    PROXY_CONNECTION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Removes hop-by-hop headers, including those that `Connection` names.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    // Most messages have none, and one pass is cheaper than a lookup of each name.
    if !headers.keys().any(|name| HOP_BY_HOP.contains(name)) {
        return;
    }
    if headers.contains_key(CONNECTION) {
        // The proxy owns the framing: a peer must not remove the length or the host.
        let named: Vec<HeaderName> = headers
            .get_all(CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
            .filter(|name| name != http::header::CONTENT_LENGTH && name != http::header::HOST)
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

/// Removes the router's token count and parses it. An invalid value is ignored.
pub(super) fn take_prefill_tokens(headers: &mut HeaderMap) -> Option<u32> {
    let value = headers.remove(X_PREFILL_TOKENS)?;
    let value = value.to_str().ok()?;
    value.bytes().all(|byte| byte.is_ascii_digit()).then(|| value.parse().ok()).flatten()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn map(headers: &[(&'static str, &'static str)]) -> HeaderMap {
        headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn only_hop_by_hop_headers_are_removed() {
        let mut headers = map(&[
            ("connection", "close, x-mine, content-length, host"),
            ("connection", "x-Other"),
            ("x-mine", "1"),
            ("x-other", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "close"),
            ("content-length", "3"),
            ("host", "a"),
            ("authorization", "Bearer x"),
            ("x-unknown", "kept"),
        ]);
        remove_hop_by_hop(&mut headers);
        let kept = [
            ("content-length", "3"),
            ("host", "a"),
            ("authorization", "Bearer x"),
            ("x-unknown", "kept"),
        ];
        assert_eq!(headers, map(&kept));
    }

    #[test]
    fn a_token_count_that_is_not_a_number_is_ignored() {
        for (value, tokens) in [
            ("0", Some(0)),
            ("1200", Some(1200)),
            ("4294967296", None),
            ("+1", None),
            ("-1", None),
            ("1.5", None),
            ("", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(X_PREFILL_TOKENS, HeaderValue::from_static(value));
            assert_eq!(take_prefill_tokens(&mut headers), tokens, "{value}");
            assert!(headers.is_empty());
        }
    }
}
