//! The span of a request.

use std::time::Duration;

use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;

use super::{Ended, LOCAL_PARENT, REMOTE_PARENT, failed, flag, number, real, text};
use crate::summary::Summary;

/// Codes of gRPC that are a fault of the server, by the semantic conventions: unknown, deadline
/// exceeded, unimplemented, internal, unavailable, data loss.
const SERVER_FAULTS: [u16; 6] = [2, 4, 12, 13, 14, 15];

impl Ended {
    /// The span of the request.
    pub(super) fn request(&self) -> Span {
        let (summary, trace) = (&self.summary, &self.trace);
        let mut attributes = Vec::with_capacity(32);
        put_request(&mut attributes, summary);
        put_reply(&mut attributes, summary);
        put_route(&mut attributes, summary);
        let is_fault = match summary.protocol {
            "grpc" => SERVER_FAULTS.contains(&summary.status),
            // A stream that broke off has the status 200.
            _ => summary.status >= 500 || summary.status == 200,
        };
        let status = match is_failed(summary) {
            true => failed(summary.outcome, &mut attributes).filter(|_| is_fault),
            false => None,
        };
        if self.spans.left_out > 0 {
            attributes.push(number("splitrail.spans_left_out", self.spans.left_out as u64));
        }
        let times = (Duration::ZERO, summary.total);
        let id = trace.context.span_id;
        let span = self.span(id, "request", SpanKind::Server, times, attributes);
        let parent = trace.parent_id.map(|id| id.to_be_bytes().to_vec());
        Span {
            flags: if parent.is_some() { REMOTE_PARENT } else { LOCAL_PARENT },
            parent_span_id: parent.unwrap_or_default(),
            status,
            ..span
        }
    }
}

fn is_failed(summary: &Summary) -> bool {
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

fn put_request(attributes: &mut Vec<KeyValue>, summary: &Summary) {
    if let Some(operation) = operation(summary.endpoint) {
        attributes.push(text("gen_ai.operation.name", operation));
    }
    if let Some(model) = &summary.model {
        attributes.push(text("gen_ai.request.model", model));
    }
    if let Some(options) = &summary.options {
        attributes.push(flag("gen_ai.request.stream", options.stream));
        if options.n > 1 {
            attributes.push(number("gen_ai.request.choice.count", options.n.into()));
        }
        if let Some(tokens) = options.max_tokens {
            attributes.push(number("gen_ai.request.max_tokens", tokens.into()));
        }
    }
    attributes.push(text("client.address", &summary.client.to_string()));
    attributes.push(text("splitrail.request_id", &summary.request_id));
    attributes.push(text("splitrail.endpoint", summary.endpoint));
    if let Some(tenant) = &summary.tenant {
        attributes.push(text("splitrail.tenant", tenant));
    }
}

fn put_reply(attributes: &mut Vec<KeyValue>, summary: &Summary) {
    let status = u64::from(summary.status);
    if summary.protocol == "grpc" {
        attributes.push(text("rpc.system", "grpc"));
        attributes.push(number("rpc.grpc.status_code", status));
    } else {
        attributes.push(number("http.response.status_code", status));
    }
    attributes.push(text("splitrail.outcome", summary.outcome));
    let used = &summary.used;
    if used.prompt_tokens > 0 {
        attributes.push(number("gen_ai.usage.input_tokens", used.prompt_tokens));
    }
    if used.completion_tokens > 0 {
        attributes.push(number("gen_ai.usage.output_tokens", used.completion_tokens));
    }
    if let Some(tokens) = used.cached() {
        attributes.push(number("gen_ai.usage.cache_read.input_tokens", tokens));
    }
    if let Some(ttft) = summary.ttft {
        let seconds = real("gen_ai.response.time_to_first_chunk", ttft.as_secs_f64());
        attributes.push(seconds);
    }
}

fn put_route(attributes: &mut Vec<KeyValue>, summary: &Summary) {
    if let Some(flow) = summary.flow {
        attributes.push(text("splitrail.flow", flow));
    }
    let workers = [
        ("splitrail.prefill_worker", &summary.prefill_worker),
        ("splitrail.decode_worker", &summary.decode_worker),
    ];
    for (key, worker) in workers {
        if let Some(worker) = worker {
            attributes.push(text(key, worker));
        }
    }
    if summary.attempts > 0 {
        attributes.push(number("splitrail.attempts", summary.attempts.into()));
    }
    if summary.prompts > 1 {
        attributes.push(number("splitrail.prompts", summary.prompts as u64));
    }
}
