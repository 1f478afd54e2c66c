//! The span of a request.

use std::time::Duration;

use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use splitrail_api::text::push_address;

use super::super::otlp::{self, Head};
use super::{
    EndedTrace, LOCAL_PARENT, REMOTE_PARENT, REQUEST, flag, number, put_error, real, text,
};
use crate::summary::Summary;

/// Maximum length of an address of IPv4 in bytes.
const ADDRESS_BYTES: usize = 15;

/// Codes of gRPC that are a fault of the server, by the semantic conventions: unknown, deadline
/// exceeded, unimplemented, internal, unavailable, data loss.
const SERVER_FAULTS: [u16; 6] = [2, 4, 12, 13, 14, 15];

impl EndedTrace<'_> {
    /// Appends the span of the request.
    pub(super) fn put_request_span(&self, out: &mut Vec<u8>) {
        let (summary, trace) = (self.summary, self.trace);
        let (id, begin, end) = (trace.context.span_id, Duration::ZERO, summary.total);
        let head = Head {
            parent_id: trace.parent_id,
            flags: if trace.parent_id.is_some() { REMOTE_PARENT } else { LOCAL_PARENT },
            ..self.head(id, REQUEST, SpanKind::Server, begin, end)
        };
        otlp::span(out, &head, |out| {
            put_request(out, summary);
            put_reply(out, summary);
            put_route(out, summary);
            let is_failed = is_failed(summary) && put_error(out, summary.outcome);
            if self.spans.left_out > 0 {
                number(out, "splitrail.spans_left_out", self.spans.left_out as u64);
            }
            is_failed && is_fault(summary)
        });
    }
}

/// Whether a failed request is a fault of the server.
fn is_fault(summary: &Summary<'_>) -> bool {
    match summary.protocol {
        "grpc" => SERVER_FAULTS.contains(&summary.status),
        // A stream that broke off has the status 200.
        _ => summary.status >= 500 || summary.status == 200,
    }
}

fn is_failed(summary: &Summary<'_>) -> bool {
    !matches!(summary.outcome, "ok" | "cancelled")
}

/// `gen_ai.operation.name` of an endpoint, if it is one of the conventions' operations.
fn operation(endpoint: &str) -> Option<&'static str> {
    match endpoint {
        "chat" | "responses" | "messages" => Some("chat"),
        "completions" | "generate" => Some("text_completion"),
        "embeddings" => Some("embeddings"),
        _ => None,
    }
}

fn put_request(out: &mut Vec<u8>, summary: &Summary<'_>) {
    if let Some(operation) = operation(summary.endpoint) {
        text(out, "gen_ai.operation.name", operation);
    }
    if let Some(model) = summary.model {
        text(out, "gen_ai.request.model", model);
    }
    if let Some(options) = &summary.options {
        flag(out, "gen_ai.request.stream", options.stream);
        if options.n > 1 {
            number(out, "gen_ai.request.choice.count", options.n.into());
        }
        if let Some(tokens) = options.output.max_tokens {
            number(out, "gen_ai.request.max_tokens", tokens.into());
        }
    }
    let mut client = String::with_capacity(ADDRESS_BYTES);
    push_address(&mut client, summary.client);
    text(out, "client.address", &client);
    text(out, "splitrail.request_id", summary.request_id);
    text(out, "splitrail.endpoint", summary.endpoint);
    if let Some(session) = summary.session {
        text(out, "gen_ai.conversation.id", session);
    }
    if let Some(tenant) = summary.tenant {
        text(out, "splitrail.tenant", tenant);
    }
}

fn put_reply(out: &mut Vec<u8>, summary: &Summary<'_>) {
    let status = u64::from(summary.status);
    if summary.protocol == "grpc" {
        text(out, "rpc.system", "grpc");
        number(out, "rpc.grpc.status_code", status);
    } else {
        number(out, "http.response.status_code", status);
    }
    text(out, "splitrail.outcome", summary.outcome);
    let used = &summary.used;
    if let Some(tokens) = used.prompt() {
        number(out, "gen_ai.usage.input_tokens", tokens);
    }
    if let Some(tokens) = used.completion() {
        number(out, "gen_ai.usage.output_tokens", tokens);
    }
    if let Some(tokens) = used.cached() {
        number(out, "gen_ai.usage.cache_read.input_tokens", tokens);
    }
    if let Some(ttft) = summary.ttft {
        real(out, "gen_ai.response.time_to_first_chunk", ttft.as_secs_f64());
    }
}

fn put_route(out: &mut Vec<u8>, summary: &Summary<'_>) {
    if let Some(flow) = summary.flow {
        text(out, "splitrail.flow", flow);
    }
    let workers = [
        ("splitrail.prefill_worker", &summary.prefill_worker),
        ("splitrail.decode_worker", &summary.decode_worker),
    ];
    for (key, worker) in workers {
        if let Some(worker) = worker {
            text(out, key, worker);
        }
    }
    if summary.attempts > 0 {
        number(out, "splitrail.attempts", summary.attempts.into());
    }
    if summary.prompts > 1 {
        number(out, "splitrail.prompts", summary.prompts as u64);
    }
}
