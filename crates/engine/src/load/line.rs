//! One sample of the Prometheus text format.

/// Counts above this are not exact in a 64-bit float, so they are not accepted.
const MAX_COUNT: f64 = 9_007_199_254_740_992.0;

/// A sample of one of an engine's metrics.
pub(crate) struct Line<'a> {
    /// The metric's name without the engine's prefix.
    pub(crate) name: &'a str,
    /// The text between the braces.
    labels: &'a str,
    pub(crate) value: f64,
}

impl<'a> Line<'a> {
    /// The sample on this line, if its name is `wanted`; `None` for comments, other metrics, and
    /// malformed lines.
    pub(super) fn parse(
        line: &'a [u8],
        prefix: &[u8],
        wanted: impl Fn(&[u8]) -> bool,
    ) -> Option<Self> {
        let line = line.strip_prefix(prefix)?;
        let name_end = memchr::memchr2(b'{', b' ', line)?;
        if !wanted(&line[..name_end]) {
            return None;
        }
        let (name, rest) = std::str::from_utf8(line).ok()?.split_at_checked(name_end)?;
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => {
                let labels = rest.split_at_checked(labels_len(rest)?)?;
                (labels.0, labels.1.strip_prefix('}')?)
            }
            None => ("", rest),
        };
        // A timestamp may follow the value.
        let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
        Some(Self { name, labels, value })
    }

    /// The value as a count, if it is one.
    pub(crate) fn count(&self) -> Option<u64> {
        let is_count = (0.0..=MAX_COUNT).contains(&self.value) && self.value.fract() == 0.0;
        is_count.then_some(self.value as u64)
    }

    /// The raw value of a label: the labels that are read here contain no escapes.
    pub(crate) fn label(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (key, value) = rest.split_once("=\"")?;
            let end = quoted_len(value)?;
            if key.trim_matches([',', ' ']) == name {
                return value.get(..end);
            }
            rest = value.get(end + 1..)?;
        }
    }
}

/// Length of a quoted text up to its closing quote; escaped quotes do not count.
fn quoted_len(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })
}

/// Length of the labels up to the closing brace; braces within quotes do not count.
fn labels_len(text: &str) -> Option<usize> {
    let mut quoted = false;
    let mut escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'}' && !quoted;
        if byte == b'"' && !escaped {
            quoted = !quoted;
        }
        escaped = byte == b'\\' && !escaped;
        ends
    })
}
