//! How long an inspection may take.

use std::time::Duration;

/// The bounds of an inspection.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Maximum time of the whole inspection.
    pub total: Duration,
    /// Maximum time of a question that needs no computation.
    pub question: Duration,
    /// Maximum time in which an engine serves a small prompt.
    pub trial: Duration,
    /// Maximum time from the reply to a prompt until its KV events arrive.
    pub events: Duration,
    /// Maximum number of workers that are asked at the same time.
    pub workers_at_once: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            total: Duration::from_secs(15),
            question: Duration::from_secs(3),
            trial: Duration::from_secs(5),
            events: Duration::from_secs(2),
            workers_at_once: 32,
        }
    }
}
