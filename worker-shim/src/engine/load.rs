//! Publishes the engine's load: the engine's own metrics together with the shim's counts.

use std::time::Duration;

use splitrail_proto::v1::Load;
use tokio::sync::watch;
use tokio::time::Instant;

use super::poll::EnginePoll;
use crate::proxy::Traffic;
use crate::ticks;

/// Minimum time between two publications. Each one costs a wake-up.
const INTERVAL: Duration = Duration::from_millis(50);

/// Runs until dropped. Publishes the load after each poll and when the shim's counts change.
/// Receivers add the time that has passed since then to its age.
pub(super) async fn run(
    mut polled: watch::Receiver<EnginePoll>,
    traffic: &Traffic,
    load: &watch::Sender<Load>,
) {
    let mut changed = traffic.changed();
    loop {
        // Changes up to here are published now, later ones next time.
        changed.borrow_and_update();
        let now = merge(&polled.borrow_and_update(), traffic, Instant::now());
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
fn merge(polled: &EnginePoll, traffic: &Traffic, now: Instant) -> Load {
    let figures = &polled.figures;
    let age = polled.at.map_or(Duration::MAX, |at| now.saturating_duration_since(at));
    Load {
        up: polled.up,
        age_ms: u32::try_from(age.as_millis()).unwrap_or(u32::MAX),
        running: figures.running,
        waiting: figures.waiting,
        requests: Some(traffic.requests()),
        prefill_tokens_queued: Some(traffic.prefill_tokens_queued()),
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
    use prometheus::Registry;
    use splitrail_engine::load::EngineLoad;

    use super::*;
    use crate::telemetry::Registrar;

    #[test]
    fn metrics_of_a_silent_engine_age_and_the_shims_counts_do_not() {
        let traffic = Traffic::new(&Registrar(&Registry::new())).unwrap();
        let now = Instant::now();
        assert_eq!(merge(&EnginePoll::default(), &traffic, now).age_ms, u32::MAX, "never reached");
        let figures = EngineLoad { running: Some(3), ..EngineLoad::default() };
        let polled = EnginePoll { up: true, process: 1, at: Some(now), figures, step_us: Some(9) };
        let _tickets = [traffic.enter(3), traffic.enter(4)];
        let old = merge(&polled, &traffic, now + Duration::from_secs(10));
        assert_eq!(old.age_ms, 10_000);
        assert_eq!((old.running, old.waiting, old.step_us), (Some(3), None, Some(9)));
        assert_eq!((old.requests, old.prefill_tokens_queued), (Some(2), Some(7)));
        assert_eq!(old.kv_used_ratio, None, "what the engine does not say is not 0");
    }

    #[tokio::test]
    async fn a_changed_count_is_published_without_a_poll_and_many_changes_together() {
        let traffic = Traffic::new(&Registrar(&Registry::new())).unwrap();
        let (_polled, seen) = watch::channel(EnginePoll::default());
        let (load, mut published) = watch::channel(Load::default());
        let running = run(seen, &traffic, &load);
        let checks = async {
            let _tickets: Vec<_> = (0..1000).map(|_| traffic.enter(1)).collect();
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
