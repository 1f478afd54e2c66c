//! Writes messages of OTLP field by field, in the order of their numbers, as protobuf.
//!
//! The generated types allocate each key, text and id of each span, and walk through all of them
//! once more for the lengths. The tests compare with them.
//! <https://protobuf.dev/programming-guides/encoding/>

use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::{encode_length_delimiter, length_delimiter_len};

/// The wire types of fields.
const VARINT: u8 = 0;
const FIXED_64: u8 = 1;
const LENGTH: u8 = 2;
const FIXED_32: u8 = 5;

/// `ScopeSpans.spans`.
const SPANS: u8 = 2;

/// The head of a span.
pub(super) struct Head<'a> {
    pub(super) trace_id: u128,
    pub(super) span_id: u64,
    /// The `tracestate`; empty if there is none.
    pub(super) state: &'a str,
    /// The id of the parent; `None` for the root of a trace.
    pub(super) parent_id: Option<u64>,
    pub(super) name: &'static str,
    pub(super) kind: SpanKind,
    /// When the span began, in nanoseconds since 1970.
    pub(super) begin_ns: u64,
    /// When the span ended, in nanoseconds since 1970.
    pub(super) end_ns: u64,
    pub(super) flags: u32,
}

/// Appends a span to the spans of a `ScopeSpans`. `put_attributes` writes its attributes, and
/// returns whether the span failed.
pub(super) fn span(
    out: &mut Vec<u8>,
    head: &Head<'_>,
    put_attributes: impl FnOnce(&mut Vec<u8>) -> bool,
) {
    /// `status: { code: STATUS_CODE_ERROR }`, field 15.
    const FAILED: [u8; 4] = [15 << 3 | LENGTH, 2, 3 << 3 | VARINT, 2];
    /// The key of `flags`, field 16.
    const FLAGS: [u8; 2] = [0x80 | FIXED_32, 1];
    message(out, SPANS, |out| {
        id(out, 1, head.trace_id.to_be_bytes());
        id(out, 2, head.span_id.to_be_bytes());
        bytes(out, 3, head.state.as_bytes());
        if let Some(parent_id) = head.parent_id {
            id(out, 4, parent_id.to_be_bytes());
        }
        bytes(out, 5, head.name.as_bytes());
        out.extend_from_slice(&[6 << 3 | VARINT, head.kind as u8]);
        fixed_64(out, 7, head.begin_ns);
        fixed_64(out, 8, head.end_ns);
        if put_attributes(out) {
            out.extend_from_slice(&FAILED);
        }
        out.extend_from_slice(&FLAGS);
        out.extend_from_slice(&head.flags.to_le_bytes());
    });
}

/// What stands before the spans in an `ExportTraceServiceRequest`, whose spans [`span`] has written
/// with a length of `spans_bytes`. `resource` are its attributes, and `scope` is the name and the
/// version of the instrumentation. The spans are not copied behind it: they are most of the message.
pub(super) fn head(resource: &[u8], scope: [&str; 2], spans_bytes: usize) -> Vec<u8> {
    /// `ExportTraceServiceRequest.resource_spans`, `ResourceSpans.resource` and
    /// `ResourceSpans.scope_spans`.
    const RESOURCE_SPANS: u8 = 1;
    const RESOURCE: u8 = 1;
    const SCOPE_SPANS: u8 = 2;
    const SCOPE: u8 = 1;
    let mut scope_head = Vec::new();
    message(&mut scope_head, SCOPE, |out| {
        bytes(out, 1, scope[0].as_bytes());
        bytes(out, 2, scope[1].as_bytes());
    });
    let mut inner = Vec::new();
    bytes(&mut inner, RESOURCE, resource);
    key_and_length(&mut inner, SCOPE_SPANS, scope_head.len() + spans_bytes);
    inner.extend(scope_head);
    let mut out = Vec::with_capacity(inner.len() + 16);
    key_and_length(&mut out, RESOURCE_SPANS, inner.len() + spans_bytes);
    out.extend(inner);
    out
}

/// The value of an attribute.
#[derive(Clone, Copy)]
pub(super) enum Value<'a> {
    Text(&'a str),
    Number(u64),
    Real(f64),
    Flag(bool),
}

impl Value<'_> {
    /// The length of the `AnyValue`.
    fn length(self) -> usize {
        match self {
            Self::Text(text) => 1 + length_delimiter_len(text.len()) + text.len(),
            Self::Number(number) => 1 + length_delimiter_len(whole(number)),
            Self::Real(_) => 9,
            Self::Flag(_) => 2,
        }
    }

    fn put(self, out: &mut Vec<u8>) {
        match self {
            Self::Text(text) => {
                key_and_length(out, 1, text.len());
                out.extend_from_slice(text.as_bytes());
            }
            Self::Flag(flag) => out.extend_from_slice(&[2 << 3 | VARINT, flag.into()]),
            Self::Number(number) => key_and_varint(out, 3 << 3 | VARINT, whole(number)),
            Self::Real(real) => fixed_64(out, 4, real.to_bits()),
        }
    }
}

/// A number as the `int64` that OTLP has.
fn whole(number: u64) -> usize {
    number.min(i64::MAX as u64) as usize
}

/// Appends an attribute of a span: a `KeyValue`, field 9.
pub(super) fn attribute(out: &mut Vec<u8>, name: &str, value: Value<'_>) {
    put_key_value(out, 9, name, value);
}

/// Appends an attribute of a resource: a `KeyValue`, field 1.
pub(super) fn resource_attribute(out: &mut Vec<u8>, name: &str, value: &str) {
    put_key_value(out, 1, name, Value::Text(value));
}

fn put_key_value(out: &mut Vec<u8>, field: u8, name: &str, value: Value<'_>) {
    let value_length = value.length();
    let name_length = 1 + length_delimiter_len(name.len()) + name.len();
    key_and_length(out, field, name_length + 1 + length_delimiter_len(value_length) + value_length);
    bytes(out, 1, name.as_bytes());
    key_and_length(out, 2, value_length);
    value.put(out);
}

/// Appends the key and the length of a field that has a length.
fn key_and_length(out: &mut Vec<u8>, field: u8, length: usize) {
    key_and_varint(out, field << 3 | LENGTH, length);
}

/// Appends the key of a field and a varint. Inlined because it is short, and called some hundred
/// times for each request.
#[inline(always)]
fn key_and_varint(out: &mut Vec<u8>, key: u8, number: usize) {
    if number < 0x80 {
        out.extend_from_slice(&[key, number as u8]);
    } else {
        out.push(key);
        // A vector has room for everything.
        let _infallible = encode_length_delimiter(number, out);
    }
}

/// Appends an id.
fn id<const N: usize>(out: &mut Vec<u8>, field: u8, id: [u8; N]) {
    key_and_length(out, field, N);
    out.extend_from_slice(&id);
}

/// Appends bytes or a text; nothing if there are none.
fn bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    if !bytes.is_empty() {
        key_and_length(out, field, bytes.len());
        out.extend_from_slice(bytes);
    }
}

fn fixed_64(out: &mut Vec<u8>, field: u8, number: u64) {
    out.push(field << 3 | FIXED_64);
    out.extend_from_slice(&number.to_le_bytes());
}

/// Appends a message, whose length is known when it is written.
fn message(out: &mut Vec<u8>, field: u8, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    write(out);
    let written = out.len() - start;
    key_and_length(out, field, written);
    let prefix = out.len() - start - written;
    out[start..].rotate_right(prefix);
}
