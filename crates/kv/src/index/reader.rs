//! Looks up a prompt: follows its runs from the first block, without waiting.

use std::sync::Arc;

use super::overlaps::{Overlaps, ResumedPrompt};
use super::run::{FullHolders, PartialHolder, Run, Stretch, View};
use super::shared::{IndexState, SharedIndex};
use super::sync::{Ordering, look_again};
use super::worker_key::WorkerKey;
use crate::hash::BlockHash;
use crate::prefetch::prefetch;

/// Reads an index from any thread, while its writer continues.
///
/// Events whose application ended before the call are seen completely. Of an event that is being
/// applied during the call, some runs may be seen before and some after it. Each worker's overlap
/// therefore consists of stretches that this worker really held at some time during the call; a
/// block that it did not hold at all during the call is never counted.
#[derive(Clone, Debug)]
pub struct IndexReader {
    pub(super) shared: Arc<SharedIndex>,
}

/// A walk must be repeated, because the writer changed something.
struct ConcurrentChange;

#[cfg(all(test, not(loom)))]
mod tests;

impl IndexReader {
    /// Finds how much of a prompt each worker holds; `hashes` are the prompt's, from
    /// [`chain_hashes`](crate::hash::chain_hashes). Clears `out` first.
    ///
    /// A worker with several cache groups resumes at a point before the prompt's last token, which
    /// is taken to be after the last of the blocks. See [`Self::find_resumed`] for other prompts.
    ///
    /// Never waits: it repeats what the writer changed meanwhile, so only a writer that makes
    /// progress can delay it.
    pub fn find(&self, hashes: &[BlockHash], out: &mut Overlaps) {
        self.find_resumed(hashes, hashes.len() as u32, out);
    }

    /// [`Self::find`], where a worker with several cache groups resumes after at most `resumed_max`
    /// blocks: an engine computes the last token of a prompt, which may be that of its last block.
    pub fn find_resumed(&self, hashes: &[BlockHash], resumed_max: u32, out: &mut Overlaps) {
        loop {
            let state = self.shared.state.load();
            if self.find_in(&state, hashes, out).is_ok() {
                return resume(&state, hashes, resumed_max, out);
            }
            look_again();
        }
    }

    fn find_in(
        &self,
        state: &IndexState,
        hashes: &[BlockHash],
        out: &mut Overlaps,
    ) -> Result<(), ConcurrentChange> {
        match walk(state, hashes, out)? {
            // The run may be in a table that replaced this one, or among runs added since.
            End::Missing if !self.shared.state.load().finds_the_same(state) => {
                Err(ConcurrentChange)
            }
            End::Missing | End::Run => self.allow_for_reuse(state, out),
        }
    }

    /// Handles the case that numbers in the state were reused while the walk used them.
    fn allow_for_reuse(
        &self,
        state: &IndexState,
        out: &mut Overlaps,
    ) -> Result<(), ConcurrentChange> {
        if self.shared.reused.load(Ordering::Acquire) <= state.reused {
            return Ok(());
        }
        let now = self.shared.state.load();
        if now.words.reused != state.words.reused {
            return Err(ConcurrentChange);
        }
        // A worker that lost its slot held nothing at some time during the call. Repeating the walk
        // would let a worker that repeatedly joins and leaves delay readers.
        out.forget_others(&now.slots);
        Ok(())
    }
}

/// Finds where workers with several cache groups resume the prompt.
fn resume(state: &IndexState, hashes: &[BlockHash], resumed_max: u32, out: &mut Overlaps) {
    out.resumed_max = resumed_max;
    if state.resume_points.is_empty() {
        return;
    }
    let mut resumed = std::mem::take(&mut out.resumed);
    resumed.resize(out.slots.keys.len(), None);
    let slot = |worker: WorkerKey| out.slots.of(worker).map(usize::from);
    let hybrids =
        || state.resume_points.iter().filter_map(|(key, points)| Some((slot(*key)?, points)));
    hybrids().for_each(|(slot, _)| resumed[slot] = Some(ResumedPrompt::default()));
    // All depths at once, because finding one takes a step for each worker that ends alone.
    for (slot, depth) in out.depths() {
        let found = resumed[usize::from(slot)].as_mut();
        found.into_iter().for_each(|found| found.held = depth);
    }
    for (slot, points) in hybrids() {
        let found = resumed[slot].as_mut();
        found.into_iter().for_each(|found| {
            found.usable = points.deepest(hashes, found.held.min(resumed_max));
            found.shortened = match found.held.checked_sub(1) {
                Some(before_last) if found.usable > before_last => {
                    points.deepest(hashes, before_last)
                }
                _ => found.usable,
            };
        });
    }
    out.resumed = resumed;
}

/// Where a walk ended.
enum End {
    /// Within a run, or because no worker or no block was left.
    Run,
    /// No run begins with the next block.
    Missing,
}

fn walk(
    state: &IndexState,
    hashes: &[BlockHash],
    out: &mut Overlaps,
) -> Result<End, ConcurrentChange> {
    out.clear();
    if !Arc::ptr_eq(&out.slots, &state.slots) {
        out.slots = Arc::clone(&state.slots);
    }
    out.alive.clear();
    out.alive.extend(state.live.iter().map(|word| word.load(Ordering::Acquire)));
    // A prompt is compared at the ends of runs, usually also at its own end.
    hashes.last().map(prefetch);
    let mut rest = hashes;
    let mut before: Option<(&Run, u32)> = None;
    let mut end = End::Run;
    while let Some(&BlockHash(hash)) = rest.first() {
        let Some((_, run)) = state.find(hash) else {
            // If the previous run was not extended, split or joined, the walk ends here.
            if before.is_some_and(|(run, version)| !run.unchanged(version)) {
                return Err(ConcurrentChange);
            }
            end = End::Missing;
            break;
        };
        let depth = (hashes.len() - rest.len()) as u32;
        let (view, matched) = step(state, run, rest, depth, out)?;
        close(depth, out);
        rest = &rest[matched as usize..];
        if matched < view.len || out.alive.iter().all(|word| *word == 0) {
            break;
        }
        before = Some((run, view.version));
    }
    let depth = (hashes.len() - rest.len()) as u32;
    out.next.fill(0);
    out.parted.fill(0);
    close(depth, out);
    Ok(end)
}

/// Records the workers of `alive` that neither continue nor ended alone: their overlap is `depth`.
fn close(depth: u32, out: &mut Overlaps) {
    if depth > 0 {
        let from = out.bits.len();
        let sets = out.alive.iter().zip(&out.next).zip(&out.parted);
        out.bits.extend(sets.map(|((alive, next), parted)| alive & !next & !parted));
        if out.bits[from..].iter().all(|word| *word == 0) {
            out.bits.truncate(from);
        } else {
            out.groups.push(depth);
        }
    }
    std::mem::swap(&mut out.alive, &mut out.next);
}

/// Reads one run, repeatedly if it was changed meanwhile: how far the prompt follows it, which
/// workers continue (`next`), and which end within it (`singles`).
fn step(
    state: &IndexState,
    run: &Run,
    rest: &[BlockHash],
    depth: u32,
    out: &mut Overlaps,
) -> Result<(View, u32), ConcurrentChange> {
    let (singles, slower) = (out.singles.len(), out.slower.len());
    loop {
        let view = run.view();
        let matched = if view.first == rest[0].0 { matched(state, &view, rest) } else { None };
        let read = matched.and_then(|matched| {
            read_full(state, view.full, out)?;
            read_partial(state, &view, matched, depth, out)?;
            if !view.tiers.is_empty() {
                read_tiers(state, &view, matched, depth, singles, out)?;
            }
            Some(matched)
        });
        match read {
            Some(matched) if run.unchanged(view.version) => return Ok((view, matched)),
            // It is no longer the same run, or this state cannot address it.
            None => return Err(ConcurrentChange),
            Some(_) => {
                out.singles.truncate(singles);
                out.slower.truncate(slower);
                look_again();
            }
        }
    }
}

/// How many blocks of the prompt lie along a run; `None` if words are out of date.
///
/// A chained hash stands for its whole prefix: if the last blocks are equal, all are, and the first
/// difference can be found by binary search.
#[inline]
fn matched(state: &IndexState, view: &View, rest: &[BlockHash]) -> Option<u32> {
    let len = view.len as usize;
    // The next run is looked up by this hash.
    rest.get(len).map(prefetch);
    if len <= rest.len() && rest[len.checked_sub(1)?].0 == view.last {
        return Some(view.len);
    }
    let hashes = state.words.get(view.strip, len)?;
    let common = len.min(rest.len());
    let agrees = |place: usize| hashes[place].load(Ordering::Relaxed) == rest[place].0;
    if agrees(common - 1) {
        return Some(common as u32);
    }
    // The first blocks are equal, the last common position differs.
    let (mut agreeing, mut parting) = (0, common - 1);
    while parting - agreeing > 1 {
        let middle = usize::midpoint(agreeing, parting);
        if agrees(middle) {
            agreeing = middle;
        } else {
            parting = middle;
        }
    }
    Some(parting.max(1) as u32)
}

#[inline]
fn read_full(state: &IndexState, full: FullHolders, out: &mut Overlaps) -> Option<()> {
    out.next.clear();
    if let Some((at, words)) = full.as_row() {
        let row = state.words.get(at, words)?;
        let sets = row.iter().zip(&out.alive);
        out.next.extend(sets.map(|(row, alive)| row.load(Ordering::Relaxed) & alive));
        out.next.resize(out.alive.len(), 0);
        return Some(());
    }
    out.next.resize(out.alive.len(), 0);
    for slot in full.slots() {
        let word = usize::from(slot) / 64;
        if let Some(alive) = out.alive.get(word) {
            out.next[word] |= alive & 1 << (slot % 64);
        }
    }
    Some(())
}

#[inline]
fn read_partial(
    state: &IndexState,
    view: &View,
    matched: u32,
    depth: u32,
    out: &mut Overlaps,
) -> Option<()> {
    out.parted.clear();
    out.parted.resize(out.alive.len(), 0);
    if view.partial.is_empty() {
        return Some(());
    }
    if let Some(partial) = view.partial.as_single() {
        take_partial(partial, matched, depth, out);
        return Some(());
    }
    let (at, count) = view.partial.extent();
    let list = state.words.get(at, count)?;
    out.singles.reserve(count);
    for word in list {
        take_partial(PartialHolder(word.load(Ordering::Relaxed)), matched, depth, out);
    }
    Some(())
}

#[inline]
fn take_partial(partial: PartialHolder, matched: u32, depth: u32, out: &mut Overlaps) {
    let (word, bit) = (usize::from(partial.slot()) / 64, 1 << (partial.slot() % 64));
    let Some(alive) = out.alive.get(word) else {
        return;
    };
    // A worker that is also a full holder, or is listed twice for a moment, counts once.
    if alive & bit & !out.next[word] & !out.parted[word] == 0 {
        return;
    }
    if partial.blocks() >= matched {
        out.next[word] |= bit;
    } else {
        out.parted[word] |= bit;
        if depth + partial.blocks() > 0 {
            out.singles.push(partial.0 + u64::from(depth));
        }
    }
}

/// Counts the blocks that are not in the fastest tier. Rarely needed.
fn read_tiers(
    state: &IndexState,
    view: &View,
    matched: u32,
    depth: u32,
    singles: usize,
    out: &mut Overlaps,
) -> Option<()> {
    let (at, count) = view.tiers.extent();
    let list = state.words.get(at, count)?;
    let stretch = |place: usize| list.get(place).map(|word| Stretch(word.load(Ordering::Relaxed)));
    for place in 0..count {
        let Some(this) = stretch(place).filter(|stretch| stretch.tier() > 0) else {
            continue;
        };
        let slot = this.slot();
        let goes_on =
            out.next.get(usize::from(slot) / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1);
        let held = if goes_on {
            matched
        } else {
            let own = out.singles[singles..].iter().find(|word| (*word >> 32) as u16 == slot);
            own.map_or(0, |word| *word as u32 - depth)
        };
        let end = stretch(place + 1)
            .filter(|next| next.slot() == slot)
            .map_or(held, |next| next.start().min(held));
        if end > this.start() && this.tier() < 4 {
            out.slower.push((slot, this.tier(), end - this.start()));
        }
    }
    Some(())
}
