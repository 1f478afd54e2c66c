//! Headers that belong to one connection, and those by which a router speaks to the
//! shim alone. All others travel on as they are.

use http::header::{
    CONNECTION, HeaderMap, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRANSFER_ENCODING, UPGRADE,
};

/// How many tokens of the prompt the engine will have to compute, as the router booked them:
/// a whole number.
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

/// Removes what concerns one connection only, with what `Connection` names.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    // Most messages have none: to look once is cheaper than to look each of them up.
    if !headers.keys().any(|name| HOP_BY_HOP.contains(name)) {
        return;
    }
    if headers.contains_key(CONNECTION) {
        // Framing is ours: what a peer names must not take a body's length away.
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

/// Takes away what the router says of the prompt's length; nonsense says nothing.
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
    fn only_what_belongs_to_the_connection_is_removed() {
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
    fn a_length_that_is_no_number_says_nothing() {
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
