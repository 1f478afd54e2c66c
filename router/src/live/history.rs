//! The last minutes of each model, for a page that is opened later.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;
use serde_json::{Value, json};

use super::model::{LegRates, Rates};
use super::pace::READING_INTERVAL;
use super::readings::UNPLACED;
use super::spans::LastReadings;
use crate::core::Core;
use splitrail_telemetry::buckets::Percentiles;
use splitrail_telemetry::clock::unix_ms;

/// Number of points that are kept of each model: ten minutes.
const POINTS: usize = 120;

/// The points of each served model.
#[derive(Debug, Default)]
pub(super) struct History {
    models: BTreeMap<String, VecDeque<Point>>,
    /// Requests that were refused because of load within the last minute.
    shed: Vec<Shed>,
}

/// Requests of a model that were refused because of load, for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shed {
    /// The model; `none` if it was not known yet.
    pub model: String,
    /// The reason, as in `splitrail_shed_total`.
    pub reason: String,
    /// Their number.
    pub requests: u64,
}

/// A model at one time.
#[derive(Clone, Debug)]
struct Point {
    unix_ms: u64,
    ttft: Option<Percentiles>,
    inter_token: Option<Percentiles>,
    rates: Option<Rates>,
    hit_ratio: Option<f64>,
}

impl History {
    /// Adds a point to each model, and drops models that are no longer served.
    pub(super) fn add(&mut self, readings: &LastReadings, core: &Core) {
        let (serving, unix_ms) = (core.serving(), unix_ms());
        self.models.retain(|name, _| serving.model(name).is_some());
        let names = serving.models.iter().map(|served| served.name()).chain([UNPLACED]);
        self.shed = names.flat_map(|name| shed(readings, name)).collect();
        for served in &serving.models {
            let spans = readings.spans(served.name());
            let points = self.models.entry(served.name().to_owned()).or_default();
            let minute = spans.map(|spans| spans.minute);
            points.push_back(Point {
                unix_ms,
                ttft: minute.and_then(|span| span.to.ttft.since(&span.from.ttft).percentiles()),
                inter_token: minute.and_then(|span| {
                    span.to.inter_token.since(&span.from.inter_token).percentiles()
                }),
                rates: spans.map(|spans| Rates::of(spans.seconds)),
                hit_ratio: minute.and_then(|span| span.hit_ratio()),
            });
            while points.len() > POINTS {
                points.pop_front();
            }
        }
    }

    /// Requests that were refused because of load within the last minute.
    pub(super) fn shed(&self) -> Vec<Shed> {
        self.shed.clone()
    }

    /// A model's points as columns.
    pub(super) fn columns(&self, model: &str) -> Option<Value> {
        let points = self.models.get(model)?;
        let column = |of: &dyn Fn(&Point) -> Value| points.iter().map(of).collect::<Value>();
        let percentiles = |of: fn(&Point) -> Option<Percentiles>| {
            let one = |pick: fn(Percentiles) -> f64| column(&|point| of(point).map(pick).into());
            json!({"p50": one(|p| p.p50), "p90": one(|p| p.p90), "p99": one(|p| p.p99)})
        };
        let leg = |of: fn(&Rates) -> LegRates| {
            let one = |pick: fn(LegRates) -> Option<f64>| {
                column(&|point| point.rates.as_ref().map(of).and_then(pick).into())
            };
            json!({
                "cached": one(|leg| leg.cached),
                "transferred": one(|leg| leg.transferred),
                "computed": one(|leg| leg.computed),
            })
        };
        let rate = |of: fn(&Rates) -> Option<f64>| {
            column(&|point| point.rates.as_ref().and_then(of).into())
        };
        Some(json!({
            "model": model,
            "step_ms": READING_INTERVAL.as_millis() as u64,
            "time_unix_ms": column(&|point| point.unix_ms.into()),
            "ttft_ms": percentiles(|point| point.ttft),
            "inter_token_ms": percentiles(|point| point.inter_token),
            "requests_per_s": rate(|rates| rates.requests_per_s),
            "prompt_tokens_per_s": {
                "prefill": leg(|rates| rates.prompt_tokens_per_s.prefill),
                "decode": leg(|rates| rates.prompt_tokens_per_s.decode),
            },
            "generation_tokens_per_s": rate(|rates| rates.generation_tokens_per_s),
            "hit_ratio": column(&|point| point.hit_ratio.into()),
        }))
    }
}

/// Requests of a model that were refused because of load within the last minute, by reason.
fn shed(readings: &LastReadings, model: &str) -> Vec<Shed> {
    let Some(spans) = readings.spans(model) else { return Vec::new() };
    let span = spans.minute;
    let reasons = span.to.shed.iter().map(|(reason, count)| {
        let before = span.from.shed.get(reason).copied().unwrap_or(0);
        (reason.clone(), count.saturating_sub(before))
    });
    let reasons = reasons.filter(|(_, requests)| *requests > 0);
    let of = |(reason, requests)| Shed { model: model.to_owned(), reason, requests };
    reasons.map(of).collect()
}
