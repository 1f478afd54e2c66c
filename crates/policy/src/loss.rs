//! Where cache hits were lost.
//!
//! The best that a stream of requests allows is one cache without bounds, shared by all
//! workers: each block that came before is a hit. What is missing from that has one of five
//! reasons, found by asking at each step how far the prompt's leading blocks still reach:
//!
//! ```text
//! came before in the stream            the best possible
//!   - computed by any worker           cold: still under way, or it failed
//!   - held by any worker now           evicted
//!   - held by the worker chosen        diverted: its load, or the policy, spoke against it
//!   - found by the engine              stale: the index promised more; or parity, where
//!                                      router and engine do not name blocks alike
//! ```
//!
//! Each step can only be shorter than the one before, so the five add up to all that is
//! missing, exactly. Where an engine found more than it was believed to hold, the steps
//! before it are taken to have reached as far.

use std::collections::HashMap;

use serde::Serialize;

/// How far a prompt's leading blocks reach. Blocks are full ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Of the whole prompt.
    pub prompt_blocks: u32,
    /// Those that came before in the stream.
    pub seen_blocks: u32,
    /// Those that some worker had computed when the request came.
    pub computed_blocks: u32,
    /// The most that any worker held.
    pub held_blocks: u32,
    /// What the worker that was chosen was believed to hold.
    pub chosen_blocks: u32,
    /// What its engine found.
    pub hit_blocks: u32,
    /// Whether the worker was known not to name blocks as the router does.
    pub parity_broken: bool,
}

/// Sums over requests, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Loss {
    /// How many requests.
    pub requests: u64,
    /// All that their prompts had.
    pub prompt_blocks: u64,
    /// The best possible hits.
    pub best_blocks: u64,
    /// The hits there were.
    pub hit_blocks: u64,
    /// Not hit, since nobody had computed them yet.
    pub cold_blocks: u64,
    /// Not hit, since nobody held them any more.
    pub evicted_blocks: u64,
    /// Not hit, since another worker was chosen than one that held them.
    pub diverted_blocks: u64,
    /// Not hit, since the worker did not hold what the index said.
    pub stale_blocks: u64,
    /// The same on a worker that does not name blocks as the router does.
    pub parity_blocks: u64,
}

/// Parts of what is missing. They add up to 1 unless nothing is missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LossShares {
    /// Of [`Loss::cold_blocks`].
    pub cold: f64,
    /// Of [`Loss::evicted_blocks`].
    pub evicted: f64,
    /// Of [`Loss::diverted_blocks`].
    pub diverted: f64,
    /// Of [`Loss::stale_blocks`].
    pub stale: f64,
    /// Of [`Loss::parity_blocks`].
    pub parity: f64,
}

impl Loss {
    /// Adds a request.
    pub fn add(&mut self, reach: &Reach) {
        let hits = reach.hit_blocks.min(reach.prompt_blocks);
        let step = |blocks: u32, before: u32| blocks.min(before).max(hits);
        let seen = step(reach.seen_blocks, reach.prompt_blocks);
        let computed = step(reach.computed_blocks, seen);
        let held = step(reach.held_blocks, computed);
        let chosen = step(reach.chosen_blocks, held);
        self.requests += 1;
        self.prompt_blocks += u64::from(reach.prompt_blocks);
        self.best_blocks += u64::from(seen);
        self.hit_blocks += u64::from(hits);
        self.cold_blocks += u64::from(seen - computed);
        self.evicted_blocks += u64::from(computed - held);
        self.diverted_blocks += u64::from(held - chosen);
        let missed = u64::from(chosen - hits);
        if reach.parity_broken {
            self.parity_blocks += missed;
        } else {
            self.stale_blocks += missed;
        }
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.prompt_blocks += other.prompt_blocks;
        self.best_blocks += other.best_blocks;
        self.hit_blocks += other.hit_blocks;
        self.cold_blocks += other.cold_blocks;
        self.evicted_blocks += other.evicted_blocks;
        self.diverted_blocks += other.diverted_blocks;
        self.stale_blocks += other.stale_blocks;
        self.parity_blocks += other.parity_blocks;
    }

    /// All that is missing from the best possible hits.
    pub fn lost_blocks(&self) -> u64 {
        self.best_blocks - self.hit_blocks
    }

    /// The part of the best possible hits that there was; 1 where none was possible.
    pub fn share_of_best(&self) -> f64 {
        if self.best_blocks == 0 { 1.0 } else { self.hit_blocks as f64 / self.best_blocks as f64 }
    }

    /// The five parts.
    pub fn shares(&self) -> LossShares {
        let lost = self.lost_blocks();
        if lost == 0 {
            return LossShares::default();
        }
        let share = |blocks: u64| blocks as f64 / lost as f64;
        LossShares {
            cold: share(self.cold_blocks),
            evicted: share(self.evicted_blocks),
            diverted: share(self.diverted_blocks),
            stale: share(self.stale_blocks),
            parity: share(self.parity_blocks),
        }
    }
}

/// Buckets of a [`LossWindow`].
const BUCKETS: usize = 60;

/// Sums over a window of time, which moves on by a sixtieth of itself.
#[derive(Clone, Debug)]
pub struct LossWindow {
    buckets: [Loss; BUCKETS],
    bucket_ns: u64,
    current: u64,
}

impl LossWindow {
    /// A window of so many nanoseconds.
    pub fn new(window_ns: u64) -> Self {
        let bucket_ns = (window_ns / BUCKETS as u64).max(1);
        Self { buckets: [Loss::default(); BUCKETS], bucket_ns, current: 0 }
    }

    /// Adds a request. Time that goes back counts as none that passed.
    pub fn add(&mut self, now_ns: u64, reach: &Reach) {
        self.advance(now_ns);
        self.buckets[(self.current % BUCKETS as u64) as usize].add(reach);
    }

    /// What is in the window now.
    pub fn sum(&mut self, now_ns: u64) -> Loss {
        self.advance(now_ns);
        let mut sum = Loss::default();
        self.buckets.iter().for_each(|bucket| sum.merge(bucket));
        sum
    }

    fn advance(&mut self, now_ns: u64) {
        let now = now_ns / self.bucket_ns;
        let passed = now.saturating_sub(self.current).min(BUCKETS as u64);
        for i in 1..=passed {
            self.buckets[((self.current + i) % BUCKETS as u64) as usize] = Loss::default();
        }
        // All of them are empty where more than a window has passed: any place will do.
        self.current = self.current.max(now);
    }
}

/// Remembers which blocks came, and which were computed: as many as it may, the recent ones.
#[derive(Clone, Debug)]
pub struct Stream {
    /// Whether each was computed. What is older than the newest half is in the second one.
    young: HashMap<u64, bool>,
    old: HashMap<u64, bool>,
    blocks_max: usize,
}

impl Stream {
    /// Remembers at least half as many blocks, and at most so many.
    pub fn new(blocks_max: usize) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), blocks_max }
    }

    /// A prompt comes: how many of its leading blocks came before, and how many were computed.
    pub fn came(&mut self, blocks: impl Iterator<Item = u64> + Clone) -> (u32, u32) {
        let seen = blocks.clone().take_while(|block| self.get(*block).is_some()).count();
        let computed = blocks.clone().take_while(|block| self.get(*block) == Some(true)).count();
        blocks.for_each(|block| self.put(block, false));
        (seen as u32, computed as u32)
    }

    /// A prompt's blocks have been computed.
    pub fn computed(&mut self, blocks: impl Iterator<Item = u64>) {
        blocks.for_each(|block| self.put(block, true));
    }

    fn get(&self, block: u64) -> Option<bool> {
        self.young.get(&block).or_else(|| self.old.get(&block)).copied()
    }

    fn put(&mut self, block: u64, computed: bool) {
        let computed = computed || self.get(block) == Some(true);
        self.young.insert(block, computed);
        if self.young.len() > self.blocks_max / 2 {
            self.old = std::mem::take(&mut self.young);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_step_that_is_missed_has_its_reason() {
        let reach = Reach {
            prompt_blocks: 100,
            seen_blocks: 90,
            computed_blocks: 70,
            held_blocks: 60,
            chosen_blocks: 45,
            hit_blocks: 40,
            parity_broken: false,
        };
        let mut loss = Loss::default();
        loss.add(&reach);
        loss.add(&Reach { parity_broken: true, ..reach });
        // An engine that found what nobody knew of, and a first prompt.
        loss.add(&Reach { prompt_blocks: 10, hit_blocks: 4, ..Reach::default() });
        loss.add(&Reach { prompt_blocks: 10, ..Reach::default() });
        let expected = Loss {
            requests: 4,
            prompt_blocks: 220,
            best_blocks: 184,
            hit_blocks: 84,
            cold_blocks: 40,
            evicted_blocks: 20,
            diverted_blocks: 30,
            stale_blocks: 5,
            parity_blocks: 5,
        };
        assert_eq!(loss, expected);
        assert!((loss.shares().diverted - 0.3).abs() < 1e-12);
    }

    #[test]
    fn a_window_forgets_what_is_older() {
        let reach = Reach { prompt_blocks: 1, ..Reach::default() };
        let mut window = LossWindow::new(600);
        for now_ns in [5, 5, 300, 599] {
            window.add(now_ns, &reach);
        }
        assert_eq!(window.sum(599).requests, 4);
        assert_eq!(window.sum(605).requests, 2);
        assert_eq!(window.sum(10).requests, 2, "time does not go back");
        assert_eq!(window.sum(5_000).requests, 0);
        window.add(5_000, &reach);
        assert_eq!(window.sum(5_599).requests, 1);
    }

    #[test]
    fn a_stream_knows_what_came_and_what_was_computed() {
        let mut stream = Stream::new(1_000);
        assert_eq!(stream.came(0..10), (0, 0));
        assert_eq!(stream.came(0..12), (10, 0));
        stream.computed(0..10);
        assert_eq!(stream.came(0..12), (12, 10));
        assert_eq!(stream.came([0, 99, 1].into_iter()), (1, 1));
    }

    proptest! {
        #[test]
        fn the_parts_add_up_whatever_is_reported(
            all in proptest::collection::vec(
                (0u32..99, 0u32..99, 0u32..99, 0u32..99, 0u32..99, 0u32..99, any::<bool>()), 1..20,
            ),
        ) {
            let mut loss = Loss::default();
            for (prompt, seen, computed, held, chosen, hit, parity_broken) in all {
                loss.add(&Reach {
                    prompt_blocks: prompt,
                    seen_blocks: seen,
                    computed_blocks: computed,
                    held_blocks: held,
                    chosen_blocks: chosen,
                    hit_blocks: hit,
                    parity_broken,
                });
            }
            let parts = loss.cold_blocks + loss.evicted_blocks + loss.diverted_blocks
                + loss.stale_blocks + loss.parity_blocks;
            prop_assert_eq!(parts, loss.lost_blocks());
            prop_assert!(loss.best_blocks <= loss.prompt_blocks);
            let LossShares { cold, evicted, diverted, stale, parity } = loss.shares();
            let sum = cold + evicted + diverted + stale + parity;
            prop_assert!(loss.lost_blocks() == 0 || (sum - 1.0).abs() < 1e-9);
        }

        #[test]
        fn a_stream_keeps_its_bound_and_the_recent_half(blocks in 4usize..200) {
            let mut stream = Stream::new(blocks);
            stream.came(0..1_000);
            prop_assert!(stream.young.len() + stream.old.len() <= blocks + 1);
            let recent = blocks as u64 / 2;
            prop_assert_eq!(stream.came(1_000 - recent..1_000).0, recent as u32);
        }
    }
}
