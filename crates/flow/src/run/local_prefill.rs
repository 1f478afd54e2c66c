//! Records why the prompt of a P/D request is computed by the worker that answers.

use crate::context::PromptContext;
use crate::decide::plan::LocalReason;

/// Records a P/D request whose prompt is computed by the worker that answers, and counts it once: not
/// for a further attempt with the same reason.
pub(crate) fn record_local_prefill(prompt: PromptContext<'_>, reason: LocalReason) {
    prompt.clock.hand_off_lost();
    if prompt.decision.prefill_made_local(reason.name()) {
        let labels = [prompt.context.served.name(), reason.name()];
        prompt.context.metrics.local_prefills.with_label_values(&labels).inc();
    }
}
