//! The runs of all workers and how they are connected; the writer's side.
//!
//! A chain of blocks lies along runs: a run's blocks follow each other, and every child starts at
//! its parent's *end*, so a path is a sequence of whole runs. Where a new chain leaves a run in its
//! middle, the run is split. A run exists while a worker holds a block of it or a child starts at
//! its end; so every run can be reached from its prompt's first block.

use std::sync::Arc;

use super::heads::Heads;
use super::resume_points::ResumePoints;
use super::run::Run;
use super::shared::{IndexState, RUNS_PER_CHUNK, SharedIndex, Slots};
use super::strips::{Place, Strips, reserve_some};
use super::sync::{AtomicU64, Ordering, SwapCell};
use super::words::{Allocator, CHUNK_WORDS, WORDS_MAX, capacity_of};
use super::worker_key::WorkerKey;

/// Maximum length of a strip in blocks, and so of a run; a longer chain continues in a child.
pub(super) const STRIP_BLOCKS_MAX: usize = CHUNK_WORDS / 4;

/// Stands for no run: the place before a prompt's first block.
pub(super) const ROOT: u32 = u32::MAX;

/// The place of the next block of a chain: after the first `at` blocks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cursor {
    pub(super) run: u32,
    pub(super) at: u32,
}

impl Cursor {
    pub(super) const START: Self = Self { run: ROOT, at: 0 };
}

/// Blocks `from` to `to` of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) run: u32,
    pub(super) from: u32,
    pub(super) to: u32,
}

/// The part of a run that only the writer uses.
#[derive(Debug)]
pub(super) struct Meta {
    pub(super) strip: u32,
    /// The place of its first block in the strip.
    pub(super) start: u32,
    /// The block before its first one; `None` at a prompt's start.
    pub(super) parent: Option<Place>,
    /// Number of blocks of the prompt before its first one.
    pub(super) depth: u32,
    /// Number of runs that start at its end, plus pins.
    pub(super) children: u32,
    /// Holders with gaps or slower tiers: for each block, the fastest tier or
    /// [`super::holders::ABSENT`]. Empty for almost every run.
    pub(super) irregular: Vec<(u16, Vec<u8>)>,
}

/// All runs.
#[derive(Debug)]
pub(super) struct Forest {
    pub(super) words: Allocator,
    pub(super) metas: Vec<Meta>,
    pub(super) strips: Strips,
    runs: Vec<Arc<[Run]>>,
    free_runs: Vec<u32>,
    heads: Arc<Heads>,
    /// Number of slots of `heads` that are not empty, including removed ones.
    heads_used: usize,
    slots: Arc<Slots>,
    live: Arc<[AtomicU64]>,
    resume_points: Arc<[(WorkerKey, Arc<ResumePoints>)]>,
    reused: u64,
    shared: Arc<SharedIndex>,
    /// States that readers may still use. The last owner of a state frees what only the state
    /// holds; that must not be a reader.
    replaced: Vec<Arc<IndexState>>,
}

impl Forest {
    pub(super) fn new() -> Self {
        let heads = Arc::new(Heads::with_room(0));
        let slots = Arc::<Slots>::default();
        let state = IndexState {
            words: Default::default(),
            runs: Vec::new(),
            heads: Arc::clone(&heads),
            slots: Arc::clone(&slots),
            live: Arc::new([]),
            resume_points: Arc::new([]),
            reused: 0,
        };
        let shared =
            SharedIndex { state: SwapCell::from_pointee(state), reused: AtomicU64::new(0) };
        Self {
            words: Allocator::default(),
            metas: Vec::new(),
            strips: Strips::default(),
            runs: Vec::new(),
            free_runs: Vec::new(),
            heads,
            heads_used: 0,
            slots,
            live: Arc::new([]),
            resume_points: Arc::new([]),
            reused: 0,
            shared: Arc::new(shared),
            replaced: Vec::new(),
        }
    }

    pub(super) fn shared(&self) -> &Arc<SharedIndex> {
        &self.shared
    }

    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Publishes a worker's slot. Readers with an older state are notified even if the slot was
    /// never used before, because they see its bit being set.
    pub(super) fn add_slot(&mut self, slots: Slots, slot: u16) {
        if self.live.len() < slots.words() {
            let bits = self.live.iter().map(|word| word.load(Ordering::Relaxed));
            self.live = bits.chain([0]).map(AtomicU64::new).collect();
        }
        let word = &self.live[usize::from(slot) / 64];
        word.store(word.load(Ordering::Relaxed) | 1 << (slot % 64), Ordering::Release);
        self.slots = Arc::new(slots);
        self.publish_reused(true);
    }

    /// Hides a worker from readers immediately, and publishes that its slot is free.
    pub(super) fn remove_slot(&mut self, worker: WorkerKey, slot: u16) {
        let word = &self.live[usize::from(slot) / 64];
        word.store(word.load(Ordering::Relaxed) & !(1 << (slot % 64)), Ordering::Release);
        self.slots = Arc::new(self.slots.without(worker));
        self.publish();
    }

    /// Replaces the list of workers with resume points.
    pub(super) fn set_resume_points(&mut self, points: Arc<[(WorkerKey, Arc<ResumePoints>)]>) {
        self.resume_points = points;
        self.publish();
    }

    #[inline]
    pub(super) fn run(&self, run: u32) -> &Run {
        &self.runs[run as usize / RUNS_PER_CHUNK][run as usize % RUNS_PER_CHUNK]
    }

    pub(super) fn meta(&self, run: u32) -> &Meta {
        &self.metas[run as usize]
    }

    pub(super) fn meta_mut(&mut self, run: u32) -> &mut Meta {
        &mut self.metas[run as usize]
    }

    /// Number of runs in use.
    pub(super) fn run_count(&self) -> usize {
        self.metas.len() - self.free_runs.len()
    }

    /// The runs in use.
    pub(super) fn run_ids(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.metas.len() as u32).filter(|run| self.run(*run).len() > 0)
    }

    /// The run that contains a block of a strip now, and the block's position in the run.
    #[inline]
    pub(super) fn locate(&self, place: Place) -> Option<(u32, u32)> {
        let run = self.strips.run_at(place)?;
        let at = place.offset - self.meta(run).start;
        (at < self.run(run).len()).then_some((run, at))
    }

    /// The place of a run's block, which does not change when runs are split or joined.
    #[inline]
    pub(super) fn place(&self, run: u32, at: u32) -> Place {
        let meta = self.meta(run);
        Place { strip: meta.strip, offset: meta.start + at }
    }

    /// The hash of a run's block.
    #[inline]
    pub(super) fn hash(&self, run: u32, at: u32) -> u64 {
        self.strips.hash(&self.words, self.place(run, at))
    }

    /// The blocks of an existing run along which a chain continues from a cursor, at least one;
    /// `None` if no existing run continues the chain, in which case the cursor is at the end of a
    /// run.
    pub(super) fn follow<T>(
        &mut self,
        cursor: Cursor,
        chain: &[T],
        hash: impl Fn(&T) -> u64,
    ) -> Option<Span> {
        let inside = cursor.run != ROOT && cursor.at < self.run(cursor.run).len();
        let (run, from) = if inside {
            (cursor.run, cursor.at)
        } else {
            (self.child(cursor, hash(chain.first()?))?, 0)
        };
        let common = (self.run(run).len() - from).min(chain.len() as u32);
        let words = self.strips.words(&self.words, self.place(run, from), common);
        let agrees = |at: usize| words[at].load(Ordering::Relaxed) == hash(&chain[at]);
        let last = common as usize - 1;
        let agreeing = if agrees(last) {
            common as usize
        } else {
            // Because hashes are chained, two chains that differ at a block differ at all later
            // blocks.
            let (mut low, mut high) = (0, last);
            while low < high {
                let middle = usize::midpoint(low, high);
                if agrees(middle) { low = middle + 1 } else { high = middle }
            }
            low
        };
        if agreeing == 0 {
            self.split(run, from);
            return None;
        }
        Some(Span { run, from, to: from + agreeing as u32 })
    }

    /// The run that starts at a cursor and begins with this block.
    fn child(&self, cursor: Cursor, first: u64) -> Option<u32> {
        let begins = |run| self.run(run).len() > 0 && self.run(run).first() == first;
        let run = self.heads.find(first, begins)?;
        // A hash identifies its whole prefix; the same hash at another depth is invalid input.
        (self.meta(run).depth == self.depth(cursor)).then_some(run)
    }

    /// Number of blocks of the prompt before a cursor.
    fn depth(&self, cursor: Cursor) -> u32 {
        if cursor.run == ROOT { 0 } else { self.meta(cursor.run).depth + cursor.at }
    }

    pub(super) fn parent_of(&self, run: u32) -> u32 {
        let parent = self.meta(run).parent.and_then(|place| self.locate(place));
        parent.map_or(ROOT, |(run, _)| run)
    }

    /// Adds the missing blocks of a chain after a cursor at a run's end (see [`Forest::follow`]);
    /// `None` if the first block's hash already stands for another block. No worker holds the new
    /// blocks, unless `grows` names a worker that holds all of the previous run and the run can be
    /// extended: then this worker holds them.
    pub(super) fn extend<T>(
        &mut self,
        cursor: Cursor,
        chain: &[T],
        hash: impl Fn(&T) -> u64,
        grows: Option<u16>,
    ) -> Option<(Span, bool)> {
        let hashes = chain.iter().map(&hash);
        if let Some(slot) = grows
            && cursor.run != ROOT
            && self.can_grow(cursor.run, slot)
        {
            let room = STRIP_BLOCKS_MAX - self.strips.len(self.meta(cursor.run).strip) as usize;
            if room > 0 {
                let from = self.run(cursor.run).len();
                let to = from + room.min(chain.len()) as u32;
                self.grow(cursor.run, slot, hashes.take(room), to);
                return Some((Span { run: cursor.run, from, to }, true));
            }
        }
        let first = hash(chain.first()?);
        let taken = |run| self.run(run).len() > 0 && self.run(run).first() == first;
        if self.heads.find(first, taken).is_some() {
            return None;
        }
        let len = chain.len().min(STRIP_BLOCKS_MAX) as u32;
        let strip = self.strips.add(&mut self.words, hashes.take(len as usize), len);
        self.publish_if_grown();
        let (parent, depth) = if cursor.run == ROOT {
            (None, 0)
        } else {
            self.meta_mut(cursor.run).children += 1;
            let depth = self.meta(cursor.run).depth + cursor.at;
            (Some(self.place(cursor.run, cursor.at - 1)), depth)
        };
        let run = self.new_run(
            Meta { strip, start: 0, parent, depth, children: 0, irregular: Vec::new() },
            len,
        );
        self.strips.begin(strip, 0, run);
        self.add_head(first, run);
        Some((Span { run, from: 0, to: len }, false))
    }

    /// Whether a run can be extended: it has no children, its strip ends with it, and this worker
    /// and few others hold all of it.
    fn can_grow(&self, run: u32, slot: u16) -> bool {
        let (meta, shared) = (self.meta(run), self.run(run));
        meta.children == 0
            && meta.irregular.is_empty()
            && shared.full().as_row().is_none()
            && shared.full().has(&self.words, slot)
            && meta.start + shared.len() == self.strips.len(meta.strip)
    }

    /// Appends blocks to a run, on behalf of one of the workers that hold all of it.
    fn grow(&mut self, run: u32, slot: u16, hashes: impl Iterator<Item = u64>, to: u32) {
        self.leave_full_to(run, slot);
        let Meta { strip, start, .. } = *self.meta(run);
        let moved = self.strips.grow(&mut self.words, strip, start + to, hashes);
        self.publish_if_grown();
        self.after_move(strip, moved);
        let last = self.hash(run, to - 1);
        self.run(run).set_len(to, last);
    }

    /// Updates the runs of a strip that has moved to new words, and frees the old words.
    fn after_move(&mut self, strip: u32, moved: Option<(super::words::Address, usize)>) {
        let Some((old, words)) = moved else {
            return;
        };
        let at = self.strips.address(strip);
        for &(start, run) in self.strips.pieces(strip) {
            self.run(run).set_strip(at.plus(start));
        }
        self.words.free(old, words);
    }

    /// Splits a run before block `at`; its children become children of the second part.
    fn split(&mut self, run: u32, at: u32) {
        let (len, place) = (self.run(run).len(), self.place(run, at));
        let Meta { depth, children, .. } = *self.meta(run);
        let parent = Some(self.place(run, at - 1));
        let meta = Meta {
            strip: place.strip,
            start: place.offset,
            parent,
            depth: depth + at,
            children,
            irregular: Vec::new(),
        };
        let tail = self.new_run(meta, len - at);
        self.split_holders(run, tail, at);
        // From here on the tail can be found; until the head is shortened no reader searches for
        // it.
        self.add_head(self.hash(run, at), tail);
        self.strips.begin(place.strip, place.offset, tail);
        self.meta_mut(run).children = 1;
        self.run(run).set_len(at, self.hash(run, at - 1));
        self.settle_cut(run, at);
    }

    fn new_run(&mut self, meta: Meta, len: u32) -> u32 {
        let run = self.free_runs.pop().unwrap_or_else(|| {
            let run = self.metas.len();
            if run == self.runs.len() * RUNS_PER_CHUNK {
                // Adds several chunks together, so that publishing is rare.
                for _ in 0..=self.runs.len() / 8 {
                    self.runs.push((0..RUNS_PER_CHUNK).map(|_| Run::default()).collect());
                }
                self.publish();
            }
            reserve_some(&mut self.metas);
            self.metas.push(Meta {
                strip: 0,
                start: 0,
                parent: None,
                depth: 0,
                children: 0,
                irregular: Vec::new(),
            });
            run as u32
        });
        let at = self.strips.address(meta.strip).plus(meta.start);
        let (start, strip) = (meta.start, meta.strip);
        self.metas[run as usize] = meta;
        let first = self.strips.hash(&self.words, Place { strip, offset: start });
        let last = self.strips.hash(&self.words, Place { strip, offset: start + len - 1 });
        self.run(run).renew(at, len, first, last);
        run
    }

    fn add_head(&mut self, first: u64, run: u32) {
        if (self.heads_used + 1) * 4 > self.heads.capacity() * 3 {
            let heads = Heads::with_room(self.run_count() + 1);
            for run in self.run_ids().filter(|other| *other != run) {
                // Only the run that is about to get its head is missing from the table.
                heads.insert(self.run(run).first(), run);
            }
            self.heads_used = self.run_count() - 1;
            self.heads = Arc::new(heads);
            self.publish();
        }
        self.heads_used += usize::from(self.heads.insert(first, run));
    }

    /// Keeps a run alive and unsplit, whether or not a worker holds it.
    pub(super) fn pin(&mut self, run: u32) {
        if run != ROOT {
            self.meta_mut(run).children += 1;
        }
    }

    /// Ends a pin; frees the run if nothing else keeps it.
    pub(super) fn unpin(&mut self, run: u32) {
        if run != ROOT {
            self.meta_mut(run).children -= 1;
            self.tidy(run);
        }
    }

    /// After a holder was removed from a run: frees the run and its ancestors as far as no worker
    /// holds them, and blocks at its end that no worker holds.
    pub(super) fn tidy(&mut self, run: u32) {
        let mut run = run;
        while run != ROOT && self.meta(run).children == 0 {
            if !self.run(run).full().is_empty(&self.words) {
                return;
            }
            let held = self.longest_held(run);
            if held > 0 {
                return self.trim(run, held);
            }
            let parent = self.parent_of(run);
            self.free_run(run);
            if parent != ROOT {
                self.meta_mut(parent).children -= 1;
            }
            run = parent;
        }
    }

    /// Removes the last blocks of a leaf, which no worker holds.
    pub(super) fn trim(&mut self, run: u32, len: u32) {
        if len == self.run(run).len() {
            return;
        }
        self.run(run).set_len(len, self.hash(run, len - 1));
        self.settle_cut(run, len);
        let Meta { strip, start, .. } = *self.meta(run);
        self.cut_strip(strip, start + len);
    }

    fn cut_strip(&mut self, strip: u32, len: u32) {
        let moved = self.strips.cut(&mut self.words, strip, len);
        self.publish_if_grown();
        self.after_move(strip, moved);
    }

    fn free_run(&mut self, run: u32) {
        let first = self.run(run).first();
        self.heads_used -= usize::from(self.heads.remove(first, run));
        self.free_sets(run);
        let Meta { strip, start, .. } = *self.meta(run);
        if self.strips.end(&mut self.words, strip, run) {
            // The leaf was the last run of the strip.
            self.cut_strip(strip, start);
        }
        self.run(run).set_len(0, 0);
        self.free_runs.push(run);
    }

    /// After words or runs were added, and before anything refers to them.
    pub(super) fn publish_if_grown(&mut self) {
        if let Some(reused) = self.words.take_grown() {
            self.publish_reused(reused);
        }
    }

    /// Publishes the state; if a number was `reused`, readers with an older state are notified.
    fn publish_reused(&mut self, reused: bool) {
        self.reused += u64::from(reused);
        self.publish();
        self.shared.reused.store(self.reused, Ordering::Release);
    }

    pub(super) fn publish(&mut self) {
        let old = self.shared.state.swap(Arc::new(IndexState {
            words: self.words.words.clone(),
            runs: self.runs.clone(),
            heads: Arc::clone(&self.heads),
            slots: Arc::clone(&self.slots),
            live: Arc::clone(&self.live),
            resume_points: Arc::clone(&self.resume_points),
            reused: self.reused,
        }));
        self.replaced.push(old);
        self.replaced.retain(|state| Arc::strong_count(state) > 1);
    }

    /// Whether this many further blocks might need more words than addresses can name.
    pub(super) fn is_full(&self, blocks: usize) -> bool {
        self.words.used_words() + self.words.free_words() + 2 * blocks > WORDS_MAX
    }

    /// Whether a run can be found by its first block.
    pub(super) fn is_head(&self, run: u32) -> bool {
        self.heads.find(self.run(run).first(), |found| found == run).is_some()
    }

    /// Number of words in use, counted from their users.
    pub(super) fn words_counted(&self) -> usize {
        let strips = (0..self.strips.count()).filter_map(|strip| self.strips.extent(strip));
        let strips: usize = strips.map(|(_, words)| capacity_of(words)).sum();
        let sets = self.run_ids().map(|run| {
            let run = self.run(run);
            let row = run.full().as_row().map_or(0, |(_, words)| capacity_of(words));
            let partial = match run.partial() {
                list if list.is_empty() || list.as_single().is_some() => 0,
                list => capacity_of(super::holders::list_words(list.extent().1)),
            };
            let tiers = run.tiers();
            let tiers = if tiers.is_empty() { 0 } else { capacity_of(tiers.extent().1) };
            row + partial + tiers
        });
        strips + sets.sum::<usize>()
    }

    /// Memory of the forest in bytes.
    pub(super) fn bytes(&self) -> usize {
        let irregular =
            |meta: &Meta| meta.irregular.iter().map(|(_, tiers)| tiers.len() + 32).sum::<usize>();
        let irregular: usize = self.metas.iter().map(irregular).sum();
        self.words.bytes()
            + self.runs.len() * RUNS_PER_CHUNK * size_of::<Run>()
            + self.metas.capacity() * size_of::<Meta>()
            + self.free_runs.capacity() * size_of::<u32>()
            + self.heads.capacity() * size_of::<u64>()
            + self.strips.bytes()
            + irregular
    }
}
