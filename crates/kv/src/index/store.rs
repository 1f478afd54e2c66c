//! Storing and removing blocks whose chained hashes are known.

use std::ops::Range;

use super::chain::BlockSequence;
use super::forest::{Cursor, Forest, Span};
use super::holders::ABSENT;
use super::names::{BATCH, Lane, Row};
use super::strips::Place;
use super::worker::Worker;
use super::{AppliedBlocks, HashedBlock, Index, WorkerKey};
use crate::event::{EngineHash, Tier};

impl Index {
    /// Stores consecutive blocks after `parent` (`None`: at a prompt's start), as [`Index::apply`]
    /// does after hashing their tokens. Blocks under a parent that the worker does not hold are
    /// `orphaned`.
    pub fn store(
        &mut self,
        worker: WorkerKey,
        parent: Option<EngineHash>,
        blocks: &[HashedBlock],
        tier: Tier,
    ) -> AppliedBlocks {
        if blocks.is_empty() {
            return AppliedBlocks::default();
        }
        let mut after = None;
        let cursor = match parent {
            None => Cursor::START,
            Some(parent) => {
                let names = self.workers.get(&worker).map(|known| &known.names);
                after = names.and_then(|names| names.find(parent.0));
                let place = names.zip(after).map(|(names, lane)| names.place(lane));
                let Some((run, at)) = place.and_then(|place| self.forest.locate(place)) else {
                    return AppliedBlocks { orphaned: blocks.len(), ..AppliedBlocks::default() };
                };
                Cursor { run, at: at + 1 }
            }
        };
        let applied = self.store_at(worker, cursor, after, blocks, tier).applied;
        if applied.stored == 0 {
            self.dismiss_if_empty(worker);
        }
        applied
    }

    /// Stores consecutive blocks after a cursor; `after` is the lane of the previous block's name,
    /// if known.
    pub(super) fn store_at(
        &mut self,
        worker: WorkerKey,
        mut cursor: Cursor,
        after: Option<Lane>,
        blocks: impl BlockSequence,
        tier: Tier,
    ) -> StoredAt {
        let limit = self.limit();
        if self.admit(worker).is_none() || self.forest.is_full(blocks.len()) {
            let applied = AppliedBlocks { over_limit: blocks.len(), ..AppliedBlocks::default() };
            return StoredAt { applied, end: None };
        }
        let Self { forest, workers, .. } = self;
        let Some(worker) = workers.get_mut(&worker) else {
            return StoredAt { applied: AppliedBlocks::default(), end: None };
        };
        worker.names.fetch(blocks.names(0));
        let mut storing =
            StoringEvent { forest, worker, tier, limit, after, applied: AppliedBlocks::default() };
        let mut from = 0;
        while from < blocks.len() {
            let rest = blocks.part(from, blocks.len());
            let Some((span, held)) = storing.find_or_extend(cursor, rest) else {
                storing.applied.malformed += rest.len();
                storing.forest.tidy(cursor.run);
                break;
            };
            let len = (span.to - span.from) as usize;
            let entered = storing.enter(rest.part(0, len), span, held);
            if entered < len {
                storing.applied.over_limit += rest.len() - entered;
                break;
            }
            cursor = Cursor { run: span.run, at: span.to };
            from += len;
        }
        let is_whole = from == blocks.len();
        StoredAt { applied: storing.applied, end: is_whole.then_some((cursor, storing.after)) }
    }

    /// Removes one physical copy of each named block from a tier.
    pub fn remove(
        &mut self,
        worker: WorkerKey,
        hashes: &[EngineHash],
        tier: Tier,
    ) -> AppliedBlocks {
        self.remove_each(worker, hashes, tier, |_| {})
    }

    /// [`Index::remove`]; calls a function with each block from which a copy was removed.
    pub(super) fn remove_each(
        &mut self,
        worker: WorkerKey,
        hashes: &[EngineHash],
        tier: Tier,
        mut taken: impl FnMut(EngineHash),
    ) -> AppliedBlocks {
        let mut applied = AppliedBlocks::default();
        let Some(known) = self.workers.get_mut(&worker) else {
            return AppliedBlocks { unknown: hashes.len(), ..applied };
        };
        let mut removal: Option<Removal> = None;
        known.names.fetch(names(hashes));
        for (at, batch) in hashes.chunks(BATCH).enumerate() {
            // Prefetches the next batch while this one is removed.
            known.names.fetch(names(&hashes[hashes.len().min((at + 1) * BATCH)..]));
            let guesses = known.names.guesses(names(batch));
            for (hash, guess) in batch.iter().zip(guesses) {
                let Some((lane, slot)) = known.names.find_guessed(guess, hash.0) else {
                    let was_waiting = known.waiting_events.remove(*hash, tier);
                    applied.removed += usize::from(was_waiting);
                    applied.unknown += usize::from(!was_waiting);
                    continue;
                };
                if known.names.is_special(lane) || !known.doubles.is_empty() {
                    Removal::end(&mut removal, known, &mut self.forest);
                }
                match known.take_copy(&mut self.forest, lane, tier) {
                    None => applied.unknown += 1,
                    Some(false) => {
                        applied.removed += 1;
                        taken(*hash);
                    }
                    Some(true) => {
                        applied.removed += 1;
                        taken(*hash);
                        let place = known.names.place(lane);
                        known.names.remove_at(lane, slot);
                        if known.doubles.contains_key(&place) {
                            known.release(&mut self.forest, place, lane);
                        } else if !removal.as_mut().is_some_and(|removal| removal.takes(place)) {
                            Removal::end(&mut removal, known, &mut self.forest);
                            removal = Some(Removal::new(place));
                        }
                    }
                }
            }
        }
        Removal::end(&mut removal, known, &mut self.forest);
        known.shrink_if_sparse();
        if known.names.is_empty() {
            self.dismiss_if_empty(worker);
        }
        self.forest.compact_if_sparse();
        applied
    }
}

/// The result of storing blocks.
pub(super) struct StoredAt {
    pub(super) applied: AppliedBlocks,
    /// The cursor after the last block, if all were stored, and the lane of its name, if known.
    pub(super) end: Option<(Cursor, Option<Lane>)>,
}

fn names(hashes: &[EngineHash]) -> impl Iterator<Item = u64> + '_ {
    hashes.iter().map(|hash| hash.0)
}

/// Consecutive blocks that are being removed. Engines evict chains from the end, so they are
/// released together.
struct Removal {
    strip: u32,
    from: u32,
    to: u32,
}

impl Removal {
    fn new(Place { strip, offset }: Place) -> Self {
        Self { strip, from: offset, to: offset + 1 }
    }

    fn takes(&mut self, place: Place) -> bool {
        if place.strip != self.strip {
            return false;
        }
        if place.offset + 1 == self.from {
            self.from -= 1;
        } else if place.offset == self.to {
            self.to += 1;
        } else {
            return false;
        }
        true
    }

    fn end(removal: &mut Option<Self>, worker: &mut Worker, forest: &mut Forest) {
        if let Some(Self { strip, from, to }) = removal.take() {
            worker.release_span(forest, strip, from, to);
        }
    }
}

/// An event that is being stored.
struct StoringEvent<'a> {
    forest: &'a mut Forest,
    worker: &'a mut Worker,
    tier: Tier,
    limit: usize,
    /// The lane of the previous block's name.
    after: Option<Lane>,
    applied: AppliedBlocks,
}

/// Blocks of an event along one run, whose names are being entered.
struct EnteredBlocks<T> {
    blocks: T,
    span: Span,
    /// Whether readers already see the worker as holder of the blocks.
    held: bool,
    /// The blocks whose names were entered and that are not published to readers yet.
    new: Range<usize>,
}

/// Why a batch was not entered completely, and before which block it stopped.
enum Stop {
    /// The table of names may have been rebuilt.
    LaidOut(usize),
    /// There is no room for more names.
    Full(usize),
}

impl StoringEvent<'_> {
    /// The blocks along which the chain continues, created if necessary; and whether readers
    /// already see the worker as their holder. `None` if hashes contradict existing blocks.
    fn find_or_extend(&mut self, cursor: Cursor, rest: impl BlockSequence) -> Option<(Span, bool)> {
        if let Some(span) = rest.follow(self.forest, cursor) {
            return Some((span, false));
        }
        let grows = (self.tier == Tier::Device).then_some(self.worker.slot);
        rest.extend(self.forest, cursor, grows)
    }

    /// Enters the names of a span's blocks; returns how many found room.
    fn enter(&mut self, blocks: impl BlockSequence, span: Span, held: bool) -> usize {
        let replaced = self.applied.replaced;
        let mut entering = EnteredBlocks { blocks, span, held, new: 0..0 };
        let mut entered = 0;
        'laid_out: while entered < blocks.len() {
            let room = self.limit.saturating_sub(self.worker.names.len());
            self.worker.names.make_room((blocks.len() - entered).min(room).max(1));
            let mut row = self.worker.names.row(blocks.names(entered));
            while entered < blocks.len() {
                // Prefetches the memory for the next batch while this one is entered.
                let next = self.worker.names.row(blocks.names(entered + BATCH));
                match self.enter_row(&mut entering, entered, &row) {
                    Ok(end) => entered = end,
                    Err(Stop::LaidOut(end)) => {
                        entered = end;
                        continue 'laid_out;
                    }
                    Err(Stop::Full(end)) => {
                        entered = end;
                        break 'laid_out;
                    }
                }
                row = next;
            }
        }
        self.hold(&mut entering);
        if held && entered < blocks.len() {
            let left = Span { from: span.from + entered as u32, ..span };
            self.forest.set_tier(left, self.worker.slot, ABSENT);
        }
        if entered < blocks.len() || self.applied.replaced > replaced {
            self.forest.tidy(span.run);
        }
        entered
    }

    /// Enters the next blocks from `from` on; returns where it stopped, and why.
    fn enter_row(
        &mut self,
        entering: &mut EnteredBlocks<impl BlockSequence>,
        from: usize,
        row: &Row,
    ) -> Result<usize, Stop> {
        let span = entering.span;
        let first = self.forest.place(span.run, span.from + from as u32);
        let mut at = 0;
        while at < row.len() {
            let place = Place { offset: first.offset + at as u32, ..first };
            let added = self.enter_new(row, at, place);
            if added > 0 {
                if entering.new.end != from + at {
                    self.hold(entering);
                    entering.new = from + at..from + at;
                }
                at += added;
                entering.new.end = from + at;
                continue;
            }
            let Some(lane) = self.worker.names.find_in(row, at) else {
                return Err(Stop::Full(from + at));
            };
            if self.worker.names.place(lane) != place {
                self.hold(entering);
                self.replace(lane, span.run);
                // The table may have been rebuilt, so positions found before are invalid.
                return Err(Stop::LaidOut(from + at));
            }
            self.copy(entering, lane);
            at += 1;
        }
        Ok(from + at)
    }

    /// Enters names of a row from `from` on, up to one that already exists or finds no room;
    /// returns their number.
    fn enter_new(&mut self, row: &Row, from: usize, place: Place) -> usize {
        let room = self.limit.saturating_sub(self.worker.names.len());
        // Slower tiers are recorded name by name.
        let most = if self.tier == Tier::Device { room } else { room.min(1) };
        let to = row.len().min(from + most);
        let (added, last) = self.worker.names.insert(row, from, to, place, self.after);
        if added > 0 {
            self.after = last;
            self.worker.counts[self.tier as usize] += added;
            self.applied.stored += added;
            if self.tier != Tier::Device
                && let Some(lane) = last
            {
                self.name_tier(lane);
            }
        }
        added
    }

    /// Records that a new name's only copy is not in the fastest tier.
    fn name_tier(&mut self, lane: Lane) {
        let mut copies = [0; Tier::COUNT];
        copies[self.tier as usize] = 1;
        self.worker.names.set_special(lane);
        self.worker.copies.insert(lane, copies);
    }

    /// Adds a copy of a block that exists under the same name.
    fn copy(&mut self, entering: &mut EnteredBlocks<impl BlockSequence>, lane: Lane) {
        // Entered blocks must be published before tiers change.
        self.hold(entering);
        self.worker.add_copies(self.forest, lane, self.tier, 1);
        self.after = Some(lane);
        self.applied.stored += 1;
    }

    /// Removes a name that stood for another block.
    fn replace(&mut self, lane: Lane, run: u32) {
        self.applied.replaced += 1;
        // Removing the old block must not free the current run.
        self.forest.pin(run);
        self.worker.forget(self.forest, lane);
        self.forest.meta_mut(run).children -= 1;
        self.after = None;
    }

    /// Publishes the entered blocks to readers.
    fn hold(&mut self, entering: &mut EnteredBlocks<impl BlockSequence>) {
        let EnteredBlocks { blocks, span, held, .. } = *entering;
        let new = std::mem::take(&mut entering.new);
        if held || new.is_empty() {
            return;
        }
        let (from, to) = (span.from + new.start as u32, span.from + new.end as u32);
        let lane_at = |worker: &Worker, at| {
            worker.names.find(blocks.names((at - span.from) as usize).next()?)
        };
        self.worker.hold(self.forest, Span { from, to, ..span }, self.tier as u8, lane_at);
    }
}
