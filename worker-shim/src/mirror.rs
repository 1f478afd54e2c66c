//! The mirror: an exact copy of which KV blocks the engine holds, and the changes that led
//! there.
//!
//! The mirror is an index whose only worker is this engine, with the engine's data-parallel
//! ranks. It follows the engine's KV events. The tasks that report to routers read the changes
//! from a ring of recent ones, or take a snapshot if the ring does not reach back far enough.
//! The mirror never waits for a router.

mod change_log;
mod messages;
mod rank_follower;
mod snapshot;
pub(crate) mod state;
mod status;
mod terms;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use splitrail_engine::identity::EventSource;
use splitrail_engine::kv_events::OtherGroups;
use splitrail_engine::kv_events::Pacing;
use splitrail_kv::{BlockHash, HashSeed};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

pub(crate) use self::change_log::ChangePosition;
pub(crate) use self::snapshot::{Snapshot, SnapshotParts};
pub use self::status::{MirrorStatus, RankStatus};
pub use self::terms::{Agreement, Disagreement, HashTerms};

use self::change_log::ChangesLost;
use self::snapshot::SharedSnapshots;
use self::state::MirrorState;
use crate::ticks;

/// Settings of a mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorConfig {
    /// Maximum number of mirrored blocks per rank. Further blocks are left out.
    pub blocks_max: usize,
    /// The hash seed that routers must use. `None` accepts the seed of the first router.
    pub seed: Option<HashSeed>,
    /// Maximum size in bytes of the ring of recent changes, for routers that reconnect.
    pub ring_bytes_max: usize,
    /// Maximum time for which the blocks are kept while the engine's events are disconnected.
    pub disconnect_max: Duration,
    /// Interval at which events are read while many arrive; zero reads each event at once. The
    /// interval delays the reports to routers, but not [`Mirror::refresh`].
    pub read_every: Duration,
}

impl Default for MirrorConfig {
    fn default() -> Self {
        Self {
            blocks_max: 8 << 20,
            seed: None,
            ring_bytes_max: 8 << 20,
            disconnect_max: Duration::from_secs(10),
            read_every: ticks::INTERVAL,
        }
    }
}

/// A handle on the mirror of one engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Mirror {
    inner: Arc<MirrorInner>,
}

#[derive(Debug)]
struct MirrorInner {
    state: Mutex<MirrorState>,
    /// The position of the last change that can be read.
    position: watch::Sender<ChangePosition>,
    /// Incremented when the routers agree on new hash settings; 0 before the first agreement.
    epoch: watch::Sender<u64>,
    /// Whether every rank has received its engine's replay at least once.
    caught_up: watch::Sender<bool>,
    /// The engine's cache groups that are not followed. They stay: that they are not named again does
    /// not mean that they are gone.
    unfollowed_groups: watch::Sender<OtherGroups>,
    snapshots: SharedSnapshots,
    /// Incremented by each caller that cannot wait for the next read.
    refresh_requests: watch::Sender<u64>,
    /// The last refresh request that each rank has completed.
    refreshed: watch::Sender<BTreeMap<u16, u64>>,
    read_every: Duration,
}

impl Mirror {
    /// Creates a mirror. It holds nothing before a router has sent its hash settings
    /// ([`Mirror::agree`]) and [`Mirror::follow`] runs.
    pub fn new(config: MirrorConfig) -> Self {
        let read_every = config.read_every;
        let state = MirrorState::new(config);
        let position = watch::Sender::new(state.position());
        let inner = MirrorInner {
            state: Mutex::new(state),
            position,
            epoch: watch::Sender::new(0),
            caught_up: watch::Sender::new(false),
            unfollowed_groups: watch::Sender::default(),
            snapshots: SharedSnapshots::default(),
            refresh_requests: watch::Sender::new(0),
            refreshed: watch::Sender::default(),
            read_every,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Follows the engine's events from each of `sources` until the future is dropped. Only one
    /// call may run at a time. A further call starts a new mirror.
    pub async fn follow(&self, sources: Vec<EventSource>) {
        self.update(|state| state.expect(sources.iter().map(|source| source.rank)));
        let ranks =
            sources.into_iter().map(|source| rank_follower::follow_rank(self.clone(), source));
        futures_util::future::join_all(ranks).await;
        // Without sources there is nothing to follow, but the future must not end.
        std::future::pending().await
    }

    /// Whether one rank of the engine holds the block with the chained hash `last` and all blocks
    /// before it, `blocks` in total. The namespace is part of the hash and needs no check of its
    /// own. Returns `false` while the engine's events are disconnected or incomplete, and of an engine
    /// with cache groups that are not followed, which may be unable to use what it holds.
    pub fn holds(&self, _namespace: BlockHash, rank: u16, blocks: u32, last: BlockHash) -> bool {
        let is_exact = self.inner.unfollowed_groups.borrow().is_empty();
        (is_exact || blocks == 0) && self.state().holds(rank, blocks, last)
    }

    /// The engine's cache groups that are not followed.
    pub fn unfollowed_groups(&self) -> watch::Receiver<OtherGroups> {
        self.inner.unfollowed_groups.subscribe()
    }

    fn add_unfollowed_groups(&self, groups: OtherGroups) {
        self.inner.unfollowed_groups.send_if_modified(|known| {
            let before = std::mem::replace(known, *known | groups);
            *known != before
        });
    }

    /// Reads the events that a rank of the engine has published so far, so that
    /// [`Mirror::holds`] takes them into account.
    pub async fn refresh(&self, rank: u16) {
        let MirrorInner { refresh_requests, refreshed, read_every, .. } = &*self.inner;
        if read_every.is_zero() || !self.state().is_current(rank) {
            return;
        }
        let mut ask = 0;
        refresh_requests.send_modify(|last| {
            *last += 1;
            ask = *last;
        });
        let mut refreshed = refreshed.subscribe();
        let is_in =
            |refreshed: &BTreeMap<u16, u64>| refreshed.get(&rank).is_some_and(|at| *at >= ask);
        // After this time the events have been read without a request.
        let _in_time = timeout(*read_every, refreshed.wait_for(is_in)).await;
    }

    /// When a rank reads its events.
    fn pacing(&self) -> Pacing {
        Pacing {
            pace: ticks::pace(self.inner.read_every),
            asks: self.inner.refresh_requests.subscribe(),
        }
    }

    /// Records that a rank has read all events that had arrived at the refresh request `ask`.
    fn record_refresh(&self, rank: u16, ask: u64) {
        self.inner.refreshed.send_modify(|refreshed| {
            refreshed.insert(rank, ask);
        });
    }

    /// The state of the mirror, for metrics and status pages. At most once a second, it takes time
    /// proportional to the size of the index.
    pub fn status(&self) -> MirrorStatus {
        self.state().status(Instant::now())
    }

    /// Adds a router's hash settings. The first router decides, for as long as any agreement
    /// exists.
    ///
    /// # Errors
    /// If other routers have agreed on different settings.
    pub fn agree(&self, terms: HashTerms) -> Result<Agreement, Disagreement> {
        let starts_new_mirror = self.update(|state| state.agree(terms))?;
        if starts_new_mirror {
            self.inner.epoch.send_modify(|epoch| *epoch += 1);
        }
        Ok(Agreement::new(self.clone()))
    }

    fn end_agreement(&self) {
        self.state().end_agreement();
    }

    /// Watches the position of the last change.
    pub(crate) fn position(&self) -> watch::Receiver<ChangePosition> {
        self.inner.position.subscribe()
    }

    /// Watches whether every rank has received its engine's replay at least once.
    pub(crate) fn caught_up(&self) -> watch::Receiver<bool> {
        self.inner.caught_up.subscribe()
    }

    /// Returns the changes after `sequence`, a limited number at a time.
    pub(crate) fn after(
        &self,
        generation: u64,
        sequence: u64,
    ) -> Result<Vec<Arc<splitrail_proto::v1::Events>>, ChangesLost> {
        self.state().log.after(generation, sequence)
    }

    /// The generation and the id of the current mirror. The id is empty before the first one.
    pub(crate) fn id(&self) -> (u64, String) {
        let state = self.state();
        (state.log.generation(), state.log.mirror_id().to_owned())
    }

    #[cfg(test)]
    pub(crate) fn epoch(&self) -> watch::Receiver<u64> {
        self.inner.epoch.subscribe()
    }

    /// Takes a snapshot of all blocks. Callers at about the same time share one.
    pub(crate) async fn snapshot(&self) -> Arc<Snapshot> {
        self.inner.snapshots.get(self).await
    }

    fn state(&self) -> MutexGuard<'_, MirrorState> {
        // A panic cannot leave a change half applied: each change is applied as a whole.
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and notifies all watchers.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut MirrorState) -> T) -> T {
        let (result, position, caught_up) = {
            let mut state = self.state();
            let result = change(&mut state);
            (result, state.position(), state.has_caught_up())
        };
        self.inner.position.send_if_modified(|known| {
            // Two updates may arrive here in reverse order.
            let is_newer = position > *known;
            *known = position.max(*known);
            is_newer
        });
        self.inner
            .caught_up
            .send_if_modified(|known| std::mem::replace(known, caught_up) != caught_up);
        result
    }
}
