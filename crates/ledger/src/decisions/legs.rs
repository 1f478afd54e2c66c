//! The events of a prompt's attempts and legs.

use super::handle::DecisionHandle;
use crate::leg::LegFacts;

impl DecisionHandle {
    /// An attempt begins.
    pub fn attempt_begun(&self) {
        self.lock().attempts += 1;
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
        decision.ledger.prefill.clone()
    }

    /// The answering leg failed. Its prefill leg may serve another attempt.
    pub fn decode_failed(&self, outcome: &'static str) {
        let mut decision = self.lock();
        decision.outcome = Some(outcome);
        decision.ledger.discard_decode(outcome);
    }
}
