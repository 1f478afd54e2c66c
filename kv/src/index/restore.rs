//! A snapshot back into an index.

use std::collections::BTreeMap;

use super::forest::Cursor;
use super::snapshot::{Named, SnapshotRun};
use super::strips::Place;
use super::{Applied, HashedBlock, Index, WorkerKey};
use crate::event::Tier;
use crate::hash::BlockHash;

/// What a restored stream needs until its end.
#[derive(Debug, Default)]
struct Grafts {
    /// The last block of every run so far.
    ends: BTreeMap<BlockHash, Place>,
    /// Last blocks of runs that live only because something may hang there.
    pinned: Vec<Place>,
    /// Blocks of such runs.
    unheld: usize,
}

/// A snapshot that comes in parts. Other changes of the index may come between them, but
/// none of the worker's own. It must be ended: until then, blocks stay that nobody holds.
#[derive(Debug)]
#[must_use = "a restore that is not ended keeps blocks that nobody holds"]
pub struct Restore {
    worker: WorkerKey,
    grafts: Grafts,
}

impl Index {
    /// Replaces all that a worker holds by a [snapshot](Index::snapshot).
    ///
    /// Hashes are taken as they are: the giver must use the same seed, model name
    /// and block size. Names of a run that contradicts itself, others or what is
    /// there already, or comes before its parent, count as `malformed`.
    pub fn restore(
        &mut self,
        worker: WorkerKey,
        runs: impl IntoIterator<Item = SnapshotRun>,
    ) -> Applied {
        let (mut restore, removed) = self.begin_restore(worker);
        let mut applied = Applied { removed, ..Applied::default() };
        for run in runs {
            applied += self.restore_run(&mut restore, &run);
        }
        self.end_restore(restore);
        applied
    }

    /// Begins to replace all that a worker holds by a snapshot that comes run by run; says
    /// how many blocks were dropped for it.
    pub fn begin_restore(&mut self, worker: WorkerKey) -> (Restore, usize) {
        let removed = self.clear_worker(worker);
        (Restore { worker, grafts: Grafts::default() }, removed)
    }

    /// The next run of a snapshot, as in [`Index::restore`].
    pub fn restore_run(&mut self, restore: &mut Restore, run: &SnapshotRun) -> Applied {
        let Restore { worker, grafts } = restore;
        let worker = *worker;
        let mut applied = Applied::default();
        let has_room = grafts.ends.len() < self.limit().saturating_mul(2);
        let cursor = self.end_of(run.parent, grafts);
        let Some(cursor) = cursor.filter(|_| has_room && is_sound(run)) else {
            applied.malformed += run.names.len();
            return applied;
        };
        let end = if run.names.is_empty() {
            self.graft(cursor, &run.hashes, grafts)
        } else {
            applied += self.restore_names(worker, cursor, run);
            self.place_of(worker, run)
        };
        grafts.ends.extend(run.hashes.last().copied().zip(end));
        applied
    }

    /// Ends a snapshot, whole or not: what is there so far stays.
    pub fn end_restore(&mut self, restore: Restore) {
        for place in restore.grafts.pinned {
            if let Some((run, _)) = self.forest.locate(place) {
                self.forest.unpin(run);
            }
        }
        self.dismiss_if_empty(restore.worker);
    }

    /// Behind which block a run goes, if its parent has come.
    fn end_of(&self, parent: Option<BlockHash>, grafts: &Grafts) -> Option<Cursor> {
        let Some(parent) = parent else {
            return Some(Cursor::START);
        };
        let (run, at) = self.forest.locate(*grafts.ends.get(&parent)?)?;
        (self.forest.hash(run, at) == parent.0).then_some(Cursor { run, at: at + 1 })
    }

    /// Blocks that nobody may hold, for what hangs behind them.
    fn graft(
        &mut self,
        mut cursor: Cursor,
        hashes: &[BlockHash],
        grafts: &mut Grafts,
    ) -> Option<Place> {
        let mut rest = hashes;
        while !rest.is_empty() {
            if self.forest.is_full(rest.len()) || grafts.unheld >= self.limit() {
                return None;
            }
            let followed = self.forest.follow(cursor, rest, |hash| hash.0);
            let span = match followed {
                Some(span) => span,
                None => {
                    let (span, _) = self.forest.extend(cursor, rest, |hash| hash.0, None)?;
                    grafts.unheld += (span.to - span.from) as usize;
                    span
                }
            };
            // Whoever holds it may let go of it before what hangs behind it comes. A pin is at
            // a run's end, wherever it is cut.
            self.forest.pin(span.run);
            let end = self.forest.run(span.run).len() - 1;
            grafts.pinned.push(self.forest.place(span.run, end));
            cursor = Cursor { run: span.run, at: span.to };
            rest = &rest[(span.to - span.from) as usize..];
        }
        Some(self.forest.place(cursor.run, cursor.at.checked_sub(1)?))
    }

    fn restore_names(&mut self, worker: WorkerKey, cursor: Cursor, run: &SnapshotRun) -> Applied {
        let mut applied = Applied::default();
        // The place before, since names of the run itself may come and go meanwhile.
        let before = cursor.at.checked_sub(1).map(|at| self.forest.place(cursor.run, at));
        let mut primary: Vec<HashedBlock> = Vec::with_capacity(run.hashes.len());
        let mut further = Vec::new();
        for named in &run.names {
            if named.at as usize == primary.len() {
                primary.push(HashedBlock { engine: named.engine, hash: run.hashes[primary.len()] });
            } else {
                further.push(named);
            }
        }
        applied += self.store_at(worker, cursor, None, &primary, Tier::Device);
        for named in further {
            let mut blocks = primary[..=named.at as usize].to_vec();
            // The blocks on the way are there: only the last one gets a further name.
            let cursor = self.behind(before).and_then(|cursor| self.walk(cursor, &mut blocks));
            let Some(cursor) = cursor else {
                // The block itself was refused.
                let is_full = applied.over_limit > 0;
                applied.over_limit += usize::from(is_full);
                applied.malformed += usize::from(!is_full);
                continue;
            };
            let block = HashedBlock { engine: named.engine, ..primary[named.at as usize] };
            applied += self.store_at(worker, cursor, None, &[block], Tier::Device);
        }
        let plain = [1, 0, 0, 0];
        for named in run.names.iter().filter(|named| named.copies != plain) {
            self.set_copies(worker, named);
        }
        applied
    }

    fn behind(&self, place: Option<Place>) -> Option<Cursor> {
        let Some(place) = place else {
            return Some(Cursor::START);
        };
        let (run, at) = self.forest.locate(place)?;
        Some(Cursor { run, at: at + 1 })
    }

    /// The cursor before the last of these blocks, which must be there.
    fn walk(&mut self, mut cursor: Cursor, blocks: &mut Vec<HashedBlock>) -> Option<Cursor> {
        blocks.pop()?;
        let mut rest = &blocks[..];
        while !rest.is_empty() {
            let span = self.forest.follow(cursor, rest, |block| block.hash.0)?;
            cursor = Cursor { run: span.run, at: span.to };
            rest = &rest[(span.to - span.from) as usize..];
        }
        Some(cursor)
    }

    fn set_copies(&mut self, worker: WorkerKey, named: &Named) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some(lane) = known.names.find(named.engine.0) else {
            return;
        };
        for tier in Tier::ALL {
            if named.copies[tier as usize] > 0 {
                known.add_copies(&mut self.forest, lane, tier, named.copies[tier as usize]);
            }
        }
        // The one copy that it was entered with.
        known.take_copy(&mut self.forest, lane, Tier::Device);
    }

    fn place_of(&self, worker: WorkerKey, run: &SnapshotRun) -> Option<Place> {
        let names = &self.workers.get(&worker)?.names;
        let last = run.hashes.len().checked_sub(1)?;
        let named = run.names.iter().find(|named| named.at as usize == last)?;
        Some(names.place(names.find(named.engine.0)?))
    }
}

/// Whether every block has a name, in order, or none has.
fn is_sound(run: &SnapshotRun) -> bool {
    let mut next = 0;
    for named in &run.names {
        match named.at.cmp(&next) {
            std::cmp::Ordering::Greater => return false,
            std::cmp::Ordering::Equal => next += 1,
            std::cmp::Ordering::Less => {}
        }
        if named.copies == [0; Tier::COUNT] {
            return false;
        }
    }
    !run.hashes.is_empty()
        && (run.names.is_empty() || next as usize == run.hashes.len())
        && next as usize <= run.hashes.len()
}
