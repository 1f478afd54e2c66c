//! Events of stored blocks whose parent is not known yet: they are kept for a while, joined when the
//! parent is stored, and dropped if their blocks become too many.

use std::collections::VecDeque;

use crate::event::{EngineHash, StoredBlock, Tier};

/// Maximum number of waiting events of one worker.
const EVENTS_MAX: usize = 64;
/// Maximum number of waiting blocks of one worker, over all its events.
pub(super) const BLOCKS_MAX: usize = 4096;

/// One worker's events that wait for their parent, oldest first.
#[derive(Debug, Default)]
pub(super) struct WaitingEvents {
    waiting: VecDeque<WaitingEvent>,
    blocks: usize,
}

/// An event that waits for its parent.
#[derive(Debug)]
pub(super) struct WaitingEvent {
    pub(super) parent: EngineHash,
    pub(super) blocks: Vec<StoredBlock>,
    pub(super) tier: Tier,
    /// Copies that were removed while waiting; no more than there are blocks.
    pub(super) removed: Vec<EngineHash>,
}

impl WaitingEvents {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Keeps an event; returns the number of waiting blocks that were dropped for it.
    pub(super) fn keep(&mut self, waiting: WaitingEvent) -> usize {
        self.blocks += waiting.blocks.len();
        self.waiting.push_back(waiting);
        let mut dropped = 0;
        while self.waiting.len() > EVENTS_MAX || self.blocks > BLOCKS_MAX {
            let Some(oldest) = self.waiting.pop_front() else { break };
            self.blocks -= oldest.blocks.len();
            dropped += oldest.blocks.len();
        }
        dropped
    }

    /// Removes and returns an event whose parent is `known`.
    pub(super) fn take(&mut self, known: impl Fn(EngineHash) -> bool) -> Option<WaitingEvent> {
        let at = self.waiting.iter().position(|waiting| known(waiting.parent))?;
        let waiting = self.waiting.remove(at)?;
        self.blocks -= waiting.blocks.len();
        Some(waiting)
    }

    /// Notes that a copy was removed; returns whether it was a waiting one.
    pub(super) fn remove(&mut self, name: EngineHash, tier: Tier) -> bool {
        let waits = |waiting: &&mut WaitingEvent| {
            let stored = waiting.blocks.iter().filter(|block| block.hash == name).count();
            let removed = waiting.removed.iter().filter(|removed| **removed == name).count();
            waiting.tier == tier && stored > removed
        };
        let Some(waiting) = self.waiting.iter_mut().find(waits) else {
            return false;
        };
        waiting.removed.push(name);
        true
    }

    /// Drops some of the events.
    pub(super) fn drop_if(&mut self, is_dropped: impl Fn(&WaitingEvent) -> bool) {
        self.waiting.retain(|waiting| !is_dropped(waiting));
        self.blocks = self.waiting.iter().map(|waiting| waiting.blocks.len()).sum();
    }

    pub(super) fn bytes(&self) -> usize {
        let tokens = |waiting: &WaitingEvent| {
            waiting.blocks.iter().map(|b| size_of_val(b) + b.tokens.len() * 4).sum::<usize>()
        };
        self.waiting.iter().map(tokens).sum()
    }
}
