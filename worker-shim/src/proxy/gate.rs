//! The header with which a router requires that the engine holds certain blocks:
//! `x-splitrail-gate: <namespace>:<rank>:<blocks>:<hash>`.
//!
//! The namespace and the hash have sixteen hexadecimal digits each. The hash is that of the last
//! required block. It is chained from the namespace and therefore identifies the whole prefix.

use futures_util::future::BoxFuture;
use http::{HeaderMap, HeaderName};
use splitrail_kv::BlockHash;

/// The name of the header.
pub const X_GATE: HeaderName = HeaderName::from_static("x-splitrail-gate");

/// The blocks that the engine must hold to serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateRequirement {
    /// The hash of the prompt's namespace, which is the root of the chained hashes.
    pub namespace: BlockHash,
    /// The data-parallel rank that must hold the blocks.
    pub rank: u16,
    /// The number of leading blocks of the prompt; never 0.
    pub blocks: u32,
    /// The chained hash of the last of these blocks.
    pub last: BlockHash,
}

/// Tells which blocks the engine holds.
pub trait Residency: Send + Sync + 'static {
    /// Whether the engine's cache holds all required blocks now. A request waits for the result.
    fn holds<'a>(&'a self, requirement: &'a GateRequirement) -> BoxFuture<'a, bool>;
}

/// The gate header is malformed, or given more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the header `x-splitrail-gate` is not `<namespace>:<rank>:<blocks>:<hash>`, given once")]
pub struct MalformedGate;

/// Removes the header, so that it does not reach the engine, and parses it.
///
/// # Errors
/// If the header is malformed.
pub(super) fn take(headers: &mut HeaderMap) -> Result<Option<GateRequirement>, MalformedGate> {
    let mut values = headers.get_all(X_GATE).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let requirement = match values.next() {
        None => parse(value.as_bytes()).ok_or(MalformedGate),
        Some(_) => Err(MalformedGate),
    };
    headers.remove(X_GATE);
    requirement.map(Some)
}

fn parse(value: &[u8]) -> Option<GateRequirement> {
    let mut parts = std::str::from_utf8(value).ok()?.split(':');
    let mut next = || parts.next();
    let namespace = hash(next()?)?;
    let rank = decimal(next()?)?.try_into().ok()?;
    let blocks = decimal(next()?).filter(|blocks| *blocks > 0)?;
    let last = hash(next()?)?;
    next().is_none().then_some(GateRequirement { namespace, rank, blocks, last })
}

/// Requires all sixteen digits, because a truncated value would name another prefix.
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

    fn written(requirement: &GateRequirement) -> String {
        format!(
            "{:016x}:{}:{}:{:016x}",
            requirement.namespace.0, requirement.rank, requirement.blocks, requirement.last.0
        )
    }

    #[test]
    fn any_deviation_from_the_gate_format_is_malformed() {
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
    fn the_gate_header_is_always_removed_and_two_are_malformed() {
        let requirement = "00000000000000ab:0:3:0000000000000003";
        for (values, ok) in
            [(vec![requirement], true), (vec!["x"], false), (vec![requirement, requirement], false)]
        {
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
        fn a_gate_header_round_trips(
            namespace: u64, rank: u16, blocks in 1u32.., last: u64
        ) {
            let (namespace, last) = (BlockHash(namespace), BlockHash(last));
            let requirement = GateRequirement { namespace, rank, blocks, last };
            prop_assert_eq!(parse(written(&requirement).as_bytes()), Some(requirement));
        }

        #[test]
        fn an_accepted_gate_header_has_the_canonical_form(bytes in "[0-9a-fA-F+:x]{0,60}") {
            if let Some(requirement) = parse(bytes.as_bytes()) {
                prop_assert_eq!(written(&requirement), bytes.to_ascii_lowercase());
            }
        }

        #[test]
        fn a_changed_byte_never_parses_to_the_same_requirement(at in 0usize..38, byte: u8) {
            let right = b"00000000000000ab:10:3:0000000000000003".to_vec();
            let mut other = right.clone();
            other[at] = byte;
            let same = other.eq_ignore_ascii_case(&right);
            prop_assert_eq!(parse(&other) == parse(&right), same);
        }
    }
}
