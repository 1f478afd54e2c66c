//! Removes pins that cannot be read any more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_telemetry::Metrics;
use tokio::time::MissedTickBehavior;

use super::release::{self, release_all};
use super::store::Why;
use crate::Served;

/// Interval at which pins that have ended, or whose worker is lost, are removed.
const SWEEP: Duration = Duration::from_millis(500);

/// Releases all pins of a pool that is served no more, in the background.
pub(crate) fn stop(served: &Arc<Served>, metrics: &Arc<Metrics>) {
    if served.pool.read_back.pins() > 0 {
        let (stopping, metrics) = (Arc::clone(served), Arc::clone(metrics));
        served.releases.run(async move { release_all(&stopping, &metrics).await });
    }
}

/// Removes pins that have ended and pins whose worker is lost, until the task is aborted.
pub(crate) async fn run(served: Arc<Served>, metrics: Arc<Metrics>) {
    let mut ticks = tokio::time::interval(SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        sweep(&served, &metrics, Instant::now());
    }
}

fn sweep(served: &Arc<Served>, metrics: &Arc<Metrics>, now: Instant) {
    let is_on = served.config.read_back;
    let (over, lost) = {
        let mut store = served.pool.read_back.store();
        if store.is_empty() {
            return;
        }
        let over = store.expire(now);
        let lost = store.retain(|pin| match pin.payload.is_lost() {
            true => Some(Why::Holder),
            false => (!is_on).then_some(Why::Stopped),
        });
        (over, lost)
    };
    metrics.read_back_pins.with_label_values(&[served.name(), "expired"]).inc_by(over as u64);
    release::several(served, metrics, lost);
}
