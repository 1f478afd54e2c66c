//! The part of the index that belongs to one worker or to one of its ranks, for the task that
//! follows its KV events: counts what was applied, logs what could not be applied, and records
//! whether the part is reliable.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use splitrail_engine::kv_events::{OtherGroups, SkippedEvents};
use splitrail_kv::{AppliedBlocks, WorkerKey};

use super::event_stats::OFTEN;
use super::parity::Cause;
use super::pool::Pool;
use super::ranks::rank_key;
use super::worker::Worker;
use crate::Cluster;
use splitrail_settings::log_throttle::KeyedLogThrottle;
use splitrail_telemetry::clock::unix_ms;

/// Minimum time for which a worker's part of the index lacks blocks before it is rebuilt.
const TRUNCATED_MIN: Duration = Duration::from_secs(60);

/// Minimum time between two canaries that are asked because blocks came: these may be the canary's own,
/// later than it waits for them.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// The minimum time doubles with each rebuild, up to this.
const TRUNCATED_MAX: Duration = Duration::from_secs(3600);

/// The reason, in metrics and logs, for a part that was dropped after an event that may have removed
/// any block.
const UNCLEAR_REMOVAL: &str = "unclear_removal";

/// Number of rebuilds within [`OFTEN`] from which a part is rebuilt often.
const OFTEN_REBUILDS: usize = 3;

/// The reason, in metrics and logs, for blocks beyond the size limit of the index.
pub const OVER_LIMIT: &str = "over_limit";

/// One worker's part of its model's index. It outlives changes of the configuration that keep the
/// pool, so it holds nothing else of the model.
pub struct IndexPart {
    cluster: Arc<Cluster>,
    model: Arc<str>,
    /// The pool whose index has this part.
    pub pool: Arc<Pool>,
    /// The worker that holds the blocks.
    pub worker: Arc<Worker>,
    /// The rank; `None` if a shim reports all ranks.
    rank: Option<u16>,
    /// Limits log lines about the worker.
    log_throttle: KeyedLogThrottle,
    /// The time since when the index has left out blocks because of its size limit.
    truncated: Option<Instant>,
    /// Minimum time in this state before the part is rebuilt.
    pub truncated_min: Duration,
    /// When the canary was last asked again because blocks came.
    asked_again: Option<Instant>,
    /// When the part was rebuilt, as often as [`OFTEN_REBUILDS`].
    rebuilt: VecDeque<Instant>,
}

/// When the task ends in any way, what it has indexed may become outdated.
impl Drop for IndexPart {
    fn drop(&mut self) {
        self.set_current(false);
    }
}

impl IndexPart {
    /// The part of `worker`'s `rank`, or of all its ranks if a shim reports them (`None`).
    pub fn new(
        cluster: Arc<Cluster>,
        model: Arc<str>,
        pool: Arc<Pool>,
        worker: Arc<Worker>,
        rank: Option<u16>,
    ) -> Self {
        Self {
            cluster,
            model,
            pool,
            worker,
            rank,
            log_throttle: KeyedLogThrottle::default(),
            truncated: None,
            truncated_min: TRUNCATED_MIN,
            asked_again: None,
            rebuilt: VecDeque::with_capacity(OFTEN_REBUILDS),
        }
    }

    /// Marks this part of the index as complete and current.
    pub fn mark_complete(&self) {
        self.set_current(true);
        self.worker.kv.event_stats.record_event_time();
        if self.worker.events_are_current() {
            self.worker.set_synced();
        }
        self.pool.speculative_index.confirmed(self.worker.index);
    }

    /// Records whether events are being received.
    pub fn set_current(&self, current: bool) {
        match self.rank {
            None => self.worker.set_events_current(current),
            Some(rank) => {
                let rank = self.worker.ranks.get(rank);
                rank.into_iter().for_each(|rank| rank.set_current(current));
            }
        }
    }

    /// Number of blocks in this part of the index.
    pub fn blocks(&self) -> usize {
        match self.rank {
            None => self.pool.index().held(self.worker.index.0),
            Some(_) => self.pool.index().block_counts(self.key()).iter().sum(),
        }
    }

    /// The key in the index: of the rank, or of the first rank.
    pub fn key(&self) -> WorkerKey {
        rank_key(self.worker.index, self.rank.unwrap_or(0))
    }

    /// Counts events, and their delay since the engine made them at `made_s` (seconds since 1970);
    /// `None` for events that are read again, whose age is no delay.
    pub fn observe(&self, events: usize, made_s: Option<f64>) {
        let metrics = &self.cluster.metrics;
        metrics.index_events.with_label_values(&self.labels()).inc_by(events as u64);
        let Some(made_s) = made_s else { return };
        let lag = unix_ms() as f64 / 1e3 - made_s;
        if lag.is_finite() {
            metrics.index_event_lag.with_label_values(&self.labels()).observe(lag.max(0.0));
        }
    }

    /// Records that `missed` events are missing.
    pub fn gap(&mut self, missed: u64) {
        self.cluster.metrics.index_gaps.with_label_values(&self.labels()).inc();
        if self.may_log("gap") {
            let (model, worker) = (self.worker.model(), self.worker.id());
            tracing::info!(model, worker, missed, "KV events are missing");
        }
    }

    /// Records a message that cannot be decoded.
    pub fn garbage(&mut self, why: &dyn std::fmt::Display) {
        self.count_rejected("garbage", 1);
        if self.may_log("garbage") {
            let (model, worker, error) = (self.worker.model(), self.worker.id(), why);
            tracing::warn!(model, worker, %error, "a KV event message cannot be decoded");
        }
    }

    /// Records events that were not applied as the engine sent them.
    pub fn skip(&mut self, skipped: SkippedEvents) {
        self.add_unfollowed_groups(skipped.unfollowed_groups);
        self.add_followed_groups(skipped.followed_groups);
        self.count_rejected("unknown_event", skipped.unknown_events as usize);
        self.count_rejected("unusable_event", skipped.unusable_events as usize);
        if skipped.replaced_by_clear == 0 {
            return;
        }
        self.count_resync(UNCLEAR_REMOVAL);
        self.worker.index_begins_anew();
        if self.may_log(UNCLEAR_REMOVAL) {
            let (model, worker) = (self.worker.model(), self.worker.id());
            tracing::warn!(
                model,
                worker,
                "a KV event that cannot be used may have removed any block: the worker's part of the \
                 index is dropped"
            );
        }
    }

    /// Records cache groups that a shim does not follow, by their names.
    pub fn add_named_groups(&self, names: &[String]) {
        names.iter().for_each(|name| self.add_unfollowed_groups(OtherGroups::named(name)));
    }

    /// Records cache groups that are not followed.
    fn add_unfollowed_groups(&self, groups: OtherGroups) {
        if let Some(groups) = self.worker.kv.event_stats.add_unfollowed_groups(groups) {
            let (model, worker) = (self.worker.model(), self.worker.id());
            tracing::warn!(
                model,
                worker,
                %groups,
                "the worker's overlap is not exact: these cache groups are not followed"
            );
        }
    }

    /// Records cache groups that are followed beside the spine.
    fn add_followed_groups(&self, groups: OtherGroups) {
        if let Some(groups) = self.worker.kv.event_stats.add_followed_groups(groups) {
            let (model, worker) = (self.worker.model(), self.worker.id());
            tracing::info!(
                model,
                worker,
                %groups,
                "the worker's model is hybrid: its overlap ends at a point where these cache groups \
                 can resume"
            );
        }
    }

    /// Counts the results of applying a number of events.
    pub fn note(&mut self, events: usize, sum: AppliedBlocks) {
        self.worker.kv.event_stats.applied(events, &sum);
        self.ask_canary_again(&sum);
        self.count_held_blocks();
        if sum.over_limit > 0 {
            self.truncated.get_or_insert_with(Instant::now);
            self.worker.ranks.set_truncated(self.rank, true);
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
                model = self.worker.model(),
                worker = self.worker.id(),
                block_size = self.pool.block_size(),
                malformed = sum.malformed,
                over_limit = sum.over_limit,
                "blocks cannot be indexed: is block_size the engine's, and \
                 limits.index_blocks_per_worker_max large enough?"
            );
        }
    }

    /// Asks the canary of a worker again, of which it saw no event, once blocks come.
    fn ask_canary_again(&mut self, sum: &AppliedBlocks) {
        let parity = &self.worker.kv.parity;
        let saw_none = || parity.parity().cause() == Some(Cause::EventsAbsent);
        if sum.stored == 0 || parity.is_believed() || !saw_none() {
            return;
        }
        let now = Instant::now();
        if self.asked_again.is_none_or(|asked| now.duration_since(asked) >= ASKED_AGAIN_AFTER) {
            self.asked_again = Some(now);
            parity.forget();
        }
    }

    /// Whether blocks that were left out may fit now. The part should then be rebuilt, because the
    /// index does not know which blocks are missing.
    pub fn has_room_again(&self, now: Instant) -> bool {
        let due = |since: Instant| now.duration_since(since) >= self.truncated_min;
        if !self.truncated.is_some_and(due) {
            return false;
        }
        let index = self.pool.index();
        let limit = index.limit();
        let room = match self.rank {
            None => limit.saturating_sub(index.held(self.worker.index.0)),
            Some(_) => index.room(self.key()),
        };
        room >= limit / 8
    }

    /// Doubles the time until the next rebuild: the same events may fill the index again.
    pub fn wait_longer(&mut self) {
        self.truncated_min = (self.truncated_min * 2).min(TRUNCATED_MAX);
    }

    /// Records that no blocks are missing any more.
    pub fn nothing_is_left_out(&mut self) {
        self.truncated = None;
        self.worker.ranks.set_truncated(self.rank, false);
    }

    /// Prepares for a complete list of blocks.
    pub fn begin_whole(&mut self) {
        self.nothing_is_left_out();
        self.worker.index_begins_anew();
    }

    /// Drops this part of the index, and all speculative blocks of the worker.
    pub fn forget(&mut self) {
        self.begin_whole();
        match self.rank {
            None => self.pool.index().remove_worker(self.worker.index.0),
            Some(_) => self.pool.index().clear_worker(self.key()),
        };
        self.pool.speculative_index.forget(self.worker.index);
        self.count_held_blocks();
    }

    /// Tells decisions how many blocks the worker holds.
    fn count_held_blocks(&self) {
        let held_blocks = self.pool.index().held(self.worker.index.0);
        self.worker.kv.held_blocks.store(held_blocks, Relaxed);
    }

    /// Counts a rebuild of this part, for `reason`.
    pub fn count_resync(&mut self, reason: &'static str) {
        let [model, worker] = self.labels();
        self.cluster.metrics.index_resyncs.with_label_values(&[model, worker, reason]).inc();
        if self.rebuilt.len() == OFTEN_REBUILDS {
            self.rebuilt.pop_front();
        }
        let now = Instant::now();
        self.rebuilt.push_back(now);
        let is_recent = |first: &Instant| now.duration_since(*first) < OFTEN;
        if self.rebuilt.len() == OFTEN_REBUILDS && self.rebuilt.front().is_some_and(is_recent) {
            self.worker.kv.event_stats.record_frequent_rebuild(now, reason);
        }
    }

    /// Counts `count` blocks or messages that were not indexed, for `reason`.
    pub fn count_rejected(&self, reason: &str, count: usize) {
        if count > 0 {
            let [model, worker] = self.labels();
            let rejected = &self.cluster.metrics.index_rejected;
            rejected.with_label_values(&[model, worker, reason]).inc_by(count as u64);
        }
    }

    /// Whether a log line of this kind is due. Prevents a log line per invalid message.
    pub fn may_log(&mut self, kind: &'static str) -> bool {
        self.log_throttle.may_log(kind)
    }

    /// The name of the model.
    pub fn model(&self) -> &str {
        &self.model
    }

    fn labels(&self) -> [&str; 2] {
        [self.model(), self.worker.id()]
    }
}
