//! A worker in a snapshot.

use std::time::Instant;

use serde::Serialize;

use super::readings::WorkerReading;
use super::spans::Spans;
use crate::attention::open_breakers;
use splitrail_fleet::parity::{Cause, Parity};
use splitrail_fleet::{ServedModel, Worker};
use splitrail_telemetry::figure::{ratio, rounded};

/// Maximum number of characters of the cause of a state.
const WHY_MAX: usize = 160;

/// A worker in a snapshot. Members that are unknown, false or empty are left out.
#[derive(Debug, Serialize)]
pub(super) struct WorkerView {
    id: String,
    url: String,
    role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    transfer_group: Option<String>,
    state: &'static str,
    state_why: String,
    state_since_unix_ms: u64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    draining: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    breakers_open: Vec<&'static str>,
    requests: u32,
    prefill_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    engine_running: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    engine_waiting: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_used_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_blocks: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slowdown: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_tokens_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    leg_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event_lag_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index_age_ms: Option<u64>,
    overlap_counts: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    overlap_issues: Vec<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parity_cause: Option<Cause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overlap_discount_ratio: Option<f64>,
}

impl WorkerView {
    /// A worker at this time.
    pub(super) fn new(
        served: &ServedModel,
        worker: &Worker,
        spans: Option<Spans<'_>>,
        now_unix_ms: u64,
    ) -> Self {
        let load = worker.load(Instant::now());
        let since = worker.health.lifecycle.since();
        let parity = worker.kv.parity.parity();
        let last_minute = LastMinute::of(worker, spans);
        let discount = Some(worker.kv.drift.discount()).filter(|share| *share > 0.0);
        let counts = worker.tells_blocks() && worker.overlap_is_believed(None);
        let learned = worker.load.costs.learned_speed(Instant::now());
        Self {
            id: worker.id().to_owned(),
            url: worker.config.url.clone(),
            role: worker.config.role.name(),
            transfer_group: worker.config.transfer_group.clone(),
            state: worker.state().name(),
            state_why: clipped(&since.why, WHY_MAX),
            state_since_unix_ms: since.unix_ms,
            draining: worker.is_draining(),
            breakers_open: open_breakers(worker),
            requests: worker.load.booked.requests(),
            prefill_tokens: worker.load.booked.prefill_tokens(),
            engine_running: load.as_ref().and_then(|load| load.running),
            engine_waiting: load.as_ref().and_then(|load| load.waiting),
            kv_used_ratio: load.as_ref().and_then(|load| rounded(load.kv_used_ratio?)),
            kv_blocks: load.as_ref().and_then(|load| load.total_blocks),
            hit_ratio: last_minute.hit_ratio,
            slowdown: worker.load.costs.slowdown().largest().and_then(rounded),
            prefill_tokens_per_s: learned.prefill_tokens_per_s.and_then(rounded),
            step_ms: learned.step_ms.and_then(rounded),
            leg_ms: last_minute.leg_ms,
            event_lag_ms: last_minute.event_lag_ms,
            index_age_ms: worker.kv.event_stats.index_age_ms(now_unix_ms),
            overlap_counts: counts,
            overlap_issues: issues(served, worker, parity),
            parity_cause: parity.cause(),
            overlap_discount_ratio: discount.and_then(rounded),
        }
    }
}

/// Why the index of a worker is not used, or not as it is. A model without a tokenizer uses no
/// index.
fn issues(served: &ServedModel, worker: &Worker, parity: Parity) -> Vec<&'static str> {
    if !served.config.tokenizer.makes_tokens() {
        return Vec::new();
    }
    let tells = worker.tells_blocks();
    let issues = [
        (!tells, "no_events"),
        (tells && !worker.events_are_current(), "events_cut_off"),
        (!worker.is_synced(), "index_building"),
        (worker.index_is_truncated(), "index_truncated"),
        (parity == Parity::Pending, "parity_pending"),
        (parity.cause().is_some(), "parity_mismatch"),
        (worker.kv.drift.has_given_up(), "drift"),
        (worker.kv.drift.discount() > 0.0 && !worker.kv.drift.has_given_up(), "overlap_discounted"),
    ];
    issues.into_iter().filter_map(|(is, issue)| is.then_some(issue)).collect()
}

/// What was counted of a worker in the last minute.
#[derive(Default)]
struct LastMinute {
    hit_ratio: Option<f64>,
    event_lag_ms: Option<f64>,
    leg_ms: Option<f64>,
}

impl LastMinute {
    fn of(worker: &Worker, spans: Option<Spans<'_>>) -> Self {
        let Some(span) = spans.map(|spans| spans.minute) else { return Self::default() };
        let Some(to) = span.to.workers.get(&worker.index) else { return Self::default() };
        let from = span.from.workers.get(&worker.index).copied().unwrap_or_default();
        let WorkerReading { hits, events, lag_s, legs, legs_s } = *to;
        let prompts = hits.prompt_tokens.saturating_sub(from.hits.prompt_tokens);
        let mean_ms = |sum_s: f64, count: u64| rounded(sum_s.max(0.0) * 1e3 / count as f64);
        Self {
            hit_ratio: ratio(hits.hit_tokens.saturating_sub(from.hits.hit_tokens), prompts),
            event_lag_ms: mean_ms(lag_s - from.lag_s, events.saturating_sub(from.events)),
            leg_ms: mean_ms(legs_s - from.legs_s, legs.saturating_sub(from.legs)),
        }
    }
}

/// At most `chars` characters of a text.
fn clipped(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}\u{2026}", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::clipped;

    #[test]
    fn texts_are_clipped_at_characters() {
        assert_eq!(
            (clipped("abc", 3), clipped("\u{e9}bcd", 2)),
            ("abc".into(), "\u{e9}b\u{2026}".into())
        );
    }
}
