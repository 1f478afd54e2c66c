//! Limits repeated log lines.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Minimum time between two log lines of the same kind.
const INTERVAL: Duration = Duration::from_secs(30);

/// Lets one log line of each kind through per [`INTERVAL`].
#[derive(Debug, Default)]
pub struct KeyedLogThrottle(BTreeMap<&'static str, Instant>);

impl KeyedLogThrottle {
    /// Whether a line of `kind` may be written now. If so, the line counts as written.
    pub fn may_log(&mut self, kind: &'static str) -> bool {
        let now = Instant::now();
        let due = self.0.get(kind).is_none_or(|last| now.duration_since(*last) >= INTERVAL);
        if due {
            self.0.insert(kind, now);
        }
        due
    }
}
