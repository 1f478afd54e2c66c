//! Remembers the prompts of clients that prefill workers have computed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::context::PromptContext;
use crate::decide::fetchable::is_fetchable;
use splitrail_fleet::ServedModel;
use splitrail_kv::BlockHash;
use splitrail_workload::hot::RecentPrompt;

/// Minimum pause after the token ids of a prompt were computed: at most 20 prompts per second are
/// tokenised a second time. It is at least as long as that took.
const LEARN_PAUSE: Duration = Duration::from_millis(50);
/// How often there may be no spare core to compute ids, before the prompt is given up.
const WAITS_MAX: u32 = 20;

/// Remembers a prompt that a worker has computed.
pub(crate) fn remember_prefix(prompt: PromptContext<'_>) {
    let PromptContext { context, unit, .. } = prompt;
    let (served, endpoint) = (&context.served, context.endpoint);
    let pool = &served.pool;
    let Some(bounds) = pool.fetch_bounds().filter(|_| pool.hot.is_on()) else { return };
    let is_salted = !matches!(unit.body.raw("cache_salt"), None | Some("null"));
    let is_short = unit.prompt_tokens.is_none_or(|tokens| tokens < bounds.min_tokens);
    if is_salted || is_short || !is_fetchable(served, endpoint, unit, context.options) {
        return;
    }
    let Some(model) = unit.body.raw("model") else { return };
    let recent = RecentPrompt { model, hashes: &unit.hashes, block_size: pool.block_size() };
    let (memory, memory_max_bytes) = context.preparer.memory();
    if !pool.hot.record(recent, memory, memory_max_bytes) {
        return;
    }
    let Some(first) = unit.hashes.first() else { return };
    let learning = LearningMark(Arc::clone(served), *first);
    let (preparer, unit) = (Arc::clone(&context.preparer), unit.clone());
    // It accounts for the body of the prompt.
    let memory = Arc::clone(&context.memory);
    let learn = async move {
        let LearningMark(served, _) = &learning;
        let _turn = served.pool.hot.turn().lock().await;
        let mut waits = 0;
        while !preparer.cores.has_spare() && waits < WAITS_MAX {
            tokio::time::sleep(LEARN_PAUSE).await;
            waits += 1;
        }
        // Requests of clients wait for the other cores. A later prompt with the prefix is learned.
        if waits == WAITS_MAX {
            return;
        }
        let begun = Instant::now();
        if let Some(ids) = preparer.prompt_ids(served, endpoint, &unit).await {
            served.pool.hot.learn(&unit.hashes, &ids.ids);
        }
        drop((unit, memory));
        tokio::time::sleep(begun.elapsed().max(LEARN_PAUSE)).await;
    };
    // If there are too many tasks, a later prompt with the same prefix is learned.
    served.releases.run(learn);
}

/// The token ids of the prompt with this first block are wanted, until it is dropped.
struct LearningMark(Arc<ServedModel>, BlockHash);

impl Drop for LearningMark {
    fn drop(&mut self) {
        self.0.pool.hot.learning_ended(self.1);
    }
}
