//! Measures how late the runtime wakes a task.

use std::sync::Arc;
use std::time::Duration;

use splitrail_telemetry::Metrics;
use tokio::time::Instant;

/// How often the delay is measured.
const INTERVAL: Duration = Duration::from_millis(100);

/// Records by how much each wake-up was late, until the task is ended.
pub(crate) async fn observe(metrics: Arc<Metrics>) {
    let lag = metrics.runtime_lag.with_label_values::<&str>(&[]);
    loop {
        let due = Instant::now() + INTERVAL;
        tokio::time::sleep_until(due).await;
        lag.observe(due.elapsed().as_secs_f64());
    }
}
