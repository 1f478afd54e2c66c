//! The clock of one prompt, and the legs that it measures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_telemetry::trace_context::TraceContext;

use super::stage::Stage;
use super::trace::{HandOffSpan, Pick, StageSpan, TracedLeg};
use super::{Cursor, Timeline};
use crate::leg::LegKind;

/// The clock of one prompt: each stage begins where the stage before it ended.
#[derive(Clone, Debug)]
pub struct PromptClock {
    timeline: Arc<Timeline>,
    prompt: u32,
}

/// How long a stage of a prompt took.
#[derive(Clone, Copy, Debug)]
pub struct StageTime {
    /// The duration of the stage.
    pub stage: Duration,
    /// The time from the end of the prefill leg, if the stage ended with the first token of a prompt
    /// that was handed over.
    pub hand_off: Option<Duration>,
}

impl PromptClock {
    pub(super) fn new(timeline: Arc<Timeline>, prompt: u32) -> Self {
        Self { timeline, prompt }
    }

    /// Notes that a stage ends at `now`. Returns how long it took.
    pub fn end_stage(&self, stage: Stage, now: Instant) -> StageTime {
        let end = self.timeline.since_origin(now);
        let mut state = self.timeline.lock();
        let cursor = state.cursor(self.prompt);
        let begin = cursor.at;
        let end = end.max(begin);
        cursor.at = end;
        let mut handed_over = None;
        match stage {
            Stage::Prefill => cursor.prefilled = Some(end),
            Stage::FirstToken => handed_over = cursor.prefilled.take(),
            _ => {}
        }
        state.totals.add(stage, end - begin);
        let hand_off = handed_over.map(|prefilled| end - prefilled);
        if let Some(hand_off) = hand_off {
            *state.hand_off.get_or_insert_default() += hand_off;
        }
        let prompt = self.prompt;
        if let Some(spans) = &mut state.spans {
            spans.push_stage(StageSpan { prompt: Some(prompt), stage, begin, end });
            spans.hand_offs.extend(handed_over.map(|begin| HandOffSpan { prompt, begin, end }));
        }
        StageTime { stage: end - begin, hand_off }
    }

    /// Lets the next stage begin at `now`: the reply had begun, and a part of it is done again.
    pub fn restart(&self, now: Instant) {
        let now = self.timeline.since_origin(now);
        let mut state = self.timeline.lock();
        let cursor = state.cursor(self.prompt);
        cursor.at = cursor.at.max(now);
    }

    /// Notes that no decode leg will use the hand-off of the last prefill leg.
    pub fn hand_off_lost(&self) {
        self.timeline.lock().cursor(self.prompt).prefilled = None;
    }

    /// Keeps a choice that has just been made, if the request is traced. `pick` gets the position
    /// of the prompt and the time.
    pub fn picked(&self, pick: impl FnOnce(u32, Duration) -> Pick) {
        if self.timeline.trace.is_none() {
            return;
        }
        let mut state = self.timeline.lock();
        let Cursor { at, .. } = *state.cursor(self.prompt);
        if let Some(spans) = &mut state.spans {
            spans.pick(pick(self.prompt, at));
        }
    }

    /// Begins a leg where the last stage ended. `span_id` makes a random id; it is called if the
    /// request is traced.
    pub fn leg(&self, kind: LegKind, worker: &str, span_id: impl FnOnce() -> u64) -> LegSpan {
        let Some(trace) = &self.timeline.trace else { return LegSpan(None) };
        // 0 is no valid id.
        let span_id = span_id().max(1);
        let mut state = self.timeline.lock();
        let Cursor { at: begin, .. } = *state.cursor(self.prompt);
        let leg = TracedLeg {
            prompt: self.prompt,
            kind,
            worker: worker.into(),
            span_id,
            begin,
            end: None,
            outcome: "cancelled",
        };
        let place = state.spans.as_mut().and_then(|spans| spans.leg(leg));
        let open = place.map(|place| OpenLeg {
            timeline: Arc::clone(&self.timeline),
            prompt: self.prompt,
            place,
            context: TraceContext { span_id, ..trace.context },
        });
        LegSpan(open.map(Box::new))
    }
}

/// A leg that is running. It does nothing if its request is not traced. Dropping it ends the leg as
/// cancelled.
#[derive(Debug, Default)]
pub struct LegSpan(Option<Box<OpenLeg>>);

#[derive(Debug)]
struct OpenLeg {
    timeline: Arc<Timeline>,
    prompt: u32,
    place: usize,
    context: TraceContext,
}

impl OpenLeg {
    fn end(&self, at: impl FnOnce(Cursor) -> Duration, outcome: &'static str) {
        let mut state = self.timeline.lock();
        let cursor = *state.cursor(self.prompt);
        let leg = state.spans.as_mut().and_then(|spans| spans.legs.get_mut(self.place));
        if let Some(leg) = leg {
            (leg.end, leg.outcome) = (Some(at(cursor).max(leg.begin)), outcome);
        }
    }
}

impl LegSpan {
    /// The `traceparent` for the engine: its parent is this leg.
    pub fn traceparent(&self) -> Option<String> {
        self.0.as_ref().map(|open| open.context.to_header())
    }

    /// Ends the leg at `now` with an outcome: `ok` or an error's name. Further calls have no effect.
    pub fn end(&mut self, now: Instant, outcome: &'static str) {
        if let Some(open) = self.0.take() {
            let now = open.timeline.since_origin(now);
            open.end(|_| now, outcome);
        }
    }

    /// Like [`end`](Self::end), at the end of the last stage of the leg's prompt.
    pub fn end_with_stage(&mut self, outcome: &'static str) {
        if let Some(open) = self.0.take() {
            open.end(|cursor| cursor.at, outcome);
        }
    }
}

impl Drop for LegSpan {
    fn drop(&mut self) {
        if self.0.is_some() {
            self.end(Instant::now(), "cancelled");
        }
    }
}
