//! When load is told: at once when it changes after a while or by much, soon otherwise, and
//! again before it is out of date.

use std::time::Duration;

use splitrail_proto::v1::Load;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::beat;

/// Changes that come faster than this are told together. A busy engine's load changes with
/// each request, and telling each router of each would cost a good part of what relaying them
/// does.
const BETWEEN_SMALL: Duration = Duration::from_millis(100);
/// The same of those by which a router would choose otherwise.
const BETWEEN_MIN: Duration = Duration::from_millis(10);
/// Fewer requests more or less are a small change,
const REQUESTS_FEW: u64 = 4;
/// and so are fewer tokens to be computed: some milliseconds of a step,
const TOKENS_FEW: u64 = 1024;
/// and less than one part in so many of what there was.
const SMALL_PART: u64 = 4;
/// What a router can ask for, whatever it says.
const INTERVAL_MIN: Duration = Duration::from_millis(50);
const INTERVAL_MAX: Duration = Duration::from_secs(10);
/// Where it does not say.
const INTERVAL: Duration = Duration::from_secs(1);

/// What has changed since it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Changed {
    Nothing,
    Little,
    Much,
}

/// Tells one router of the engine's load.
#[derive(Debug)]
pub(crate) struct LoadTeller {
    load: watch::Receiver<Load>,
    interval: Duration,
    /// When the present figures were first seen.
    seen_at: Instant,
    told_at: Option<Instant>,
    /// What was told then.
    told: Load,
    changed: Changed,
}

impl LoadTeller {
    pub(crate) fn new(load: watch::Receiver<Load>) -> Self {
        let seen_at = Instant::now();
        Self {
            load,
            interval: INTERVAL,
            seen_at,
            told_at: None,
            told: Load::default(),
            changed: Changed::Much,
        }
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
            self.see(now);
        }
        if self.told_at.is_some_and(|told_at| now < self.next(told_at)) {
            return None;
        }
        let mut load = *self.load.borrow();
        let since = now.duration_since(self.seen_at).as_millis();
        load.age_ms = load.age_ms.saturating_add(u32::try_from(since).unwrap_or(u32::MAX));
        self.told = load;
        (self.changed, self.told_at) = (Changed::Nothing, Some(now));
        Some(load)
    }

    /// Waits until something is due.
    pub(crate) async fn wait(&mut self) {
        let Some(next) = self.told_at.map(|told_at| self.next(told_at)) else {
            return;
        };
        if self.changed == Changed::Much {
            return tokio::time::sleep_until(next).await;
        }
        let sleep = tokio::time::sleep_until(beat::after(next));
        // Its sender is gone with the engine's watch: then only time passes.
        if self.load.has_changed().is_err() {
            return sleep.await;
        }
        tokio::select! {
            () = sleep => {}
            _ = self.load.changed() => self.see(Instant::now()),
        }
    }

    /// Takes in new figures.
    fn see(&mut self, now: Instant) {
        let load = *self.load.borrow_and_update();
        self.seen_at = now;
        self.changed = if is_much(&self.told, &load) { Changed::Much } else { Changed::Little };
    }

    fn next(&self, told_at: Instant) -> Instant {
        told_at
            + match self.changed {
                Changed::Much => BETWEEN_MIN,
                Changed::Little => BETWEEN_SMALL.min(self.interval),
                Changed::Nothing => self.interval,
            }
    }
}

/// Whether a router might choose otherwise for it.
fn is_much(told: &Load, now: &Load) -> bool {
    let much = |was: Option<u64>, is: Option<u64>, few: u64| {
        let (was, is) = (was.unwrap_or_default(), is.unwrap_or_default());
        was.abs_diff(is) >= few.max(was / SMALL_PART)
    };
    told.up != now.up
        || much(told.requests, now.requests, REQUESTS_FEW)
        || much(told.prefill_tokens_queued, now.prefill_tokens_queued, TOKENS_FEW)
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
        assert_eq!(teller.due_at(at(299)), None);
        let told = teller.due_at(at(300)).map(|load| (load.running, load.age_ms));
        assert_eq!(told, Some((Some(3), 99)));

        // Whoever measured is gone: what was measured last grows old.
        drop(sender);
        assert_eq!(teller.due_at(at(499)), None);
        assert_eq!(teller.due_at(at(500)).map(|load| load.age_ms), Some(299));
    }

    #[test]
    fn what_changes_by_much_is_not_kept_back_and_single_requests_are_told_together() {
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
            let mut teller = LoadTeller::new(load);
            let start = teller.seen_at;
            let at = |ms| start + Duration::from_millis(ms);
            assert!(teller.due_at(start).is_some());
            sender.send_replace(now);
            assert_eq!(teller.due_at(at(after_ms - 1)), None, "{was:?} {now:?}");
            assert_eq!(teller.due_at(at(after_ms)).map(|load| load.requests), Some(now.requests));
            // After a while without a change, a small one is told at once too.
            sender.send_replace(was);
            assert!(teller.due_at(at(after_ms + 100)).is_some());
        }
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
