//! A snapshot of the whole cluster. docs/http.md describes its members.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::decisions::{DecisionView, RecentDecisions};
use super::history::Shed;
use super::model::ModelView;
use super::readings::{ModelReading, UNPLACED};
use super::spans::{LastReadings, WINDOW};
use super::worker::WorkerView;
use crate::attention::{self, Attention};
use crate::core::Core;
use splitrail_fleet::{Roster, Worker};
use splitrail_settings::natural_order::compare;
use splitrail_telemetry::clock::unix_ms;

/// The number of the snapshot's form. It is raised if a member changes its meaning or is removed.
const SCHEMA: u32 = 1;

/// Maximum number of things that need attention in a snapshot.
const ATTENTION_MAX: usize = 32;

/// Maximum number of workers that one of them names. The workers themselves have their states.
const WORKERS_NAMED_MAX: usize = 64;

/// The cluster at one time, in counts, rates and names.
#[derive(Debug, Serialize)]
pub(super) struct Snapshot {
    schema: u32,
    time_unix_ms: u64,
    router_version: &'static str,
    uptime_ms: u64,
    /// As in the `ETag` of `/admin/config`.
    config_hash: String,
    draining: bool,
    ready: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_ready_why: Option<String>,
    /// The time over which percentiles and hit ratios are computed.
    window_ms: u64,
    /// Requests that failed, or were refused because of load, before their model was known: those of
    /// the results `failed` and `shed`, as far as there were any.
    unplaced_failures_per_s: BTreeMap<&'static str, f64>,
    needs_attention: Vec<Attention>,
    models: Vec<ModelView>,
    decisions: Vec<DecisionView>,
}

/// A snapshot of the present.
pub(super) fn snapshot(readings: &LastReadings, core: &Core, shed: &[Shed]) -> Snapshot {
    let (serving, now_unix_ms) = (core.serving(), unix_ms());
    let unready = core.unready();
    let recent = RecentDecisions::read(core, now_unix_ms);
    let models = serving.models.iter().map(|served| {
        let spans = readings.spans(served.name());
        let roster = served.pool.roster();
        let view = |worker: &Arc<Worker>| WorkerView::new(served, worker, spans, now_unix_ms);
        let workers = in_order(&roster).into_iter().map(view).collect();
        ModelView::new(core, served, spans, recent.flows(served.name()), workers)
    });
    Snapshot {
        schema: SCHEMA,
        time_unix_ms: now_unix_ms,
        router_version: env!("CARGO_PKG_VERSION"),
        uptime_ms: u64::try_from(core.uptime().as_millis()).unwrap_or(u64::MAX),
        config_hash: core.metrics.config_hash(),
        draining: core.is_draining(),
        ready: unready.is_none(),
        not_ready_why: unready,
        window_ms: u64::try_from(WINDOW.as_millis()).unwrap_or(u64::MAX),
        unplaced_failures_per_s: unplaced_failures(readings),
        needs_attention: shortened(attention::find(core, shed)),
        models: models.collect(),
        decisions: recent.shown,
    }
}

/// The workers of a model: by role, and those of a role by name.
pub(crate) fn in_order(roster: &Roster) -> Vec<&Arc<Worker>> {
    let mut workers: Vec<&Arc<Worker>> = roster.iter().collect();
    workers.sort_by(|one, other| {
        one.config.role.cmp(&other.config.role).then_with(|| compare(one.id(), other.id()))
    });
    workers
}

/// The first of what needs attention, each with the first of its workers.
fn shortened(mut found: Vec<Attention>) -> Vec<Attention> {
    found.truncate(ATTENTION_MAX);
    found.iter_mut().for_each(|attention| attention.workers.truncate(WORKERS_NAMED_MAX));
    found
}

fn unplaced_failures(readings: &LastReadings) -> BTreeMap<&'static str, f64> {
    let Some(spans) = readings.spans(UNPLACED) else { return BTreeMap::new() };
    let span = spans.seconds;
    let rate = |result| {
        let count = |reading: &ModelReading| reading.results.get(result).copied().unwrap_or(0);
        let rate = span.per_s(count(span.to), count(span.from)).filter(|rate| *rate > 0.0)?;
        Some((result, rate))
    };
    ["failed", "shed"].into_iter().filter_map(rate).collect()
}
