//! Hot prefixes: which leading blocks recent prompts had in common, how often they are used, and the
//! token ids of those that are used again.
//!
//! Prompts are kept as a tree of runs of blocks (`runs`): what several prompts have in common is one
//! entry. A run counts the prompts that contained it, and each count loses half of its worth in
//! [`HotBounds::half_life_ms`]. A block that a worker holds saves its tokens as often as it is used,
//! so the blocks with the highest counts are the best choice for any number of blocks. A run is never
//! used more often than the run before it, so these blocks are always whole prefixes.
//!
//! Ids are kept only of runs that were used again: [`HotPrefixes::record`] says when they are lacking.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;

use crate::hash::BlockHash;
use crate::runs::{Note, RunId, Runs};

/// Uses from which a run is hot: at the second one if the first was within the half-life.
const USES_MIN: f64 = 1.5;
/// Maximum number of hashes in the prefixes of [`HotPrefixes::hottest`], unless the first prefix is
/// longer. What prefixes have in common is in each of them.
const HOTTEST_HASHES_MAX: usize = 1 << 18;
/// Bytes of memory for each run besides its blocks and ids.
const RUN_BYTES: usize = 192;
/// What is removed beyond the bounds when they are exceeded: an eighth, so that it is seldom done.
const ROOM: usize = 8;

/// The bounds of hot prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotBounds {
    /// Maximum number of bytes of memory.
    pub bytes_max: usize,
    /// Maximum number of runs.
    pub runs_max: usize,
    /// The time in which a use loses half of its worth, in milliseconds.
    pub half_life_ms: u64,
}

/// The prefixes of recent prompts of one model. It has no clock: callers pass a time that never
/// decreases. Its [`fmt::Debug`] shows no ids.
pub struct HotPrefixes {
    bounds: HotBounds,
    /// Tokens per block.
    block_size: usize,
    runs: Runs<RunFacts>,
    runs_count: usize,
    bytes: usize,
}

/// What is known of a run.
#[derive(Default)]
struct RunFacts {
    /// Number of prompts with the run, each counting less with its age, at `at_ms`.
    uses: f64,
    at_ms: u64,
    /// Number of runs that follow this one.
    followers: usize,
    /// The token ids of the run's blocks, if they are known.
    ids: Option<Box<[u32]>>,
    /// Of a prompt's first run, the name of the model or adapter.
    model: Option<Box<str>>,
}

impl Note for RunFacts {
    fn cut(&mut self, first: usize, blocks: usize) -> Self {
        let ids = self.ids.take().map(|ids| {
            let (begin, end) = ids.split_at(ids.len() / blocks.max(1) * first);
            self.ids = Some(end.into());
            begin.into()
        });
        let Self { uses, at_ms, .. } = *self;
        Self { uses, at_ms, followers: 1, ids, model: self.model.take() }
    }
}

/// A prefix that is worth holding.
#[derive(Clone, Debug, PartialEq)]
pub struct HotPrefix {
    /// The hashes of its blocks.
    pub hashes: Vec<BlockHash>,
    /// The end of each of its runs, in blocks, and how often that run is used.
    uses: Vec<(usize, f64)>,
}

impl HotPrefix {
    /// What the blocks from `held` to `blocks` are worth: their number, each times its uses.
    pub fn worth(&self, held: usize, blocks: usize) -> f64 {
        let mut begin = 0;
        let runs = self.uses.iter().map(|&(end, uses)| {
            let (first, last) = (begin.max(held), end.min(blocks));
            begin = end;
            last.saturating_sub(first) as f64 * uses
        });
        runs.sum()
    }
}

/// The tokens of a prefix, with the name that belongs to its namespace.
pub struct PrefixTokens {
    /// The token ids of all blocks.
    pub ids: Vec<u32>,
    /// The model or adapter, as it was given to [`HotPrefixes::record`].
    pub model: Box<str>,
}

impl HotPrefixes {
    /// No prefixes, of blocks of `block_size` tokens.
    pub fn new(bounds: HotBounds, block_size: usize) -> Self {
        Self { bounds, block_size, runs: Runs::default(), runs_count: 0, bytes: 0 }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Counts a prompt of a model or adapter. Returns whether it has hot blocks whose token ids are
    /// not known, and should be given to [`Self::learn`].
    pub fn record(&mut self, now_ms: u64, model: &str, hashes: &[BlockHash]) -> bool {
        // No single prompt replaces all others.
        let per_block = size_of::<BlockHash>() + self.block_size * size_of::<u32>();
        let hashes = &hashes[..hashes.len().min(self.bounds.bytes_max / ROOM / per_block)];
        let (mut known, mut last, mut lacks_ids) = (0, None, false);
        while let Some((mut at, alike)) = self.runs.next(last, &hashes[known..]) {
            if alike < self.runs.get(at).blocks.len() {
                at = self.runs.cut(at, alike);
                (self.runs_count, self.bytes) = (self.runs_count + 1, self.bytes + RUN_BYTES);
            }
            let uses = self.uses(at, now_ms) + 1.0;
            let facts = &mut self.runs.get_mut(at).note;
            (facts.uses, facts.at_ms) = (uses, now_ms);
            lacks_ids |= facts.ids.is_none() && uses >= USES_MIN;
            known += alike;
            last = Some(at);
        }
        let rest = &hashes[known..];
        if !rest.is_empty() {
            let model = last.is_none().then(|| model.into());
            let facts = RunFacts { uses: 1.0, at_ms: now_ms, followers: 0, ids: None, model };
            self.bytes += bytes(rest.len(), &facts);
            self.runs_count += 1;
            self.runs.append(last, rest, facts);
            if let Some(last) = last {
                self.runs.get_mut(last).note.followers += 1;
            }
        }
        self.keep_bounds(now_ms);
        lacks_ids
    }

    /// Takes over the token ids of a prompt for those of its runs that are hot. The ids must be those
    /// from which the hashes were computed.
    pub fn learn(&mut self, now_ms: u64, hashes: &[BlockHash], ids: &[u32]) {
        let (mut known, mut last) = (0, None);
        while let Some((at, alike)) = self.runs.next(last, &hashes[known..]) {
            let is_whole = alike == self.runs.get(at).blocks.len();
            let range = known * self.block_size..(known + alike) * self.block_size;
            let Some(own) = ids.get(range).filter(|_| is_whole) else { break };
            if self.uses(at, now_ms) >= USES_MIN && self.runs.get(at).note.ids.is_none() {
                self.runs.get_mut(at).note.ids = Some(own.into());
                self.bytes += size_of_val(own);
            }
            known += alike;
            last = Some(at);
        }
        self.keep_bounds(now_ms);
    }

    /// The hottest blocks whose tokens are known, at most `blocks_max`, as the prefixes that have all
    /// of them; at most `prefixes_max` of those, the ones of most worth first. None of these prefixes
    /// is the beginning of another one.
    pub fn hottest(&self, now_ms: u64, blocks_max: usize, prefixes_max: usize) -> Vec<HotPrefix> {
        let hot = self.runs.iter().filter(|(_, run)| run.note.ids.is_some());
        let hot = hot.map(|(at, _)| (self.uses(at, now_ms), at));
        let mut hot: Vec<(f64, RunId)> = hot.filter(|(uses, _)| *uses >= USES_MIN).collect();
        hot.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut chosen = ChosenRuns { parts: HashMap::new(), left: blocks_max };
        for (_, at) in hot {
            if chosen.left == 0 {
                break;
            }
            chosen.add(self, now_ms, at);
        }
        let last = |(at, part): &(RunId, Part)| self.runs.get(*at).blocks[part.blocks - 1];
        let ends = chosen.parts.into_iter().filter(|(_, part)| !part.is_followed);
        let mut ends: Vec<(RunId, Part)> = ends.collect();
        ends.sort_by(|a, b| b.1.worth.total_cmp(&a.1.worth).then_with(|| last(a).cmp(&last(b))));
        let mut hashes_left = HOTTEST_HASHES_MAX;
        let mut prefixes: Vec<HotPrefix> = Vec::new();
        for (at, part) in ends.into_iter().take(prefixes_max) {
            if part.end > hashes_left && !prefixes.is_empty() {
                break;
            }
            hashes_left = hashes_left.saturating_sub(part.end);
            prefixes.push(self.prefix(now_ms, at, part.blocks));
        }
        prefixes
    }

    /// The tokens of a prefix; `None` if they are not known, or not any more.
    pub fn tokens(&self, hashes: &[BlockHash]) -> Option<PrefixTokens> {
        let mut ids = Vec::with_capacity(hashes.len() * self.block_size);
        let (mut known, mut last, mut model) = (0, None, None);
        while known < hashes.len() {
            let (at, alike) = self.runs.next(last, &hashes[known..])?;
            let facts = &self.runs.get(at).note;
            ids.extend_from_slice(facts.ids.as_ref()?.get(..alike * self.block_size)?);
            model = model.or(facts.model.as_ref());
            known += alike;
            last = Some(at);
        }
        Some(PrefixTokens { ids, model: model?.clone() })
    }

    /// Removes the least used ends of prompts, until no more than this number of bytes is taken.
    pub fn shrink(&mut self, now_ms: u64, bytes_max: usize) {
        self.remove_coldest(now_ms, bytes_max, usize::MAX);
    }

    /// Bytes of memory that are taken.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of runs, which is at least the number of prefixes.
    pub fn len(&self) -> usize {
        self.runs_count
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.runs_count == 0
    }

    fn uses(&self, at: RunId, now_ms: u64) -> f64 {
        let facts = &self.runs.get(at).note;
        let age =
            now_ms.saturating_sub(facts.at_ms) as f64 / self.bounds.half_life_ms.max(1) as f64;
        facts.uses * (-age).exp2()
    }

    fn prefix(&self, now_ms: u64, end: RunId, blocks: usize) -> HotPrefix {
        let mut path = vec![(end, blocks)];
        let mut at = end;
        while let Some(parent) = self.runs.get(at).parent {
            path.push((parent, self.runs.get(parent).blocks.len()));
            at = parent;
        }
        let mut prefix = HotPrefix { hashes: Vec::new(), uses: Vec::with_capacity(path.len()) };
        for (at, blocks) in path.into_iter().rev() {
            prefix.hashes.extend_from_slice(&self.runs.get(at).blocks[..blocks]);
            prefix.uses.push((prefix.hashes.len(), self.uses(at, now_ms)));
        }
        prefix
    }

    fn keep_bounds(&mut self, now_ms: u64) {
        let HotBounds { bytes_max, runs_max, .. } = self.bounds;
        if self.bytes > bytes_max || self.runs_count > runs_max {
            let (bytes, runs) = (bytes_max - bytes_max / ROOM, runs_max - runs_max / ROOM);
            self.remove_coldest(now_ms, bytes, runs);
        }
    }

    /// Removes runs that no other run follows, the least used ones first.
    fn remove_coldest(&mut self, now_ms: u64, bytes_max: usize, runs_max: usize) {
        let is_within = |all: &Self| all.bytes <= bytes_max && all.runs_count <= runs_max;
        if is_within(self) {
            return;
        }
        // The bits of numbers that are not negative are in the order of the numbers.
        let cold = |all: &Self, at| Reverse((all.uses(at, now_ms).to_bits(), at));
        let ends = self.runs.iter().filter(|(_, run)| run.note.followers == 0);
        let mut ends: BinaryHeap<_> = ends.map(|(at, _)| cold(self, at)).collect();
        while !is_within(self) {
            let Some(Reverse((_, at))) = ends.pop() else { return };
            let run = self.runs.remove(at);
            self.bytes -= bytes(run.blocks.len(), &run.note);
            self.runs_count -= 1;
            let Some(parent) = run.parent else { continue };
            let followers = &mut self.runs.get_mut(parent).note.followers;
            *followers -= 1;
            if *followers == 0 {
                ends.push(cold(self, parent));
            }
        }
    }
}

impl fmt::Debug for HotPrefixes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { runs_count, bytes, .. } = self;
        write!(f, "HotPrefixes({runs_count} runs, {bytes} bytes)")
    }
}

/// Bytes of memory of a run.
fn bytes(blocks: usize, facts: &RunFacts) -> usize {
    let ids = facts.ids.as_ref().map_or(0, |ids| size_of_val(&**ids));
    let model = facts.model.as_ref().map_or(0, |model| model.len());
    RUN_BYTES + blocks * size_of::<BlockHash>() + ids + model
}

/// Runs that are chosen, each with all runs before it.
struct ChosenRuns {
    parts: HashMap<RunId, Part>,
    /// The number of blocks that may still be chosen.
    left: usize,
}

/// The chosen part of a run.
struct Part {
    /// Its leading blocks.
    blocks: usize,
    /// Whether a run after it is chosen as well.
    is_followed: bool,
    /// The number of blocks of the prefix that ends with it.
    end: usize,
    /// The worth of that prefix.
    worth: f64,
}

impl ChosenRuns {
    /// Chooses a run, and those before it that are not chosen yet, as far as there is room. Runs whose
    /// tokens are not known, and those after them, are left out.
    fn add(&mut self, all: &HotPrefixes, now_ms: u64, at: RunId) {
        let (mut path, mut before) = (Vec::new(), Some(at));
        while let Some(at) = before.filter(|at| !self.parts.contains_key(at)) {
            path.push(at);
            before = all.runs.get(at).parent;
        }
        for at in path.into_iter().rev() {
            let run = all.runs.get(at);
            let blocks = run.blocks.len().min(self.left);
            let (mut end, mut worth) = (blocks, blocks as f64 * all.uses(at, now_ms));
            if blocks == 0 || run.note.ids.is_none() {
                return;
            }
            if let Some(parent) = run.parent {
                let whole = all.runs.get(parent).blocks.len();
                // What follows a part of a run is no prefix.
                let part = self.parts.get_mut(&parent).filter(|part| part.blocks == whole);
                let Some(part) = part else { return };
                part.is_followed = true;
                (end, worth) = (part.end + end, part.worth + worth);
            }
            self.left -= blocks;
            self.parts.insert(at, Part { blocks, is_followed: false, end, worth });
        }
    }
}
