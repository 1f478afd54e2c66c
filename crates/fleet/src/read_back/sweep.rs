//! Removes pins that cannot be read any more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_telemetry::Metrics;
use splitrail_workload::pins::PinEnd;
use tokio::time::MissedTickBehavior;

use super::release::{self, close, release_all};
use crate::ServedModel;

/// Interval at which pins that have ended, or whose worker is lost, are removed.
const SWEEP: Duration = Duration::from_millis(500);

/// Releases all pins of a pool that is served no more, in the background. Those that its last requests
/// leave are released at once.
pub(crate) fn stop(served: &Arc<ServedModel>, metrics: &Arc<Metrics>) {
    let releases = close(served, metrics);
    if !releases.is_empty() {
        let _runs = served.releases.run(release_all(releases));
    }
}

/// Removes pins that have ended and pins whose worker is lost, until the task is aborted.
pub(crate) async fn run(served: Arc<ServedModel>, metrics: Arc<Metrics>) {
    let mut ticks = tokio::time::interval(SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        sweep(&served, &metrics, Instant::now());
    }
}

fn sweep(served: &Arc<ServedModel>, metrics: &Arc<Metrics>, now: Instant) {
    let is_on = served.config.read_back && !served.pool.read_back.is_distrusted();
    let roster = served.pool.roster();
    let is_gone = |holder, process, _| {
        roster.get(holder).is_none_or(|worker| worker.health.presence.restarts() != process)
    };
    let (over, lost) = {
        let mut store = served.pool.read_back.store();
        if store.is_empty() {
            return;
        }
        let over = store.expire(now);
        store.forget_left(is_gone);
        let lost = store.retain(|pin| match pin.payload.is_lost() {
            true => Some(PinEnd::Holder),
            false => (!is_on).then_some(PinEnd::Stopped),
        });
        (over, lost)
    };
    metrics.read_back_pins.with_label_values(&[served.name(), "expired"]).inc_by(over as u64);
    release::release_in_background(served, metrics, lost);
}
