//! Follows one rank's events into the mirror.

use std::time::Duration;

use splitrail_engine::vllm::events::EventBatch;
use splitrail_engine::vllm::subscription::{Subscription, SyncOutcome, Update};
use splitrail_kv::Applied;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{Mirror, Quiet, Source};

/// Batches between the subscription and the mirror. A full queue holds the stream back in
/// the kernel's buffers, and in the end at the engine.
const QUEUE_BATCHES: usize = 64;
/// Live batches that wait for a replay, in bytes: as much as one payload may have.
const BUFFER_BYTES_MAX: usize = 16 << 20;
/// For how long blocks may be missing that were beyond the bound, before the mirror begins anew.
pub(super) const TRUNCATED_MIN: Duration = Duration::from_secs(60);

/// Follows a rank. Never ends.
pub(super) async fn follow(mirror: Mirror, source: Source) {
    let mut epoch = mirror.inner.epoch.subscribe();
    let rank = source.rank;
    let mut intake = Intake::new(mirror, source);
    loop {
        // Until somebody says how blocks are hashed, nothing can be done with events.
        if epoch.wait_for(|epoch| *epoch > 0).await.is_err() {
            return;
        }
        epoch.mark_unchanged();
        // What was there before is not known to be true.
        intake.forget();
        let (sink, mut updates) = mpsc::channel(QUEUE_BATCHES);
        let mut subscription =
            Subscription::new(intake.source.events.clone(), intake.source.replay.clone());
        subscription.buffer.max_bytes = BUFFER_BYTES_MAX;
        subscription.pacing = Some(intake.mirror.pacing());
        let following = subscription.run(sink, CancellationToken::new());
        // All are parts of this future: dropping it ends all.
        tokio::select! {
            () = following => {}
            reason = intake.apply_all(&mut updates) => {
                tracing::info!(rank, reason, "the mirror begins anew");
                intake.mirror.update(|state| state.count_reset(rank, reason));
            }
            changed = epoch.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}

pub(super) struct Intake {
    mirror: Mirror,
    source: Source,
    said: Quiet,
    /// Since when blocks are missing that were beyond the bound.
    truncated: Option<Instant>,
    /// Since when the engine's events are cut off.
    cut_off: Option<Instant>,
    /// The rank that the stream says it is of, if it says so: one stream, one rank.
    speaks: Option<u16>,
}

/// However following ends, what it has left is not known to be true any more.
impl Drop for Intake {
    fn drop(&mut self) {
        let rank = self.source.rank;
        self.mirror.update(|state| state.set_current(rank, false));
    }
}

impl Intake {
    pub(super) fn new(mirror: Mirror, source: Source) -> Self {
        let said = Quiet::default();
        Self { mirror, source, said, truncated: None, cut_off: None, speaks: None }
    }

    /// Applies what comes, until following must begin anew; says why.
    async fn apply_all(&mut self, updates: &mut mpsc::Receiver<Update>) -> &'static str {
        let cut_off_max = self.mirror.state().config.cut_off_max;
        loop {
            let update = match self.cut_off {
                None => updates.recv().await,
                Some(since) => match timeout_at(since + cut_off_max, updates.recv()).await {
                    Ok(update) => update,
                    Err(_) => return "cut_off",
                },
            };
            let Some(update) = update else {
                return "ended";
            };
            self.take(update);
            if self.has_room_again(Instant::now()) {
                return "over_limit";
            }
        }
    }

    pub(super) fn take(&mut self, update: Update) {
        let rank = self.source.rank;
        match update {
            Update::Batch { sequence, batch } => {
                self.apply(&batch);
                self.mirror.update(|state| state.applied(rank, sequence));
            }
            Update::Reset { reason } => {
                self.truncated = None;
                self.mirror.update(|state| state.reset(rank, reason.name()));
                if self.said.may_log("reset") {
                    tracing::warn!(rank, reason = reason.name(), "the mirror begins anew");
                }
            }
            Update::Synced { outcome } => self.synced(outcome),
            Update::Gap { expected, sequence } => {
                self.mirror.update(|state| state.gap(rank, sequence));
                if self.said.may_log("gap") {
                    let missed = sequence.saturating_sub(expected);
                    tracing::info!(rank, missed, "KV events are missing");
                }
            }
            Update::Garbage { error, .. } => {
                self.mirror.update(|state| state.reject(rank, 1));
                if self.said.may_log("garbage") {
                    tracing::warn!(rank, %error, "a KV event message makes no sense");
                }
            }
            Update::Fresh { ask } => self.mirror.answer(rank, ask),
            Update::Disconnected { error } => {
                self.mirror.update(|state| state.set_current(rank, false));
                if self.mirror.state().blocks(rank) > 0 {
                    self.cut_off.get_or_insert_with(Instant::now);
                }
                if self.said.may_log("disconnected") {
                    let endpoint = self.source.events.to_string();
                    tracing::warn!(rank, endpoint, %error, "the engine's KV events are cut off");
                }
            }
        }
    }

    fn synced(&mut self, outcome: SyncOutcome) {
        let rank = self.source.rank;
        self.cut_off = None;
        self.mirror.update(|state| state.set_current(rank, true));
        if !self.said.may_log("synced") {
            return;
        }
        let blocks = self.mirror.state().blocks(rank);
        match outcome {
            SyncOutcome::Replayed => tracing::info!(rank, blocks, "the mirror is in step"),
            SyncOutcome::ReplayFailed | SyncOutcome::NoReplay => tracing::warn!(
                rank,
                blocks,
                "the mirror knows only what was stored since now: no replay to be had"
            ),
        }
    }

    fn apply(&mut self, batch: &EventBatch) {
        let rank = self.source.rank;
        if *self.speaks.get_or_insert(batch.rank.unwrap_or(rank)) != batch.rank.unwrap_or(rank) {
            self.mirror.update(|state| state.reject(rank, batch.events.len()));
            if self.said.may_log("rank") {
                tracing::warn!(rank, says = batch.rank, "another rank's events are left out");
            }
            return;
        }
        let (mut sum, mut rest) = (Applied::default(), &batch.events[..]);
        while !rest.is_empty() {
            let (applied, left) =
                self.mirror.update(|state| state.apply(rank, batch.timestamp_s, rest));
            sum += applied;
            rest = left;
        }
        if sum.over_limit > 0 {
            self.truncated.get_or_insert_with(Instant::now);
        }
        if sum.malformed + sum.over_limit > 0 && self.said.may_log("rejected") {
            tracing::warn!(
                rank,
                malformed = sum.malformed,
                over_limit = sum.over_limit,
                "blocks cannot be mirrored: is the router's block_size the engine's, and are \
                 the bounds large enough?"
            );
        }
    }

    /// Whether what was beyond the bound may fit now: nobody says which blocks those were.
    pub(super) fn has_room_again(&self, now: Instant) -> bool {
        let due = |since: Instant| now.duration_since(since) >= TRUNCATED_MIN;
        if !self.truncated.is_some_and(due) {
            return false;
        }
        let (room, limit) = self.mirror.state().room(self.source.rank);
        room >= limit / 8
    }

    fn forget(&mut self) {
        let rank = self.source.rank;
        (self.truncated, self.cut_off, self.speaks) = (None, None, None);
        self.mirror.update(|state| state.forget(rank));
    }
}
