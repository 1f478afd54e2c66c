//! Snapshots of all blocks, for routers that have no data yet or have missed too many changes.
//!
//! The mirror is locked only while its blocks are copied, which takes a few milliseconds for a
//! million blocks; they are sorted afterwards, without the lock. Routers that need a snapshot at
//! about the same time share one, and the number of snapshots in memory is limited. A slow router,
//! which keeps its snapshot in memory, therefore delays another router only if that one needs a
//! further snapshot and the limit is reached.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use splitrail_kv::{FrozenBlocks, SnapshotRun};
use splitrail_proto::v1::SnapshotPart;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::Mirror;
use super::change_log::ChangePosition;
use super::messages;

/// Maximum number of snapshots in memory.
const SNAPSHOTS_MAX: usize = 2;

/// All blocks that the engine held at one position in the sequence of changes.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// The last change that the snapshot contains.
    pub(crate) position: ChangePosition,
    mirror_id: String,
    ranks: Vec<(u16, FrozenBlocks, Vec<u32>)>,
    _permit: Option<SnapshotPermit>,
}

/// Shares snapshots between routers and limits their number.
///
/// A task that waits for a snapshot may stay unpolled for a long time if its router does not read.
/// It therefore holds no lock and has no place in a queue while it waits.
#[derive(Debug)]
pub(super) struct SharedSnapshots {
    last: Mutex<Weak<Snapshot>>,
    /// Held by the thread that takes a snapshot.
    taking: Mutex<()>,
    permits: Arc<Semaphore>,
    freed: Arc<Notify>,
}

/// The permit for one snapshot. Dropping it wakes the tasks that wait for one.
#[derive(Debug)]
struct SnapshotPermit {
    permit: Option<OwnedSemaphorePermit>,
    freed: Arc<Notify>,
}

impl Drop for SnapshotPermit {
    fn drop(&mut self) {
        drop(self.permit.take());
        self.freed.notify_waiters();
    }
}

impl Default for SharedSnapshots {
    fn default() -> Self {
        let permits = Arc::new(Semaphore::new(SNAPSHOTS_MAX));
        Self { last: Mutex::default(), taking: Mutex::default(), permits, freed: Arc::default() }
    }
}

impl SharedSnapshots {
    /// Returns a new snapshot, or an existing one if all changes after it are still in the change
    /// log.
    pub(super) async fn get(&self, mirror: &Mirror) -> Arc<Snapshot> {
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            if let Some(snapshot) = self.current(mirror) {
                return snapshot;
            }
            if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
                let freed = Arc::clone(&self.freed);
                let permit = SnapshotPermit { permit: Some(permit), freed };
                let source = mirror.clone();
                // Sorting many runs takes long, so it runs on a blocking thread.
                let made =
                    tokio::task::spawn_blocking(move || Snapshot::take(&source, permit)).await;
                return made.unwrap_or_else(|_| Arc::new(Snapshot::empty(mirror)));
            }
            freed.await;
        }
    }

    fn last(&self) -> MutexGuard<'_, Weak<Snapshot>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self, mirror: &Mirror) -> Option<Arc<Snapshot>> {
        let snapshot = self.last().upgrade()?;
        mirror.state().log.covers_with_margin(snapshot.position).then_some(snapshot)
    }
}

impl Snapshot {
    /// Takes a snapshot, unless another thread has just taken one.
    fn take(mirror: &Mirror, permit: SnapshotPermit) -> Arc<Self> {
        let snapshots = &mirror.inner.snapshots;
        let _only = snapshots.taking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(snapshot) = snapshots.current(mirror) {
            return snapshot;
        }
        let (position, mirror_id, ranks) = {
            let mut state = mirror.state();
            let ranks = state.freeze();
            (state.position(), state.log.mirror_id().to_owned(), ranks)
        };
        let sorted = ranks.into_iter().map(|(rank, frozen)| {
            let order = frozen.order();
            (rank, frozen, order)
        });
        let ranks = sorted.collect();
        let snapshot = Arc::new(Self { position, mirror_id, ranks, _permit: Some(permit) });
        *snapshots.last() = Arc::downgrade(&snapshot);
        snapshot
    }

    /// Stands in for a snapshot that could not be taken. Its position belongs to no mirror, so the
    /// router gets another snapshot afterwards.
    fn empty(mirror: &Mirror) -> Self {
        let (_, mirror_id) = mirror.id();
        Self { position: ChangePosition::default(), mirror_id, ranks: Vec::new(), _permit: None }
    }
}

/// The parts of a snapshot in order, each of a limited size.
#[derive(Debug)]
pub(crate) struct SnapshotParts {
    snapshot: Arc<Snapshot>,
    rank: usize,
    run: usize,
    pieces: std::vec::IntoIter<SnapshotRun>,
    ended: bool,
}

impl SnapshotParts {
    pub(crate) fn new(snapshot: Arc<Snapshot>) -> Self {
        Self { snapshot, rank: 0, run: 0, pieces: Vec::new().into_iter(), ended: false }
    }

    /// The position of the snapshot.
    pub(crate) fn snapshot_position(&self) -> ChangePosition {
        self.snapshot.position
    }

    /// Whether the current rank has another piece of a run; loads the pieces of the next run if
    /// needed.
    fn has_more(&mut self) -> bool {
        while self.pieces.as_slice().is_empty() {
            let Some((_, frozen, order)) = self.snapshot.ranks.get(self.rank) else {
                return false;
            };
            let Some(run) = order.get(self.run) else {
                return false;
            };
            self.pieces = frozen.pieces(*run).into_iter();
            self.run += 1;
        }
        true
    }
}

impl Iterator for SnapshotParts {
    type Item = SnapshotPart;

    fn next(&mut self) -> Option<SnapshotPart> {
        if self.ended {
            return None;
        }
        let (rank, rank_names) = match self.snapshot.ranks.get(self.rank) {
            Some((rank, frozen, _)) => (*rank, frozen.names_count() as u64),
            None => (0, 0),
        };
        let (mut runs, mut blocks) = (Vec::new(), 0);
        while blocks < messages::MESSAGE_BLOCKS_MAX
            && self.has_more()
            && let Some(run) = self.pieces.next()
        {
            blocks += run.hashes.len();
            runs.push(messages::proto_run(run));
        }
        if !self.has_more() && self.rank + 1 < self.snapshot.ranks.len() {
            (self.rank, self.run) = (self.rank + 1, 0);
        } else {
            self.ended = !self.has_more();
        }
        Some(SnapshotPart {
            mirror_id: self.snapshot.mirror_id.clone(),
            sequence: self.snapshot.position.sequence,
            rank: u32::from(rank),
            runs,
            last: self.ended,
            rank_names,
        })
    }
}
