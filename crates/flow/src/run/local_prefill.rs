//! Records why the prompt of a P/D request is computed by the worker that answers.

use crate::context::{Context, PromptContext};
use crate::decide::plan::LocalReason;

/// Records and counts a P/D request whose prompt is computed by the worker that answers.
pub(crate) fn record_local_prefill(prompt: PromptContext<'_>, reason: LocalReason) {
    prompt.clock.hand_off_lost();
    let is_new = prompt.decision.prefill_made_local(reason.name());
    count_local(prompt.context, reason, is_new);
}

/// Records and counts a P/D request whose prefill leg was answered without a hand-off.
pub(crate) fn record_nothing_handed_over(prompt: PromptContext<'_>, reason: LocalReason) {
    prompt.clock.hand_off_lost();
    let is_new = prompt.decision.nothing_handed_over(reason.name());
    count_local(prompt.context, reason, is_new);
}

/// Counts a request once: `is_new` is false for a further attempt with the same reason.
fn count_local(context: &Context, reason: LocalReason, is_new: bool) {
    if is_new {
        let labels = [context.served.name(), reason.name()];
        context.metrics.local_prefills.with_label_values(&labels).inc();
    }
}
