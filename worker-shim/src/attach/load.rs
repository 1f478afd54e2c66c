//! When load is told: at once when it changes, and again before it is out of date.

use std::time::Duration;

use splitrail_proto::v1::Load;
use tokio::sync::watch;
use tokio::time::Instant;

/// Changes that come faster than this are told together.
const BETWEEN_MIN: Duration = Duration::from_millis(10);
/// What a router can ask for, whatever it says.
const INTERVAL_MIN: Duration = Duration::from_millis(50);
const INTERVAL_MAX: Duration = Duration::from_secs(10);
/// Where it does not say.
const INTERVAL: Duration = Duration::from_secs(1);

/// Tells one router of the engine's load.
#[derive(Debug)]
pub(crate) struct LoadTeller {
    load: watch::Receiver<Load>,
    interval: Duration,
    /// When the present figures were first seen.
    seen_at: Instant,
    told_at: Option<Instant>,
    changed: bool,
}

impl LoadTeller {
    pub(crate) fn new(load: watch::Receiver<Load>) -> Self {
        let seen_at = Instant::now();
        Self { load, interval: INTERVAL, seen_at, told_at: None, changed: true }
    }

    /// How often the router wants to hear of it even if nothing changes.
    pub(crate) fn set_interval(&mut self, interval_ms: u32) {
        self.interval = match interval_ms {
            0 => INTERVAL,
            wanted => Duration::from_millis(u64::from(wanted)).clamp(INTERVAL_MIN, INTERVAL_MAX),
        };
    }

    /// What is to be told now, if anything. Figures that are told again are as much older as
    /// time has passed.
    pub(crate) fn due(&mut self) -> Option<Load> {
        self.due_at(Instant::now())
    }

    fn due_at(&mut self, now: Instant) -> Option<Load> {
        if self.load.has_changed().unwrap_or(false) {
            self.load.mark_unchanged();
            (self.changed, self.seen_at) = (true, now);
        }
        if self.told_at.is_some_and(|told_at| now < self.next(told_at)) {
            return None;
        }
        let mut load = *self.load.borrow();
        let since = now.duration_since(self.seen_at).as_millis();
        load.age_ms = load.age_ms.saturating_add(u32::try_from(since).unwrap_or(u32::MAX));
        (self.changed, self.told_at) = (false, Some(now));
        Some(load)
    }

    /// Waits until something is due.
    pub(crate) async fn wait(&mut self) {
        let Some(next) = self.told_at.map(|told_at| self.next(told_at)) else {
            return;
        };
        let sleep = tokio::time::sleep_until(next);
        if self.changed || self.load.has_changed().is_err() {
            return sleep.await;
        }
        tokio::select! {
            () = sleep => {}
            // Its sender is gone with the engine's watch: then only time passes.
            _ = self.load.changed() => (self.changed, self.seen_at) = (true, Instant::now()),
        }
    }

    fn next(&self, told_at: Instant) -> Instant {
        told_at + if self.changed { BETWEEN_MIN } else { self.interval }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_told_on_change_and_again_in_time_with_its_true_age() {
        let (sender, load) = watch::channel(Load { age_ms: 5, ..Load::default() });
        let mut teller = LoadTeller::new(load);
        teller.set_interval(200);
        let start = teller.seen_at;
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(teller.due_at(at(0)).map(|load| load.age_ms), Some(5));
        assert_eq!(teller.due_at(at(199)), None);
        assert_eq!(teller.due_at(at(200)).map(|load| load.age_ms), Some(205));

        // A burst is told as one.
        for running in 1..=3 {
            sender.send_replace(Load { running: Some(running), ..Load::default() });
            assert_eq!(teller.due_at(at(201)), None);
        }
        let told = teller.due_at(at(210)).map(|load| (load.running, load.age_ms));
        assert_eq!(told, Some((Some(3), 9)));

        // Whoever measured is gone: what was measured last grows old.
        drop(sender);
        assert_eq!(teller.due_at(at(409)), None);
        assert_eq!(teller.due_at(at(410)).map(|load| load.age_ms), Some(209));
    }

    #[test]
    fn a_router_cannot_ask_for_more_than_is_good() {
        let mut teller = LoadTeller::new(watch::channel(Load::default()).1);
        for (asked, kept) in [(0, INTERVAL), (1, INTERVAL_MIN), (u32::MAX, INTERVAL_MAX)] {
            teller.set_interval(asked);
            assert_eq!(teller.interval, kept);
        }
    }
}
