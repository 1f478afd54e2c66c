//! Limits repeated log lines.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum time between two log lines of the same kind.
const INTERVAL: Duration = Duration::from_secs(30);

/// Lets a log line through at most once every 30 seconds.
#[derive(Debug, Default)]
pub struct LogThrottle(Mutex<Option<Instant>>);

impl LogThrottle {
    /// Whether the line may be written now. If so, the line counts as written.
    pub fn may_log(&self) -> bool {
        let now = Instant::now();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let due = last.is_none_or(|last| now.duration_since(last) >= INTERVAL);
        if due {
            *last = Some(now);
        }
        due
    }
}

/// Lets a log line of each kind through at most once every 30 seconds.
#[derive(Debug, Default)]
pub struct KeyedLogThrottle(BTreeMap<&'static str, LogThrottle>);

impl KeyedLogThrottle {
    /// Whether a line of `kind` may be written now. If so, the line counts as written.
    pub fn may_log(&mut self, kind: &'static str) -> bool {
        self.0.entry(kind).or_default().may_log()
    }
}
