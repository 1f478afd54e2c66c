//! Applies a shim's reports of its engine's blocks to the index: a snapshot, then events in the order of their
//! numbers. Anything else is a fault, after which events are ignored until the next snapshot.

use std::sync::Arc;

use splitrail_kv::{Applied, EngineHash, HashedBlock, Restore, Tier, WorkerKey};
use splitrail_proto::v1;
use splitrail_proto::v1::change::Change;

use super::wire::{self, Nonsense};
use crate::{Pool, Worker};

/// Blocks between two times that the index is let go: others write to it as well.
const PIECE_BLOCKS: usize = 4096;

/// Data-parallel ranks of one worker.
pub const RANKS_MAX: u32 = 256;

/// What is wrong with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// So many changes are missing before it.
    Gap(u64),
    /// It makes no sense.
    Nonsense(&'static str),
}

impl From<Nonsense> for Fault {
    fn from(why: Nonsense) -> Self {
        Self::Nonsense(why)
    }
}

/// One worker's blocks, as far as its shim has told.
pub struct Blocks {
    pool: Arc<Pool>,
    worker: Arc<Worker>,
    /// The shim's mirror that they are of.
    mirror_id: String,
    state: State,
}

enum State {
    /// What is in the index is not to be trusted.
    Unknown,
    /// A snapshot is coming in.
    Restoring(Restoring),
    /// Everything up to this change is in the index.
    Whole(u64),
}

/// A part of a snapshot that is in the index.
struct Restoring {
    pool: Arc<Pool>,
    sequence: u64,
    rank: u16,
    restore: Option<Restore>,
}

impl Drop for Restoring {
    fn drop(&mut self) {
        self.end_rank();
    }
}

impl Restoring {
    fn end_rank(&mut self) {
        if let Some(restore) = self.restore.take() {
            self.pool.index().end_restore(restore);
        }
    }
}

impl Blocks {
    /// Nothing is known of the worker yet.
    pub fn new(pool: Arc<Pool>, worker: Arc<Worker>) -> Self {
        Self { pool, worker, mirror_id: String::new(), state: State::Unknown }
    }

    /// Up to which change all of this mirror is in the index.
    pub fn known(&self, mirror_id: &str) -> Option<u64> {
        match self.state {
            State::Whole(sequence) if self.mirror_id == mirror_id => Some(sequence),
            _ => None,
        }
    }

    /// Whether all up to some change is in the index.
    pub fn is_whole(&self) -> bool {
        matches!(self.state, State::Whole(_))
    }

    /// Whether a snapshot is coming in.
    pub fn is_restoring(&self) -> bool {
        matches!(self.state, State::Restoring(_))
    }

    /// What is in the index is not to be trusted any more.
    pub fn distrust(&mut self) {
        self.state = State::Unknown;
    }

    /// Takes a part of a snapshot; the number of its last change, once it is whole. What became
    /// of its blocks is added to `sum`.
    ///
    /// # Errors
    /// It makes no sense.
    pub async fn snapshot(
        &mut self,
        part: v1::SnapshotPart,
        sum: &mut Applied,
    ) -> Result<Option<u64>, Fault> {
        let rank = rank(part.rank)?;
        let goes_on = match &self.state {
            State::Restoring(restoring) => {
                restoring.sequence == part.sequence && self.mirror_id == part.mirror_id
            }
            _ => false,
        };
        if !goes_on {
            self.begin(part.mirror_id, part.sequence).await;
        }
        let State::Restoring(mut restoring) = std::mem::replace(&mut self.state, State::Unknown)
        else {
            return Err(Fault::Nonsense("a snapshot has no beginning"));
        };
        if rank < restoring.rank {
            return Err(Fault::Nonsense("ranks of a snapshot are out of order"));
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
            self.state = State::Whole(sequence);
            return Ok(Some(sequence));
        }
        self.state = State::Restoring(restoring);
        Ok(None)
    }

    async fn begin(&mut self, mirror_id: String, sequence: u64) {
        self.state = State::Unknown;
        self.mirror_id = mirror_id;
        self.pool.index().remove_worker(self.worker.index as u32);
        // It may have taken a while.
        tokio::task::yield_now().await;
        let pool = Arc::clone(&self.pool);
        self.state = State::Restoring(Restoring { pool, sequence, rank: 0, restore: None });
    }

    async fn restore(
        &self,
        restoring: &mut Restoring,
        runs: Vec<v1::Run>,
        sum: &mut Applied,
    ) -> Result<(), Fault> {
        let mut runs = runs.into_iter().map(wire::run).peekable();
        while runs.peek().is_some() {
            {
                let mut index = self.pool.index();
                let Some(restore) = restoring.restore.as_mut().filter(|_| self.is_here()) else {
                    return Ok(());
                };
                let limit = index.room(self.key(restoring.rank)).1;
                let mut blocks = 0;
                while blocks < PIECE_BLOCKS
                    && let Some(run) = runs.next()
                {
                    let run = run?;
                    blocks += run.hashes.len();
                    if index.held(self.worker.index as u32) + run.names.len() > limit {
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

    /// Takes changes that follow what is known; the number of the last. What became of their
    /// blocks is added to `sum`.
    ///
    /// # Errors
    /// They do not follow, or make no sense.
    pub async fn events(&mut self, events: &v1::Events, sum: &mut Applied) -> Result<u64, Fault> {
        let State::Whole(known) = self.state else {
            return Err(Fault::Nonsense("events come before a whole snapshot"));
        };
        match known.checked_add(1) {
            Some(next) if next == events.sequence => {}
            Some(next) if next < events.sequence => {
                return Err(Fault::Gap(events.sequence - next));
            }
            _ => return Err(Fault::Nonsense("changes are told twice")),
        }
        let key = self.key(rank(events.rank)?);
        // A message that breaks off in its middle leaves nothing that could be trusted.
        self.state = State::Unknown;
        for change in &events.changes {
            match change.change.as_ref().ok_or("a change says nothing")? {
                Change::Stored(stored) => {
                    let blocks = wire::stored(stored)?;
                    let tier = wire::tier(stored.tier)?;
                    let parent = stored.parent.map(EngineHash);
                    self.store(key, parent, &blocks, tier, sum).await;
                }
                Change::Removed(removed) => {
                    let tier = wire::tier(removed.tier)?;
                    self.remove(key, &removed.names, tier, sum).await;
                }
                Change::Cleared(_) => {
                    if self.is_here() {
                        sum.removed += self.pool.index().clear_worker(key);
                    }
                    self.pool.assumed.forget(self.worker.index);
                }
            }
        }
        self.state = State::Whole(events.sequence);
        Ok(events.sequence)
    }

    async fn store(
        &self,
        key: WorkerKey,
        mut parent: Option<EngineHash>,
        blocks: &[HashedBlock],
        tier: Tier,
        sum: &mut Applied,
    ) {
        let mut left = blocks.len();
        for piece in blocks.chunks(PIECE_BLOCKS) {
            left -= piece.len();
            {
                let mut index = self.pool.index();
                if !self.is_here() {
                    return;
                }
                // The index bounds each rank; this bounds all of them together.
                let (room, limit) = index.room(key);
                let held = index.held(key.worker);
                let (fits, beyond) = match held + room == limit {
                    true => (piece, &[][..]),
                    false => piece.split_at(limit.saturating_sub(held).min(piece.len())),
                };
                let applied = index.store(key, parent, fits, tier);
                *sum += applied;
                if applied.over_limit + beyond.len() > 0 {
                    // What follows has no parent any more.
                    sum.over_limit += beyond.len() + left;
                    return;
                }
            }
            parent = piece.last().map(|block| block.engine);
            if blocks.len() > PIECE_BLOCKS {
                tokio::task::yield_now().await;
            }
        }
    }

    async fn remove(&self, key: WorkerKey, names: &[u64], tier: Tier, sum: &mut Applied) {
        let mut piece_names = Vec::with_capacity(names.len().min(PIECE_BLOCKS));
        for piece in names.chunks(PIECE_BLOCKS) {
            piece_names.clear();
            piece_names.extend(piece.iter().copied().map(EngineHash));
            {
                let mut index = self.pool.index();
                if !self.is_here() {
                    return;
                }
                *sum += index.remove(key, &piece_names, tier);
            }
            if names.len() > PIECE_BLOCKS {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Whether the worker is still in the fleet; asked with the index in hand.
    fn is_here(&self) -> bool {
        !self.worker.gone.is_cancelled()
    }

    fn key(&self, rank: u16) -> WorkerKey {
        WorkerKey { worker: self.worker.index as u32, rank }
    }
}

fn rank(rank: u32) -> Result<u16, Nonsense> {
    u16::try_from(rank).ok().filter(|_| rank < RANKS_MAX).ok_or("there is no such rank")
}
