//! Follows one worker's KV events into the index.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_engine::vllm::events::EventBatch;
use splitrail_engine::vllm::subscription::{ResetReason, Subscription, SyncOutcome, Update};
use splitrail_kv::{Applied, KvEvent};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::pool::worker_key;
use super::worker::Worker;
use crate::core::{Core, Served, unix_ms};

/// Batches between the subscription and the index. A full queue holds the stream
/// back in the kernel's buffers, and in the end at the engine.
const QUEUE_BATCHES: usize = 256;

/// Between two log lines of one kind about one worker.
const QUIET: Duration = Duration::from_secs(30);

/// Follows a worker until the task is ended.
pub async fn run(core: Arc<Core>, served: Arc<Served>, worker: Arc<Worker>) {
    let events = worker.config.kv_events.as_deref().and_then(|address| address.parse().ok());
    let Some(events) = events else {
        // Addresses are checked with the configuration.
        tracing::error!(worker = worker.id(), "kv_events is not an address");
        return;
    };
    served.pool.block_size_known().await;
    let replay = worker.config.kv_replay.as_deref().and_then(|address| address.parse().ok());
    let (sink, mut updates) = mpsc::channel(QUEUE_BATCHES);
    let following = Subscription::new(events, replay).run(sink, CancellationToken::new());
    let mut intake = Intake { core, served, worker, said: BTreeMap::new() };
    // What an earlier run of this task has left is not known to be true.
    intake.forget();
    let applying = async {
        while let Some(update) = updates.recv().await {
            intake.take(update);
        }
    };
    // Both are parts of this task: ending it ends both.
    tokio::join!(following, applying);
}

struct Intake {
    core: Arc<Core>,
    served: Arc<Served>,
    worker: Arc<Worker>,
    /// When a log line of each kind was last written.
    said: BTreeMap<&'static str, Instant>,
}

/// However following ends, what it has left is not known to be true any more.
impl Drop for Intake {
    fn drop(&mut self) {
        self.worker.set_events_current(false);
    }
}

impl Intake {
    fn take(&mut self, update: Update) {
        match update {
            Update::Batch { batch, .. } => self.apply(&batch),
            Update::Reset { reason } => self.reset(reason),
            Update::Synced { outcome } => self.synced(outcome),
            Update::Gap { expected, sequence } => {
                self.core.metrics.index_gaps.with_label_values(&self.labels()).inc();
                if self.may_log("gap") {
                    let worker = self.worker.id();
                    tracing::info!(worker, missed = sequence - expected, "KV events are missing");
                }
            }
            Update::Garbage { error, .. } => {
                self.count_rejected("garbage", 1);
                if self.may_log("garbage") {
                    let worker = self.worker.id();
                    tracing::warn!(worker, %error, "a KV event message makes no sense");
                }
            }
            Update::Disconnected { error } => {
                self.worker.set_events_current(false);
                if self.may_log("disconnected") {
                    let endpoint = self.worker.config.kv_events.as_deref().unwrap_or_default();
                    tracing::warn!(
                        worker = self.worker.id(),
                        endpoint,
                        %error,
                        "KV events are cut off: no overlap is believed until they come again"
                    );
                }
            }
        }
    }

    fn synced(&mut self, outcome: SyncOutcome) {
        self.worker.set_synced();
        self.worker.set_events_current(true);
        self.served.pool.assumed.confirmed(self.worker.index);
        if !self.may_log("synced") {
            return;
        }
        let held = self.served.pool.index().block_counts(worker_key(self.worker.index));
        let blocks: usize = held.iter().sum();
        let worker = self.worker.id();
        match outcome {
            SyncOutcome::Replayed => tracing::info!(worker, blocks, "index is in step"),
            SyncOutcome::ReplayFailed | SyncOutcome::NoReplay => tracing::warn!(
                worker,
                blocks,
                "index knows only what was stored since now: no replay to be had"
            ),
        }
    }

    fn apply(&mut self, batch: &EventBatch) {
        let metrics = &self.core.metrics;
        metrics.index_events.with_label_values(&self.labels()).inc_by(batch.events.len() as u64);
        let lag = unix_ms() as f64 / 1e3 - batch.timestamp_s;
        if lag.is_finite() {
            metrics.index_event_lag.with_label_values(&self.labels()).observe(lag.max(0.0));
        }
        if let Some(rank) = batch.rank.filter(|rank| *rank != 0) {
            // No request goes to a further data-parallel rank: what it holds is of no use.
            self.count_rejected("rank", batch.events.len());
            if self.may_log("rank") {
                let worker = self.worker.id();
                tracing::warn!(worker, rank, "events of a further data-parallel rank are left out");
            }
            return;
        }
        if batch.events.contains(&KvEvent::Cleared) {
            self.served.pool.assumed.forget(self.worker.index);
        }
        let sum = self.index_events(batch);
        for (reason, blocks) in [
            ("unknown_parent", sum.orphaned),
            ("block_size", sum.malformed),
            ("over_limit", sum.over_limit),
            ("replaced", sum.replaced),
        ] {
            self.count_rejected(reason, blocks);
        }
        if sum.malformed + sum.over_limit > 0 && self.may_log("rejected") {
            tracing::warn!(
                worker = self.worker.id(),
                block_size = self.served.pool.block_size(),
                malformed = sum.malformed,
                over_limit = sum.over_limit,
                "blocks cannot be indexed: is block_size the engine's, and \
                 limits.index_blocks_per_worker_max large enough?"
            );
        }
    }

    fn index_events(&self, batch: &EventBatch) -> Applied {
        let mut index = self.served.pool.index();
        let mut sum = Applied::default();
        for event in &batch.events {
            let applied = index.apply(worker_key(self.worker.index), event);
            sum.orphaned += applied.orphaned;
            sum.malformed += applied.malformed;
            sum.over_limit += applied.over_limit;
            sum.replaced += applied.replaced;
        }
        sum
    }

    fn reset(&mut self, reason: ResetReason) {
        self.forget();
        let [model, worker] = self.labels();
        let resyncs = &self.core.metrics.index_resyncs;
        resyncs.with_label_values(&[model, worker, reason.name()]).inc();
        if self.may_log("reset") {
            let worker = self.worker.id();
            tracing::warn!(worker, reason = reason.name(), "index of this worker starts anew");
        }
    }

    fn forget(&self) {
        self.served.pool.index().remove_worker(self.worker.index as u32);
        self.served.pool.assumed.forget(self.worker.index);
    }

    fn labels(&self) -> [&str; 2] {
        [self.served.name(), self.worker.id()]
    }

    fn count_rejected(&self, reason: &str, count: usize) {
        if count > 0 {
            let [model, worker] = self.labels();
            let rejected = &self.core.metrics.index_rejected;
            rejected.with_label_values(&[model, worker, reason]).inc_by(count as u64);
        }
    }

    /// A stream of nonsense must not become a stream of log lines.
    fn may_log(&mut self, kind: &'static str) -> bool {
        let now = Instant::now();
        let due = self.said.get(kind).is_none_or(|last| now.duration_since(*last) >= QUIET);
        if due {
            self.said.insert(kind, now);
        }
        due
    }
}
