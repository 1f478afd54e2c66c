//! Publishes the engine's load: the engine's own metrics together with the shim's counts.

use std::time::Duration;

use splitrail_proto::v1::Load;
use tokio::sync::watch;
use tokio::time::Instant;

use super::ProxyLoad;
use super::poll::EnginePoll;
use crate::ticks;

/// Minimum time between two publications. Each one costs a wake-up.
const INTERVAL: Duration = Duration::from_millis(50);

/// Runs until dropped. Publishes the load after each poll and when the shim's counts change.
/// Receivers add the time that has passed since then to its age.
pub(super) async fn run(
    mut polled: watch::Receiver<EnginePoll>,
    proxy_load: &impl ProxyLoad,
    load: &watch::Sender<Load>,
) {
    let mut changed = proxy_load.changed();
    loop {
        // Changes up to here are published now, later ones next time.
        changed.borrow_and_update();
        let now = merge(&polled.borrow_and_update(), proxy_load, Instant::now());
        load.send_if_modified(|was| std::mem::replace(was, now) != now);
        let not_before = Instant::now() + INTERVAL;
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

/// Combines both sources.
fn merge(polled: &EnginePoll, proxy_load: &impl ProxyLoad, now: Instant) -> Load {
    let figures = &polled.figures;
    let age = polled.at.map_or(Duration::MAX, |at| now.saturating_duration_since(at));
    Load {
        up: polled.up,
        age_ms: u32::try_from(age.as_millis()).unwrap_or(u32::MAX),
        running: figures.running,
        waiting: figures.waiting,
        requests: Some(proxy_load.requests()),
        prefill_tokens_queued: Some(proxy_load.prefill_tokens_queued()),
        kv_used_ratio: figures.kv_used_ratio,
        kv_blocks: figures.total_blocks,
        step_us: polled.step_us,
        started_at_s: figures.started_at_s,
        asleep: figures.is_asleep,
        tokens_total: figures.tokens_total,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use splitrail_engine::load::EngineLoad;

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

    impl ProxyLoad for Counts {
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
    fn metrics_of_a_silent_engine_age_and_the_shims_counts_do_not() {
        let counts = counts();
        let now = Instant::now();
        assert_eq!(merge(&EnginePoll::default(), &counts, now).age_ms, u32::MAX, "never reached");
        let figures = EngineLoad { running: Some(3), ..EngineLoad::default() };
        let polled = EnginePoll { up: true, process: 1, at: Some(now), figures, step_us: Some(9) };
        counts.set(5);
        let old = merge(&polled, &counts, now + Duration::from_secs(10));
        assert_eq!(old.age_ms, 10_000);
        assert_eq!((old.running, old.waiting, old.step_us), (Some(3), None, Some(9)));
        assert_eq!((old.requests, old.prefill_tokens_queued), (Some(5), Some(7)));
        assert_eq!(old.kv_used_ratio, None, "what the engine does not say is not 0");
    }

    #[tokio::test]
    async fn a_changed_count_is_published_without_a_poll_and_many_changes_together() {
        let counts = counts();
        let (_polled, seen) = watch::channel(EnginePoll::default());
        let (load, mut published) = watch::channel(Load::default());
        let running = run(seen, &counts, &load);
        let checks = async {
            for requests in 1..=1000 {
                counts.set(requests);
            }
            let mut times = 0;
            while published.borrow_and_update().requests != Some(1000) {
                published.changed().await.unwrap();
                times += 1;
            }
            assert!(times <= 2, "published {times} times");
        };
        let timeout = Duration::from_secs(30);
        tokio::select! {
            () = running => unreachable!(),
            in_time = tokio::time::timeout(timeout, checks) => in_time.unwrap(),
        }
    }
}
