//! Applies a shim's reports of its engine's blocks to the index: a snapshot, then events in the
//! order of their numbers. A message out of order or an invalid one is a fault; after a fault,
//! events are ignored until the next snapshot.

use std::sync::Arc;

use splitrail_kv::{AppliedBlocks, EngineHash, HashedBlock, Restore, Tier, WorkerKey};
use splitrail_proto::v1;
use splitrail_proto::v1::change::Change;

use super::wire::{self, InvalidReason};
use splitrail_fleet::ranks::rank_key;
use splitrail_fleet::{Pool, Worker};

/// Number of blocks applied before the index lock is released, so that other writers get their
/// turn.
const BLOCKS_PER_LOCK: usize = 4096;

/// Maximum number of data-parallel ranks of one worker.
pub const RANKS_MAX: u32 = 256;

/// What is wrong with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This number of changes is missing before the message.
    Gap(u64),
    /// The message is invalid.
    Invalid(&'static str),
}

impl From<InvalidReason> for Fault {
    fn from(why: InvalidReason) -> Self {
        Self::Invalid(why)
    }
}

/// The blocks of one worker, as its shim reported them.
pub struct ShimBlocks {
    pool: Arc<Pool>,
    worker: Arc<Worker>,
    /// The shim's mirror to which the blocks belong.
    mirror_id: String,
    state: BlocksState,
}

enum BlocksState {
    /// The worker's entries in the index may be wrong or incomplete.
    Unknown,
    /// A snapshot is being received.
    Restoring(PartialRestore),
    /// All changes up to this number are in the index.
    Complete(u64),
}

/// A snapshot of which a part is in the index.
struct PartialRestore {
    pool: Arc<Pool>,
    sequence: u64,
    rank: u16,
    restore: Option<Restore>,
}

impl Drop for PartialRestore {
    fn drop(&mut self) {
        self.end_rank();
    }
}

impl PartialRestore {
    fn end_rank(&mut self) {
        if let Some(restore) = self.restore.take() {
            self.pool.index().end_restore(restore);
        }
    }
}

impl ShimBlocks {
    /// Begins in the state `Unknown`.
    pub fn new(pool: Arc<Pool>, worker: Arc<Worker>) -> Self {
        Self { pool, worker, mirror_id: String::new(), state: BlocksState::Unknown }
    }

    /// The number of the last change in the index, if the index has everything up to it and the
    /// blocks are those of this mirror.
    pub fn known(&self, mirror_id: &str) -> Option<u64> {
        match self.state {
            BlocksState::Complete(sequence) if self.mirror_id == mirror_id => Some(sequence),
            _ => None,
        }
    }

    /// Whether everything up to some change is in the index.
    pub fn is_complete(&self) -> bool {
        matches!(self.state, BlocksState::Complete(_))
    }

    /// Whether a snapshot is being received.
    pub fn is_restoring(&self) -> bool {
        matches!(self.state, BlocksState::Restoring(_))
    }

    /// Marks the worker's entries in the index as unreliable until the next snapshot.
    pub fn distrust(&mut self) {
        self.state = BlocksState::Unknown;
    }

    /// Applies a part of a snapshot, and adds what happened to its blocks to `sum`. Returns the
    /// number of the snapshot's last change once the snapshot is complete.
    ///
    /// # Errors
    /// The part is invalid or out of order.
    pub async fn snapshot(
        &mut self,
        part: v1::SnapshotPart,
        sum: &mut AppliedBlocks,
    ) -> Result<Option<u64>, Fault> {
        let rank = rank(part.rank)?;
        let continues = match &self.state {
            BlocksState::Restoring(restoring) => {
                restoring.sequence == part.sequence && self.mirror_id == part.mirror_id
            }
            _ => false,
        };
        if !continues {
            self.begin(part.mirror_id, part.sequence).await;
        }
        let BlocksState::Restoring(mut restoring) =
            std::mem::replace(&mut self.state, BlocksState::Unknown)
        else {
            return Err(Fault::Invalid("the snapshot has not begun"));
        };
        if rank < restoring.rank {
            return Err(Fault::Invalid("ranks of a snapshot are out of order"));
        }
        if rank > restoring.rank || restoring.restore.is_none() {
            restoring.end_rank();
            restoring.rank = rank;
            let expected = usize::try_from(part.rank_names).unwrap_or(usize::MAX);
            let (restore, _) = self.pool.index().begin_restore(self.key(rank), expected);
            restoring.restore = Some(restore);
        }
        self.restore(&mut restoring, part.runs, sum).await?;
        if part.last {
            let sequence = restoring.sequence;
            drop(restoring);
            self.state = BlocksState::Complete(sequence);
            return Ok(Some(sequence));
        }
        self.state = BlocksState::Restoring(restoring);
        Ok(None)
    }

    async fn begin(&mut self, mirror_id: String, sequence: u64) {
        self.state = BlocksState::Unknown;
        self.mirror_id = mirror_id;
        self.pool.index().remove_worker(self.worker.index.0);
        // Removing a worker's blocks may have taken long.
        tokio::task::yield_now().await;
        let pool = Arc::clone(&self.pool);
        self.state =
            BlocksState::Restoring(PartialRestore { pool, sequence, rank: 0, restore: None });
    }

    async fn restore(
        &self,
        restoring: &mut PartialRestore,
        runs: Vec<v1::Run>,
        sum: &mut AppliedBlocks,
    ) -> Result<(), Fault> {
        let mut runs = runs.into_iter().map(wire::run).peekable();
        while runs.peek().is_some() {
            {
                let mut index = self.pool.index();
                let Some(restore) = restoring.restore.as_mut().filter(|_| self.is_in_fleet())
                else {
                    return Ok(());
                };
                let limit = index.limit();
                let mut blocks = 0;
                while blocks < BLOCKS_PER_LOCK
                    && let Some(run) = runs.next()
                {
                    let run = run?;
                    blocks += run.hashes.len().max(run.names.len());
                    if index.held(self.worker.index.0) + run.names.len() > limit {
                        sum.over_limit += run.names.len();
                    } else {
                        *sum += index.restore_run(restore, &run);
                    }
                }
            }
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Applies changes that follow the last known one, adds what happened to their blocks to `sum`,
    /// and returns the number of the last change.
    ///
    /// # Errors
    /// Changes are missing before these, or the message is invalid.
    pub async fn events(
        &mut self,
        events: &v1::Events,
        sum: &mut AppliedBlocks,
    ) -> Result<u64, Fault> {
        let BlocksState::Complete(known) = self.state else {
            return Err(Fault::Invalid("events before a complete snapshot"));
        };
        match known.checked_add(1) {
            Some(next) if next == events.sequence => {}
            Some(next) if next < events.sequence => {
                return Err(Fault::Gap(events.sequence - next));
            }
            _ => return Err(Fault::Invalid("changes were sent twice")),
        }
        let key = self.key(rank(events.rank)?);
        // If the message turns out to be invalid half-way, the index holds a part of it.
        self.state = BlocksState::Unknown;
        let mut blocks = 0;
        for change in &events.changes {
            blocks += 1 + match change.change.as_ref().ok_or("a change is empty")? {
                Change::Stored(stored) => {
                    let blocks = wire::stored(stored)?;
                    let tier = wire::tier(stored.tier)?;
                    let parent = stored.parent.map(EngineHash);
                    self.store(key, parent, &blocks, tier, sum).await;
                    blocks.len()
                }
                Change::Removed(removed) => {
                    let tier = wire::tier(removed.tier)?;
                    self.remove(key, &removed.names, tier, sum).await;
                    removed.names.len()
                }
                Change::Cleared(_) => {
                    if self.is_in_fleet() {
                        sum.removed += self.pool.index().clear_worker(key);
                    }
                    self.pool.speculative_index.forget(self.worker.index);
                    BLOCKS_PER_LOCK
                }
            };
            if blocks >= BLOCKS_PER_LOCK {
                blocks = 0;
                tokio::task::yield_now().await;
            }
        }
        self.state = BlocksState::Complete(events.sequence);
        Ok(events.sequence)
    }

    async fn store(
        &self,
        key: WorkerKey,
        mut parent: Option<EngineHash>,
        blocks: &[HashedBlock],
        tier: Tier,
        sum: &mut AppliedBlocks,
    ) {
        let mut left = blocks.len();
        for piece in blocks.chunks(BLOCKS_PER_LOCK) {
            left -= piece.len();
            {
                let mut index = self.pool.index();
                if !self.is_in_fleet() {
                    return;
                }
                // The index bounds each rank; this bounds all ranks of the worker together.
                let (room, limit) = (index.room(key), index.limit());
                let held = index.held(key.worker);
                let (fits, beyond) = match held + room == limit {
                    true => (piece, &[][..]),
                    false => piece.split_at(limit.saturating_sub(held).min(piece.len())),
                };
                let applied = index.store(key, parent, fits, tier);
                *sum += applied;
                if applied.over_limit + beyond.len() > 0 {
                    // The blocks after these have no parent in the index.
                    sum.over_limit += beyond.len() + left;
                    return;
                }
            }
            parent = piece.last().map(|block| block.engine);
            if blocks.len() > BLOCKS_PER_LOCK {
                tokio::task::yield_now().await;
            }
        }
    }

    async fn remove(&self, key: WorkerKey, names: &[u64], tier: Tier, sum: &mut AppliedBlocks) {
        let mut piece_names = Vec::with_capacity(names.len().min(BLOCKS_PER_LOCK));
        for piece in names.chunks(BLOCKS_PER_LOCK) {
            piece_names.clear();
            piece_names.extend(piece.iter().copied().map(EngineHash));
            {
                let mut index = self.pool.index();
                if !self.is_in_fleet() {
                    return;
                }
                *sum += index.remove(key, &piece_names, tier);
            }
            if names.len() > BLOCKS_PER_LOCK {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Whether the worker is still in the fleet. Must be called while the index is locked.
    fn is_in_fleet(&self) -> bool {
        !self.worker.gone.is_cancelled()
    }

    fn key(&self, rank: u16) -> WorkerKey {
        rank_key(self.worker.index, rank)
    }
}

fn rank(rank: u32) -> Result<u16, InvalidReason> {
    u16::try_from(rank).ok().filter(|_| rank < RANKS_MAX).ok_or("the rank is out of range")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use splitrail_kv::{HashSeed, IndexConfig};

    use super::*;

    fn attached() -> ShimBlocks {
        let (model, seed) = ("m".to_owned(), HashSeed(7));
        let max_blocks_per_worker = 1 << 20;
        let config = IndexConfig { model, block_size: 16, seed, max_blocks_per_worker };
        let pool = Arc::new(Pool::new(config, Some(1)));
        let config = r#"{"id": "w", "role": "both", "url": "http://w:1"}"#;
        let config = serde_json::from_str(config).unwrap();
        let worker = pool.enter(|number| Worker::new(number, config, "w:1".parse().unwrap()));
        ShimBlocks::new(pool, worker)
    }

    /// The number of turns that a future takes of the thread, and its result.
    fn turns<T>(future: impl Future<Output = T>) -> (usize, T) {
        let mut future = pin!(future);
        let mut turns = 1;
        loop {
            match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(result) => return (turns, result),
                Poll::Pending => turns += 1,
            }
        }
    }

    fn snapshot(runs: Vec<v1::Run>) -> v1::SnapshotPart {
        v1::SnapshotPart { runs, last: true, ..v1::SnapshotPart::default() }
    }

    /// A run of the given number of blocks, each with a further name.
    fn run(number: u64, blocks: u32) -> v1::Run {
        let base = number << 32;
        let named = |at: u32, name: u64| v1::Named { at, name: base + name, copies: vec![1] };
        let named = (0..blocks)
            .flat_map(|at| [named(at, u64::from(at)), named(at, u64::from(blocks + at))]);
        let hashes = (1..=u64::from(blocks)).map(|hash| base + hash).collect();
        v1::Run { parent: None, hashes, names: Vec::new(), named: named.collect() }
    }

    #[test]
    fn further_names_of_blocks_count_towards_the_turn_of_others() {
        let mut blocks = attached();
        let mut sum = AppliedBlocks::default();
        let runs = (0..8).map(|number| run(number, 1024)).collect();
        let (turns, taken) = turns(blocks.snapshot(snapshot(runs), &mut sum));
        assert_eq!((taken, sum.stored), (Ok(Some(0)), 8 * 2048));
        // One after the worker's former blocks were dropped, and one for each two runs.
        assert_eq!(turns, 2 + 8 / 2);
    }

    #[test]
    fn many_short_changes_leave_others_their_turn() {
        let mut blocks = attached();
        turns(blocks.snapshot(snapshot(Vec::new()), &mut AppliedBlocks::default())).1.unwrap();
        let removed = Change::Removed(v1::Removed { names: vec![7], tier: 0 });
        let cleared = Change::Cleared(v1::Cleared {});
        for (change, count, expected) in [(removed, 10_000, 1 + 4), (cleared, 10, 1 + 10)] {
            let sequence = blocks.known("").unwrap() + 1;
            let changes = vec![v1::Change { change: Some(change) }; count];
            let events = v1::Events { sequence, changes, ..v1::Events::default() };
            let (turns, applied) = turns(blocks.events(&events, &mut AppliedBlocks::default()));
            assert_eq!((turns, applied), (expected, Ok(sequence)));
        }
    }
}
