//! Returns memory: moves the words in use together when much of the memory is unused.

use super::forest::Forest;
use super::run::{FullHolders, List};
use super::sync::Ordering;
use super::words::Address;

/// Number of unused words below which moving is not worthwhile; small in unit tests.
const FLOOR_WORDS: usize = if cfg!(test) { 1 << 6 } else { 1 << 12 };

impl Forest {
    /// Moves all words in use to new chunks and frees the old ones, if the unused words exceed a
    /// third of the used ones by `FLOOR_WORDS`. Takes time proportional to the words in use, and
    /// happens only after a proportional number was freed.
    pub(super) fn compact_if_sparse(&mut self) {
        if self.words.free_words() <= self.words.used_words() / 3 + FLOOR_WORDS {
            return;
        }
        let retired = self.words.retire();
        for strip in 0..self.strips.count() {
            if let Some((at, words)) = self.strips.extent(strip) {
                let new = self.moved(at, words);
                self.strips.set_address(strip, new);
                for place in 0..self.strips.pieces(strip).len() {
                    let (start, run) = self.strips.pieces(strip)[place];
                    self.run(run).set_strip(new.plus(start));
                }
            }
        }
        let runs: Vec<u32> = self.run_ids().collect();
        for run in runs {
            self.move_sets(run);
        }
        self.words.drop_chunks(&retired);
        self.publish();
    }

    fn move_sets(&mut self, run: u32) {
        if let Some((at, words)) = self.run(run).full().as_row() {
            let new = self.moved(at, words);
            self.run(run).set_full(FullHolders::row(new, words));
        }
        let partial = self.run(run).partial();
        if !partial.is_empty() && partial.as_single().is_none() {
            let (at, count) = partial.extent();
            let new = self.moved(at, super::holders::list_words(count));
            self.run(run).set_partial(List::of(new, count));
        }
        let tiers = self.run(run).tiers();
        if !tiers.is_empty() {
            let (at, count) = tiers.extent();
            let new = self.moved(at, count);
            self.run(run).set_tiers(List::of(new, count));
        }
    }

    /// A copy of an extent in the new chunks, which readers can already access.
    fn moved(&mut self, at: Address, words: usize) -> Address {
        let new = self.words.allocate(words);
        self.publish_if_grown();
        let (from, to) = (self.words.slice(at, words), self.words.slice(new, words));
        for (from, to) in from.iter().zip(to) {
            to.store(from.load(Ordering::Relaxed), Ordering::Release);
        }
        new
    }
}
