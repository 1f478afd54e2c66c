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
//! docs/traces.md has all spans.
//!
//! The spans with the attribute `splitrail.ttft.part` follow each other without a gap from the
//! arrival of a prompt to its first token. The names `gen_ai.*` are those of OpenTelemetry's semantic
//! conventions up to 1.41, in which they are in development.

mod request;

use std::time::Duration;

use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use splitrail_api::text::random_id;
use splitrail_ledger::leg::LegKind;
use splitrail_ledger::timeline::{
    HandOffSpan, Pick, RequestTrace, ScoredCandidate, Spans, Stage, StageSpan, TracedLeg,
};

use super::otlp::{self, Head, Value, attribute, resource_attribute};
use crate::summary::Summary;

/// The flags of a span that is sampled and whose parent is not of another process.
const LOCAL_PARENT: u32 = 0x101;
/// The flags of a span that is sampled and whose parent is of another process.
const REMOTE_PARENT: u32 = 0x301;

/// A traced request that has ended.
pub(super) struct EndedTrace<'r> {
    pub(super) trace: &'r RequestTrace,
    pub(super) spans: &'r Spans,
    pub(super) summary: &'r Summary<'r>,
}

/// What all spans of this process have in common.
pub(super) struct Resource {
    attributes: Vec<u8>,
}

impl Resource {
    pub(super) fn new(service_name: &str) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let mut attributes = Vec::new();
        resource_attribute(&mut attributes, "service.name", service_name);
        resource_attribute(&mut attributes, "service.version", VERSION);
        resource_attribute(&mut attributes, "service.instance.id", &random_id());
        if !host.trim().is_empty() {
            resource_attribute(&mut attributes, "host.name", host.trim());
        }
        Self { attributes }
    }

    /// What stands before spans of `spans_bytes` in the request that exports them.
    pub(super) fn head(&self, spans_bytes: usize) -> Vec<u8> {
        otlp::head(&self.attributes, ["splitrail", VERSION], spans_bytes)
    }
}

/// The version of the router.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The span of a request.
const REQUEST: &str = "request";
/// The span from the end of a prefill leg to the first token.
const HAND_OFF: &str = "hand-off";
/// The spans of legs.
const PREFILL_LEG: &str = "prefill leg";
const DECODE_LEG: &str = "decode leg";

/// The name of the span of a stage, where no other span is the same.
fn stage_span(stage: Stage) -> &'static str {
    match stage {
        Stage::Receive | Stage::Tokenize | Stage::Prefill => stage.name(),
        Stage::Admit => "queue",
        Stage::Match | Stage::Pick => "pick",
        Stage::DecodeTry => "decode try",
        Stage::PeerFetch => "peer fetch",
        Stage::FirstToken => "first token",
        Stage::Failed => "failed attempt",
    }
}

/// The kind of a span below the request's.
#[derive(Clone, Copy)]
enum Part<'a> {
    Stage(Stage),
    /// A choice of a worker, with what was kept of it.
    Pick(Option<&'a Pick>),
    Leg(&'a TracedLeg),
    HandOff,
}

/// A span below the request's, before it is given its form.
#[derive(Clone, Copy)]
struct InnerSpan<'a> {
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
    HandOff(HandOffSpan),
    Leg(&'a TracedLeg),
}

impl EndedTrace<'_> {
    /// The number of spans.
    pub(super) fn count(&self) -> usize {
        let mut count = 1;
        self.each(|_| count += 1);
        count
    }

    /// At least the number of spans, without looking at each.
    pub(super) fn count_max(&self) -> usize {
        let Spans { stages, legs, hand_offs, .. } = self.spans;
        1 + stages.len() + legs.len() + hand_offs.len()
    }

    /// Appends the spans, of which that of the request is the first. Returns their number.
    pub(super) fn put_spans(&self, out: &mut Vec<u8>) -> usize {
        self.put_request_span(out);
        let mut count = 1;
        // A hand-off comes before the spans in it.
        let mut hand_offs: Vec<(HandOffSpan, u64)> = Vec::new();
        self.each(|below| {
            count += 1;
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
                let InnerSpan { begin, end, .. } = below;
                hand_offs.push((HandOffSpan { prompt, begin, end }, own_id));
            }
            self.put_below(out, below, own_id, parent_id);
        });
        count
    }

    /// Calls `put` with each span below the request's.
    fn each<'a>(&'a self, mut put: impl FnMut(InnerSpan<'a>)) {
        for hand_off in self.hand_offs() {
            put(InnerSpan {
                part: Part::HandOff,
                prompt: Some(hand_off.prompt),
                begin: hand_off.begin,
                end: hand_off.end,
                parent: Parent::Request,
                is_ttft_part: true,
            });
        }
        let Spans { stages, legs, .. } = self.spans;
        legs.iter().map(|leg| self.leg(leg)).for_each(&mut put);
        stages.iter().filter_map(|span| self.stage(span)).for_each(put);
    }

    /// The hand-offs. A whole reply has no first token, and so none.
    fn hand_offs(&self) -> &[HandOffSpan] {
        if self.has_first_token() { &self.spans.hand_offs } else { &[] }
    }

    /// The hand-off that a stage is a part of.
    fn hand_off_around(&self, span: &StageSpan) -> Option<HandOffSpan> {
        let holds = |one: &&HandOffSpan| {
            Some(one.prompt) == span.prompt && one.begin <= span.begin && span.end <= one.end
        };
        self.hand_offs().iter().find(holds).copied()
    }

    /// The span of a leg.
    fn leg<'a>(&'a self, leg: &'a TracedLeg) -> InnerSpan<'a> {
        let span = self.spans.stages.iter().find(|span| is_whole(span, leg));
        let is_ttft_part = span.is_some_and(|span| {
            self.is_before_reply(span)
                && span.stage != Stage::FirstToken
                && self.hand_off_around(span).is_none()
        });
        InnerSpan {
            part: Part::Leg(leg),
            prompt: Some(leg.prompt),
            begin: leg.begin,
            end: leg.end.unwrap_or(leg.begin),
            parent: Parent::Request,
            is_ttft_part,
        }
    }

    /// The span of a stage; `None` if another span is the same.
    fn stage<'a>(&'a self, span: &'a StageSpan) -> Option<InnerSpan<'a>> {
        let Spans { stages, picks, legs, .. } = self.spans;
        let hand_off = self.hand_off_around(span);
        let mut below = InnerSpan {
            part: Part::Stage(span.stage),
            prompt: span.prompt,
            begin: span.begin,
            end: span.end,
            parent: hand_off.map_or(Parent::Request, Parent::HandOff),
            is_ttft_part: hand_off.is_none() && self.is_before_reply(span),
        };
        match span.stage {
            Stage::Receive | Stage::Tokenize | Stage::Admit => {}
            // A part of the choice that follows, unless none does.
            Stage::Match if picked(stages, span) => return None,
            Stage::Match => below.part = Part::Pick(None),
            Stage::Pick => {
                let is_of_lap =
                    |pick: &&Pick| Some(pick.prompt) == span.prompt && pick.begin == span.begin;
                below.part = Part::Pick(picks.iter().find(is_of_lap));
                below.begin = matched(stages, span).map_or(span.begin, |span| span.begin);
            }
            // The whole of it is the span of the hand-off, or of the leg.
            Stage::FirstToken if hand_off.is_some() || !self.has_first_token() => return None,
            Stage::FirstToken => {
                let begun = |leg: &&TracedLeg| {
                    Some(leg.prompt) == span.prompt
                        && leg.kind == LegKind::Decode
                        && leg.begin == span.begin
                };
                below.parent = legs.iter().find(begun).map_or(Parent::Request, Parent::Leg);
            }
            _ if legs.iter().any(|leg| is_whole(span, leg)) => return None,
            Stage::PeerFetch | Stage::Prefill | Stage::DecodeTry | Stage::Failed => {}
        }
        Some(below)
    }

    /// Whether the reply is a stream that has begun.
    fn has_first_token(&self) -> bool {
        self.summary.ttft.is_some()
    }

    /// Whether a stage is before the first token of the request.
    fn is_before_reply(&self, span: &StageSpan) -> bool {
        self.summary.ttft.is_some_and(|ttft| span.end <= ttft)
    }

    fn put_below(&self, out: &mut Vec<u8>, below: InnerSpan<'_>, own_id: u64, parent_id: u64) {
        let (name, kind) = match below.part {
            Part::Stage(stage) => (stage_span(stage), SpanKind::Internal),
            Part::HandOff => (HAND_OFF, SpanKind::Internal),
            Part::Pick(_) => (stage_span(Stage::Pick), SpanKind::Internal),
            Part::Leg(leg) => match leg.kind {
                LegKind::Prefill => (PREFILL_LEG, SpanKind::Client),
                LegKind::Decode => (DECODE_LEG, SpanKind::Client),
            },
        };
        let head = Head {
            parent_id: Some(parent_id),
            flags: LOCAL_PARENT,
            ..self.head(own_id, name, kind, below.begin, below.end)
        };
        otlp::span(out, &head, |out| {
            let is_failed = match below.part {
                Part::Stage(Stage::PeerFetch) => {
                    // Of a batch, the way of the first prompt is known.
                    let way = self.summary.peer_fetch.filter(|_| below.prompt == Some(0));
                    way.into_iter().for_each(|way| text(out, "splitrail.peer_fetch.way", way));
                    false
                }
                Part::Stage(_) | Part::HandOff => false,
                Part::Pick(Some(pick)) => {
                    put_pick(out, pick);
                    false
                }
                Part::Pick(None) => put_error(out, "no_worker"),
                Part::Leg(leg) => {
                    text(out, "splitrail.worker", &leg.worker);
                    text(out, "splitrail.outcome", leg.outcome);
                    !matches!(leg.outcome, "ok" | "cancelled") && put_error(out, leg.outcome)
                }
            };
            if below.is_ttft_part {
                flag(out, "splitrail.ttft.part", true);
            }
            if let Some(prompt) = below.prompt.filter(|_| self.summary.prompts > 1) {
                number(out, "splitrail.prompt.index", prompt.into());
            }
            is_failed
        });
    }

    fn head(
        &self,
        span_id: u64,
        name: &'static str,
        kind: SpanKind,
        begin: Duration,
        end: Duration,
    ) -> Head<'_> {
        let arrived = self.summary.arrived_unix();
        // 64 bits last until the year 2554.
        let unix_ns = |at: Duration| (arrived + at).as_nanos() as u64;
        Head {
            trace_id: self.trace.context.trace_id,
            span_id,
            state: self.trace.state.as_deref().unwrap_or_default(),
            parent_id: None,
            name,
            kind,
            begin_ns: unix_ns(begin),
            end_ns: unix_ns(end),
            flags: LOCAL_PARENT,
        }
    }
}

/// Whether a stage is the whole of a leg.
fn is_whole(span: &StageSpan, leg: &TracedLeg) -> bool {
    Some(leg.prompt) == span.prompt && leg.begin == span.begin && leg.end == Some(span.end)
}

/// Whether a choice follows the look-up of candidates immediately.
fn picked(stages: &[StageSpan], matched: &StageSpan) -> bool {
    let follows = |span: &&StageSpan| span.prompt == matched.prompt && span.begin == matched.end;
    stages.iter().find(follows).is_some_and(|span| span.stage == Stage::Pick)
}

/// The look-up of candidates immediately before a choice.
fn matched<'a>(stages: &'a [StageSpan], pick: &StageSpan) -> Option<&'a StageSpan> {
    let precedes = |span: &&StageSpan| span.prompt == pick.prompt && span.end == pick.begin;
    stages.iter().rfind(precedes).filter(|span| span.stage == Stage::Match)
}

fn put_pick(out: &mut Vec<u8>, pick: &Pick) {
    text(out, "splitrail.pick.leg", pick.leg);
    number(out, "splitrail.pick.candidates", pick.candidates as u64);
    let ScoredCandidate { worker, cost, overlap_blocks } = &pick.chosen;
    text(out, "splitrail.pick.worker", worker);
    real(out, "splitrail.pick.cost", *cost);
    number(out, "splitrail.pick.overlap_blocks", (*overlap_blocks).into());
    if let Some(ScoredCandidate { worker, cost, overlap_blocks }) = &pick.runner_up {
        text(out, "splitrail.pick.runner_up.worker", worker);
        real(out, "splitrail.pick.runner_up.cost", *cost);
        number(out, "splitrail.pick.runner_up.overlap_blocks", (*overlap_blocks).into());
    }
}

/// Adds the type of the error of a span that failed. Returns that it failed.
fn put_error(out: &mut Vec<u8>, error: &str) -> bool {
    text(out, "error.type", error);
    true
}

fn text(out: &mut Vec<u8>, key: &str, value: &str) {
    attribute(out, key, Value::Text(value));
}

fn number(out: &mut Vec<u8>, key: &str, value: u64) {
    attribute(out, key, Value::Number(value));
}

fn real(out: &mut Vec<u8>, key: &str, value: f64) {
    attribute(out, key, Value::Real(value));
}

fn flag(out: &mut Vec<u8>, key: &str, value: bool) {
    attribute(out, key, Value::Flag(value));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
