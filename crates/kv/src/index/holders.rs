//! The workers that hold blocks of a run.
//!
//! Engines evict from the end, so a worker nearly always holds a prefix of a run, in its fastest
//! tier: readers see this as a set of full holders and a list of partial ones. A worker with gaps
//! or slower tiers is *irregular*: its blocks are recorded one by one beside the run, and readers
//! see the prefix up to the first gap, with its tiers.

use super::forest::{Forest, Span};
use super::run::{FullHolders, IN_PLACE, List, PartialHolder, Stretch};
use super::sync::Ordering;
use super::words::Allocator;

/// In place of a tier: the block is not held.
pub(super) const ABSENT: u8 = u8::MAX;
/// The fastest tier, which is not recorded.
const DEVICE: u8 = 0;

impl FullHolders {
    pub(super) fn is_empty(self, words: &Allocator) -> bool {
        match self.as_row() {
            None => self == Self::EMPTY,
            Some((at, len)) => {
                words.slice(at, len).iter().all(|word| word.load(Ordering::Relaxed) == 0)
            }
        }
    }

    pub(super) fn has(self, words: &Allocator, slot: u16) -> bool {
        match self.as_row() {
            None => self.slots().any(|other| other == slot),
            Some((at, len)) => {
                let row = words.slice(at, len);
                let word = row.get(usize::from(slot) / 64);
                word.is_some_and(|word| word.load(Ordering::Relaxed) >> (slot % 64) & 1 == 1)
            }
        }
    }

    /// All slots of the set.
    pub(super) fn all(self, words: &Allocator) -> Vec<u16> {
        match self.as_row() {
            None => self.slots().collect(),
            Some((at, len)) => {
                let row: Vec<u64> =
                    words.slice(at, len).iter().map(|word| word.load(Ordering::Relaxed)).collect();
                super::overlaps::slots_in(&row).collect()
            }
        }
    }
}

impl List {
    /// The entries of a list of partial holders.
    pub(super) fn partials(self, words: &Allocator) -> impl Iterator<Item = PartialHolder> + '_ {
        let single = self.as_single();
        let (at, count) =
            if single.is_some() { (super::words::Address(0), 0) } else { self.extent() };
        let list = words.slice(at, count).iter();
        single.into_iter().chain(list.map(|word| PartialHolder(word.load(Ordering::Relaxed))))
    }
}

/// Whether a worker holds a prefix in the fastest tier and nothing after it.
fn is_plain(tiers: &[u8]) -> bool {
    let beginning = tiers.iter().take_while(|tier| **tier == DEVICE).count();
    tiers[beginning..].iter().all(|tier| *tier == ABSENT)
}

/// Number of words that a list of this many partial holders takes.
pub(super) fn list_words(count: usize) -> usize {
    count.next_power_of_two()
}

impl Forest {
    /// The length of the prefix of a run that a worker holds, in blocks.
    pub(super) fn beginning(&self, run: u32, slot: u16) -> u32 {
        let shared = self.run(run);
        if shared.full().has(&self.words, slot) {
            return shared.len();
        }
        self.find_partial(run, slot).map_or(0, |(_, partial)| partial.blocks())
    }

    pub(super) fn find_partial(&self, run: u32, slot: u16) -> Option<(usize, PartialHolder)> {
        let list = self.run(run).partial();
        if list.is_empty() {
            return None;
        }
        list.partials(&self.words).enumerate().find(|(_, partial)| partial.slot() == slot)
    }

    /// The tier of a block for a worker, or [`ABSENT`].
    pub(super) fn tier_of(&self, run: u32, slot: u16, at: u32) -> u8 {
        if let Some((_, tiers)) = self.meta(run).irregular.iter().find(|(of, _)| *of == slot) {
            return tiers.get(at as usize).copied().unwrap_or(ABSENT);
        }
        if at < self.beginning(run, slot) { DEVICE } else { ABSENT }
    }

    /// Whether a worker holds none of these blocks.
    pub(super) fn holds_none(&self, span: Span, slot: u16) -> bool {
        let irregular = &self.meta(span.run).irregular;
        if !irregular.is_empty() && irregular.iter().any(|(of, _)| *of == slot) {
            return (span.from..span.to).all(|at| self.tier_of(span.run, slot, at) == ABSENT);
        }
        self.beginning(span.run, slot) <= span.from
    }

    /// Sets the tier of these blocks for a worker; [`ABSENT`] if they are no longer held.
    ///
    /// Blocks at a run's end that no worker holds any more stay until [`Forest::tidy`].
    pub(super) fn set_tier(&mut self, span: Span, slot: u16, tier: u8) {
        let Span { run, from, to } = span;
        let irregular = self.meta(run).irregular.iter().position(|(of, _)| *of == slot);
        let beginning = self.beginning(run, slot);
        if irregular.is_none() {
            if tier == DEVICE && from <= beginning {
                return self.set_beginning(run, slot, beginning.max(to));
            }
            if tier == ABSENT && to >= beginning {
                return self.set_beginning(run, slot, beginning.min(from));
            }
        }
        let len = self.run(run).len() as usize;
        let mut tiers = match irregular {
            Some(place) => self.meta_mut(run).irregular.swap_remove(place).1,
            None => vec![DEVICE; beginning as usize],
        };
        tiers.resize(len, ABSENT);
        tiers[from as usize..to as usize].fill(tier);
        self.settle(run, slot, tiers);
    }

    /// Notes that a worker holds nothing of a run any more.
    pub(super) fn drop_holder(&mut self, run: u32, slot: u16) {
        let irregular = self.meta(run).irregular.iter().position(|(of, _)| *of == slot);
        if let Some(place) = irregular {
            self.meta_mut(run).irregular.swap_remove(place);
        }
        self.set_beginning(run, slot, 0);
        if irregular.is_some() {
            self.show_tiers(run);
        }
    }

    /// Records what a worker holds, block by block.
    fn settle(&mut self, run: u32, slot: u16, tiers: Vec<u8>) {
        let beginning = tiers.iter().take_while(|tier| **tier != ABSENT).count();
        if !is_plain(&tiers) {
            self.meta_mut(run).irregular.push((slot, tiers));
        }
        // Readers ignore tiers beyond the blocks that a worker holds. So when blocks are added,
        // their tiers are written first, and when blocks are removed, their tiers are removed last.
        let beginning = beginning as u32;
        let is_less = beginning < self.beginning(run, slot);
        if is_less {
            self.set_beginning(run, slot, beginning);
        }
        self.show_tiers(run);
        if !is_less {
            self.set_beginning(run, slot, beginning);
        }
    }

    /// Publishes the slower tiers of a run's holders to readers.
    fn show_tiers(&mut self, run: u32) {
        let mut stretches = Vec::new();
        for (slot, tiers) in &self.meta(run).irregular {
            let held = tiers.iter().take_while(|tier| **tier != ABSENT);
            let mut last = DEVICE;
            for (at, tier) in held.enumerate() {
                if *tier != last {
                    stretches.push(Stretch::new(*slot, *tier, at as u32).0);
                    last = *tier;
                }
            }
        }
        let old = self.run(run).tiers();
        if stretches.is_empty() && old.is_empty() {
            return;
        }
        let new = self.new_list(&stretches, stretches.len());
        self.run(run).set_tiers(new);
        self.free_list(old, old.extent().1);
    }

    fn new_list(&mut self, entries: &[u64], words: usize) -> List {
        if entries.is_empty() {
            return List::EMPTY;
        }
        let at = self.words.allocate(words);
        self.publish_if_grown();
        for (word, entry) in self.words.slice(at, entries.len()).iter().zip(entries) {
            word.store(*entry, Ordering::Release);
        }
        List::of(at, entries.len())
    }

    fn free_list(&mut self, list: List, words: usize) {
        if !list.is_empty() && list.as_single().is_none() {
            self.words.free(list.extent().0, words);
        }
    }

    /// Publishes to readers that a worker holds the first `blocks` of a run. Until the last step
    /// the worker is always in at least one of the two sets.
    fn set_beginning(&mut self, run: u32, slot: u16, blocks: u32) {
        let is_full = self.run(run).full().has(&self.words, slot);
        if blocks == self.run(run).len() {
            if !is_full {
                self.add_full(run, slot);
            }
            self.remove_partial(run, slot);
        } else if blocks == 0 {
            if is_full {
                self.remove_full(run, slot);
            }
            self.remove_partial(run, slot);
        } else {
            self.set_partial(run, PartialHolder::new(slot, blocks));
            if is_full {
                self.remove_full(run, slot);
            }
        }
    }

    /// Moves all full holders but one to the partial holders, before a run is extended.
    pub(super) fn leave_full_to(&mut self, run: u32, slot: u16) {
        let (full, len) = (self.run(run).full(), self.run(run).len());
        let sole = FullHolders::of(&[slot]);
        if full != sole {
            for other in full.slots().filter(|other| *other != slot) {
                self.set_partial(run, PartialHolder::new(other, len));
            }
            self.run(run).set_full(sole);
        }
    }

    fn add_full(&mut self, run: u32, slot: u16) {
        let full = self.run(run).full();
        let width = usize::from(slot) / 64 + 1;
        if let Some((at, words)) = full.as_row()
            && width <= words
        {
            let word = &self.words.slice(at, words)[usize::from(slot) / 64];
            word.store(word.load(Ordering::Relaxed) | 1 << (slot % 64), Ordering::Release);
            return self.run(run).raise();
        }
        let mut slots = full.all(&self.words);
        slots.push(slot);
        let new = self.new_full(&slots);
        self.replace_full(run, new);
    }

    fn remove_full(&mut self, run: u32, slot: u16) {
        let full = self.run(run).full();
        let slots = match full.as_row() {
            None => full.slots().filter(|other| *other != slot).collect(),
            Some((at, words)) => {
                let word = &self.words.slice(at, words)[usize::from(slot) / 64];
                word.store(word.load(Ordering::Relaxed) & !(1 << (slot % 64)), Ordering::Release);
                self.run(run).raise();
                full.all(&self.words)
            }
        };
        // A row is removed when only half of the slots that fit in place are left, to avoid
        // switching back and forth.
        if full.as_row().is_none() || slots.len() <= IN_PLACE / 2 {
            self.replace_full(run, FullHolders::of(&slots));
        }
    }

    fn new_full(&mut self, slots: &[u16]) -> FullHolders {
        if slots.len() <= IN_PLACE {
            return FullHolders::of(slots);
        }
        let highest = slots.iter().copied().max().map_or(0, usize::from);
        let words = (highest / 64 + 1).max(self.slots().words());
        let at = self.words.allocate(words);
        self.publish_if_grown();
        let mut row = vec![0_u64; words];
        for slot in slots {
            row[usize::from(*slot) / 64] |= 1 << (slot % 64);
        }
        for (word, bits) in self.words.slice(at, words).iter().zip(row) {
            word.store(bits, Ordering::Release);
        }
        FullHolders::row(at, words)
    }

    fn replace_full(&mut self, run: u32, new: FullHolders) {
        let old = self.run(run).full();
        self.run(run).set_full(new);
        if let Some((at, words)) = old.as_row() {
            self.words.free(at, words);
        }
    }

    fn set_partial(&mut self, run: u32, partial: PartialHolder) {
        let list = self.run(run).partial();
        let found = self.find_partial(run, partial.slot());
        if list.is_empty() || (list.as_single().is_some() && found.is_some()) {
            return self.run(run).set_partial(List::single(partial));
        }
        if let Some((place, _)) = found {
            let (at, count) = list.extent();
            self.words.slice(at, count)[place].store(partial.0, Ordering::Release);
            return self.run(run).raise();
        }
        let single = list.as_single();
        let count = single.map_or_else(|| list.extent().1, |_| 1);
        if single.is_none() && list_words(count) == list_words(count + 1) {
            let at = list.extent().0;
            self.words.slice(at, count + 1)[count].store(partial.0, Ordering::Release);
            return self.run(run).set_partial(List::of(at, count + 1));
        }
        let mut entries: Vec<u64> = list.partials(&self.words).map(|entry| entry.0).collect();
        entries.push(partial.0);
        self.replace_partials(run, &entries);
    }

    fn remove_partial(&mut self, run: u32, slot: u16) {
        let Some((place, _)) = self.find_partial(run, slot) else {
            return;
        };
        let list = self.run(run).partial();
        if list.as_single().is_some() {
            return self.run(run).set_partial(List::EMPTY);
        }
        let (at, count) = list.extent();
        if count > 2 && list_words(count) == list_words(count - 1) {
            let words = self.words.slice(at, count);
            words[place].store(words[count - 1].load(Ordering::Relaxed), Ordering::Release);
            self.run(run).raise();
            return self.run(run).set_partial(List::of(at, count - 1));
        }
        let mut entries: Vec<u64> = list.partials(&self.words).map(|entry| entry.0).collect();
        entries.swap_remove(place);
        self.replace_partials(run, &entries);
    }

    fn replace_partials(&mut self, run: u32, entries: &[u64]) {
        let old = self.run(run).partial();
        let new = match entries {
            [single] => List::single(PartialHolder(*single)),
            _ => self.new_list(entries, list_words(entries.len().max(1))),
        };
        self.run(run).set_partial(new);
        if old.as_single().is_none() {
            self.free_list(old, list_words(old.extent().1.max(1)));
        }
    }

    /// The longest prefix that any worker holds of a run that no worker holds in full.
    pub(super) fn longest_held(&self, run: u32) -> u32 {
        let last = |tiers: &[u8]| tiers.iter().rposition(|tier| *tier != ABSENT);
        let irregular = self.meta(run).irregular.iter();
        let irregular = irregular.filter_map(|(_, tiers)| last(tiers)).max();
        let list = self.run(run).partial();
        let partial = list.partials(&self.words).map(PartialHolder::blocks).max();
        irregular.map_or(0, |last| last as u32 + 1).max(partial.unwrap_or(0))
    }

    /// Gives the second part of a run, from block `at` on, its holders.
    pub(super) fn split_holders(&mut self, run: u32, tail: u32, at: u32) {
        let full = self.run(run).full();
        let slots = full.all(&self.words);
        let new = self.new_full(&slots);
        self.run(tail).set_full(new);
        let partials: Vec<_> = self.run(run).partial().partials(&self.words).collect();
        for partial in partials.iter().filter(|partial| partial.blocks() > at) {
            self.set_partial(tail, PartialHolder::new(partial.slot(), partial.blocks() - at));
        }
        for place in 0..self.meta(run).irregular.len() {
            let (slot, tiers) = &self.meta(run).irregular[place];
            let (slot, second) = (*slot, tiers.get(at as usize..).unwrap_or_default().to_vec());
            let mut second = second;
            second.resize(self.run(tail).len() as usize, ABSENT);
            self.settle(tail, slot, second);
        }
    }

    /// After a run was shortened to `len` blocks: workers that hold all remaining blocks become
    /// full holders, and workers that hold a plain prefix are no longer irregular.
    pub(super) fn settle_cut(&mut self, run: u32, len: u32) {
        if !self.meta(run).irregular.is_empty() {
            self.meta_mut(run).irregular.retain_mut(|(_, tiers)| {
                tiers.resize(len as usize, ABSENT);
                !is_plain(tiers)
            });
            self.show_tiers(run);
        }
        let partials: Vec<_> = self.run(run).partial().partials(&self.words).collect();
        for partial in partials.iter().filter(|partial| partial.blocks() >= len) {
            self.set_beginning(run, partial.slot(), len);
        }
    }

    /// Frees the sets of a run that no worker holds.
    pub(super) fn free_sets(&mut self, run: u32) {
        self.replace_full(run, FullHolders::EMPTY);
        self.replace_partials(run, &[]);
        let tiers = self.run(run).tiers();
        self.run(run).set_tiers(List::EMPTY);
        self.free_list(tiers, tiers.extent().1);
    }
}
