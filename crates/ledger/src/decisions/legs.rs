//! The events of a prompt's attempts and legs.

use super::handle::DecisionHandle;
use crate::leg::LegFacts;

impl DecisionHandle {
    /// An attempt begins.
    pub fn attempt_begun(&self) {
        self.lock().attempts += 1;
    }

    /// The prefill leg is about to be sent.
    pub fn prefill_sent(&self, leg: LegFacts) {
        self.lock().ledger.prefill_sent(leg);
    }

    /// The prefill engine is known to have begun to compute the prompt.
    pub fn prefill_begun(&self) {
        self.lock().ledger.prefill_begun();
    }

    /// The prefill engine is known to have computed the prompt.
    pub fn prefill_worked(&self) {
        self.lock().ledger.prefill_worked();
    }

    /// The prefill engine has answered; a figure that it did not report is `None`. Returns the
    /// leg; `None` if it was discarded in the meantime.
    pub fn prefill_reported(
        &self,
        prompt_tokens: Option<u32>,
        cached_tokens: Option<u32>,
    ) -> Option<LegFacts> {
        let mut decision = self.lock();
        decision.ledger.prefill_reported(prompt_tokens, cached_tokens);
        decision.ledger.prefill().cloned()
    }

    /// The prefill leg was answered without a hand-off, for this reason: the prompt is going to
    /// be prefilled by the worker that answers. Returns whether the reason differs from the last
    /// one that was recorded.
    pub fn nothing_handed_over(&self, reason: &'static str) -> bool {
        let mut decision = self.lock();
        let is_new = decision.make_local(reason);
        decision.ledger.discard(reason);
        is_new
    }

    /// The leg that answers is about to be sent.
    pub fn decode_sent(&self, leg: LegFacts) {
        self.lock().ledger.decode_sent(leg);
    }

    /// The answering engine is known to have begun: the head of its stream has arrived, or its events
    /// say so.
    pub fn decode_begun(&self) {
        self.lock().ledger.decode_begun();
    }

    /// The answering engine is known to have the whole prompt.
    pub fn decode_worked(&self) {
        self.lock().ledger.decode_worked();
    }

    /// The answering leg failed. Its prefill leg may serve another attempt.
    pub fn decode_failed(&self, outcome: &'static str) {
        let mut decision = self.lock();
        decision.outcome = Some(outcome);
        decision.ledger.discard_decode(outcome);
    }

    /// All legs of the present attempt are discarded.
    pub fn attempt_discarded(&self, reason: &'static str) {
        self.lock().ledger.discard(reason);
    }

    /// The worker was lost during the stream; this leg is about to be sent to continue the
    /// answer. Its prompt has the tokens that were delivered so far.
    pub fn resume_sent(&self, leg: LegFacts) {
        self.lock().ledger.decode_resumed(leg);
    }

    /// The leg that was sent to continue the reply failed.
    pub fn resume_failed(&self, reason: &'static str) {
        self.lock().ledger.discard_decode(reason);
    }
}
