//! Determines why cache hits were lost.
//!
//! The best possible result for a stream of requests is one cache without bounds that all workers
//! share: each block that came before is a hit. Each hit that is missing from that has one of five
//! reasons. They are found by determining, step by step, how many leading blocks of the prompt
//! remain:
//!
//! ```text
//! came before in the stream            the best possible
//!   - computed by any worker           cold: still under way, or it failed
//!   - held by any worker now           evicted; or parity, where what the worker holds is not known
//!   - held by the worker chosen        diverted: its load, or the policy, spoke against it
//!   - found by the engine              stale: the index promised more; or parity, where
//!                                      router and engine do not name blocks alike
//! ```
//!
//! Each step has at most as many blocks as the one before it, so the five reasons add up to exactly
//! the number of missing hits. If an engine found more blocks than it was believed to hold, the
//! earlier steps are raised to that number.

use serde::Serialize;

mod stream;

pub use stream::Stream;

/// The number of leading full blocks of a prompt at each step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepBlocks {
    /// All full blocks of the prompt.
    pub prompt_blocks: u32,
    /// Leading blocks that came before in the stream.
    pub seen_blocks: u32,
    /// Leading blocks that some worker had computed when the request came.
    pub computed_blocks: u32,
    /// The largest number of leading blocks that any worker held.
    pub held_blocks: u32,
    /// Leading blocks that the chosen worker held according to the index.
    pub chosen_blocks: u32,
    /// Leading blocks that the engine found in its cache.
    pub hit_blocks: u32,
    /// The part of these hits that the worker had fetched from another worker for this request.
    pub fetched_blocks: u32,
    /// Whether the worker was known to compute other block hashes than the router.
    pub parity_broken: bool,
}

/// Sums over requests, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Loss {
    /// The number of requests.
    pub requests: u64,
    /// All full blocks of their prompts.
    pub prompt_blocks: u64,
    /// The best possible hits.
    pub best_blocks: u64,
    /// The actual hits.
    pub hit_blocks: u64,
    /// The part of the hits that was fetched from another worker for the request. Without the
    /// fetch it would be missing, mostly as `diverted_blocks`.
    pub fetched_blocks: u64,
    /// Blocks that were missed because no worker had computed them yet.
    pub cold_blocks: u64,
    /// Blocks that were missed because no worker held them any more.
    pub evicted_blocks: u64,
    /// Blocks that were missed because a worker that did not hold them was chosen.
    pub diverted_blocks: u64,
    /// Blocks that were missed because the worker did not hold what the index said.
    pub stale_blocks: u64,
    /// The same on a worker that computes other block hashes than the router.
    pub parity_blocks: u64,
}

impl Loss {
    /// Adds a request.
    pub fn add(&mut self, blocks: &StepBlocks) {
        let hits = blocks.hit_blocks.min(blocks.prompt_blocks);
        let step = |blocks: u32, before: u32| blocks.min(before).max(hits);
        let seen = step(blocks.seen_blocks, blocks.prompt_blocks);
        let computed = step(blocks.computed_blocks, seen);
        let held = step(blocks.held_blocks, computed);
        let chosen = step(blocks.chosen_blocks, held);
        self.requests += 1;
        self.prompt_blocks += u64::from(blocks.prompt_blocks);
        self.best_blocks += u64::from(seen);
        self.hit_blocks += u64::from(hits);
        self.fetched_blocks += u64::from(blocks.fetched_blocks.min(hits));
        self.cold_blocks += u64::from(seen - computed);
        self.diverted_blocks += u64::from(held - chosen);
        let [gone, missed] = [computed - held, chosen - hits].map(u64::from);
        if blocks.parity_broken {
            // The worker may have held them, under names that the router does not know.
            self.parity_blocks += gone + missed;
        } else {
            self.evicted_blocks += gone;
            self.stale_blocks += missed;
        }
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.prompt_blocks += other.prompt_blocks;
        self.best_blocks += other.best_blocks;
        self.hit_blocks += other.hit_blocks;
        self.fetched_blocks += other.fetched_blocks;
        self.cold_blocks += other.cold_blocks;
        self.evicted_blocks += other.evicted_blocks;
        self.diverted_blocks += other.diverted_blocks;
        self.stale_blocks += other.stale_blocks;
        self.parity_blocks += other.parity_blocks;
    }
}

/// Buckets of a [`LossWindow`].
const BUCKETS: usize = 60;

/// Sums over a sliding window of time, which advances in steps of a sixtieth of its length.
#[derive(Clone, Debug)]
pub struct LossWindow {
    buckets: [Loss; BUCKETS],
    bucket_ns: u64,
    current: u64,
}

impl LossWindow {
    /// A window of `window_ns` nanoseconds.
    pub fn new(window_ns: u64) -> Self {
        let bucket_ns = (window_ns / BUCKETS as u64).max(1);
        Self { buckets: [Loss::default(); BUCKETS], bucket_ns, current: 0 }
    }

    /// Adds a request. If time goes backwards, the window does not move.
    pub fn add(&mut self, now_ns: u64, blocks: &StepBlocks) {
        self.advance(now_ns);
        self.buckets[(self.current % BUCKETS as u64) as usize].add(blocks);
    }

    /// The sum over the window at the time `now_ns`.
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
        // If more than a window has passed, all buckets are empty and any of them can be the
        // current one.
        self.current = self.current.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_step_that_is_missed_has_its_reason() {
        let blocks = StepBlocks {
            prompt_blocks: 100,
            seen_blocks: 90,
            computed_blocks: 70,
            held_blocks: 60,
            chosen_blocks: 45,
            hit_blocks: 40,
            fetched_blocks: 15,
            parity_broken: false,
        };
        let mut loss = Loss::default();
        loss.add(&blocks);
        loss.add(&StepBlocks { parity_broken: true, ..blocks });
        // An engine that found blocks that were not in the index, and a first prompt.
        loss.add(&StepBlocks { prompt_blocks: 10, hit_blocks: 4, ..StepBlocks::default() });
        loss.add(&StepBlocks { prompt_blocks: 10, ..StepBlocks::default() });
        let expected = Loss {
            requests: 4,
            prompt_blocks: 220,
            best_blocks: 184,
            hit_blocks: 84,
            fetched_blocks: 30,
            cold_blocks: 40,
            evicted_blocks: 10,
            diverted_blocks: 30,
            stale_blocks: 5,
            parity_blocks: 15,
        };
        assert_eq!(loss, expected);
    }

    #[test]
    fn blocks_of_a_worker_without_parity_do_not_count_as_evicted() {
        // No overlap of such a worker is believed.
        let blocks = StepBlocks {
            prompt_blocks: 10,
            seen_blocks: 10,
            computed_blocks: 10,
            parity_broken: true,
            ..StepBlocks::default()
        };
        let mut loss = Loss::default();
        loss.add(&blocks);
        assert_eq!((loss.parity_blocks, loss.evicted_blocks), (10, 0));
    }

    #[test]
    fn a_window_forgets_what_is_older() {
        let blocks = StepBlocks { prompt_blocks: 1, ..StepBlocks::default() };
        let mut window = LossWindow::new(600);
        for now_ns in [5, 5, 300, 599] {
            window.add(now_ns, &blocks);
        }
        assert_eq!(window.sum(599).requests, 4);
        assert_eq!(window.sum(605).requests, 2);
        assert_eq!(window.sum(10).requests, 2, "time does not go back");
        assert_eq!(window.sum(5_000).requests, 0);
        window.add(5_000, &blocks);
        assert_eq!(window.sum(5_599).requests, 1);
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
                loss.add(&StepBlocks {
                    prompt_blocks: prompt,
                    seen_blocks: seen,
                    computed_blocks: computed,
                    held_blocks: held,
                    chosen_blocks: chosen,
                    hit_blocks: hit,
                    fetched_blocks: seen / 2,
                    parity_broken,
                });
            }
            let parts = loss.cold_blocks + loss.evicted_blocks + loss.diverted_blocks
                + loss.stale_blocks + loss.parity_blocks;
            prop_assert_eq!(parts, loss.best_blocks - loss.hit_blocks);
            prop_assert!(loss.best_blocks <= loss.prompt_blocks);
            prop_assert!(loss.fetched_blocks <= loss.hit_blocks);
        }
    }
}
