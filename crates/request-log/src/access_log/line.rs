//! The lines of the access log, in JSON.

use std::net::IpAddr;
use std::time::Duration;

use splitrail_api::text::{push_address, push_ms, push_number};
use splitrail_telemetry::trace_context::push_hex;

use crate::summary::Summary;

/// The version of the lines.
const VERSION: u64 = 1;
/// Usual maximum length of a line in bytes.
const USUAL_BYTES: usize = 768;
/// Maximum length of a text in characters. Longer ones are cut.
const TEXT_MAX_CHARS: usize = 256;

/// The value of a field.
#[derive(Clone, Copy)]
enum Value<'a> {
    Text(&'a str),
    Number(u64),
    /// A duration, in milliseconds.
    Ms(Duration),
    TraceId(u128),
    Address(IpAddr),
}

/// The fields of a request; those that are not known are `None`.
fn fields<'s>(summary: &'s Summary<'_>) -> [(&'static str, Option<Value<'s>>); 24] {
    let used = &summary.used;
    let above_0 = |count: u64| Some(Value::Number(count)).filter(|_| count > 0);
    let batch = if summary.prompts > 1 { summary.prompts as u64 } else { 0 };
    [
        ("request_id", Some(Value::Text(summary.request_id))),
        ("trace_id", summary.trace_id.map(Value::TraceId)),
        ("client", Some(Value::Address(summary.client))),
        ("session", summary.session.map(Value::Text)),
        ("tenant", summary.tenant.map(Value::Text)),
        ("model", summary.model.map(Value::Text)),
        ("endpoint", Some(Value::Text(summary.endpoint))),
        ("protocol", Some(Value::Text(summary.protocol))),
        ("status", Some(Value::Number(summary.status.into()))),
        ("outcome", Some(Value::Text(summary.outcome))),
        ("flow", summary.flow.map(Value::Text)),
        ("prefill_worker", summary.prefill_worker.as_deref().map(Value::Text)),
        ("decode_worker", summary.decode_worker.as_deref().map(Value::Text)),
        ("peer_fetch", summary.peer_fetch.map(Value::Text)),
        ("prompts", above_0(batch)),
        ("attempts", above_0(summary.attempts.into())),
        ("prompt_tokens", used.prompt().map(Value::Number)),
        ("cached_tokens", used.cached().map(Value::Number)),
        ("output_tokens", used.completion().map(Value::Number)),
        ("queue_ms", summary.queue.map(Value::Ms)),
        ("prefill_ms", summary.prefill.map(Value::Ms)),
        ("hand_off_ms", summary.hand_off.map(Value::Ms)),
        ("ttft_ms", summary.ttft.map(Value::Ms)),
        ("total_ms", Some(Value::Ms(summary.total))),
    ]
}

/// The line of a request.
pub(super) fn json(summary: &Summary<'_>) -> Vec<u8> {
    let mut out = String::with_capacity(USUAL_BYTES);
    out.push_str("{\"version\":");
    push_number(&mut out, VERSION);
    out.push_str(",\"unix_ms\":");
    push_number(&mut out, summary.ended_unix.as_millis() as u64);
    put_fields(&mut out, summary);
    out.push_str("}\n");
    out.into_bytes()
}

fn put_fields(out: &mut String, summary: &Summary<'_>) {
    for (name, value) in fields(summary) {
        let Some(value) = value else { continue };
        out.extend([",\"", name, "\":"]);
        match value {
            Value::Text(text) => put_quoted(out, text),
            Value::Number(number) => push_number(out, number),
            Value::Ms(duration) => push_ms(out, duration),
            Value::TraceId(id) => {
                out.push('"');
                push_hex(out, id, 32);
                out.push('"');
            }
            Value::Address(address) => {
                out.push('"');
                push_address(out, address);
                out.push('"');
            }
        }
    }
}

/// Whether a text needs no escapes, as almost all do.
fn is_plain(text: &str) -> bool {
    let plain = |byte| matches!(byte, b'-'..=b':' | b'@'..=b'Z' | b'a'..=b'z' | b'+' | b'_');
    !text.is_empty() && text.len() <= TEXT_MAX_CHARS && text.bytes().all(plain)
}

/// Appends a JSON string of plain ASCII: no text can end its line, its field or, in a terminal,
/// become a command.
fn put_quoted(out: &mut String, text: &str) {
    out.push('"');
    if is_plain(text) {
        out.extend([text, "\""]);
        return;
    }
    for c in text.chars().take(TEXT_MAX_CHARS) {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            ' '..='~' => out.push(c),
            c => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str("\\u");
                    push_hex(out, u128::from(*unit), 4);
                }
            }
        }
    }
    out.push('"');
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Instant;

    use proptest::prelude::*;
    use serde_json::Value as Json;

    use super::*;
    use crate::identity::{ClientTrace, Identity, Protocol};

    fn identity() -> Identity {
        let client = Ipv4Addr::LOCALHOST.into();
        Identity::new(Some(b"id-1"), client, Protocol::Http, ClientTrace::default())
    }

    fn summary<'r>(identity: &'r Identity, model: &'r str) -> Summary<'r> {
        let mut summary = Summary::new(identity, "chat", Instant::now());
        summary.model = Some(model);
        (summary.status, summary.outcome) = (404, "model_not_found");
        summary.trace_id = Some(0xab);
        summary.peer_fetch = Some("one_shot");
        summary.total = Duration::from_micros(12_034);
        summary
    }

    #[test]
    fn a_line_has_the_fields_that_are_known() {
        let identity = identity();
        let line = String::from_utf8(json(&summary(&identity, "m"))).unwrap();
        let (start, rest) = line.split_once(",\"request_id\":").unwrap();
        let start: Json = serde_json::from_str(&format!("{start}}}")).unwrap();
        assert_eq!(start["version"], 1);
        assert!(start["unix_ms"].as_u64().unwrap() > 1_700_000_000_000);
        assert_eq!(
            rest,
            "\"id-1\",\"trace_id\":\"000000000000000000000000000000ab\",\"client\":\"127.0.0.1\",\
             \"model\":\"m\",\"endpoint\":\"chat\",\"protocol\":\"http\",\"status\":404,\
             \"outcome\":\"model_not_found\",\"peer_fetch\":\"one_shot\",\"total_ms\":12.034}\n"
        );
    }

    proptest! {
        /// Whatever a client sends as a name, the line stays one line with the same fields.
        #[test]
        fn no_name_of_a_client_breaks_a_line(name in "\\PC{0,40}|[\"\\\\\n\r\t\u{1b}\u{7f}<>=\u{2028}\u{1f600} ]{0,40}") {
            let identity = identity();
            let summary = summary(&identity, &name);
            let line = String::from_utf8(json(&summary)).unwrap();
            let read: Json = serde_json::from_str(&line).unwrap();
            prop_assert_eq!(&read["model"], &Json::from(name.as_str()));
            prop_assert_eq!(&read["endpoint"], "chat");
            prop_assert!(line.is_ascii() && line.ends_with('\n'));
            prop_assert!(!line[..line.len() - 1].contains(|c: char| c.is_ascii_control()));
        }
    }
}
