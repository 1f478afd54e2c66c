//! The field `date` of a reply.

use std::time::SystemTime;

/// Length of a date in the only form that senders may use (RFC 9110, section 5.6.7).
const LENGTH: usize = 29;

/// A `date` as it was sent: most replies are read without looking at theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpDate([u8; LENGTH]);

impl HttpDate {
    /// The value of the field; `None` if it cannot be a date.
    pub(super) fn of(value: &[u8]) -> Option<Self> {
        value.trim_ascii().try_into().ok().map(Self)
    }

    /// The time; `None` if the value is no date.
    pub fn time(&self) -> Option<SystemTime> {
        let text = std::str::from_utf8(&self.0).ok()?;
        httpdate::parse_http_date(text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn a_date_is_read_and_anything_else_is_none() {
        let time = |text: &[u8]| HttpDate::of(text).and_then(|date| date.time());
        let expected = UNIX_EPOCH + Duration::from_secs(1_795_148_140);
        assert_eq!(time(b" Fri, 20 Nov 2026 04:15:40 GMT"), Some(expected));
        for other in [&b""[..], b"now", b"Fri, 20 Nov 2026 04:15:40 XYZ", &[0xff; LENGTH]] {
            assert_eq!(time(other), None);
        }
    }
}
