//! How long a hand-off is valid.
//!
//! A prefill engine keeps the blocks of a hand-off for the time of its lease, and then gives them to other
//! requests. A decode engine that fetches them later gets no error: vLLM answers 200 from whatever the
//! blocks hold by then. Therefore the router enforces the deadline.

use std::time::Duration;

use tokio::time::Instant;

/// The time by which a decode worker must have taken a hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    ends: Instant,
}

impl Lease {
    /// A lease whose clock started when the prefill reply's first byte came: the engine had
    /// staged the blocks by then. `engine` is what the engine itself says is left of it
    /// `now`; the earlier counts, and of either a tenth is kept for the way.
    pub fn new(
        started: Instant,
        configured: Duration,
        engine: Option<Duration>,
        now: Instant,
    ) -> Self {
        let own = started + usable(configured);
        let said = engine.map(|left| now + usable(left));
        Self { ends: said.map_or(own, |said| said.min(own)) }
    }

    /// When it is over.
    pub fn ends(&self) -> Instant {
        self.ends
    }

    /// What is left of it.
    pub fn left(&self, now: Instant) -> Duration {
        self.ends.saturating_duration_since(now)
    }
}

/// The part of a lease in which a decode worker may be sent: a tenth is kept for the way.
pub fn usable(lease: Duration) -> Duration {
    lease - lease / 10
}

/// What an engine's expiry leaves, both in seconds since 1970. Engines that give the time of
/// a clock of their own (since the machine's start, say) cannot be understood; nor can an
/// expiry that is past, since no engine hands over what it has freed: clocks differ then.
pub fn left_by_engine(expiry_unix_s: f64, now_unix_s: f64) -> Option<Duration> {
    const DAY_S: f64 = 86_400.0;
    let left_s = expiry_unix_s - now_unix_s;
    (left_s > 0.0 && left_s < DAY_S).then(|| Duration::from_secs_f64(left_s))
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn the_clock_starts_with_the_reply_and_a_tenth_is_kept() {
        let started = Instant::now();
        let lease = Lease::new(started, 30 * S, None, started + 5 * S);
        assert_eq!(lease.left(started), 27 * S);
        assert_eq!(lease.left(started + 20 * S), 7 * S);
        assert_eq!(lease.left(started + 27 * S), Duration::ZERO);
        assert_eq!(lease.left(started + 40 * S), Duration::ZERO);
    }

    #[test]
    fn the_engine_s_own_expiry_counts_if_it_is_earlier() {
        let started = Instant::now();
        let now = started + S;
        let lease = |engine| Lease::new(started, 30 * S, Some(engine), now).left(started);
        assert_eq!(lease(10 * S), 10 * S);
        assert_eq!(lease(100 * S), 27 * S);
    }

    #[test]
    fn only_an_expiry_by_the_calendar_can_be_understood() {
        let now = 1_800_000_000.0;
        assert_eq!(left_by_engine(now + 30.0, now), Some(30 * S));
        assert_eq!(left_by_engine(now - 1.0, now), None);
        assert_eq!(left_by_engine(4_711.5, now), None);
        assert_eq!(left_by_engine(now * 1000.0, now), None);
        assert_eq!(left_by_engine(f64::NAN, now), None);
    }
}
