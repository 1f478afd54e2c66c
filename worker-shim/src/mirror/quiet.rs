//! A stream of nonsense must not become a stream of log lines.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Between two log lines of one kind.
const BETWEEN: Duration = Duration::from_secs(30);

/// When a log line of each kind was last written.
#[derive(Debug, Default)]
pub(crate) struct Quiet(BTreeMap<&'static str, Instant>);

impl Quiet {
    /// Whether a line of this kind may be written again; then it counts as written.
    pub(crate) fn may_log(&mut self, kind: &'static str) -> bool {
        let now = Instant::now();
        let due = self.0.get(kind).is_none_or(|last| now.duration_since(*last) >= BETWEEN);
        if due {
            self.0.insert(kind, now);
        }
        due
    }
}
