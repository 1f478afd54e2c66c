//! Notices that a worker's KV events have stopped although its engine works.
//!
//! A connection whose peer hangs, or is gone without closing it, looks like one of an engine that has
//! nothing to say. But an engine that computes blocks which are new to it and to the index announces
//! them while it serves the request.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of replies with new blocks and without an event after which the events have stopped.
const REPLIES: u32 = 3;

/// Minimum time from the first of these replies to the last: events may be a little later than the
/// replies, of which many can end at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether one worker's events have stopped.
#[derive(Debug, Default)]
pub(super) struct Silence(Mutex<Option<Replies>>);

/// The replies with new blocks since the last event.
#[derive(Debug)]
struct Replies {
    first: Instant,
    count: u32,
    is_reported: bool,
}

impl Silence {
    /// Records that an event has arrived.
    pub(super) fn record_event(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Records a reply with new blocks during which no event arrived. Returns whether the events have
    /// stopped, once until the next event.
    pub(super) fn record_reply(&self, now: Instant) -> bool {
        let mut silence = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let replies = silence.get_or_insert(Replies { first: now, count: 0, is_reported: false });
        replies.count = replies.count.saturating_add(1);
        let has_stopped = !replies.is_reported
            && replies.count >= REPLIES
            && now.saturating_duration_since(replies.first) >= PATIENCE;
        replies.is_reported |= has_stopped;
        has_stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_stopped_after_three_replies_and_five_seconds_and_this_is_said_once() {
        let (silence, start) = (Silence::default(), Instant::now());
        let reply = |at_s| silence.record_reply(start + Duration::from_secs(at_s));
        assert_eq!([0, 0, 0, 1, 4].map(reply), [false; 5], "many replies at once");
        assert_eq!([5, 6, 60].map(reply), [true, false, false]);
        silence.record_event();
        assert_eq!([70, 80].map(reply), [false; 2], "few replies");
        assert!(reply(81));
    }
}
