//! Prompt tokens that a prefill has computed for an answer.

use std::sync::Arc;

use crate::core::{Core, Served};

/// Counts as wasted when dropped, unless the answer that lives on it ended well.
pub struct Spent {
    core: Arc<Core>,
    served: Arc<Served>,
    tokens: u32,
    /// Why it was in vain.
    pub reason: &'static str,
}

impl Spent {
    /// A prefill of a prompt is done.
    pub fn new(core: &Arc<Core>, served: &Arc<Served>, tokens: u32) -> Self {
        let (core, served) = (Arc::clone(core), Arc::clone(served));
        Self { core, served, tokens, reason: "cancelled" }
    }

    /// The answer ended well.
    pub fn well(mut self) {
        self.tokens = 0;
    }
}

impl Drop for Spent {
    fn drop(&mut self) {
        if self.tokens > 0 {
            let labels = [self.served.name(), self.reason];
            let wasted = self.core.metrics.wasted_prompt_tokens.with_label_values(&labels);
            wasted.inc_by(self.tokens.into());
        }
    }
}
