//! Writes a request that has ended to the access log and the traces.

use std::time::Instant;

use splitrail_api::error::{Error, Fault};
use splitrail_api::name::Name;
use splitrail_ledger::close::UsedTokens;
use splitrail_ledger::timeline::Stage;
use splitrail_request_log::identity::{Identity, Protocol};
use splitrail_request_log::summary::Summary;
use splitrail_settings::logging::RequestIds;

use super::Scope;

/// Logs a failure by its kind; details about the request are only sent to the client. A refusal
/// because of load is no warning: under load, each request would write one.
pub fn log_failure(ids: &RequestIds, model: Option<&str>, error: &Error) {
    ids.during(|| match (error.fault(), error.result()) {
        (Fault::Client, _) | (_, "shed") => tracing::debug!(model, %error, "request refused"),
        _ => tracing::warn!(model, %error, "request failed"),
    });
}

/// How a request has ended.
pub(super) struct RequestEnd {
    /// `ok`, an error's name, or `cancelled`.
    pub(super) outcome: &'static str,
    /// The outcome's kind, as in `splitrail_request_results_total`.
    pub(super) result: &'static str,
    /// The status of the reply.
    pub(super) status: u16,
    /// The name that the client sent as `model`, if no served model has it.
    pub(super) unknown_model: Option<Name>,
}

impl RequestEnd {
    /// The request was served.
    pub(super) fn ok(protocol: Protocol) -> Self {
        Self { outcome: "ok", result: "ok", status: protocol.ok(), unknown_model: None }
    }

    /// The request failed. `is_replied` says whether the head of the reply was sent before.
    pub(super) fn failed(protocol: Protocol, error: &Error, is_replied: bool) -> Self {
        // Over HTTP, the status of a stream is sent before its events.
        let status = match (protocol, is_replied) {
            (Protocol::Http, true) => protocol.ok(),
            _ => protocol.status(error),
        };
        let unknown_model = error.unknown_model().map(Name::from);
        Self { outcome: error.outcome(), result: error.result(), status, unknown_model }
    }

    /// The client left, or the deadline that it had named has passed (`is_late`).
    pub(super) fn cancelled(protocol: Protocol, is_replied: bool, is_late: bool) -> Self {
        let status = match (protocol, is_replied) {
            (Protocol::Http, true) => protocol.ok(),
            (Protocol::Grpc, _) if is_late => tonic::Code::DeadlineExceeded as u16,
            _ => protocol.cancelled(),
        };
        Self { outcome: "cancelled", result: "cancelled", status, unknown_model: None }
    }
}

impl Scope {
    /// Writes the request to the access log and to its trace.
    pub(super) fn write_logs(&self, now: Instant, ending: RequestEnd, used: UsedTokens) {
        let spans = self.timeline.close(now);
        let is_logged =
            self.core.logs.access_log.takes(&self.core.serving().config.access_log, ending.outcome);
        if spans.is_none() && !is_logged {
            return;
        }
        let summary = self.summary(now, &ending, used);
        if is_logged {
            self.core.logs.access_log.write(&summary);
        }
        if let (Some(spans), Some(trace)) = (spans, &self.timeline.trace) {
            self.core.logs.traces.submit(trace, &spans, &summary);
        }
    }

    fn summary<'r>(
        &'r self,
        now: Instant,
        ending: &'r RequestEnd,
        used: UsedTokens,
    ) -> Summary<'r> {
        let Identity { arrived, .. } = self.identity;
        let mut summary = Summary::new(&self.identity, self.endpoint, now);
        if let Some(trace) = &self.timeline.trace {
            summary.trace_id = Some(trace.context.trace_id);
        }
        summary.status = ending.status;
        summary.outcome = ending.outcome;
        summary.tenant = self.sender.tenant.as_ref().map(|tenant| &*tenant.name);
        summary.model = ending.unknown_model.as_deref();
        summary.options = self.options;
        summary.used = used;
        summary.queue = self.timeline.total(Stage::Admit);
        summary.prefill = self.timeline.total(Stage::Prefill);
        // A whole reply has no first token.
        if self.options.is_some_and(|options| options.stream) {
            summary.hand_off = self.timeline.hand_off();
            summary.ttft = self.begun.map(|begun| begun.duration_since(arrived));
        }
        let Some(placed) = &self.placed else { return summary };
        summary.model = Some(placed.served.name());
        summary.flow = Some(self.labels().1);
        summary.prompts = placed.decisions.len();
        for (place, decision) in placed.decisions.iter().enumerate() {
            decision.with(|decision| {
                summary.attempts += decision.attempts;
                if place == 0 {
                    summary.prefill_worker = decision.prefill_worker.clone();
                    summary.decode_worker = decision.decode_worker.clone();
                    summary.peer_fetch = decision.fetch.as_ref().map(|fetch| fetch.choice.way);
                }
            });
        }
        summary
    }
}
