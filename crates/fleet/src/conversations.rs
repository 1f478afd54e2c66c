//! The recent conversations of a model, for the placement of prompts.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use splitrail_kv::{BlockHash, ConversationBounds, Conversations, PromptSharing};

/// The recent conversations of one model.
#[derive(Debug)]
pub struct RecentConversations {
    began: Instant,
    /// Locked for a walk along a prompt, which takes one step for each of its prompts before.
    known: Mutex<Conversations>,
}

impl Default for RecentConversations {
    fn default() -> Self {
        let known = Mutex::new(Conversations::new(ConversationBounds::default()));
        Self { began: Instant::now(), known }
    }
}

impl RecentConversations {
    /// Notes a prompt that has arrived.
    pub fn record(&self, now: Instant, hashes: &[BlockHash]) {
        let now_ms = now.saturating_duration_since(self.began).as_millis() as u64;
        self.known().record(now_ms, hashes);
    }

    /// What a prompt has in common with conversations, its own one included once it is recorded.
    pub fn find(&self, hashes: &[BlockHash]) -> PromptSharing {
        self.known().find(hashes)
    }

    fn known(&self) -> MutexGuard<'_, Conversations> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
