//! Finds out whether an engine has begun a leg that is given up before anything of its reply has come.

use crate::context::PromptContext;
use crate::decide::place::PlacedLeg;
use splitrail_ledger::leg::LegKind;

/// A leg that has been sent. If this is dropped before [`ended`](Self::ended), because the client has
/// left, the worker's KV events tell whether its engine has begun to compute the prompt: they have
/// blocks of the prompt that neither the worker had when the leg was placed, nor an earlier request
/// was about to leave there.
pub(crate) struct SentLeg<'a> {
    prompt: PromptContext<'a>,
    placed: &'a PlacedLeg,
    kind: LegKind,
    has_ended: bool,
}

impl<'a> SentLeg<'a> {
    pub(crate) fn new(prompt: PromptContext<'a>, placed: &'a PlacedLeg, kind: LegKind) -> Self {
        Self { prompt, placed, kind, has_ended: false }
    }

    /// Notes that the leg has ended in any way.
    pub(crate) fn ended(mut self) {
        self.has_ended = true;
    }
}

impl Drop for SentLeg<'_> {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let PromptContext { context, unit, decision, .. } = self.prompt;
        let before = self.placed.overlap_blocks.max(self.placed.speculative_blocks);
        let now = context.served.pool.overlap_blocks_of(&self.placed.worker, &unit.hashes);
        if now > before {
            decision.enter(|entry| entry.begun(self.kind));
        }
    }
}
