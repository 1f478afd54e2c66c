//! Makes the spans of a request from its timeline.
//!
//! ```text
//! request
//! ├ receive, tokenize, queue, pick       (stages before the legs)
//! ├ prefill leg                          (its engine continues the trace from here)
//! ├ hand-off                             (end of the prefill leg to the first token)
//! │ └ pick
//! └ decode leg                           (its engine continues the trace from here)
//!   └ first token                        (without a hand-off)
//! ```
//!
//! The spans with the attribute `splitrail.ttft.part` follow each other without a gap from the
//! arrival of a prompt to its first token. The names `gen_ai.*` are those of OpenTelemetry's semantic
//! conventions up to 1.41, in which they are in development.

mod request;

use std::time::Duration;

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use splitrail_api::text::random_id;
use splitrail_ledger::leg::LegKind;
use splitrail_ledger::timeline::{HandOff, Lap, Leg, Pick, RequestTrace, Scored, Spans, Stage};

use crate::summary::Summary;

/// The flags of a span that is sampled and whose parent is not of another process.
const LOCAL_PARENT: u32 = 0x101;
/// The flags of a span that is sampled and whose parent is of another process.
const REMOTE_PARENT: u32 = 0x301;

/// A traced request that has ended.
pub(super) struct Ended {
    pub(super) trace: RequestTrace,
    pub(super) spans: Box<Spans>,
    pub(super) summary: Summary,
}

/// What all spans of this process have in common.
pub(super) struct Resource {
    attributes: Vec<KeyValue>,
}

impl Resource {
    pub(super) fn new(service_name: &str) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let mut attributes = vec![
            text("service.name", service_name),
            text("service.version", env!("CARGO_PKG_VERSION")),
            text("service.instance.id", &random_id()),
        ];
        if !host.trim().is_empty() {
            attributes.push(text("host.name", host.trim()));
        }
        Self { attributes }
    }

    pub(super) fn spans(&self, spans: Vec<Span>) -> ResourceSpans {
        let resource = v1::Resource { attributes: self.attributes.clone(), ..Default::default() };
        let scope = InstrumentationScope {
            name: "splitrail".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        };
        let scope_spans = ScopeSpans { scope: Some(scope), spans, ..Default::default() };
        ResourceSpans {
            resource: Some(resource),
            scope_spans: vec![scope_spans],
            ..Default::default()
        }
    }
}

/// The kind of a span below the request's.
#[derive(Clone, Copy)]
enum Part<'a> {
    /// A stage, with its name.
    Stage(&'static str),
    /// A choice of a worker, with what was kept of it.
    Pick(Option<&'a Pick>),
    Leg(&'a Leg),
    HandOff,
}

/// A span below the request's, before it is given its form.
#[derive(Clone, Copy)]
struct Below<'a> {
    part: Part<'a>,
    prompt: Option<u32>,
    begin: Duration,
    end: Duration,
    parent: Parent<'a>,
    /// Whether the span is a part of the time to first token that no other part covers.
    is_ttft_part: bool,
}

/// The parent of a span below the request's.
#[derive(Clone, Copy)]
enum Parent<'a> {
    Request,
    HandOff(HandOff),
    Leg(&'a Leg),
}

impl Ended {
    /// The number of spans.
    pub(super) fn count(&self) -> usize {
        let mut count = 1;
        self.each(|_| count += 1);
        count
    }

    /// The spans; that of the request is the first.
    pub(super) fn into_spans(self) -> Vec<Span> {
        let mut spans = vec![self.request()];
        // A hand-off comes before the spans in it.
        let mut hand_offs: Vec<(HandOff, u64)> = Vec::new();
        self.each(|below| {
            let own_id = match below.part {
                Part::Leg(leg) => leg.span_id,
                _ => rand::random::<u64>().max(1),
            };
            let parent_id = match below.parent {
                Parent::Request => self.trace.context.span_id,
                Parent::Leg(leg) => leg.span_id,
                Parent::HandOff(hand_off) => {
                    let found = hand_offs.iter().find(|(known, _)| *known == hand_off);
                    found.map_or(self.trace.context.span_id, |(_, id)| *id)
                }
            };
            if let (Part::HandOff, Some(prompt)) = (below.part, below.prompt) {
                let Below { begin, end, .. } = below;
                hand_offs.push((HandOff { prompt, begin, end }, own_id));
            }
            spans.push(self.below(below, own_id, parent_id));
        });
        spans
    }

    /// Calls `put` with each span below the request's.
    fn each<'a>(&'a self, mut put: impl FnMut(Below<'a>)) {
        for hand_off in self.hand_offs() {
            put(Below {
                part: Part::HandOff,
                prompt: Some(hand_off.prompt),
                begin: hand_off.begin,
                end: hand_off.end,
                parent: Parent::Request,
                is_ttft_part: true,
            });
        }
        let Spans { laps, legs, .. } = &*self.spans;
        legs.iter().map(|leg| self.leg(leg)).for_each(&mut put);
        laps.iter().filter_map(|lap| self.stage(lap)).for_each(put);
    }

    /// The hand-offs. A whole reply has no first token, and so none.
    fn hand_offs(&self) -> &[HandOff] {
        if self.has_first_token() { &self.spans.hand_offs } else { &[] }
    }

    /// The hand-off that a stage is a part of.
    fn hand_off_around(&self, lap: &Lap) -> Option<HandOff> {
        let holds = |one: &&HandOff| {
            Some(one.prompt) == lap.prompt && one.begin <= lap.begin && lap.end <= one.end
        };
        self.hand_offs().iter().find(holds).copied()
    }

    /// The span of a leg.
    fn leg<'a>(&'a self, leg: &'a Leg) -> Below<'a> {
        let lap = self.spans.laps.iter().find(|lap| is_whole(lap, leg));
        let is_ttft_part = lap.is_some_and(|lap| {
            self.is_before_reply(lap)
                && lap.stage != Stage::FirstToken
                && self.hand_off_around(lap).is_none()
        });
        Below {
            part: Part::Leg(leg),
            prompt: Some(leg.prompt),
            begin: leg.begin,
            end: leg.end.unwrap_or(leg.begin),
            parent: Parent::Request,
            is_ttft_part,
        }
    }

    /// The span of a stage; `None` if another span is the same.
    fn stage<'a>(&'a self, lap: &'a Lap) -> Option<Below<'a>> {
        let Spans { laps, picks, legs, .. } = &*self.spans;
        let hand_off = self.hand_off_around(lap);
        let mut below = Below {
            part: Part::Stage(lap.stage.name()),
            prompt: lap.prompt,
            begin: lap.begin,
            end: lap.end,
            parent: hand_off.map_or(Parent::Request, Parent::HandOff),
            is_ttft_part: hand_off.is_none() && self.is_before_reply(lap),
        };
        match lap.stage {
            Stage::Receive | Stage::Tokenize => {}
            Stage::Admit => below.part = Part::Stage("queue"),
            // A part of the choice that follows, unless none does.
            Stage::Match if picked(laps, lap) => return None,
            Stage::Match => below.part = Part::Pick(None),
            Stage::Pick => {
                let is_of_lap =
                    |pick: &&Pick| Some(pick.prompt) == lap.prompt && pick.begin == lap.begin;
                below.part = Part::Pick(picks.iter().find(is_of_lap));
                below.begin = matched(laps, lap).map_or(lap.begin, |lap| lap.begin);
            }
            // The whole of it is the span of the hand-off, or of the leg.
            Stage::FirstToken if hand_off.is_some() || !self.has_first_token() => return None,
            Stage::FirstToken => {
                let begun = |leg: &&Leg| {
                    Some(leg.prompt) == lap.prompt
                        && leg.kind == LegKind::Decode
                        && leg.begin == lap.begin
                };
                below.part = Part::Stage("first token");
                below.parent = legs.iter().find(begun).map_or(Parent::Request, Parent::Leg);
            }
            _ if legs.iter().any(|leg| is_whole(lap, leg)) => return None,
            Stage::Prefill => below.part = Part::Stage("prefill"),
            Stage::DecodeTry => below.part = Part::Stage("decode try"),
            Stage::Failed => below.part = Part::Stage("failed attempt"),
        }
        Some(below)
    }

    /// Whether the reply is a stream that has begun.
    fn has_first_token(&self) -> bool {
        self.summary.ttft.is_some()
    }

    /// Whether a stage is before the first token of the request.
    fn is_before_reply(&self, lap: &Lap) -> bool {
        self.summary.ttft.is_some_and(|ttft| lap.end <= ttft)
    }

    fn below(&self, below: Below<'_>, own_id: u64, parent_id: u64) -> Span {
        let mut attributes = Vec::new();
        let (mut kind, mut status) = (SpanKind::Internal, None);
        let name = match below.part {
            Part::Stage(name) => name,
            Part::HandOff => "hand-off",
            Part::Pick(pick) => {
                match pick {
                    Some(pick) => put_pick(&mut attributes, pick),
                    None => status = failed("no_worker", &mut attributes),
                }
                "pick"
            }
            Part::Leg(leg) => {
                kind = SpanKind::Client;
                attributes.push(text("splitrail.worker", &leg.worker));
                attributes.push(text("splitrail.outcome", leg.outcome));
                if !matches!(leg.outcome, "ok" | "cancelled") {
                    status = failed(leg.outcome, &mut attributes);
                }
                match leg.kind {
                    LegKind::Prefill => "prefill leg",
                    LegKind::Decode => "decode leg",
                }
            }
        };
        if below.is_ttft_part {
            attributes.push(flag("splitrail.ttft.part", true));
        }
        if let Some(prompt) = below.prompt.filter(|_| self.summary.prompts > 1) {
            attributes.push(number("splitrail.prompt.index", u64::from(prompt)));
        }
        Span {
            parent_span_id: parent_id.to_be_bytes().to_vec(),
            flags: LOCAL_PARENT,
            status,
            ..self.span(own_id, name, kind, (below.begin, below.end), attributes)
        }
    }

    fn span(
        &self,
        span_id: u64,
        name: &str,
        kind: SpanKind,
        (begin, end): (Duration, Duration),
        attributes: Vec<KeyValue>,
    ) -> Span {
        let arrived = self.summary.arrived_unix();
        let unix_ns = |at: Duration| u64::try_from((arrived + at).as_nanos()).unwrap_or(u64::MAX);
        Span {
            trace_id: self.trace.context.trace_id.to_be_bytes().to_vec(),
            span_id: span_id.to_be_bytes().to_vec(),
            trace_state: self.trace.state.as_deref().unwrap_or_default().to_owned(),
            name: name.to_owned(),
            kind: kind.into(),
            start_time_unix_nano: unix_ns(begin),
            end_time_unix_nano: unix_ns(end),
            attributes,
            ..Default::default()
        }
    }
}

/// Whether a stage is the whole of a leg.
fn is_whole(lap: &Lap, leg: &Leg) -> bool {
    Some(leg.prompt) == lap.prompt && leg.begin == lap.begin && leg.end == Some(lap.end)
}

/// Whether a choice follows the look-up of candidates immediately.
fn picked(laps: &[Lap], matched: &Lap) -> bool {
    let follows = |lap: &&Lap| lap.prompt == matched.prompt && lap.begin == matched.end;
    laps.iter().find(follows).is_some_and(|lap| lap.stage == Stage::Pick)
}

/// The look-up of candidates immediately before a choice.
fn matched<'a>(laps: &'a [Lap], pick: &Lap) -> Option<&'a Lap> {
    let precedes = |lap: &&Lap| lap.prompt == pick.prompt && lap.end == pick.begin;
    laps.iter().rfind(precedes).filter(|lap| lap.stage == Stage::Match)
}

fn put_pick(attributes: &mut Vec<KeyValue>, pick: &Pick) {
    attributes.push(text("splitrail.pick.leg", pick.leg));
    attributes.push(number("splitrail.pick.candidates", pick.candidates as u64));
    let Scored { worker, cost, overlap_blocks } = &pick.chosen;
    attributes.push(text("splitrail.pick.worker", worker));
    attributes.push(real("splitrail.pick.cost", *cost));
    attributes.push(number("splitrail.pick.overlap_blocks", u64::from(*overlap_blocks)));
    if let Some(Scored { worker, cost, overlap_blocks }) = &pick.runner_up {
        attributes.push(text("splitrail.pick.runner_up.worker", worker));
        attributes.push(real("splitrail.pick.runner_up.cost", *cost));
        let blocks = number("splitrail.pick.runner_up.overlap_blocks", u64::from(*overlap_blocks));
        attributes.push(blocks);
    }
}

/// The status of a span that failed. Adds the type of the error.
fn failed(error: &str, attributes: &mut Vec<KeyValue>) -> Option<Status> {
    attributes.push(text("error.type", error));
    Some(Status { code: StatusCode::Error.into(), message: String::new() })
}

fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, Value::StringValue(value.to_owned()))
}

fn number(key: &str, value: u64) -> KeyValue {
    attribute(key, Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)))
}

fn real(key: &str, value: f64) -> KeyValue {
    attribute(key, Value::DoubleValue(value))
}

fn flag(key: &str, value: bool) -> KeyValue {
    attribute(key, Value::BoolValue(value))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    let value = Some(AnyValue { value: Some(value) });
    KeyValue { key: key.to_owned(), value, ..Default::default() }
}
