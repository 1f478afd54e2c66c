//! Decides when a router is sent the engine's load: at once after a large change or after a
//! quiet period, a little later after a small change, and periodically if nothing changes.

use std::time::Duration;

use splitrail_proto::v1::Load;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::ticks;

/// Minimum time between two reports if the load has changed a little. A busy engine's load
/// changes with each request, and a report for each change would cost a noticeable part of the
/// CPU time that relaying the requests takes.
const SMALL_CHANGE_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum time between two reports if the change is large enough to influence the choice of a
/// worker.
const LARGE_CHANGE_INTERVAL: Duration = Duration::from_millis(10);
/// A change of the request count is large from this number on,
const LARGE_CHANGE_REQUESTS: u64 = 4;
/// and a change of the queued prompt tokens from this number on (some milliseconds of a step).
const LARGE_CHANGE_TOKENS: u64 = 1024;
/// In addition, a large change is at least the previous value divided by this number.
const LARGE_CHANGE_DIVISOR: u64 = 4;
/// Minimum of the report interval that a router can ask for.
const INTERVAL_MIN: Duration = Duration::from_millis(50);
/// Maximum of the report interval that a router can ask for.
const INTERVAL_MAX: Duration = Duration::from_secs(10);
/// The report interval if the router asks for none.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(1);

/// The size of the change since the last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadChange {
    None,
    Small,
    Large,
}

/// Reports the engine's load to one router.
#[derive(Debug)]
pub(crate) struct LoadReporter {
    load: watch::Receiver<Load>,
    interval: Duration,
    /// When the current figures were received.
    received_at: Instant,
    reported_at: Option<Instant>,
    /// The figures of the last report.
    reported: Load,
    change: LoadChange,
}

impl LoadReporter {
    pub(crate) fn new(load: watch::Receiver<Load>) -> Self {
        let received_at = Instant::now();
        Self {
            load,
            interval: DEFAULT_INTERVAL,
            received_at,
            reported_at: None,
            reported: Load::default(),
            change: LoadChange::Large,
        }
    }

    /// Sets the interval of reports while nothing changes, in milliseconds; 0 for the default.
    pub(crate) fn set_interval(&mut self, interval_ms: u32) {
        self.interval = match interval_ms {
            0 => DEFAULT_INTERVAL,
            wanted => Duration::from_millis(u64::from(wanted)).clamp(INTERVAL_MIN, INTERVAL_MAX),
        };
    }

    /// Returns the load to report now, or `None` if no report is due. The age of unchanged figures
    /// is increased by the time that has passed.
    pub(crate) fn due(&mut self) -> Option<Load> {
        self.due_at(Instant::now())
    }

    fn due_at(&mut self, now: Instant) -> Option<Load> {
        if self.load.has_changed().unwrap_or(false) {
            self.take_new(now);
        }
        if self.reported_at.is_some_and(|reported_at| now < self.next_at(reported_at)) {
            return None;
        }
        let mut load = *self.load.borrow();
        let since = now.duration_since(self.received_at).as_millis();
        load.age_ms = load.age_ms.saturating_add(u32::try_from(since).unwrap_or(u32::MAX));
        self.reported = load;
        (self.change, self.reported_at) = (LoadChange::None, Some(now));
        Some(load)
    }

    /// Waits until a report may be due.
    pub(crate) async fn wait(&mut self) {
        let Some(next_at) = self.reported_at.map(|reported_at| self.next_at(reported_at)) else {
            return;
        };
        if self.change == LoadChange::Large {
            return tokio::time::sleep_until(next_at).await;
        }
        let sleep = tokio::time::sleep_until(ticks::next_after(next_at));
        // Without a sender there are no new figures; only the interval counts.
        if self.load.has_changed().is_err() {
            return sleep.await;
        }
        tokio::select! {
            () = sleep => {}
            _ = self.load.changed() => self.take_new(Instant::now()),
        }
    }

    /// Takes new figures into account.
    fn take_new(&mut self, now: Instant) {
        let load = *self.load.borrow_and_update();
        self.received_at = now;
        self.change = if is_large_change(&self.reported, &load) {
            LoadChange::Large
        } else {
            LoadChange::Small
        };
    }

    fn next_at(&self, reported_at: Instant) -> Instant {
        reported_at
            + match self.change {
                LoadChange::Large => LARGE_CHANGE_INTERVAL,
                LoadChange::Small => SMALL_CHANGE_INTERVAL.min(self.interval),
                LoadChange::None => self.interval,
            }
    }
}

/// Whether the change may influence a router's choice of a worker.
fn is_large_change(reported: &Load, now: &Load) -> bool {
    let much = |was: Option<u64>, is: Option<u64>, few: u64| {
        let (was, is) = (was.unwrap_or_default(), is.unwrap_or_default());
        was.abs_diff(is) >= few.max(was / LARGE_CHANGE_DIVISOR)
    };
    (reported.up, reported.started_at_s) != (now.up, now.started_at_s)
        || much(reported.requests, now.requests, LARGE_CHANGE_REQUESTS)
        || much(reported.prefill_tokens_queued, now.prefill_tokens_queued, LARGE_CHANGE_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_reported_on_change_and_periodically_with_its_age() {
        let (sender, load) = watch::channel(Load { age_ms: 5, ..Load::default() });
        let mut reporter = LoadReporter::new(load);
        reporter.set_interval(200);
        let start = reporter.received_at;
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(reporter.due_at(at(0)).map(|load| load.age_ms), Some(5));
        assert_eq!(reporter.due_at(at(199)), None);
        assert_eq!(reporter.due_at(at(200)).map(|load| load.age_ms), Some(205));

        // Several changes in a short time are reported together.
        for running in 1..=3 {
            sender.send_replace(Load { running: Some(running), ..Load::default() });
            assert_eq!(reporter.due_at(at(201)), None);
        }
        assert_eq!(reporter.due_at(at(299)), None);
        let reported = reporter.due_at(at(300)).map(|load| (load.running, load.age_ms));
        assert_eq!(reported, Some((Some(3), 99)));

        // Without a sender, the age of the last figures grows.
        drop(sender);
        assert_eq!(reporter.due_at(at(499)), None);
        assert_eq!(reporter.due_at(at(500)).map(|load| load.age_ms), Some(299));
    }

    #[test]
    fn large_load_changes_are_reported_at_once_and_small_ones_together() {
        let of = |requests, tokens, up| Load {
            requests: Some(requests),
            prefill_tokens_queued: Some(tokens),
            up,
            ..Load::default()
        };
        for (was, now, after_ms) in [
            (of(0, 0, true), of(1, 300, true), 100),
            (of(0, 0, true), of(4, 0, true), 10),
            (of(9, 0, true), of(5, 0, true), 10),
            (of(100, 0, true), of(110, 0, true), 100),
            (of(100, 0, true), of(75, 0, true), 10),
            (of(1, 0, true), of(1, 8000, true), 10),
            (of(1, 80_000, true), of(1, 72_000, true), 100),
            (of(1, 0, true), of(1, 0, false), 10),
        ] {
            let (sender, load) = watch::channel(was);
            let mut reporter = LoadReporter::new(load);
            let start = reporter.received_at;
            let at = |ms| start + Duration::from_millis(ms);
            assert!(reporter.due_at(start).is_some());
            sender.send_replace(now);
            assert_eq!(reporter.due_at(at(after_ms - 1)), None, "{was:?} {now:?}");
            assert_eq!(reporter.due_at(at(after_ms)).map(|load| load.requests), Some(now.requests));
            // After a quiet period, a small change is reported at once too.
            sender.send_replace(was);
            assert!(reporter.due_at(at(after_ms + 100)).is_some());
        }
    }

    #[test]
    fn the_report_interval_of_a_router_is_limited() {
        let mut reporter = LoadReporter::new(watch::channel(Load::default()).1);
        for (asked, kept) in [(0, DEFAULT_INTERVAL), (1, INTERVAL_MIN), (u32::MAX, INTERVAL_MAX)] {
            reporter.set_interval(asked);
            assert_eq!(reporter.interval, kept);
        }
    }
}
