//! The session of a request: what an agent calls the conversation or the task that it works on.
//!
//! A session is a claim of the client. It groups requests for operators and for fair shares; it chooses
//! no worker, because the prefix does, and opens no cache.

use http::HeaderMap;

/// The headers that agents send, the first one that is there counts: a general one, Claude Code, Codex
/// and pi (before a proxy such as nginx, which drops names with `_`), OpenCode, and clients of Dynamo.
const HEADERS: [&str; 6] = [
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-dynamo-session-id",
];

/// Maximum length of a session in bytes.
const LENGTH_MAX: usize = 256;

/// The session that the head of a request names; `None` if it names none, or one that is too long or has
/// other than visible ASCII characters.
pub fn session(headers: &HeaderMap) -> Option<&str> {
    let sent = HEADERS.iter().find_map(|name| headers.get(*name))?;
    let text = sent.to_str().ok()?;
    let is_plain = text.bytes().all(|byte| byte.is_ascii_graphic());
    (is_plain && (1..=LENGTH_MAX).contains(&text.len())).then_some(text)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_first_header_that_is_there_counts_if_it_is_short_and_plain() {
        let of = |pairs: &[(&'static str, &[u8])]| {
            let value = |bytes| HeaderValue::from_bytes(bytes).expect("a value");
            let pairs = pairs.iter().map(|(name, bytes)| (*name, value(*bytes)));
            let headers: HeaderMap =
                pairs.map(|(name, value)| (name.parse().expect("a name"), value)).collect();
            session(&headers).map(str::to_owned)
        };
        assert_eq!(of(&[("session_id", b"a"), ("x-session-id", b"b")]).as_deref(), Some("b"));
        assert_eq!(of(&[("x-claude-code-session-id", b"3f-9")]).as_deref(), Some("3f-9"));
        let long = [b'a'; 257];
        for bad in [b"".as_slice(), b"a b", b"\xff", &long] {
            assert_eq!(of(&[("x-session-id", bad)]), None);
        }
        assert_eq!(of(&[("x-client-request-id", b"a")]), None);
    }
}
