//! Storing and removing blocks whose chained hashes are known.

use std::ops::Range;

use super::forest::{Cursor, Forest, Span};
use super::holders::ABSENT;
use super::names::Lane;
use super::strips::Place;
use super::worker::Worker;
use super::{Applied, HashedBlock, Index, WorkerKey};
use crate::event::{EngineHash, Tier};

impl Index {
    /// Stores consecutive blocks behind `parent` (`None`: at a prompt's start), as
    /// [`Index::apply`] does after hashing their tokens. Blocks under a parent that
    /// the worker does not hold are `orphaned`.
    pub fn store(
        &mut self,
        worker: WorkerKey,
        parent: Option<EngineHash>,
        blocks: &[HashedBlock],
        tier: Tier,
    ) -> Applied {
        if blocks.is_empty() {
            return Applied::default();
        }
        let mut after = None;
        let cursor = match parent {
            None => Cursor::START,
            Some(parent) => {
                after = self.workers.get(&worker).and_then(|known| known.names.find(parent.0));
                let place =
                    after.and_then(|lane| Some(self.workers.get(&worker)?.names.place(lane)));
                let Some((run, at)) = place.and_then(|place| self.forest.locate(place)) else {
                    return Applied { orphaned: blocks.len(), ..Applied::default() };
                };
                Cursor { run, at: at + 1 }
            }
        };
        let applied = self.store_at(worker, cursor, after, blocks, tier);
        self.dismiss_if_empty(worker);
        applied
    }

    pub(super) fn store_at(
        &mut self,
        worker: WorkerKey,
        mut cursor: Cursor,
        after: Option<Lane>,
        blocks: &[HashedBlock],
        tier: Tier,
    ) -> Applied {
        let limit = self.limit();
        if self.admit(worker).is_none() || self.forest.is_full(blocks.len()) {
            return Applied { over_limit: blocks.len(), ..Applied::default() };
        }
        let Self { forest, workers, .. } = self;
        let Some(worker) = workers.get_mut(&worker) else {
            return Applied::default();
        };
        let mut storing =
            Storing { forest, worker, tier, limit, after, applied: Applied::default() };
        let mut rest = blocks;
        while !rest.is_empty() {
            let Some((span, held)) = storing.find_or_extend(cursor, rest) else {
                storing.applied.malformed += rest.len();
                storing.forest.tidy(cursor.run);
                break;
            };
            let len = (span.to - span.from) as usize;
            let entered = storing.enter(&rest[..len], span, held);
            if entered < len {
                storing.applied.over_limit += rest.len() - entered;
                break;
            }
            cursor = Cursor { run: span.run, at: span.to };
            rest = &rest[len..];
        }
        storing.applied
    }

    /// Takes one physical copy of each named block away from a tier.
    pub fn remove(&mut self, worker: WorkerKey, hashes: &[EngineHash], tier: Tier) -> Applied {
        let mut applied = Applied::default();
        let Some(known) = self.workers.get_mut(&worker) else {
            return Applied { unknown: hashes.len(), ..applied };
        };
        let mut near = None;
        let mut going: Option<Going> = None;
        for hash in hashes {
            let Some(lane) = known.names.find_near(near, hash.0) else {
                let aside = known.aside.remove(*hash, tier);
                applied.removed += usize::from(aside);
                applied.unknown += usize::from(!aside);
                continue;
            };
            near = Some(lane);
            if known.names.is_special(lane) || !known.doubles.is_empty() {
                Going::end(&mut going, known, &mut self.forest);
            }
            match known.take_copy(&mut self.forest, lane, tier) {
                None => applied.unknown += 1,
                Some(false) => applied.removed += 1,
                Some(true) => {
                    applied.removed += 1;
                    let place = known.names.place(lane);
                    known.names.remove(lane);
                    if known.doubles.contains_key(&place) {
                        known.release(&mut self.forest, place, lane);
                    } else if !going.as_mut().is_some_and(|going| going.takes(place)) {
                        Going::end(&mut going, known, &mut self.forest);
                        going = Some(Going::new(place));
                    }
                }
            }
        }
        Going::end(&mut going, known, &mut self.forest);
        self.dismiss_if_empty(worker);
        self.forest.compact_if_sparse();
        applied
    }
}

/// Consecutive blocks that are on their way out; engines evict chains from the end,
/// so they are let go together.
struct Going {
    strip: u32,
    from: u32,
    to: u32,
}

impl Going {
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

    fn end(going: &mut Option<Self>, worker: &mut Worker, forest: &mut Forest) {
        if let Some(Self { strip, from, to }) = going.take() {
            worker.release_span(forest, strip, from, to);
        }
    }
}

/// One event that is being stored.
struct Storing<'a> {
    forest: &'a mut Forest,
    worker: &'a mut Worker,
    tier: Tier,
    limit: usize,
    /// The name of the block before.
    after: Option<Lane>,
    applied: Applied,
}

impl Storing<'_> {
    /// Blocks along which the chain goes on, made if need be; and whether the worker
    /// is shown to hold them already. `None` where hashes contradict what is there.
    fn find_or_extend(&mut self, cursor: Cursor, rest: &[HashedBlock]) -> Option<(Span, bool)> {
        let hash = |block: &HashedBlock| block.hash.0;
        if let Some(span) = self.forest.follow(cursor, rest, hash) {
            return Some((span, false));
        }
        let grows = (self.tier == Tier::Device).then_some(self.worker.slot);
        self.forest.extend(cursor, rest, hash, grows)
    }

    /// Enters the names of a span's blocks; says how many found room.
    fn enter(&mut self, blocks: &[HashedBlock], span: Span, held: bool) -> usize {
        let first = self.forest.place(span.run, span.from);
        let mut new = 0..0;
        let mut entered = blocks.len();
        let replaced = self.applied.replaced;
        for (at, block) in blocks.iter().enumerate() {
            let place = Place { offset: first.offset + at as u32, ..first };
            let known = self.worker.names.find(block.engine.0);
            if let Some(lane) = known {
                if self.worker.names.place(lane) == place {
                    self.copy(lane, blocks, &mut new, span, held);
                    continue;
                }
                self.hold(blocks, &mut new, span, held);
                self.replace(lane, span.run);
            }
            let room = self.worker.names.len() < self.limit;
            let name = if room {
                self.worker.names.insert(block.engine.0, place, self.after)
            } else {
                None
            };
            let Some(lane) = name else {
                entered = at;
                break;
            };
            self.after = Some(lane);
            self.applied.stored += 1;
            self.worker.counts[self.tier as usize] += 1;
            if self.tier != Tier::Device {
                self.worker.names.set_special(lane);
                let mut copies = [0; Tier::COUNT];
                copies[self.tier as usize] = 1;
                self.worker.copies.insert(lane, copies);
            }
            if new.end != at {
                self.hold(blocks, &mut new, span, held);
                new = at..at;
            }
            new.end = at + 1;
        }
        self.hold(blocks, &mut new, span, held);
        if held && entered < blocks.len() {
            let left = Span { from: span.from + entered as u32, ..span };
            self.forest.set_tier(left, self.worker.slot, ABSENT);
        }
        if entered < blocks.len() || self.applied.replaced > replaced {
            self.forest.tidy(span.run);
        }
        entered
    }

    /// One more copy of a block that is there under the same name.
    fn copy(
        &mut self,
        lane: Lane,
        blocks: &[HashedBlock],
        new: &mut Range<usize>,
        span: Span,
        held: bool,
    ) {
        // What is entered but not shown yet must be, before tiers change.
        self.hold(blocks, new, span, held);
        self.worker.add_copies(self.forest, lane, self.tier, 1);
        self.after = Some(lane);
        self.applied.stored += 1;
    }

    /// A name that stood for something else.
    fn replace(&mut self, lane: Lane, run: u32) {
        self.applied.replaced += 1;
        // The run at hand must outlive what hangs together with the old block.
        self.forest.pin(run);
        self.worker.forget(self.forest, lane);
        self.forest.meta_mut(run).children -= 1;
        self.after = None;
    }

    /// Shows readers what was entered.
    fn hold(&mut self, blocks: &[HashedBlock], new: &mut Range<usize>, span: Span, held: bool) {
        let range = std::mem::take(new);
        if held || range.is_empty() {
            return;
        }
        let (from, to) = (span.from + range.start as u32, span.from + range.end as u32);
        let lane_at =
            |worker: &Worker, at| worker.names.find(blocks[(at - span.from) as usize].engine.0);
        self.worker.hold(self.forest, Span { from, to, ..span }, self.tier as u8, lane_at);
    }
}
