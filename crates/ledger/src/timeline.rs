//! The times of one request on one clock, for `server-timing`, the stage histogram, the record
//! file, the access log and traces, so that they agree.
//!
//! A stage of a prompt begins where the stage before it ended. So the stages up to the first token
//! add up to the time to first token. A request that is not traced allocates nothing for its times,
//! unless it has several prompts.

mod clock;
mod stage;
mod trace;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};
use splitrail_api::text::push_ms;

pub use clock::{LegSpan, PromptClock, StageTime};
pub use stage::Stage;
pub use trace::{HandOffSpan, Pick, RequestTrace, ScoredCandidate, Spans, StageSpan, TracedLeg};

/// The times of one request.
#[derive(Debug)]
pub struct Timeline {
    /// When the request arrived.
    pub origin: Instant,
    /// The place of the request in a trace, if it is traced.
    pub trace: Option<RequestTrace>,
    state: Mutex<TimelineState>,
}

#[derive(Debug)]
struct TimelineState {
    /// The time in each stage, over all prompts.
    totals: StageTimes,
    /// Time from the end of prefill legs to the first token, over all prompts.
    hand_off: Option<Duration>,
    /// The end of the last stage that all prompts share.
    shared: Cursor,
    /// The first prompt, once it has had a stage of its own.
    first: Option<Cursor>,
    /// Further prompts. Their number is bounded by the places of `limits.in_flight_max`.
    others: Vec<Cursor>,
    /// What traces need in addition; `None` if the request is not traced.
    spans: Option<Box<Spans>>,
}

/// How far a prompt is.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    /// The end of the last stage, since the arrival.
    at: Duration,
    /// The end of a prefill leg whose hand-off no decode leg has used yet.
    prefilled: Option<Duration>,
}

/// The time of one request in each stage. The JSON form is an object with milliseconds by stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageTimes([Option<Duration>; Stage::ALL.len()]);

impl StageTimes {
    fn add(&mut self, stage: Stage, took: Duration) {
        *self.0[stage as usize].get_or_insert_default() += took;
    }

    /// The time in a stage; `None` if the request did not have it.
    fn get(&self, stage: Stage) -> Option<Duration> {
        self.0[stage as usize]
    }

    /// The stages that the request had.
    fn iter(&self) -> impl Iterator<Item = (Stage, Duration)> {
        Stage::ALL.into_iter().filter_map(|stage| Some((stage, self.get(stage)?)))
    }
}

impl Serialize for StageTimes {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.iter().map(|(stage, took)| (stage.name(), took.as_secs_f64() * 1e3)))
    }
}

/// The times of a request that has ended.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RequestTimes {
    /// Time from the arrival to the first event of a stream; `None` for a whole reply, and if no
    /// event came.
    pub ttft_ms: Option<f64>,
    /// Time from the arrival to the end of the request.
    pub total_ms: f64,
    /// The time in each stage, over all prompts.
    pub stages_ms: StageTimes,
}

impl TimelineState {
    fn cursor(&mut self, prompt: u32) -> &mut Cursor {
        let shared = self.shared;
        match (prompt as usize).checked_sub(1) {
            None => self.first.get_or_insert(shared),
            Some(place) => {
                if self.others.len() <= place {
                    self.others.resize(place + 1, shared);
                }
                &mut self.others[place]
            }
        }
    }
}

impl Timeline {
    /// The times of a request that arrived at `origin`. It is traced if it has a place in a trace.
    pub fn new(origin: Instant, trace: Option<RequestTrace>) -> Self {
        let spans = trace.is_some().then(Box::default);
        let state = TimelineState {
            totals: StageTimes::default(),
            hand_off: None,
            shared: Cursor::default(),
            first: None,
            others: Vec::new(),
            spans,
        };
        Self { origin, trace, state: Mutex::new(state) }
    }

    /// Notes that a stage which all prompts share ends at `now`. Returns its duration.
    pub fn end_stage(&self, stage: Stage, now: Instant) -> Duration {
        let end = self.since_origin(now);
        let mut state = self.lock();
        let begin = state.shared.at;
        let end = end.max(begin);
        state.shared.at = end;
        state.totals.add(stage, end - begin);
        if let Some(spans) = &mut state.spans {
            spans.push_stage(StageSpan { prompt: None, stage, begin, end });
        }
        end - begin
    }

    /// Notes that the request ends at `now`. If it ends before all prompts have their own stages, it
    /// ends within the stage that all share and that is not over.
    pub fn end_within(&self, now: Instant) {
        let is_open = |stage: &Stage| self.total(*stage).is_none();
        if let Some(stage) = [Stage::Receive, Stage::Tokenize].into_iter().find(is_open) {
            self.end_stage(stage, now);
        }
    }

    /// The clock of a prompt, whose own stages begin where the shared ones end.
    pub fn prompt(self: &Arc<Self>, prompt: usize) -> PromptClock {
        PromptClock::new(Arc::clone(self), prompt as u32)
    }

    /// When the reply began: the end of the last stage of the prompts so far; `now` if they had
    /// none.
    pub fn reply_begun(&self, now: Instant) -> Instant {
        let state = self.lock();
        let prompts = state.first.iter().chain(&state.others);
        let last = prompts.map(|cursor| cursor.at).max();
        last.and_then(|last| self.origin.checked_add(last)).unwrap_or(now)
    }

    /// The time in a stage over all prompts; `None` if no prompt had it.
    pub fn total(&self, stage: Stage) -> Option<Duration> {
        self.lock().totals.get(stage)
    }

    /// The time in the legs that led to the first token, over all prompts.
    pub fn legs(&self) -> Duration {
        let state = self.lock();
        let of_legs = [Stage::Prefill, Stage::FirstToken].into_iter();
        of_legs.filter_map(|stage| state.totals.get(stage)).sum()
    }

    /// The time from the end of prefill legs to the first token, over all prompts; `None` if no
    /// prompt was handed over.
    pub fn hand_off(&self) -> Option<Duration> {
        self.lock().hand_off
    }

    /// The stages so far.
    pub fn times(&self) -> StageTimes {
        self.lock().totals
    }

    /// The value of the `server-timing` header: milliseconds per stage. The times of a batch's
    /// prompts are added up.
    pub fn server_timing(&self) -> String {
        const STAGE_BYTES: usize = 32;
        let state = self.lock();
        let mut out = String::with_capacity(STAGE_BYTES * Stage::ALL.len());
        for (stage, took) in state.totals.iter() {
            let separator = if out.is_empty() { "" } else { ", " };
            out.extend([separator, stage.name(), ";dur="]);
            push_ms(&mut out, took);
        }
        out
    }

    /// Takes what a trace needs when the request ends at `end`: nothing lasts longer than the
    /// request. `None` if the request is not traced.
    pub fn close(&self, end: Instant) -> Option<Box<Spans>> {
        let end = self.since_origin(end);
        let mut spans = self.lock().spans.take()?;
        spans.close(end);
        Some(spans)
    }

    fn since_origin(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.origin)
    }

    fn lock(&self) -> MutexGuard<'_, TimelineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
