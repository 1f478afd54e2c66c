//! Remembers on which paths a prefill worker returned no hand-off: older engines return hand-offs in chat
//! completions, and none in responses or messages.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use splitrail_engine::dialect::Dialect;

use super::breaker::Breaker;
use splitrail_config::model::BreakerConfig;

/// One reply without a place for it is enough, unless the one before it had one. Then a request tries whether that is still so,
/// and after each that finds it so, the next one waits twice as long.
const PAUSES: BreakerConfig = BreakerConfig { failures: 1, cooldown: Duration::from_secs(30) };

/// Where one worker hands nothing over, by dialect. It has no clock: every instant is its
/// caller's.
#[derive(Debug, Default)]
pub struct HandOvers {
    responses: Place,
    messages: Place,
}

/// One dialect's place for hand-offs.
#[derive(Debug)]
struct Place {
    breaker: Breaker,
    /// Whether the last reply had it: one that has not is an accident then, and the next one
    /// tells.
    was_there: AtomicBool,
}

impl Default for Place {
    fn default() -> Self {
        Self { breaker: Breaker::new(PAUSES), was_there: AtomicBool::new(false) }
    }
}

impl HandOvers {
    /// What is handed over for chats is handed over, or the engine has failed.
    fn of(&self, dialect: Dialect) -> Option<&Place> {
        match dialect {
            Dialect::Chunks => None,
            Dialect::Responses => Some(&self.responses),
            Dialect::Messages => Some(&self.messages),
        }
    }

    /// Whether a prefill there may bring a hand-off, or it is time to see whether one does.
    pub fn may_come(&self, dialect: Dialect, now: Instant) -> bool {
        self.of(dialect).is_none_or(|place| place.breaker.allows(now))
    }

    /// A prefill is sent there. Where that is a trial, nobody else is meanwhile.
    pub fn begin(&self, dialect: Dialect, now: Instant) {
        self.of(dialect).into_iter().for_each(|place| place.breaker.begin(now));
    }

    /// A hand-off came. Says whether that is news.
    pub fn came(&self, dialect: Dialect) -> bool {
        self.of(dialect).is_some_and(|place| {
            place.was_there.store(true, Relaxed);
            place.breaker.succeed()
        })
    }

    /// A reply had no place for one. Says whether that is news.
    pub fn missed(&self, dialect: Dialect, now: Instant) -> bool {
        self.of(dialect).is_some_and(|place| {
            let is_accident = place.was_there.swap(false, Relaxed);
            !is_accident && place.breaker.fail(now)
        })
    }

    /// It may be another process than before.
    pub fn forget(&self) {
        for place in [&self.responses, &self.messages] {
            place.was_there.store(false, Relaxed);
            place.breaker.succeed();
        }
    }

    /// The endpoints on which it hands nothing over, as metrics name them.
    pub fn missing(&self) -> Vec<&'static str> {
        let all = [("responses", &self.responses), ("messages", &self.messages)];
        all.into_iter().filter(|(_, place)| place.breaker.is_open()).map(|(name, _)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn what_did_not_come_is_tried_again_now_and_then_and_by_dialect() {
        let (hand_overs, start) = (HandOvers::default(), Instant::now());
        assert!(hand_overs.may_come(Dialect::Messages, start));
        hand_overs.begin(Dialect::Messages, start);
        assert!(hand_overs.missed(Dialect::Messages, start));
        assert!(!hand_overs.missed(Dialect::Messages, start), "sent before it was known");
        let may_come = |dialect, at| hand_overs.may_come(dialect, at);
        assert!(!may_come(Dialect::Messages, start + 29 * S));
        assert!(may_come(Dialect::Responses, start) && may_come(Dialect::Chunks, start));
        assert_eq!(hand_overs.missing(), ["messages"]);
        let trial = start + 30 * S;
        assert!(may_come(Dialect::Messages, trial));
        hand_overs.begin(Dialect::Messages, trial);
        assert!(!may_come(Dialect::Messages, trial), "one trial at a time");
        hand_overs.missed(Dialect::Messages, trial);
        assert!(!may_come(Dialect::Messages, trial + 59 * S));
        assert!(may_come(Dialect::Messages, trial + 60 * S));
        assert!(hand_overs.came(Dialect::Messages));
        assert!(may_come(Dialect::Messages, trial) && hand_overs.missing().is_empty());
        assert!(!hand_overs.missed(Dialect::Messages, trial), "once is an accident");
        assert!(may_come(Dialect::Messages, trial));
        assert!(hand_overs.missed(Dialect::Messages, trial));
        assert!(!may_come(Dialect::Messages, trial));
    }

    #[test]
    fn another_process_is_asked_anew_and_chats_always_are() {
        let (hand_overs, now) = (HandOvers::default(), Instant::now());
        for dialect in [Dialect::Responses, Dialect::Messages, Dialect::Chunks] {
            hand_overs.missed(dialect, now);
        }
        assert_eq!(hand_overs.missing(), ["responses", "messages"]);
        assert!(hand_overs.may_come(Dialect::Chunks, now));
        hand_overs.forget();
        assert!(hand_overs.missing().is_empty());
        assert!(hand_overs.may_come(Dialect::Responses, now));
    }
}
