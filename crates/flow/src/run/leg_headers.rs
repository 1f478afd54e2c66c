//! The headers of legs: request id and trace.

use std::sync::atomic::Ordering::Relaxed;

use http::HeaderValue;
use splitrail_engine_client::LegHeaders;
use splitrail_ledger::decisions::DecisionHandle;
use splitrail_ledger::timeline::LegSpan;

use crate::context::Context;

/// Begins an attempt. Each attempt has an id of its own: the request ids of an engine must be
/// unique, and with the client's id a client could refer to the request of another client.
pub(crate) fn begin_attempt(context: &Context, decision: &DecisionHandle) -> LegHeaders {
    decision.attempt_begun();
    context.activity.iter().for_each(|activity| activity.leg_sent());
    leg_headers(context)
}

/// Headers for a leg, with an id that no other request has.
pub(crate) fn leg_headers(context: &Context) -> LegHeaders {
    LegHeaders {
        traceparent: context.traceparent.clone(),
        tracestate: context.tracestate.clone(),
        via: context.via.clone(),
        fresh: context.distrusts_kept_connections.load(Relaxed),
        ..LegHeaders::with_random_id()
    }
}

/// The headers of a traced leg, whose engine continues the trace from the leg.
pub(crate) fn traced_headers(leg_headers: LegHeaders, leg: &LegSpan) -> LegHeaders {
    match leg.traceparent().and_then(|header| HeaderValue::try_from(header).ok()) {
        Some(header) => LegHeaders { traceparent: Some(header), ..leg_headers },
        None => leg_headers,
    }
}
