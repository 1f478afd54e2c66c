//! Tells how busy the engine is: its own figures, and what is on the way to it.

use std::time::Duration;

use splitrail_proto::v1::Load;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Busy;
use super::poll::Polled;
use crate::ticks;

/// Changes that come closer together are told at once: each wait costs a wake-up.
const COALESCE: Duration = Duration::from_millis(50);

/// Tells until dropped: whenever the engine was asked, and when what is on its way changes.
/// Whoever tells it on, later, adds the time that has passed to its age.
pub(super) async fn run(
    mut polled: watch::Receiver<Polled>,
    busy: &impl Busy,
    load: &watch::Sender<Load>,
) {
    let mut changed = busy.changed();
    loop {
        // What changed until now is told now; what changes from here on, next time.
        changed.borrow_and_update();
        let now = merged(&polled.borrow_and_update(), busy, Instant::now());
        load.send_if_modified(|was| std::mem::replace(was, now) != now);
        let not_before = Instant::now() + COALESCE;
        tokio::select! {
            Ok(()) = polled.changed() => {}
            Ok(()) = changed.changed() => {}
            else => return,
        }
        if Instant::now() < not_before {
            tokio::time::sleep_until(ticks::next_after(not_before)).await;
        }
    }
}

/// What routers are told.
fn merged(polled: &Polled, busy: &impl Busy, now: Instant) -> Load {
    let figures = &polled.figures;
    let age = polled.at.map_or(Duration::MAX, |at| now.saturating_duration_since(at));
    Load {
        up: polled.up,
        age_ms: u32::try_from(age.as_millis()).unwrap_or(u32::MAX),
        running: figures.running,
        waiting: figures.waiting,
        requests: Some(busy.requests()),
        prefill_tokens_queued: Some(busy.prefill_tokens_queued()),
        kv_used_ratio: figures.kv_used_ratio,
        kv_blocks: figures.total_blocks,
        step_us: polled.step_us,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use splitrail_engine::vllm::load::EngineLoad;

    use super::*;

    struct Counts {
        requests: AtomicU64,
        changed: watch::Sender<()>,
    }

    impl Counts {
        fn set(&self, requests: u64) {
            self.requests.store(requests, Ordering::Relaxed);
            self.changed.send_replace(());
        }
    }

    impl Busy for Counts {
        fn requests(&self) -> u64 {
            self.requests.load(Ordering::Relaxed)
        }
        fn prefill_tokens_queued(&self) -> u64 {
            7
        }
        fn changed(&self) -> watch::Receiver<()> {
            self.changed.subscribe()
        }
    }

    fn counts() -> Counts {
        Counts { requests: AtomicU64::new(0), changed: watch::channel(()).0 }
    }

    #[test]
    fn figures_of_an_engine_that_has_gone_silent_grow_old_and_counts_do_not() {
        let counts = counts();
        let now = Instant::now();
        assert_eq!(merged(&Polled::default(), &counts, now).age_ms, u32::MAX, "never reached");
        let figures = EngineLoad { running: Some(3), ..EngineLoad::default() };
        let polled = Polled { up: true, process: 1, at: Some(now), figures, step_us: Some(9) };
        counts.set(5);
        let old = merged(&polled, &counts, now + Duration::from_secs(10));
        assert_eq!(old.age_ms, 10_000);
        assert_eq!((old.running, old.waiting, old.step_us), (Some(3), None, Some(9)));
        assert_eq!((old.requests, old.prefill_tokens_queued), (Some(5), Some(7)));
        assert_eq!(old.kv_used_ratio, None, "what the engine does not say is not 0");
    }

    #[tokio::test]
    async fn a_change_is_told_without_another_poll_and_many_are_told_together() {
        let counts = counts();
        let (_polled, seen) = watch::channel(Polled::default());
        let (load, mut told) = watch::channel(Load::default());
        let telling = run(seen, &counts, &load);
        let checks = async {
            for requests in 1..=1000 {
                counts.set(requests);
            }
            let mut times = 0;
            while told.borrow_and_update().requests != Some(1000) {
                told.changed().await.unwrap();
                times += 1;
            }
            assert!(times <= 2, "told {times} times");
        };
        let patience = Duration::from_secs(30);
        tokio::select! {
            () = telling => unreachable!(),
            in_time = tokio::time::timeout(patience, checks) => in_time.unwrap(),
        }
    }
}
