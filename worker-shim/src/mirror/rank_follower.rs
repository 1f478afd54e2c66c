//! Applies the KV events of one rank to the mirror.

use std::time::Duration;

use splitrail_engine::identity::EventSource;
use splitrail_engine::kv_events::EventBatch;
use splitrail_engine::kv_events::{Subscription, SyncOutcome, Update};
use splitrail_kv::AppliedBlocks;
use splitrail_settings::log_throttle::KeyedLogThrottle;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::Mirror;

/// Maximum number of batches between the subscription and the mirror. A full queue leaves
/// events in the kernel's buffers, and finally at the engine.
const QUEUE_BATCHES: usize = 64;
/// Maximum size in bytes of live batches that wait for a replay; the maximum size of one
/// payload.
const BUFFER_BYTES_MAX: usize = 16 << 20;
/// Time for which blocks beyond the limit stay left out before the mirror is rebuilt to
/// include them.
pub(super) const TRUNCATED_MIN: Duration = Duration::from_secs(60);

/// Follows the events of one rank. Never ends.
pub(super) async fn follow_rank(mirror: Mirror, source: EventSource) {
    let mut epoch = mirror.inner.epoch.subscribe();
    let rank = source.rank;
    let mut intake = RankIntake::new(mirror, source);
    loop {
        // Events cannot be applied before a router has sent the hash settings.
        if epoch.wait_for(|epoch| *epoch > 0).await.is_err() {
            return;
        }
        epoch.mark_unchanged();
        // Earlier blocks may be out of date.
        intake.forget();
        let (sink, mut updates) = mpsc::channel(QUEUE_BATCHES);
        let mut subscription =
            Subscription::new(intake.source.events.clone(), intake.source.replay.clone());
        subscription.buffer.max_bytes = BUFFER_BYTES_MAX;
        subscription.pacing = Some(intake.mirror.pacing());
        let following = subscription.run(sink, CancellationToken::new());
        // All branches belong to this future and end when it is dropped.
        tokio::select! {
            () = following => {}
            reason = intake.apply_all(&mut updates) => {
                tracing::info!(rank, reason, "the mirror is rebuilt");
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

/// Applies the updates of one rank's subscription to the mirror.
pub(super) struct RankIntake {
    mirror: Mirror,
    source: EventSource,
    log_throttle: KeyedLogThrottle,
    /// When blocks beyond the limit were first left out.
    truncated_since: Option<Instant>,
    /// When the engine's events were disconnected.
    disconnected_since: Option<Instant>,
    /// The rank that the first batch of the stream named. A stream belongs to one rank.
    stream_rank: Option<u16>,
    /// Whether what arrives may be a replay: since the start, an interruption or a reset, until all
    /// has been caught up with.
    is_replayed: bool,
}

/// The blocks may be out of date as soon as the events are no longer followed.
impl Drop for RankIntake {
    fn drop(&mut self) {
        let rank = self.source.rank;
        self.mirror.update(|state| state.set_current(rank, false));
    }
}

impl RankIntake {
    pub(super) fn new(mirror: Mirror, source: EventSource) -> Self {
        let log_throttle = KeyedLogThrottle::default();
        Self {
            mirror,
            source,
            log_throttle,
            truncated_since: None,
            disconnected_since: None,
            stream_rank: None,
            is_replayed: true,
        }
    }

    /// Applies updates until the subscription must be restarted. Returns the reason.
    async fn apply_all(&mut self, updates: &mut mpsc::Receiver<Update>) -> &'static str {
        let disconnect_max = self.mirror.state().config.disconnect_max;
        loop {
            let update = match self.disconnected_since {
                None => updates.recv().await,
                Some(since) => match timeout_at(since + disconnect_max, updates.recv()).await {
                    Ok(update) => update,
                    Err(_) => return "cut_off",
                },
            };
            let Some(update) = update else {
                return "ended";
            };
            self.handle(update);
            if self.may_fit_now(Instant::now()) {
                return "over_limit";
            }
        }
    }

    pub(super) fn handle(&mut self, update: Update) {
        let rank = self.source.rank;
        match update {
            Update::Batch { sequence, batch } => {
                self.apply(&batch);
                self.mirror.update(|state| state.finish_batch(rank, sequence));
            }
            Update::Reset { reason } => {
                self.truncated_since = None;
                self.mirror.update(|state| state.reset(rank, reason.name()));
                if self.log_throttle.may_log("reset") {
                    tracing::warn!(rank, reason = reason.name(), "the mirror is rebuilt");
                }
            }
            Update::Synced { outcome } => self.synced(outcome),
            Update::Gap { expected, sequence } => {
                self.mirror.update(|state| state.record_gap(rank, sequence));
                if self.log_throttle.may_log("gap") {
                    let missed = sequence.saturating_sub(expected);
                    tracing::info!(rank, missed, "KV events are missing");
                }
            }
            Update::Garbage { error, .. } => {
                self.mirror.update(|state| state.count_rejected(rank, 1));
                if self.log_throttle.may_log("garbage") {
                    tracing::warn!(rank, %error, "a KV event message cannot be decoded");
                }
            }
            Update::Fresh { ask } => self.mirror.record_refresh(rank, ask),
            Update::Disconnected { error } => {
                self.is_replayed = true;
                self.mirror.update(|state| state.set_current(rank, false));
                if self.mirror.state().blocks(rank) > 0 {
                    self.disconnected_since.get_or_insert_with(Instant::now);
                }
                if self.log_throttle.may_log("disconnected") {
                    let endpoint = self.source.events.to_string();
                    tracing::warn!(rank, endpoint, %error, "the engine's KV events are disconnected");
                }
            }
        }
    }

    fn synced(&mut self, outcome: SyncOutcome) {
        let rank = self.source.rank;
        self.disconnected_since = None;
        self.is_replayed = false;
        self.mirror.update(|state| state.set_current(rank, true));
        if !self.log_throttle.may_log("synced") {
            return;
        }
        let blocks = self.mirror.state().blocks(rank);
        match outcome {
            SyncOutcome::Replayed => tracing::info!(rank, blocks, "the mirror has caught up"),
            SyncOutcome::ReplayFailed | SyncOutcome::NoReplay => tracing::warn!(
                rank,
                blocks,
                "no replay is available: the mirror learns only blocks that are stored from now on"
            ),
        }
    }

    fn apply(&mut self, batch: &EventBatch) {
        let rank = self.source.rank;
        if *self.stream_rank.get_or_insert(batch.rank.unwrap_or(rank)) != batch.rank.unwrap_or(rank)
        {
            self.mirror.update(|state| state.count_rejected(rank, batch.events.len()));
            if self.log_throttle.may_log("rank") {
                tracing::warn!(rank, says = batch.rank, "events of another rank are ignored");
            }
            return;
        }
        let skipped = batch.skipped;
        // The mirror has the blocks of the spine alone.
        let beside = skipped.unfollowed_groups | skipped.followed_groups;
        self.mirror.add_unfollowed_groups(beside);
        let rejected = (skipped.unknown_events + skipped.unusable_events) as usize;
        self.mirror.update(|state| state.count_rejected(rank, rejected));
        if skipped.replaced_by_clear > 0 {
            self.mirror.update(|state| state.count_reset(rank, "unclear_removal"));
            if self.log_throttle.may_log("unclear_removal") {
                tracing::warn!(
                    rank,
                    "a KV event that cannot be used may have removed any block: the mirror is emptied"
                );
            }
        }
        // The age of what is read again is no delay.
        let made_s = if self.is_replayed { 0.0 } else { batch.timestamp_s };
        let (mut sum, mut rest) = (AppliedBlocks::default(), &batch.events[..]);
        while !rest.is_empty() {
            let (applied, left) = self.mirror.update(|state| state.apply(rank, made_s, rest));
            sum += applied;
            rest = left;
        }
        if sum.over_limit > 0 {
            self.truncated_since.get_or_insert_with(Instant::now);
        }
        if sum.malformed + sum.over_limit > 0 && self.log_throttle.may_log("rejected") {
            tracing::warn!(
                rank,
                malformed = sum.malformed,
                over_limit = sum.over_limit,
                "blocks cannot be mirrored: is the router's block_size the engine's, and are \
                 the bounds large enough?"
            );
        }
    }

    /// Whether blocks that were left out may fit now. The engine does not list them again, so the
    /// mirror has to be rebuilt.
    pub(super) fn may_fit_now(&self, now: Instant) -> bool {
        let due = |since: Instant| now.duration_since(since) >= TRUNCATED_MIN;
        if !self.truncated_since.is_some_and(due) {
            return false;
        }
        let state = self.mirror.state();
        state.room(self.source.rank) >= state.blocks_max() / 8
    }

    fn forget(&mut self) {
        let rank = self.source.rank;
        (self.truncated_since, self.disconnected_since, self.stream_rank) = (None, None, None);
        self.is_replayed = true;
        self.mirror.update(|state| state.forget(rank));
    }
}
