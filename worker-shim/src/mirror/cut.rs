//! Copies of everything, for routers that know nothing yet or have missed too much.
//!
//! A copy is made while the mirror is locked, in a few milliseconds for a million blocks;
//! everything else is done from the copy. Routers that come at about the same time share one,
//! and there are never more than a few: a router that takes long holds up only those whose
//! copy would be one too many.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use splitrail_kv::{Frozen, SnapshotRun};
use splitrail_proto::v1::SnapshotPart;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::Mirror;
use super::log::Head;
use super::wire;

/// Most copies at once.
const CUTS_MAX: usize = 2;

/// Everything that was held at one moment.
#[derive(Debug)]
pub(crate) struct Cut {
    /// The moment.
    pub(crate) head: Head,
    mirror_id: String,
    ranks: Vec<(u16, Frozen, Vec<u32>)>,
    _one_of_few: Option<OneOfFew>,
}

/// The copies that there are.
///
/// Whoever waits for one may be left alone for long, when its router reads nothing: so it
/// holds no lock meanwhile, and stands in no queue.
#[derive(Debug)]
pub(super) struct Cuts {
    last: Mutex<Weak<Cut>>,
    /// Held by the thread that makes one.
    making: Mutex<()>,
    few: Arc<Semaphore>,
    freed: Arc<Notify>,
}

/// The right to one copy.
#[derive(Debug)]
struct OneOfFew {
    permit: Option<OwnedSemaphorePermit>,
    freed: Arc<Notify>,
}

impl Drop for OneOfFew {
    fn drop(&mut self) {
        drop(self.permit.take());
        self.freed.notify_waiters();
    }
}

impl Default for Cuts {
    fn default() -> Self {
        let few = Arc::new(Semaphore::new(CUTS_MAX));
        Self { last: Mutex::default(), making: Mutex::default(), few, freed: Arc::default() }
    }
}

impl Cuts {
    /// A copy as of now, or one from which the ring leads on to now.
    pub(super) async fn take(&self, mirror: &Mirror) -> Arc<Cut> {
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            if let Some(cut) = self.shared(mirror) {
                return cut;
            }
            if let Ok(permit) = Arc::clone(&self.few).try_acquire_owned() {
                let freed = Arc::clone(&self.freed);
                let right = OneOfFew { permit: Some(permit), freed };
                let of = mirror.clone();
                // Sorting takes a while, where there are many runs.
                let made = tokio::task::spawn_blocking(move || Cut::make(&of, right)).await;
                return made.unwrap_or_else(|_| Arc::new(Cut::nothing(mirror)));
            }
            freed.await;
        }
    }

    fn last(&self) -> MutexGuard<'_, Weak<Cut>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shared(&self, mirror: &Mirror) -> Option<Arc<Cut>> {
        let cut = self.last().upgrade()?;
        mirror.state().log.reaches_well(cut.head).then_some(cut)
    }
}

impl Cut {
    /// Makes one, unless somebody else was quicker.
    fn make(mirror: &Mirror, right: OneOfFew) -> Arc<Self> {
        let cuts = &mirror.inner.cuts;
        let _only = cuts.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cut) = cuts.shared(mirror) {
            return cut;
        }
        let (head, mirror_id, ranks) = {
            let mut state = mirror.state();
            let ranks = state.freeze();
            (state.head(), state.log.mirror_id().to_owned(), ranks)
        };
        let sorted = ranks.into_iter().map(|(rank, frozen)| {
            let order = frozen.order();
            (rank, frozen, order)
        });
        let ranks = sorted.collect();
        let cut = Arc::new(Self { head, mirror_id, ranks, _one_of_few: Some(right) });
        *cuts.last() = Arc::downgrade(&cut);
        cut
    }

    /// In place of a copy that could not be made: it is of no mirror, so that another follows.
    fn nothing(mirror: &Mirror) -> Self {
        let (_, mirror_id) = mirror.id();
        Self { head: Head::default(), mirror_id, ranks: Vec::new(), _one_of_few: None }
    }
}

/// A copy on its way to a router, in parts of a bounded size.
#[derive(Debug)]
pub(crate) struct Parts {
    cut: Arc<Cut>,
    rank: usize,
    run: usize,
    pieces: std::vec::IntoIter<SnapshotRun>,
    ended: bool,
}

impl Parts {
    pub(crate) fn new(cut: Arc<Cut>) -> Self {
        Self { cut, rank: 0, run: 0, pieces: Vec::new().into_iter(), ended: false }
    }

    /// The copy that the parts are of.
    pub(crate) fn head(&self) -> Head {
        self.cut.head
    }

    /// Whether there is another run of the present rank.
    fn has_more(&mut self) -> bool {
        while self.pieces.as_slice().is_empty() {
            let Some((_, frozen, order)) = self.cut.ranks.get(self.rank) else {
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

impl Iterator for Parts {
    type Item = SnapshotPart;

    fn next(&mut self) -> Option<SnapshotPart> {
        if self.ended {
            return None;
        }
        let (rank, rank_names) = match self.cut.ranks.get(self.rank) {
            Some((rank, frozen, _)) => (*rank, frozen.names_count() as u64),
            None => (0, 0),
        };
        let (mut runs, mut blocks) = (Vec::new(), 0);
        while blocks < wire::MESSAGE_BLOCKS_MAX
            && self.has_more()
            && let Some(run) = self.pieces.next()
        {
            blocks += run.hashes.len();
            runs.push(wire::run(run));
        }
        if !self.has_more() && self.rank + 1 < self.cut.ranks.len() {
            (self.rank, self.run) = (self.rank + 1, 0);
        } else {
            self.ended = !self.has_more();
        }
        Some(SnapshotPart {
            mirror_id: self.cut.mirror_id.clone(),
            sequence: self.cut.head.sequence,
            rank: u32::from(rank),
            runs,
            last: self.ended,
            rank_names,
        })
    }
}
