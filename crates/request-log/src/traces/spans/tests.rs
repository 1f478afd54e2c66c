//! The written spans, read by the generated types of OTLP.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use prost::Message;
use splitrail_telemetry::trace_context::TraceContext;

use super::*;
use crate::identity::{ClientTrace, Identity, Protocol};

const PARENT: u64 = 0xb7ad;
const TRACE: u128 = 0x0af7_6519;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A traced request that has ended, with what it owns.
struct Traced {
    trace: RequestTrace,
    spans: Spans,
    summary: Summary<'static>,
}

impl Traced {
    fn ended(&self) -> EndedTrace<'_> {
        let Self { trace, spans, summary } = self;
        EndedTrace { trace, spans, summary }
    }
}

/// A P/D request with all kinds of spans, whose first prefill leg failed.
fn traced(state: &str, model: &'static str) -> Traced {
    let client = Ipv4Addr::LOCALHOST.into();
    let identity = Identity::new(Some(b"id-1"), client, Protocol::Http, ClientTrace::default());
    let mut summary = Summary::new(Box::leak(Box::new(identity)), "chat", Instant::now());
    summary.ended_unix = Duration::from_secs(1_800_000_000);
    (summary.total, summary.ttft) = (ms(100), Some(ms(60)));
    (summary.status, summary.outcome, summary.prompts) = (502, "engine_failed", 2);
    summary.model = Some(model);
    summary.peer_fetch = Some("two_step");
    let span =
        |stage, begin, end| StageSpan { prompt: Some(0), stage, begin: ms(begin), end: ms(end) };
    let leg = |kind, span_id, begin, end, outcome| TracedLeg {
        prompt: 0,
        kind,
        worker: "p0".into(),
        span_id,
        begin: ms(begin),
        end: Some(ms(end)),
        outcome,
    };
    let scored =
        |worker: &str| ScoredCandidate { worker: worker.into(), cost: -1.5, overlap_blocks: 300 };
    let pick = Pick {
        prompt: 0,
        begin: ms(3),
        leg: "prefill",
        chosen: scored("p0"),
        runner_up: Some(scored("p1")),
        candidates: 200,
    };
    let spans = Spans {
        stages: vec![
            StageSpan { prompt: None, stage: Stage::Receive, begin: ms(0), end: ms(1) },
            span(Stage::Match, 1, 3),
            span(Stage::Pick, 3, 5),
            span(Stage::Failed, 5, 9),
            span(Stage::PeerFetch, 9, 10),
            span(Stage::Prefill, 10, 30),
            span(Stage::Pick, 30, 31),
            span(Stage::FirstToken, 31, 60),
        ],
        picks: vec![pick],
        legs: vec![
            leg(LegKind::Prefill, 5, 5, 9, "engine_failed"),
            leg(LegKind::Prefill, 6, 10, 30, "ok"),
            leg(LegKind::Decode, 7, 31, 100, "cancelled"),
        ],
        hand_offs: vec![HandOffSpan { prompt: 0, begin: ms(30), end: ms(60) }],
        left_out: 3,
    };
    let context = TraceContext { trace_id: TRACE, span_id: 9, is_sampled: true };
    let state = (!state.is_empty()).then(|| state.into());
    let trace = RequestTrace { context, parent_id: Some(PARENT), state };
    Traced { trace, spans, summary }
}

fn read(message: &[u8]) -> (ExportTraceServiceRequest, Vec<Span>) {
    let request = ExportTraceServiceRequest::decode(message).unwrap();
    let spans = request.resource_spans[0].scope_spans[0].spans.clone();
    (request, spans)
}

fn value(attributes: &[KeyValue], key: &str) -> Option<Value> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.clone()?.value
}

#[test]
fn the_generated_types_write_the_same_bytes() {
    let resource = Resource::new("edge");
    for (state, model) in
        [("", "m"), ("vendor=1,other=x", "m\u{e9}"), ("a=b", "x".repeat(500).leak())]
    {
        let mut spans = Vec::new();
        let mut count = 0;
        for _ in 0..40 {
            let traced = traced(state, model);
            let ended = traced.ended();
            assert!(ended.count_max() >= ended.count());
            count += ended.put_spans(&mut spans);
        }
        let message = [resource.head(spans.len()), spans].concat();
        let (request, spans) = read(&message);
        assert_eq!(spans.len(), count);
        assert_eq!(request.encode_to_vec(), message);
    }
}

#[test]
fn the_spans_have_their_names_parents_times_and_attributes() {
    let mut bytes = Vec::new();
    let traced = traced("a=b", "m");
    let ended = traced.ended();
    assert_eq!(ended.put_spans(&mut bytes), ended.count());
    let head = Resource::new("edge").head(bytes.len());
    let (request, spans) = read(&[head, bytes].concat());
    let resource = request.resource_spans[0].resource.clone().unwrap().attributes;
    assert_eq!(value(&resource, "service.name"), Some(Value::StringValue("edge".into())));
    let scope = request.resource_spans[0].scope_spans[0].scope.clone().unwrap();
    assert_eq!(scope.name, "splitrail");

    let root = &spans[0];
    assert_eq!(root.trace_id, TRACE.to_be_bytes());
    assert_eq!((root.name.as_str(), root.kind()), ("request", SpanKind::Server));
    assert_eq!(root.parent_span_id, PARENT.to_be_bytes());
    assert_eq!((root.flags, root.trace_state.as_str()), (REMOTE_PARENT, "a=b"));
    assert_eq!(root.status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!(root.end_time_unix_nano, 1_800_000_000_000_000_000);
    assert_eq!(root.end_time_unix_nano - root.start_time_unix_nano, 100_000_000);
    assert_eq!(value(&root.attributes, "splitrail.spans_left_out"), Some(Value::IntValue(3)));
    let ttft = value(&root.attributes, "gen_ai.response.time_to_first_chunk");
    assert_eq!(ttft, Some(Value::DoubleValue(0.06)));

    let named = |name: &'static str| spans.iter().filter(move |span| span.name == name);
    let [failed, prefill] = [0, 1].map(|at| named("prefill leg").nth(at).unwrap());
    assert_eq!(failed.status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!(
        value(&failed.attributes, "error.type"),
        Some(Value::StringValue("engine_failed".into()))
    );
    assert_eq!((prefill.status.as_ref(), prefill.flags), (None, LOCAL_PARENT));
    assert_eq!(prefill.span_id, 6u64.to_be_bytes());
    assert_eq!(prefill.parent_span_id, root.span_id);
    assert_eq!(value(&prefill.attributes, "splitrail.ttft.part"), Some(Value::BoolValue(true)));
    let pick = named("pick").find(|pick| !pick.attributes.is_empty()).unwrap();
    let cost = value(&pick.attributes, "splitrail.pick.runner_up.cost");
    assert_eq!(cost, Some(Value::DoubleValue(-1.5)));
    let candidates = value(&pick.attributes, "splitrail.pick.candidates");
    assert_eq!(candidates, Some(Value::IntValue(200)));
    let fetch = named("peer fetch").next().unwrap();
    let way = value(&fetch.attributes, "splitrail.peer_fetch.way");
    assert_eq!(way, Some(Value::StringValue("two_step".into())));
    let hand_off = named("hand-off").next().unwrap();
    assert_eq!(hand_off.end_time_unix_nano - hand_off.start_time_unix_nano, 30_000_000);
    assert!(spans.iter().any(|span| span.parent_span_id == hand_off.span_id));
}

/// The names in the tree of docs/traces.md are those that the code gives.
#[test]
fn every_span_is_documented_and_every_documented_span_exists() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/traces.md");
    let document = std::fs::read_to_string(path).unwrap();
    let tree = document.split("## Spans\n").nth(1).unwrap().split("```").nth(1).unwrap();
    let documented: BTreeSet<&str> = tree
        .lines()
        .map(|line| line.trim_start_matches(|c: char| " \u{2502}\u{251c}\u{2514}".contains(c)))
        .map(|line| line.split_once("  ").map_or(line, |(name, _)| name))
        .filter(|name| !name.is_empty())
        .collect();
    let made = Stage::ALL.map(stage_span).into_iter();
    let made = made.chain([REQUEST, HAND_OFF, PREFILL_LEG, DECODE_LEG]).collect();
    assert_eq!(documented, made);
}
