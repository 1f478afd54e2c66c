//! Restores a snapshot into an index.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::chain;
use super::forest::Cursor;
use super::names::Lane;
use super::snapshot::{BlockName, RunNames, SnapshotRun};
use super::strips::Place;
use super::{AppliedBlocks, HashedBlock, Index, WorkerKey};
use crate::event::Tier;
use crate::hash::BlockHash;

/// The state of a restore between its runs.
#[derive(Debug, Default)]
struct RestoreState {
    /// The last block of every run so far.
    ends: HashMap<BlockHash, Place, BuildHasherDefault<ChainedHashHasher>>,
    /// The lane of the last block of the last run, if known.
    last: Option<Lane>,
    /// Number of names for which room is to be made before the first arrives.
    expected: usize,
    /// Last blocks of runs that are pinned because a later run may follow them.
    pinned: Vec<Place>,
    /// Number of blocks of such runs.
    unheld: usize,
}

/// Distributes chained hashes, which a malicious sender may have chosen.
#[derive(Debug, Default)]
struct ChainedHashHasher(u64);

impl Hasher for ChainedHashHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = super::names::spread_name(self.0 ^ value);
    }
}

/// A snapshot that arrives in parts. Other changes of the index may come between the parts, but
/// none of the same worker. The restore must be ended: until then, blocks are kept that no worker
/// holds.
#[derive(Debug)]
#[must_use = "a restore that is not ended keeps blocks that no worker holds"]
pub struct Restore {
    worker: WorkerKey,
    state: RestoreState,
}

impl Index {
    /// Replaces all that a worker holds by a [snapshot](Index::snapshot).
    ///
    /// Hashes are used as they are: the sender must use the same seed, model name and block size.
    /// Names of a run that contradicts itself, other runs or existing blocks, or that precedes its
    /// parent, count as `malformed`.
    pub fn restore(
        &mut self,
        worker: WorkerKey,
        runs: impl IntoIterator<Item = SnapshotRun>,
    ) -> AppliedBlocks {
        let (mut restore, removed) = self.begin_restore(worker, 0);
        let mut applied = AppliedBlocks { removed, ..AppliedBlocks::default() };
        for run in runs {
            applied += self.restore_run(&mut restore, &run);
        }
        self.end_restore(restore);
        applied
    }

    /// Begins to replace all that a worker holds by a snapshot that arrives run by run; returns the
    /// restore and the number of blocks that were dropped. About `expected` names will arrive (0 if
    /// unknown): memory for them is allocated immediately, and what is not needed is freed at the
    /// end.
    pub fn begin_restore(&mut self, worker: WorkerKey, expected: usize) -> (Restore, usize) {
        let removed = self.clear_worker(worker);
        let expected = expected.min(self.limit().saturating_sub(self.held(worker.worker)));
        (Restore { worker, state: RestoreState { expected, ..RestoreState::default() } }, removed)
    }

    /// Applies the next run of a snapshot, as in [`Index::restore`].
    pub fn restore_run(&mut self, restore: &mut Restore, run: &SnapshotRun) -> AppliedBlocks {
        let Restore { worker, state } = restore;
        let worker = *worker;
        let mut applied = AppliedBlocks::default();
        let has_room = state.ends.len() < self.limit().saturating_mul(2);
        let cursor = self.end_of(run.parent, state);
        let Some(cursor) = cursor.filter(|_| has_room && is_sound(run)) else {
            applied.malformed += run.names.len();
            return applied;
        };
        let after = state.last.take();
        let end = match &run.names {
            names if names.is_empty() => self.add_unheld(cursor, &run.hashes, state),
            RunNames::Plain(names) => {
                self.make_room(worker, &mut state.expected);
                let named = chain::NamedBlocks { names, hashes: &run.hashes };
                let stored = self.store_at(worker, cursor, after, named, Tier::Device);
                applied += stored.applied;
                stored.end.map(|(cursor, last)| {
                    state.last = last;
                    self.forest.place(cursor.run, cursor.at - 1)
                })
            }
            RunNames::Each(names) => {
                self.make_room(worker, &mut state.expected);
                applied += self.restore_names(worker, cursor, &run.hashes, names);
                self.place_of(worker, &run.hashes, names)
            }
        };
        state.ends.extend(run.hashes.last().copied().zip(end));
        applied
    }

    /// Ends a snapshot, complete or not: what has arrived stays.
    pub fn end_restore(&mut self, restore: Restore) {
        for place in restore.state.pinned {
            if let Some((run, _)) = self.forest.locate(place) {
                self.forest.unpin(run);
            }
        }
        if let Some(known) = self.workers.get_mut(&restore.worker) {
            known.names.fit();
        }
        self.dismiss_if_empty(restore.worker);
    }

    /// Makes room for all expected names before the first arrives.
    fn make_room(&mut self, worker: WorkerKey, expected: &mut usize) {
        if *expected > 0
            && self.admit(worker).is_some()
            && let Some(known) = self.workers.get_mut(&worker)
        {
            known.names.expect(std::mem::take(expected));
        }
    }

    /// The cursor after a run's parent, if the parent has arrived.
    fn end_of(&self, parent: Option<BlockHash>, state: &RestoreState) -> Option<Cursor> {
        let Some(parent) = parent else {
            return Some(Cursor::START);
        };
        let (run, at) = self.forest.locate(*state.ends.get(&parent)?)?;
        (self.forest.hash(run, at) == parent.0).then_some(Cursor { run, at: at + 1 })
    }

    /// Adds blocks that possibly no worker holds, because a later run follows them.
    fn add_unheld(
        &mut self,
        mut cursor: Cursor,
        hashes: &[BlockHash],
        state: &mut RestoreState,
    ) -> Option<Place> {
        let mut rest = hashes;
        while !rest.is_empty() {
            if self.forest.is_full(rest.len()) || state.unheld >= self.limit() {
                return None;
            }
            let followed = self.forest.follow(cursor, rest, |hash| hash.0);
            let span = match followed {
                Some(span) => span,
                None => {
                    let (span, _) = self.forest.extend(cursor, rest, |hash| hash.0, None)?;
                    state.unheld += (span.to - span.from) as usize;
                    span
                }
            };
            // The worker that holds the run may release it before the run that follows arrives. A
            // pin is at a run's end, even if the run is split.
            self.forest.pin(span.run);
            let end = self.forest.run(span.run).len() - 1;
            state.pinned.push(self.forest.place(span.run, end));
            cursor = Cursor { run: span.run, at: span.to };
            rest = &rest[(span.to - span.from) as usize..];
        }
        Some(self.forest.place(cursor.run, cursor.at.checked_sub(1)?))
    }

    fn restore_names(
        &mut self,
        worker: WorkerKey,
        cursor: Cursor,
        hashes: &[BlockHash],
        names: &[BlockName],
    ) -> AppliedBlocks {
        let mut applied = AppliedBlocks::default();
        // The place of the previous block is kept, because names of the run itself may change
        // meanwhile.
        let before = cursor.at.checked_sub(1).map(|at| self.forest.place(cursor.run, at));
        let mut primary: Vec<HashedBlock> = Vec::with_capacity(hashes.len());
        let mut further = Vec::new();
        for named in names {
            if named.at as usize == primary.len() {
                primary.push(HashedBlock { engine: named.engine, hash: hashes[primary.len()] });
            } else {
                further.push(named);
            }
        }
        applied += self.store_at(worker, cursor, None, &primary[..], Tier::Device).applied;
        // One walk for all further names, each of which may be of a block at the end of the run.
        let places = match further.is_empty() {
            true => Vec::new(),
            false => self.places_after(before, &primary),
        };
        for named in further {
            // The blocks before it exist: only the block itself gets a further name.
            let cursor = match (named.at as usize).checked_sub(1) {
                None => self.behind(before),
                Some(at) => places.get(at).and_then(|place| self.behind(Some(*place))),
            };
            let Some(cursor) = cursor else {
                // The block itself was refused.
                let is_full = applied.over_limit > 0;
                applied.over_limit += usize::from(is_full);
                applied.malformed += usize::from(!is_full);
                continue;
            };
            let block = HashedBlock { engine: named.engine, ..primary[named.at as usize] };
            applied += self.store_at(worker, cursor, None, &[block][..], Tier::Device).applied;
        }
        let plain = [1, 0, 0, 0];
        for named in names.iter().filter(|named| named.copies != plain) {
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

    /// The places of the leading ones of these blocks that exist after a place. Names that are
    /// stored later may divide runs, but change no place.
    fn places_after(&mut self, before: Option<Place>, blocks: &[HashedBlock]) -> Vec<Place> {
        let mut places = Vec::with_capacity(blocks.len());
        let Some(mut cursor) = self.behind(before) else { return places };
        while places.len() < blocks.len()
            && let Some(span) =
                self.forest.follow(cursor, &blocks[places.len()..], |block| block.hash.0)
        {
            places.extend((span.from..span.to).map(|at| self.forest.place(span.run, at)));
            cursor = Cursor { run: span.run, at: span.to };
        }
        places
    }

    fn set_copies(&mut self, worker: WorkerKey, named: &BlockName) {
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
        // Removes the copy with which the name was entered.
        known.take_copy(&mut self.forest, lane, Tier::Device);
    }

    fn place_of(
        &self,
        worker: WorkerKey,
        hashes: &[BlockHash],
        names: &[BlockName],
    ) -> Option<Place> {
        let known = &self.workers.get(&worker)?.names;
        let last = hashes.len().checked_sub(1)?;
        let named = names.iter().find(|named| named.at as usize == last)?;
        Some(known.place(known.find(named.engine.0)?))
    }
}

/// Whether every block has a name, in order, or none has.
fn is_sound(run: &SnapshotRun) -> bool {
    let names = match &run.names {
        RunNames::Plain(names) => {
            let suits = names.is_empty() || names.len() == run.hashes.len();
            return suits && !run.hashes.is_empty();
        }
        RunNames::Each(names) => names,
    };
    let mut next = 0;
    for named in names {
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
        && (names.is_empty() || next as usize == run.hashes.len())
        && next as usize <= run.hashes.len()
}
