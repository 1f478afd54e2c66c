//! W3C trace context: the header by which requests of several programs belong to one trace.
//! <https://www.w3.org/TR/trace-context/>

/// Length of a `traceparent` of version 00: version, trace id, parent id and flags, with hyphens.
const LENGTH: usize = 55;

/// The bit of the flags that says that the caller records the trace.
const SAMPLED: u8 = 1;

/// A place in a trace, as a `traceparent` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The id of the trace; never 0.
    pub trace_id: u128,
    /// The id of the span that makes the request; never 0.
    pub span_id: u64,
    /// Whether the caller records the trace.
    pub is_sampled: bool,
}

impl TraceContext {
    /// Reads the value of a `traceparent` header; `None` if it is invalid. Of later versions, the
    /// part that version 00 defines is read.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let head = bytes.get(..LENGTH)?;
        if head[2] != b'-' || head[35] != b'-' || head[52] != b'-' {
            return None;
        }
        let version = hex(&head[..2])?;
        match (version, bytes.get(LENGTH)) {
            (0xff, _) | (0, Some(_)) => return None,
            (_, None | Some(b'-')) => {}
            _ => return None,
        }
        let trace_id = hex(&head[3..35])?;
        let span_id = hex(&head[36..52])? as u64;
        let flags = hex(&head[53..])? as u8;
        (trace_id != 0 && span_id != 0).then_some(Self {
            trace_id,
            span_id,
            is_sampled: flags & SAMPLED != 0,
        })
    }

    /// The value of a `traceparent` header of version 00.
    pub fn to_header(self) -> String {
        let mut text = String::with_capacity(LENGTH);
        text.push_str("00-");
        push_hex(&mut text, self.trace_id, 32);
        text.push('-');
        push_hex(&mut text, self.span_id.into(), 16);
        text.push_str(if self.is_sampled { "-01" } else { "-00" });
        text
    }
}

/// The number that lower-case hexadecimal digits stand for.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(value))
    })
}

/// Appends the last `digits` of the 32 hexadecimal digits of a number, in lower case.
pub fn push_hex(out: &mut String, number: u128, digits: usize) {
    let digit = |value: u8| if value < 10 { b'0' + value } else { b'a' + value - 10 };
    let mut text = [0; 32];
    for (pair, byte) in text.chunks_exact_mut(2).zip(number.to_be_bytes()) {
        pair.copy_from_slice(&[byte >> 4, byte & 15].map(digit));
    }
    let first = text.len().saturating_sub(digits);
    // Digits are ASCII.
    out.push_str(std::str::from_utf8(&text[first..]).unwrap_or_default());
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_traceparent_is_read_and_written() {
        let read = TraceContext::parse(GOOD).unwrap();
        assert_eq!(read.trace_id, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!(read.span_id, 0x00f0_67aa_0ba9_02b7);
        assert!(read.is_sampled);
        assert_eq!(read.to_header(), GOOD);
        let unsampled = TraceContext::parse(&GOOD.replace("-01", "-fe")).unwrap();
        assert!(!unsampled.is_sampled);
        assert_eq!(unsampled.to_header(), GOOD.replace("-01", "-00"));
    }

    #[test]
    fn the_known_part_of_a_later_version_is_read() {
        let later = format!("{}-what-ever", GOOD.replace("00-4", "cc-4"));
        assert_eq!(TraceContext::parse(&later), TraceContext::parse(GOOD));
    }

    #[test]
    fn an_invalid_traceparent_is_none() {
        for bad in [
            "",
            "00",
            &GOOD[1..],
            &GOOD[..54],
            &format!("{GOOD}-"),
            &format!("{GOOD}x"),
            &GOOD.to_uppercase(),
            &GOOD.replace("00-4", "ff-4"),
            &GOOD.replace("-00f067aa0ba902b7", "-0000000000000000"),
            &GOOD.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &GOOD.replace('-', "_"),
            &GOOD.replace("4bf", "4é"),
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
    }
}
