//! How long bytes may wait until a client reads them.
//!
//! A client that reads nothing has gone or attacks; one that reads very slowly makes the router
//! hold a reply for hours. Only time in which bytes wait for the client counts: an engine may take
//! any time between two events.

use std::time::Duration;

use tokio::time::Instant;

use splitrail_config::model::Limits;

/// The required pace of a client's reading.
#[derive(Clone, Copy, Debug)]
pub struct RequiredPace {
    /// Maximum time in which it may read nothing.
    pub stall: Duration,
    /// Maximum time for which it may be slower than `min_bytes_per_s`.
    pub grace: Duration,
    /// Minimum pace in bytes per second; 0 for none.
    pub min_bytes_per_s: u64,
}

impl From<&Limits> for RequiredPace {
    fn from(limits: &Limits) -> Self {
        Self {
            stall: limits.write_stall,
            grace: limits.reply_grace,
            min_bytes_per_s: limits.reply_min_bytes_per_s,
        }
    }
}

/// Why a client reads too slowly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlowReason {
    /// The client reads nothing.
    Stalled,
    /// The client reads less than the minimum pace.
    TooSlow,
}

/// An observation of the bytes that wait for a client.
#[derive(Clone, Copy, Debug)]
pub struct Observation {
    /// Whether anything waits.
    pub waits: bool,
    /// Number of bytes that the client has taken so far.
    pub taken_bytes: u64,
    /// Number of streams of one connection that wait and share the required pace.
    pub sharers: u32,
}

/// For how long bytes have waited for a client.
#[derive(Debug, Default)]
pub struct WaitTime {
    /// The bytes that had been taken when progress stopped, and when that was.
    since: Option<(u64, Instant)>,
    /// Time for which bytes have waited, less the time that the taken bytes allow.
    excess: Duration,
}

impl WaitTime {
    /// The time at which the client is given up if it takes nothing until then, and the reason. The
    /// clock is read only if something has changed.
    pub fn see(
        &mut self,
        seen: Observation,
        required_pace: &RequiredPace,
        now: impl FnOnce() -> Instant,
    ) -> Option<(Instant, SlowReason)> {
        let at = match self.since {
            None if !seen.waits => return None,
            Some((taken_bytes, at)) if seen.waits && taken_bytes == seen.taken_bytes => at,
            before => {
                let now = now();
                if let Some((taken_bytes, at)) = before {
                    let bytes = seen.taken_bytes.saturating_sub(taken_bytes);
                    let allowed = allowed_time(bytes, seen.sharers, required_pace.min_bytes_per_s);
                    let waited = now.saturating_duration_since(at);
                    self.excess = self.excess.saturating_add(waited).saturating_sub(allowed);
                }
                self.since = seen.waits.then_some((seen.taken_bytes, now));
                now
            }
        };
        self.since?;
        let stalls = (at + required_pace.stall, SlowReason::Stalled);
        let too_slow = (at + required_pace.grace.saturating_sub(self.excess), SlowReason::TooSlow);
        let is_paced = required_pace.min_bytes_per_s > 0 && too_slow.0 < stalls.0;
        Some(if is_paced { too_slow } else { stalls })
    }
}

/// The time that a number of bytes allows.
fn allowed_time(bytes: u64, sharers: u32, min_bytes_per_s: u64) -> Duration {
    if min_bytes_per_s == 0 {
        return Duration::MAX;
    }
    let seconds = bytes as f64 * f64::from(sharers.max(1)) / min_bytes_per_s as f64;
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);
    const PACE: RequiredPace =
        RequiredPace { stall: Duration::from_secs(30), grace: S, min_bytes_per_s: 10 };

    /// Observes a client that takes this many bytes at each step of this duration, while bytes
    /// wait; returns the step at which it is given up, and why.
    fn reads(
        required_pace: RequiredPace,
        sharers: u32,
        step: (u64, Duration),
    ) -> Option<(u32, SlowReason)> {
        let start = Instant::now();
        let mut waiting = WaitTime::default();
        for i in 0..1000 {
            let seen = Observation { waits: true, taken_bytes: u64::from(i) * step.0, sharers };
            let now = start + i * step.1;
            let (at, slow) = waiting.see(seen, &required_pace, || now)?;
            if at <= now + step.1 {
                return Some((i, slow));
            }
        }
        None
    }

    #[test]
    fn a_client_has_the_grace_period_and_time_for_the_bytes_it_has_read() {
        let quick = RequiredPace { grace: 2 * S, ..PACE };
        assert_eq!(reads(quick, 1, (11, S)), None, "always quick enough");
        let grace = RequiredPace { grace: 10 * S, ..PACE };
        assert_eq!(reads(grace, 1, (5, S)), Some((18, SlowReason::TooSlow)), "half of each second");
        assert_eq!(reads(grace, 2, (5, S)), None, "two share the pace");
        let none = RequiredPace { min_bytes_per_s: 0, ..PACE };
        assert_eq!(reads(none, 1, (1, 29 * S)), None, "no minimum pace is configured");
        assert_eq!(reads(none, 1, (1, 30 * S)), Some((0, SlowReason::Stalled)));
    }

    #[test]
    fn time_without_waiting_data_does_not_count() {
        let start = Instant::now();
        let mut waiting = WaitTime::default();
        for i in 0..100 {
            let seen = |waits| Observation { waits, taken_bytes: u64::from(i), sharers: 1 };
            let due = waiting.see(seen(true), &PACE, || start + i * S);
            assert_eq!(due, Some((start + i * S + S, SlowReason::TooSlow)));
            let after = start + i * S + S / 20;
            assert_eq!(
                waiting.see(
                    Observation { taken_bytes: u64::from(i) + 1, ..seen(false) },
                    &PACE,
                    || after
                ),
                None
            );
        }
    }
}
