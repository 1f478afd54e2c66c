//! Follows one worker's KV events into the index.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_engine::vllm::events::EventBatch;
use splitrail_engine::vllm::subscription::{ResetReason, Subscription, SyncOutcome, Update};
use splitrail_kv::{Applied, WorkerKey};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::pool::Worker;
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
    let replay = worker.config.kv_replay.as_deref().and_then(|address| address.parse().ok());
    let (sink, mut updates) = mpsc::channel(QUEUE_BATCHES);
    let following = Subscription::new(events, replay).run(sink, CancellationToken::new());
    let mut intake = Intake { core, served, worker, last_line: None, other_rank_seen: false };
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
    last_line: Option<Instant>,
    other_rank_seen: bool,
}

impl Intake {
    fn take(&mut self, update: Update) {
        match update {
            Update::Batch { batch, .. } => self.apply(&batch),
            Update::Reset { reason } => self.reset(reason),
            Update::Synced { outcome } => {
                self.worker.set_synced();
                let held = self.served.pool.index().block_counts(self.key(0));
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
            Update::Gap { expected, sequence } => {
                let worker = self.worker.id();
                tracing::info!(worker, missed = sequence - expected, "KV events are missing");
                self.core.metrics.index_gaps.with_label_values(&self.labels()).inc();
            }
            Update::Garbage { error, .. } => {
                self.count_rejected("garbage", 1);
                let worker = self.worker.id().to_owned();
                if self.may_log() {
                    tracing::warn!(worker, %error, "a KV event message makes no sense");
                }
            }
            Update::Disconnected { error } => {
                tracing::warn!(worker = self.worker.id(), %error, "KV events are cut off");
            }
        }
    }

    fn apply(&mut self, batch: &EventBatch) {
        let rank = batch.rank.unwrap_or(0);
        if rank != 0 && !std::mem::replace(&mut self.other_rank_seen, true) {
            let worker = self.worker.id();
            tracing::warn!(
                worker,
                rank,
                "events of a further data-parallel rank: indexed apart, not routed to"
            );
        }
        let mut index = self.served.pool.index_mut();
        let mut sum = Applied::default();
        for event in &batch.events {
            let applied = index.apply(self.key(rank), event);
            sum.orphaned += applied.orphaned;
            sum.malformed += applied.malformed;
            sum.over_limit += applied.over_limit;
            sum.replaced += applied.replaced;
        }
        drop(index);
        let labels = self.labels();
        let metrics = &self.core.metrics;
        metrics.index_events.with_label_values(&labels).inc_by(batch.events.len() as u64);
        let lag = unix_ms() as f64 / 1e3 - batch.timestamp_s;
        if lag.is_finite() {
            metrics.index_event_lag.with_label_values(&labels).observe(lag.max(0.0));
        }
        for (reason, blocks) in [
            ("unknown_parent", sum.orphaned),
            ("block_size", sum.malformed),
            ("over_limit", sum.over_limit),
            ("replaced", sum.replaced),
        ] {
            self.count_rejected(reason, blocks);
        }
        if sum.malformed + sum.over_limit > 0 && self.may_log() {
            let (worker, block_size) = (self.worker.id(), self.served.pool.block_size);
            tracing::warn!(
                worker,
                block_size,
                malformed = sum.malformed,
                over_limit = sum.over_limit,
                "blocks cannot be indexed: is block_size the engine's, and \
                 limits.index_blocks_per_worker_max large enough?"
            );
        }
    }

    fn reset(&mut self, reason: ResetReason) {
        let mut index = self.served.pool.index_mut();
        index.remove_worker(self.worker.index as u32);
        drop(index);
        let [model, worker] = self.labels();
        let metrics = &self.core.metrics;
        metrics.index_resyncs.with_label_values(&[model, worker, reason.name()]).inc();
        if self.may_log() {
            let worker = self.worker.id();
            tracing::warn!(worker, reason = reason.name(), "index of this worker starts anew");
        }
    }

    fn key(&self, rank: u16) -> WorkerKey {
        WorkerKey { worker: self.worker.index as u32, rank }
    }

    fn labels(&self) -> [&str; 2] {
        [self.served.name(), self.worker.id()]
    }

    fn count_rejected(&self, reason: &str, blocks: usize) {
        if blocks > 0 {
            let [model, worker] = self.labels();
            let labels = [model, worker, reason];
            let metrics = &self.core.metrics;
            metrics.index_rejected_blocks.with_label_values(&labels).inc_by(blocks as u64);
        }
    }

    /// A stream of garbage must not become a stream of log lines.
    fn may_log(&mut self) -> bool {
        let now = Instant::now();
        let due = self.last_line.is_none_or(|last| now.duration_since(last) >= QUIET);
        if due {
            self.last_line = Some(now);
        }
        due
    }
}
