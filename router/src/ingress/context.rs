//! What a request is called, for clients, logs and engines: its id and its trace context.

use std::time::Instant;

use http::HeaderValue;
use http::header::{HeaderMap, HeaderName};

use splitrail_api::name::Name;
use splitrail_api::text::random_id;

/// The header with a request's id, in requests and replies.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum length in bytes of a client's id that is kept.
const ID_MAX_BYTES: usize = 128;

/// The identity of a request.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The id for the client, logs and records. Engines never see it.
    pub request_id: Name,
    /// When it arrived.
    pub arrived: Instant,
}

impl Identity {
    /// Uses the client's id if it is short and plain, otherwise a new one.
    pub fn new(sent: Option<&[u8]>) -> Self {
        let sane = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(byte);
        let kept = sent
            .filter(|id| (1..=ID_MAX_BYTES).contains(&id.len()) && id.iter().all(sane))
            .and_then(|id| std::str::from_utf8(id).ok());
        let request_id = kept.map_or_else(|| random_id().as_str().into(), Name::from);
        Self { request_id, arrived: Instant::now() }
    }

    /// Puts the id into the head of the reply.
    pub fn put(&self, headers: &mut HeaderMap) {
        if let Ok(id) = HeaderValue::from_str(&self.request_id) {
            headers.insert(X_REQUEST_ID, id);
        }
    }
}

/// A client's W3C trace context, if it has the right format: engines get no other header of a
/// client, and no free text.
pub fn trace_context(sent: Option<&HeaderValue>) -> Option<HeaderValue> {
    // https://www.w3.org/TR/trace-context/: version, trace id, parent id, flags.
    const LENGTHS: [usize; 4] = [2, 32, 16, 2];
    let text = sent?.to_str().ok()?;
    let parts: Vec<&str> = text.split('-').collect();
    let hex = |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let fits = parts.len() == LENGTHS.len()
        && parts.iter().zip(LENGTHS).all(|(part, length)| part.len() == length && hex(part));
    if fits && parts[0] != "ff" { sent.cloned() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_trace_context_is_dropped() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let sent = HeaderValue::from_static(good);
        assert_eq!(trace_context(Some(&sent)), Some(sent));
        for bad in [
            "",
            "00",
            "a free text",
            &good[1..],
            &good.to_uppercase(),
            &good.replace("00-4", "ff-4"),
        ] {
            let sent = HeaderValue::from_str(bad).ok();
            assert_eq!(trace_context(sent.as_ref()), None, "{bad}");
        }
    }

    #[test]
    fn only_short_request_ids_of_plain_characters_are_kept() {
        assert_eq!(Identity::new(Some(b"abc-1.2_3:4")).request_id, "abc-1.2_3:4");
        for bad in [&b""[..], b"a b", b"a\nb", "\u{e9}".as_bytes(), &[b'a'; 129]] {
            assert_eq!(Identity::new(Some(bad)).request_id.len(), 32);
        }
        assert_ne!(Identity::new(None).request_id, Identity::new(None).request_id);
    }
}
