//! The block size of a pool: that of the configuration, or that of its engines.

use std::sync::atomic::Ordering::Relaxed;

use super::Pool;
use crate::resync::ResyncRequest;
use crate::roster::Roster;
use crate::worker::Worker;

impl Pool {
    /// Tokens per block; 0 until an engine has reported the block size. Until then no block hashes
    /// can be computed.
    pub fn block_size(&self) -> u32 {
        *self.block_size.borrow()
    }

    /// Waits until the block size is known.
    pub async fn block_size_known(&self) {
        let mut sizes = self.block_size.subscribe();
        // The sender is part of `self` and outlives the wait, so that this cannot fail.
        let _known = sizes.wait_for(|tokens| *tokens > 0).await;
    }

    /// Waits until the block size is another than `tokens`.
    pub async fn block_size_changed(&self, tokens: u32) {
        let mut sizes = self.block_size.subscribe();
        // The sender is part of `self` and outlives the wait, so that this cannot fail.
        let _changed = sizes.wait_for(|now| *now != tokens).await;
    }

    /// Sets the chunk of chunked local attention in tokens.
    pub fn set_attention_chunk_tokens(&self, tokens: Option<u32>) {
        self.attention_chunk_tokens.store(tokens.unwrap_or(0), Relaxed);
    }

    /// The chunk of chunked local attention in tokens, if the model's folder says it.
    pub fn attention_chunk_tokens(&self) -> Option<u32> {
        Some(self.attention_chunk_tokens.load(Relaxed)).filter(|tokens| *tokens > 0)
    }

    /// Whether the block size is that of the engines, since the configuration has none.
    pub fn learns_block_size(&self) -> bool {
        self.learns_block_size
    }

    /// Records the block size that a worker's engine reports. If the configuration has none, the
    /// pool takes over the first one, and later another one that more than half of the engines
    /// report that have reported one. Returns whether the pool's block size equals the engine's.
    pub fn learn_block_size(&self, worker: &Worker, tokens: u32) -> bool {
        worker.engine.facts.set_block_size(Some(tokens));
        if self.block_size() == tokens || !self.learns_block_size {
            return self.block_size() == tokens;
        }
        let roster = self.roster();
        // A worker may report before it is in the roster.
        if self.block_size() == 0 || is_of_most(&roster, tokens) {
            self.take_over_block_size(&roster, tokens);
        }
        self.block_size() == tokens
    }

    /// Takes over the block size of most engines after others have left.
    pub(super) fn count_block_sizes(&self) {
        if !self.learns_block_size {
            return;
        }
        let roster = self.roster();
        let mut sizes: Vec<u32> =
            roster.iter().filter_map(|worker| worker.engine.facts.block_size()).collect();
        sizes.sort_unstable();
        // A size of more than half is also the one in the middle.
        let Some(tokens) = sizes.get(sizes.len() / 2).copied() else { return };
        if tokens != self.block_size() && is_of_most(&roster, tokens) {
            self.take_over_block_size(&roster, tokens);
        }
    }

    /// Replaces the block size. All that is indexed was named by the former one, so that all
    /// workers' events are read again.
    fn take_over_block_size(&self, roster: &Roster, tokens: u32) {
        // The lock of the index is taken before the block size is set, as everywhere; it decides
        // which engine is first.
        let mut index = self.index();
        let before = self.block_size();
        roster.iter().for_each(|worker| _ = index.remove_worker(worker.index.0));
        if !index.set_block_size(tokens) {
            return;
        }
        self.block_size.send_replace(tokens);
        drop(index);
        if before == 0 {
            return;
        }
        let model = roster.iter().next().map_or("", |worker| worker.model());
        tracing::warn!(
            model,
            before,
            block_size = tokens,
            "most engines have another block size now"
        );
        for worker in roster.iter() {
            self.speculative_index.forget(worker.index);
            worker.kv.parity.forget();
            worker.kv.resync.request(ResyncRequest { reason: "block_size", is_last_resort: true });
        }
    }
}

/// Whether more than half of the engines that have reported a block size report this one.
fn is_of_most(roster: &Roster, tokens: u32) -> bool {
    let (mut agree, mut reported) = (0, 0);
    for other in roster.iter().filter_map(|worker| worker.engine.facts.block_size()) {
        reported += 1;
        agree += usize::from(other == tokens);
    }
    2 * agree > reported
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use super::super::tests::index;
    use super::*;

    #[test]
    fn the_first_engine_that_says_its_block_size_decides() {
        let pool = Pool::new(index(0), None);
        let [first, second] = [enter(&pool, "a"), enter(&pool, "b")];
        assert_eq!(pool.block_size(), 0);
        assert!(pool.learn_block_size(&first, 32));
        assert!(!pool.learn_block_size(&second, 16));
        assert_eq!((pool.block_size(), pool.index().config().block_size), (32, 32));
        let configured = Pool::new(index(16), None);
        let worker = enter(&configured, "a");
        assert!(!configured.learn_block_size(&worker, 32));
        assert_eq!(configured.block_size(), 16);
    }

    #[test]
    fn one_engine_does_not_decide_the_block_size_of_the_others() {
        let pool = Pool::new(index(0), None);
        let [odd, second, third] = ["a", "b", "c"].map(|id| enter(&pool, id));
        assert!(pool.learn_block_size(&odd, 17));
        assert!(!pool.learn_block_size(&second, 16), "one against one");
        assert!(pool.learn_block_size(&third, 16));
        assert!(!pool.learn_block_size(&odd, 17) && !pool.learn_block_size(&odd, 18));
        assert_eq!((pool.block_size(), pool.index().config().block_size), (16, 16));
    }

    #[test]
    fn a_block_size_on_which_all_engines_agree_is_taken_over() {
        let pool = Pool::new(index(0), None);
        let [first, second] = [enter(&pool, "a"), enter(&pool, "b")];
        assert!(pool.learn_block_size(&first, 16) && pool.learn_block_size(&second, 16));
        assert!(!pool.learn_block_size(&first, 32), "the other engine has 16 still");
        assert_eq!(pool.block_size(), 16);
        assert!(pool.learn_block_size(&second, 32));
        assert_eq!((pool.block_size(), pool.index().config().block_size), (32, 32));
        // An engine that is down has no say.
        second.set_up(false, "test");
        assert!(pool.learn_block_size(&first, 64));
    }

    #[test]
    fn the_block_size_of_the_engines_that_stay_is_taken_over_when_others_leave() {
        let pool = Pool::new(index(0), None);
        let [blue, other, green, newer] = ["a", "b", "c", "d"].map(|id| enter(&pool, id));
        assert!(pool.learn_block_size(&blue, 16) && pool.learn_block_size(&other, 16));
        assert!(!pool.learn_block_size(&green, 32) && !pool.learn_block_size(&newer, 32));
        pool.leave(&blue);
        pool.leave(&other);
        assert_eq!((pool.block_size(), pool.index().config().block_size), (32, 32));
        pool.leave(&green);
        pool.leave(&newer);
        assert_eq!(pool.block_size(), 32, "nobody says another one");
        let configured = Pool::new(index(16), None);
        let [first, second] = ["a", "b"].map(|id| enter(&configured, id));
        assert!(!configured.learn_block_size(&second, 32));
        configured.leave(&first);
        assert_eq!(configured.block_size(), 16);
    }

    fn enter(pool: &Pool, id: &str) -> Arc<Worker> {
        let config = format!(r#"{{"id": "{id}", "role": "both", "url": "http://{id}:1"}}"#);
        let config = serde_json::from_str(&config).unwrap();
        pool.enter(|number| Worker::new(number, config, format!("{id}:1").parse().unwrap()))
    }
}
