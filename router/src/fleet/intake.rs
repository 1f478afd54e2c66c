//! Follows one worker's KV events into the index.

use std::sync::Arc;
use std::time::Instant;

use splitrail_engine::vllm::events::EventBatch;
use splitrail_engine::vllm::subscription::{ResetReason, Subscription, SyncOutcome, Update};
use splitrail_engine::zmtp::Endpoint;
use splitrail_kv::{Applied, KvEvent};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::indexing::{Indexing, OVER_LIMIT};
use super::pool::worker_key;

/// Batches between the subscription and the index. A full queue holds the stream
/// back in the kernel's buffers, and in the end at the engine.
const QUEUE_BATCHES: usize = 256;

/// Follows a worker until the task is ended.
pub(super) async fn run(part: Indexing) {
    let (worker, pool) = (Arc::clone(&part.worker), Arc::clone(&part.pool));
    let endpoint = |address: &Option<String>| -> Option<Endpoint> {
        address.as_deref().and_then(|address| address.parse().ok())
    };
    let events = endpoint(&worker.config.kv_events);
    let Some(events) = events else {
        // Addresses are checked with the configuration.
        tracing::error!(worker = worker.id(), "kv_events is not an address");
        return;
    };
    pool.block_size_known().await;
    let replay = endpoint(&worker.config.kv_replay);
    let mut intake = Intake(part);
    loop {
        let (sink, mut updates) = mpsc::channel(QUEUE_BATCHES);
        let subscription = Subscription::new(events.clone(), replay.clone());
        let following = subscription.run(sink, CancellationToken::new());
        // What was wished for before comes true here.
        let mut wishes = intake.0.worker.resync.wishes();
        // What was there before is not known to be true.
        intake.0.forget();
        let applying = async {
            loop {
                tokio::select! {
                    update = updates.recv() => match update {
                        Some(update) => intake.take(update),
                        None => std::future::pending().await,
                    },
                    reason = wishes.next() => return reason,
                }
                if intake.0.has_room_again(Instant::now()) {
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
                    intake.0.wait_longer();
                }
            }
        }
    }
}

struct Intake(Indexing);

impl Intake {
    fn take(&mut self, update: Update) {
        match update {
            Update::Batch { batch, .. } => self.apply(&batch),
            Update::Reset { reason } => self.reset(reason),
            Update::Synced { outcome } => self.synced(outcome),
            Update::Gap { expected, sequence } => self.0.gap(sequence - expected),
            Update::Garbage { error, .. } => self.0.garbage(&error),
            Update::Disconnected { error } => {
                let worker = Arc::clone(&self.0.worker);
                worker.set_events_current(false);
                // Whatever comes back may be another version of it.
                worker.parity.forget();
                if self.0.may_log("disconnected") {
                    let endpoint = worker.config.kv_events.as_deref().unwrap_or_default();
                    tracing::warn!(
                        worker = worker.id(),
                        endpoint,
                        %error,
                        "KV events are cut off: no overlap is believed until they come again"
                    );
                }
            }
        }
    }

    fn synced(&mut self, outcome: SyncOutcome) {
        self.0.in_step();
        if !self.0.may_log("synced") {
            return;
        }
        let blocks = self.0.blocks();
        let worker = self.0.worker.id();
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
        self.0.observe(batch.events.len(), batch.timestamp_s);
        if let Some(rank) = batch.rank.filter(|rank| *rank != 0) {
            // No request goes to a further data-parallel rank: what it holds is of no use.
            self.0.worker.witness.of_other_rank(batch.events.len());
            self.0.count_rejected("rank", batch.events.len());
            if self.0.may_log("rank") {
                let worker = self.0.worker.id();
                tracing::warn!(worker, rank, "events of a further data-parallel rank are left out");
            }
            return;
        }
        if batch.events.contains(&KvEvent::Cleared) {
            self.0.pool.assumed.forget(self.0.worker.index);
            // What this batch leaves out counts below.
            self.0.nothing_is_left_out();
        }
        let sum = self.index_events(batch);
        self.0.note(batch.events.len(), sum);
    }

    fn index_events(&self, batch: &EventBatch) -> Applied {
        let Indexing { pool, worker, .. } = &self.0;
        let mut index = pool.index();
        let mut sum = Applied::default();
        if worker.gone.is_cancelled() {
            return sum;
        }
        for event in &batch.events {
            sum += index.apply(worker_key(worker.index), event);
        }
        sum
    }

    /// All of its events are read again: the bound left blocks out that may fit now, or
    /// somebody has asked for it.
    fn begin_anew(&self, reason: &str) {
        self.0.count_resync(reason);
        self.0.worker.set_events_current(false);
        tracing::info!(worker = self.0.worker.id(), reason, "index of this worker is read anew");
    }

    fn reset(&mut self, reason: ResetReason) {
        // Unless batches were just lost on the way, nothing says that it is the same process.
        if !matches!(reason, ResetReason::Gap | ResetReason::Garbage) {
            self.0.worker.becomes_another();
        }
        self.0.forget();
        self.0.count_resync(reason.name());
        if self.0.may_log("reset") {
            let worker = self.0.worker.id();
            tracing::warn!(worker, reason = reason.name(), "index of this worker starts anew");
        }
    }
}

#[cfg(test)]
mod tests;
