//! Follows one worker's KV events into the index.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_engine::vllm::events::EventBatch;
use splitrail_engine::vllm::subscription::{ResetReason, Subscription, SyncOutcome, Update};
use splitrail_engine::zmtp::Endpoint;
use splitrail_kv::{Applied, KvEvent};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::pool::worker_key;
use super::worker::Worker;
use crate::core::{Core, Served, unix_ms};

/// Batches between the subscription and the index. A full queue holds the stream
/// back in the kernel's buffers, and in the end at the engine.
const QUEUE_BATCHES: usize = 256;

/// For how long a worker's index may lack blocks before it is made anew.
pub const TRUNCATED_MIN: Duration = Duration::from_secs(60);

/// That grows each time that it was, up to this.
const TRUNCATED_MAX: Duration = Duration::from_secs(3600);

/// The reason in metrics and logs of what was beyond the bound.
const OVER_LIMIT: &str = "over_limit";

/// Between two log lines of one kind about one worker.
const QUIET: Duration = Duration::from_secs(30);

/// Follows a worker until the task is ended. Where the index lacks blocks of it, it is made
/// anew after `truncated_min` at the earliest, as far as there is room.
pub async fn run(
    core: Arc<Core>,
    served: Arc<Served>,
    worker: Arc<Worker>,
    truncated_min: Duration,
) {
    let endpoint = |address: &Option<String>| -> Option<Endpoint> {
        address.as_deref().and_then(|address| address.parse().ok())
    };
    let events = endpoint(&worker.config.kv_events);
    let Some(events) = events else {
        // Addresses are checked with the configuration.
        tracing::error!(worker = worker.id(), "kv_events is not an address");
        return;
    };
    served.pool.block_size_known().await;
    let replay = endpoint(&worker.config.kv_replay);
    let said = BTreeMap::new();
    let mut intake = Intake { core, served, worker, said, truncated: None, truncated_min };
    loop {
        let (sink, mut updates) = mpsc::channel(QUEUE_BATCHES);
        let subscription = Subscription::new(events.clone(), replay.clone());
        let following = subscription.run(sink, CancellationToken::new());
        // What was wished for before comes true here.
        let mut wishes = intake.worker.resync.wishes();
        // What was there before is not known to be true.
        intake.forget();
        let applying = async {
            loop {
                tokio::select! {
                    update = updates.recv() => match update {
                        Some(update) => intake.take(update),
                        None => std::future::pending().await,
                    },
                    reason = wishes.next() => return reason,
                }
                if intake.has_room_again(Instant::now()) {
                    return OVER_LIMIT;
                }
            }
        };
        // Both are parts of this task: ending it ends both.
        tokio::select! {
            () = following => return,
            reason = applying => {
                intake.begin_anew(reason);
                if reason == OVER_LIMIT {
                    // The same history may lead to the same place.
                    intake.truncated_min = (intake.truncated_min * 2).min(TRUNCATED_MAX);
                }
            }
        }
    }
}

struct Intake {
    core: Arc<Core>,
    served: Arc<Served>,
    worker: Arc<Worker>,
    /// When a log line of each kind was last written.
    said: BTreeMap<&'static str, Instant>,
    /// Since when the index lacks blocks of this worker that were beyond its bound.
    truncated: Option<Instant>,
    /// For how long at least.
    truncated_min: Duration,
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
                // Whatever comes back may be another version of it.
                self.worker.parity.forget();
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
            self.worker.witness.of_other_rank(batch.events.len());
            self.count_rejected("rank", batch.events.len());
            if self.may_log("rank") {
                let worker = self.worker.id();
                tracing::warn!(worker, rank, "events of a further data-parallel rank are left out");
            }
            return;
        }
        if batch.events.contains(&KvEvent::Cleared) {
            self.served.pool.assumed.forget(self.worker.index);
            // What was left out is gone as well; what this batch leaves out counts below.
            self.truncated = None;
            self.worker.set_index_truncated(false);
        }
        let sum = self.index_events(batch);
        self.worker.witness.applied(batch.events.len(), &sum);
        if sum.over_limit > 0 {
            self.truncated.get_or_insert_with(Instant::now);
            self.worker.set_index_truncated(true);
        }
        for (reason, blocks) in [
            ("unknown_parent", sum.orphaned),
            ("block_size", sum.malformed),
            (OVER_LIMIT, sum.over_limit),
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
        if self.worker.gone.is_cancelled() {
            return sum;
        }
        for event in &batch.events {
            sum += index.apply(worker_key(self.worker.index), event);
        }
        sum
    }

    /// Whether what was beyond the bound may fit now: then the index starts anew, for
    /// nobody says which blocks those were.
    fn has_room_again(&mut self, now: Instant) -> bool {
        let due = |since: Instant| now.duration_since(since) >= self.truncated_min;
        if !self.truncated.is_some_and(due) {
            return false;
        }
        let (room, limit) = self.served.pool.index().room(worker_key(self.worker.index));
        room >= limit / 8
    }

    /// All of its events are read again: the bound left blocks out that may fit now, or
    /// somebody has asked for it.
    fn begin_anew(&self, reason: &str) {
        self.count_resync(reason);
        self.worker.set_events_current(false);
        tracing::info!(worker = self.worker.id(), reason, "index of this worker is read anew");
    }

    fn count_resync(&self, reason: &str) {
        let [model, worker] = self.labels();
        self.core.metrics.index_resyncs.with_label_values(&[model, worker, reason]).inc();
    }

    fn reset(&mut self, reason: ResetReason) {
        // Unless batches were just lost on the way, nothing says that it is the same process.
        if !matches!(reason, ResetReason::Gap | ResetReason::Garbage) {
            self.worker.becomes_another();
        }
        self.forget();
        self.count_resync(reason.name());
        if self.may_log("reset") {
            let worker = self.worker.id();
            tracing::warn!(worker, reason = reason.name(), "index of this worker starts anew");
        }
    }

    fn forget(&mut self) {
        self.truncated = None;
        self.worker.index_begins_anew();
        self.worker.set_index_truncated(false);
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

#[cfg(test)]
mod tests;
