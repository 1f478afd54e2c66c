//! Where a model's cache hits were lost recently: the best hits that its stream of prompts allows,
//! minus the hits of its engines, divided into causes that add up to the difference.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use splitrail_kv::BlockHash;

use crate::Roster;
use splitrail_config::model::CacheLossTrackingConfig;
use splitrail_ledger::decisions::Decision;
use splitrail_policy::loss::{Loss, LossWindow, StepBlocks, Stream};
use splitrail_workload::clock::ns_since;

/// Maximum number of blocks of one request that are tracked. They are looked up on the thread that
/// serves the connection, which a prompt of a million tokens would hold for milliseconds.
const REQUEST_BLOCKS_MAX: usize = 4096;

/// The tracker of one model's lost cache hits.
#[derive(Debug)]
pub struct Losses {
    epoch: Instant,
    /// Whether tracking is enabled. If not, requests do not take the lock.
    is_watched: AtomicBool,
    state: Mutex<Option<LossState>>,
}

#[derive(Debug)]
struct LossState {
    config: CacheLossTrackingConfig,
    stream: Stream,
    window: LossWindow,
}

/// What is tracked of one prompt while its request runs.
#[derive(Clone, Debug)]
pub struct FollowedPrompt {
    blocks: Vec<u64>,
    step_blocks: StepBlocks,
}

impl Default for Losses {
    fn default() -> Self {
        Self { epoch: Instant::now(), is_watched: AtomicBool::new(false), state: Mutex::default() }
    }
}

impl Losses {
    /// Sets the configuration; `None` disables tracking. If it has changed, all counts are dropped.
    pub fn configure(&self, config: Option<CacheLossTrackingConfig>) {
        let mut state = self.lock();
        self.is_watched.store(config.is_some(), Relaxed);
        if state.as_ref().map(|state| state.config) != config {
            *state = config.map(|config| LossState {
                config,
                stream: Stream::new(config.blocks_max),
                window: LossWindow::new(
                    u64::try_from(config.window.as_nanos()).unwrap_or(u64::MAX),
                ),
            });
        }
    }

    /// Records the arrival of the prompts of a request, and returns what is tracked of each; nothing if
    /// tracking is disabled. Only the first `REQUEST_BLOCKS_MAX` blocks count.
    pub fn record_arrival<'p>(
        &self,
        prompts: impl Iterator<Item = &'p [BlockHash]>,
    ) -> Vec<FollowedPrompt> {
        if !self.is_watched.load(Relaxed) {
            return Vec::new();
        }
        let mut room = REQUEST_BLOCKS_MAX;
        let tracked = prompts.map(|hashes| {
            let hashes = &hashes[..hashes.len().min(room)];
            room -= hashes.len();
            hashes.iter().map(|hash| hash.0).collect()
        });
        let tracked: Vec<Vec<u64>> = tracked.collect();
        let mut state = self.lock();
        let Some(state) = state.as_mut() else { return Vec::new() };
        let follow = |blocks: Vec<u64>| {
            let (seen_blocks, computed_blocks) = state.stream.record_arrival(&blocks);
            let prompt_blocks = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
            let step_blocks =
                StepBlocks { prompt_blocks, seen_blocks, computed_blocks, ..StepBlocks::default() };
            FollowedPrompt { blocks, step_blocks }
        };
        tracked.into_iter().map(follow).collect()
    }

    /// Records that a prompt has been computed.
    pub fn computed(&self, followed: &FollowedPrompt) {
        if let Some(state) = self.lock().as_mut() {
            state.stream.computed(&followed.blocks);
        }
    }

    /// Counts where the cache hits of a prompt were lost after its request has succeeded. `roster`
    /// has the workers, and blocks have `block_size` tokens.
    pub fn ended(
        &self,
        followed: &FollowedPrompt,
        decision: &Decision,
        roster: &Roster,
        block_size: u32,
    ) {
        let Some(cached) = decision.cached_tokens else { return };
        let worker = decision.prefill_worker.as_deref().or(decision.decode_worker.as_deref());
        let worker = worker.and_then(|id| roster.named(id));
        let step_blocks = StepBlocks {
            held_blocks: decision.best_overlap_blocks,
            chosen_blocks: decision.overlap_blocks,
            hit_blocks: cached / block_size.max(1),
            fetched_blocks: decision.peer_fetched_tokens() / block_size.max(1),
            parity_broken: worker.is_some_and(|worker| !worker.takes_part_in_kv_routing()),
            ..followed.step_blocks
        };
        let now_ns = ns_since(self.epoch, Instant::now());
        if let Some(state) = self.lock().as_mut() {
            state.window.add(now_ns, &step_blocks);
        }
    }

    /// The sums over the window; `None` if tracking is disabled.
    pub fn sum(&self) -> Option<Loss> {
        let now_ns = ns_since(self.epoch, Instant::now());
        self.lock().as_mut().map(|state| state.window.sum(now_ns))
    }

    fn lock(&self) -> MutexGuard<'_, Option<LossState>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_tracked_up_to_a_number_of_blocks() {
        let losses = Losses::default();
        let blocks: Vec<BlockHash> = (0..3000).map(BlockHash).collect();
        assert!(losses.record_arrival([&blocks[..]].into_iter()).is_empty(), "not enabled");
        losses.configure(Some(CacheLossTrackingConfig::default()));
        let tracked = |followed: Vec<FollowedPrompt>| -> Vec<_> {
            let step_blocks = followed.into_iter().map(|one| one.step_blocks);
            step_blocks
                .map(|step_blocks| (step_blocks.prompt_blocks, step_blocks.seen_blocks))
                .collect()
        };
        let prompts = || [&blocks[..], &blocks[..2000], &blocks[..10]].into_iter();
        assert_eq!(tracked(losses.record_arrival(prompts())), [(3000, 0), (1096, 1096), (0, 0)]);
        assert_eq!(tracked(losses.record_arrival([&blocks[..10]].into_iter())), [(10, 10)]);
    }
}
