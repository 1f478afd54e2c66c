//! Counts the results of one worker's KV events, to explain why blocks are not found.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use splitrail_engine::kv_events::OtherGroups;
use splitrail_kv::AppliedBlocks;

use super::silence::Silence;
use splitrail_telemetry::clock::unix_ms;

/// How long a rebuild of a worker's part of the index counts.
pub(super) const OFTEN: Duration = Duration::from_secs(600);

/// Counters of one worker. They only grow.
#[derive(Debug, Default)]
pub struct EventStats {
    counts: Mutex<EventCounts>,
    last_event_unix_ms: AtomicU64,
    /// The bits of the cache groups that are not followed.
    unfollowed_groups: AtomicU64,
    /// The bits of those that are followed beside the spine.
    followed_groups: AtomicU64,
    /// When a part of the index that is rebuilt often was last rebuilt, and why.
    rebuilt_often: Mutex<Option<(Instant, &'static str)>>,
    silence: Silence,
}

/// The counts at one time, or the difference of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventCounts {
    /// Events that were received.
    pub events: u64,
    /// Blocks that were stored in the index.
    pub stored: u64,
    /// Blocks whose parent is unknown.
    pub parentless: u64,
    /// Blocks of another size than configured.
    pub malformed: u64,
    /// Blocks beyond the size limit of the index.
    pub over_limit: u64,
    /// Events of a data-parallel rank that is not indexed.
    pub other_rank: u64,
}

impl EventStats {
    /// Counts events and the results of applying them.
    pub fn applied(&self, events: usize, sum: &AppliedBlocks) {
        if events > 0 {
            self.record_event_time();
        }
        let mut counts = self.counts();
        counts.events += events as u64;
        counts.stored += sum.stored as u64;
        counts.parentless += (sum.aside + sum.orphaned) as u64;
        counts.malformed += sum.malformed as u64;
        counts.over_limit += sum.over_limit as u64;
        drop(counts);
        if events > 0 {
            self.silence.record_event();
        }
    }

    /// Events came, or a synchronisation of the index ended.
    pub fn record_event_time(&self) {
        self.last_event_unix_ms.store(unix_ms(), Relaxed);
    }

    /// Records the reply of a leg that computed new blocks. `events_before` is the number of events
    /// when the leg was placed. Returns whether the worker's events have stopped, once until the next
    /// event. Of a worker that has never sent an event, nothing can stop.
    pub(super) fn record_reply(&self, events_before: u64, now: Instant) -> bool {
        events_before > 0 && self.now().events == events_before && self.silence.record_reply(now)
    }

    /// Milliseconds since the last event or synchronisation; `None` if there was none.
    pub fn index_age_ms(&self, now_unix_ms: u64) -> Option<u64> {
        let heard = Some(self.last_event_unix_ms.load(Relaxed)).filter(|ms| *ms > 0);
        heard.map(|heard| now_unix_ms.saturating_sub(heard))
    }

    /// Adds cache groups that are not followed; returns all of them if some are new. They stay for as
    /// long as the worker: that they are not named again does not mean that they are gone.
    pub(super) fn add_unfollowed_groups(&self, groups: OtherGroups) -> Option<OtherGroups> {
        add_groups(&self.unfollowed_groups, groups)
    }

    /// The cache groups that are not followed.
    pub fn unfollowed_groups(&self) -> OtherGroups {
        OtherGroups::from_bits(self.unfollowed_groups.load(Relaxed))
    }

    /// Adds cache groups that are followed beside the spine; returns all of them if some are new.
    pub(super) fn add_followed_groups(&self, groups: OtherGroups) -> Option<OtherGroups> {
        add_groups(&self.followed_groups, groups)
    }

    /// The cache groups that are followed beside the spine.
    pub fn followed_groups(&self) -> OtherGroups {
        OtherGroups::from_bits(self.followed_groups.load(Relaxed))
    }

    /// Records that a part of the worker's index was rebuilt once more within minutes, for this reason
    /// as in `splitrail_index_resyncs_total`.
    pub(super) fn record_frequent_rebuild(&self, now: Instant, reason: &'static str) {
        let mut rebuilt = self.rebuilt_often.lock().unwrap_or_else(PoisonError::into_inner);
        *rebuilt = Some((now, reason));
    }

    /// Why the index of the worker has been rebuilt several times within the last minutes; `None` if
    /// it has not.
    pub fn often_rebuilt(&self, now: Instant) -> Option<&'static str> {
        let rebuilt = *self.rebuilt_often.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = rebuilt.filter(|(at, _)| now.saturating_duration_since(*at) < OFTEN);
        recent.map(|(_, reason)| reason)
    }

    /// Counts events that are not used because they are those of another rank.
    pub fn of_other_rank(&self, events: usize) {
        let mut counts = self.counts();
        counts.events += events as u64;
        counts.other_rank += events as u64;
    }

    /// The counts now.
    pub fn now(&self) -> EventCounts {
        *self.counts()
    }

    /// A poisoned lock is still used: each count is valid by itself.
    fn counts(&self) -> MutexGuard<'_, EventCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn add_groups(known: &AtomicU64, groups: OtherGroups) -> Option<OtherGroups> {
    let before = OtherGroups::from_bits(known.load(Relaxed));
    let all = before | groups;
    if all != before {
        known.fetch_or(groups.bits(), Relaxed);
    }
    Some(all).filter(|all| *all != before)
}

impl EventCounts {
    /// The difference to earlier counts.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            events: self.events - earlier.events,
            stored: self.stored - earlier.stored,
            parentless: self.parentless - earlier.parentless,
            malformed: self.malformed - earlier.malformed,
            over_limit: self.over_limit - earlier.over_limit,
            other_rank: self.other_rank - earlier.other_rank,
        }
    }
}
