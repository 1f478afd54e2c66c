//! Remembers for which endpoints a prefill worker returned no hand-off: older engines return
//! hand-offs in chat completions, but not in responses or messages.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use splitrail_engine::dialect::Dialect;

use splitrail_workload::breaker::Breaker;

/// The dialects in which one worker returns no hand-off. It has no clock: callers pass the time.
#[derive(Debug, Default)]
pub struct MissingHandOffs {
    responses: DialectHandOffs,
    messages: DialectHandOffs,
}

/// Hand-offs in one dialect.
#[derive(Debug, Default)]
struct DialectHandOffs {
    /// One reply without a hand-off opens it, unless the reply before it had one.
    breaker: Breaker,
    /// Whether the last reply had a hand-off. A single reply without one is then ignored, and the
    /// next reply decides.
    was_there: AtomicBool,
}

impl MissingHandOffs {
    /// `None` for chat completions: there, a missing hand-off is a failure of the engine.
    fn of(&self, dialect: Dialect) -> Option<&DialectHandOffs> {
        match dialect {
            Dialect::Chunks => None,
            Dialect::Responses => Some(&self.responses),
            Dialect::Messages => Some(&self.messages),
        }
    }

    /// Whether a prefill in this dialect may return a hand-off, or a trial is due.
    pub fn may_come(&self, dialect: Dialect, now: Instant) -> bool {
        self.of(dialect).is_none_or(|place| place.breaker.allows(now))
    }

    /// Records that a prefill is sent. If it is a trial, no other prefill is sent meanwhile.
    pub fn begin(&self, dialect: Dialect, now: Instant) {
        self.of(dialect).into_iter().for_each(|place| place.breaker.begin(now));
    }

    /// Records a hand-off. Returns whether it ends a period without hand-offs.
    pub fn record_hand_off(&self, dialect: Dialect) -> bool {
        self.of(dialect).is_some_and(|place| {
            place.was_there.store(true, Relaxed);
            place.breaker.succeed()
        })
    }

    /// Records a reply without a hand-off. Returns whether this begins a period without hand-offs.
    pub fn record_missing(&self, dialect: Dialect, now: Instant) -> bool {
        self.of(dialect).is_some_and(|place| {
            let is_accident = place.was_there.swap(false, Relaxed);
            !is_accident && place.breaker.fail(now)
        })
    }

    /// Forgets all results, because the worker may have been restarted.
    pub fn forget(&self) {
        for place in [&self.responses, &self.messages] {
            place.was_there.store(false, Relaxed);
            place.breaker.succeed();
        }
    }

    /// The endpoints for which the worker returns no hand-off, by their names in metrics.
    pub fn missing(&self) -> Vec<&'static str> {
        let all = [("responses", &self.responses), ("messages", &self.messages)];
        all.into_iter().filter(|(_, place)| place.breaker.is_open()).map(|(name, _)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn missing_hand_offs_are_tried_again_at_intervals_by_dialect() {
        let (missing_hand_offs, start) = (MissingHandOffs::default(), Instant::now());
        assert!(missing_hand_offs.may_come(Dialect::Messages, start));
        missing_hand_offs.begin(Dialect::Messages, start);
        assert!(missing_hand_offs.record_missing(Dialect::Messages, start));
        assert!(
            !missing_hand_offs.record_missing(Dialect::Messages, start),
            "sent before it was known"
        );
        let may_come = |dialect, at| missing_hand_offs.may_come(dialect, at);
        assert!(!may_come(Dialect::Messages, start + 29 * S));
        assert!(may_come(Dialect::Responses, start) && may_come(Dialect::Chunks, start));
        assert_eq!(missing_hand_offs.missing(), ["messages"]);
        let trial = start + 30 * S;
        assert!(may_come(Dialect::Messages, trial));
        missing_hand_offs.begin(Dialect::Messages, trial);
        assert!(!may_come(Dialect::Messages, trial), "one trial at a time");
        missing_hand_offs.record_missing(Dialect::Messages, trial);
        assert!(!may_come(Dialect::Messages, trial + 59 * S));
        assert!(may_come(Dialect::Messages, trial + 60 * S));
        assert!(missing_hand_offs.record_hand_off(Dialect::Messages));
        assert!(may_come(Dialect::Messages, trial) && missing_hand_offs.missing().is_empty());
        assert!(!missing_hand_offs.record_missing(Dialect::Messages, trial), "once is an accident");
        assert!(may_come(Dialect::Messages, trial));
        assert!(missing_hand_offs.record_missing(Dialect::Messages, trial));
        assert!(!may_come(Dialect::Messages, trial));
    }

    #[test]
    fn another_process_is_asked_again_and_chats_always_are() {
        let (missing_hand_offs, now) = (MissingHandOffs::default(), Instant::now());
        for dialect in [Dialect::Responses, Dialect::Messages, Dialect::Chunks] {
            missing_hand_offs.record_missing(dialect, now);
        }
        assert_eq!(missing_hand_offs.missing(), ["responses", "messages"]);
        assert!(missing_hand_offs.may_come(Dialect::Chunks, now));
        missing_hand_offs.forget();
        assert!(missing_hand_offs.missing().is_empty());
        assert!(missing_hand_offs.may_come(Dialect::Responses, now));
    }
}
