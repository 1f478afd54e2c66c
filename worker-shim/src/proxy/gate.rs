//! The header by which a router asks for blocks:
//! `x-splitrail-gate: <namespace>:<rank>:<blocks>:<hash>`.
//!
//! The namespace and the hash are sixteen hex digits each. The hash is that of the last
//! block asked for, chained from the namespace, and so names the whole prefix.

use futures_util::future::BoxFuture;
use http::{HeaderMap, HeaderName};
use splitrail_kv::BlockHash;

/// The header.
pub const X_GATE: HeaderName = HeaderName::from_static("x-splitrail-gate");

/// The blocks that a router asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The root of the prompt's chain: what must agree besides tokens.
    pub namespace: BlockHash,
    /// The data-parallel rank that must hold them.
    pub rank: u16,
    /// How many leading blocks of the prompt; never 0.
    pub blocks: u32,
    /// The chained hash of the last of them.
    pub last: BlockHash,
}

/// What knows which blocks the engine holds.
pub trait Residency: Send + Sync + 'static {
    /// Whether all blocks from the prompt's first to `ask.last` are in the engine's cache
    /// now. A request waits for it.
    fn holds<'a>(&'a self, ask: &'a Ask) -> BoxFuture<'a, bool>;
}

/// A gate header that makes no sense, or stands there twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the header `x-splitrail-gate` is not `<namespace>:<rank>:<blocks>:<hash>`, given once")]
pub struct Malformed;

/// Takes the header away: no engine gets to see it.
///
/// # Errors
/// If it is there and is no ask.
pub(super) fn take(headers: &mut HeaderMap) -> Result<Option<Ask>, Malformed> {
    let mut values = headers.get_all(X_GATE).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let ask = match values.next() {
        None => parse(value.as_bytes()).ok_or(Malformed),
        Some(_) => Err(Malformed),
    };
    headers.remove(X_GATE);
    ask.map(Some)
}

fn parse(value: &[u8]) -> Option<Ask> {
    let mut parts = std::str::from_utf8(value).ok()?.split(':');
    let mut next = || parts.next();
    let namespace = hash(next()?)?;
    let rank = decimal(next()?)?.try_into().ok()?;
    let blocks = decimal(next()?).filter(|blocks| *blocks > 0)?;
    let last = hash(next()?)?;
    next().is_none().then_some(Ask { namespace, rank, blocks, last })
}

/// All sixteen digits: a value that was cut short would name another prefix.
fn hash(part: &str) -> Option<BlockHash> {
    let is_whole = part.len() == 16 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_whole.then(|| u64::from_str_radix(part, 16).ok()).flatten().map(BlockHash)
}

fn decimal(part: &str) -> Option<u32> {
    let is_number = part.bytes().all(|byte| byte.is_ascii_digit());
    let is_canonical = part == "0" || !part.starts_with('0');
    (is_number && is_canonical).then(|| part.parse().ok()).flatten()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn written(ask: &Ask) -> String {
        format!("{:016x}:{}:{}:{:016x}", ask.namespace.0, ask.rank, ask.blocks, ask.last.0)
    }

    #[test]
    fn what_is_not_exactly_an_ask_is_malformed() {
        let root = "00000000000000ab";
        for wrong in [
            String::new(),
            ":::".to_owned(),
            "0:0:0:0".to_owned(),
            format!("{root}:0:0:{root}"),
            format!("{root}:0:3"),
            format!("{root}:0:3:{root}:"),
            format!("{root}:0:3:{root} "),
            format!(" {root}:0:3:{root}"),
            format!("{root}:+1:3:{root}"),
            format!("{root}:01:3:{root}"),
            format!("{root}:0:03:{root}"),
            format!("{root}::3:{root}"),
            format!("{root}:65536:3:{root}"),
            format!("{root}:0:4294967296:{root}"),
            format!("{root}:0:3:+000000000000ab"),
            format!("{root}:0:3:0x000000000000ab"),
            format!("{root}:0:3:{root}0"),
            format!("{root}:0:3:ab"),
        ] {
            assert_eq!(parse(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn it_is_taken_away_whatever_it_says_and_two_are_none() {
        let ask = "00000000000000ab:0:3:0000000000000003";
        for (values, ok) in [(vec![ask], true), (vec!["x"], false), (vec![ask, ask], false)] {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(X_GATE, HeaderValue::from_static(value));
            }
            assert_eq!(take(&mut headers).is_ok(), ok);
            assert!(headers.is_empty());
        }
        assert_eq!(take(&mut HeaderMap::new()), Ok(None));
    }

    proptest! {
        #[test]
        fn what_a_router_writes_is_read_back(
            namespace: u64, rank: u16, blocks in 1u32.., last: u64
        ) {
            let (namespace, last) = (BlockHash(namespace), BlockHash(last));
            let ask = Ask { namespace, rank, blocks, last };
            prop_assert_eq!(parse(written(&ask).as_bytes()), Some(ask));
        }

        #[test]
        fn what_is_read_was_written_so(bytes in "[0-9a-fA-F+:x]{0,60}") {
            if let Some(ask) = parse(bytes.as_bytes()) {
                prop_assert_eq!(written(&ask), bytes.to_ascii_lowercase());
            }
        }

        #[test]
        fn one_changed_byte_never_reads_as_the_same_ask(at in 0usize..38, byte: u8) {
            let right = b"00000000000000ab:10:3:0000000000000003".to_vec();
            let mut other = right.clone();
            other[at] = byte;
            let same = other.eq_ignore_ascii_case(&right);
            prop_assert_eq!(parse(&other) == parse(&right), same);
        }
    }
}
