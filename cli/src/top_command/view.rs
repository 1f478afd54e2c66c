//! What is shown: the snapshots of all routers in one.

use std::collections::BTreeMap;

use splitrail_settings::natural_order::compare;

use super::live::{Decision, LiveSnapshot, Model, Percentiles, Sources, Worker};
use super::options::{Options, Sort};
use crate::cluster::role_place;

/// What is known of one router.
#[derive(Clone, Debug, Default)]
pub(super) struct Router {
    pub(super) name: String,
    /// The latest snapshot; `None` if the router cannot be followed now.
    pub(super) snapshot: Option<LiveSnapshot>,
    /// Why it cannot be followed; `None` before the first try has ended.
    pub(super) error: Option<String>,
}

/// Figures of one or several models, of all routers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Totals {
    pub(super) requests_in_flight: u64,
    pub(super) queue_requests: u64,
    pub(super) requests_per_s: Option<f64>,
    /// Requests that failed or were shed.
    pub(super) failures_per_s: f64,
    /// Other requests that did not end well, by the kind of their outcome.
    pub(super) others_per_s: BTreeMap<String, f64>,
    pub(super) generation_tokens_per_s: Option<f64>,
    /// Prompt tokens of prefill legs.
    pub(super) prefill: Sources,
    /// Prompt tokens of decode legs.
    pub(super) decode: Sources,
    /// Percentiles cannot be summed: those of the router and model with the largest 99th one.
    pub(super) ttft_ms: Option<Percentiles>,
    pub(super) inter_token_ms: Option<Percentiles>,
    /// Mean milliseconds of the parts of a prompt up to its first token, the largest first: those of
    /// the router and model that need the longest.
    pub(super) stages_ms: Vec<(String, f64)>,
}

/// A worker, of all routers that know it.
#[derive(Clone, Debug, Default)]
pub(super) struct Row<'s> {
    pub(super) model: &'s str,
    pub(super) id: &'s str,
    /// The address of its engine.
    pub(super) url: &'s str,
    pub(super) role: &'s str,
    /// The state; if routers differ, that of the first one that is not in service.
    pub(super) state: &'s str,
    pub(super) state_why: &'s str,
    /// Whether routers see it in different states.
    pub(super) is_mixed: bool,
    pub(super) requests: u64,
    pub(super) prefill_tokens: u64,
    pub(super) engine_running: Option<u64>,
    pub(super) engine_waiting: Option<u64>,
    pub(super) kv_used_ratio: Option<f64>,
    /// The mean of those that routers have.
    pub(super) hit_ratio: Option<f64>,
    /// The largest.
    pub(super) slowdown: Option<f64>,
    /// Prompt tokens that it computes per second: the fewest that a router has learned.
    pub(super) prefill_tokens_per_s: Option<f64>,
    /// The longest that a router has learned of a decode step.
    pub(super) step_ms: Option<f64>,
    /// The longest mean time of its legs.
    pub(super) leg_ms: Option<f64>,
    /// The largest.
    pub(super) event_lag_ms: Option<f64>,
    /// What is wrong with it, each once.
    pub(super) issues: Vec<String>,
}

/// What is shown.
pub(super) struct View<'s> {
    pub(super) routers: &'s [Router],
    /// The names of all models, whatever is chosen.
    pub(super) models: Vec<&'s str>,
    /// The flow of the chosen model, if it is one.
    pub(super) flow: Option<&'s str>,
    pub(super) totals: Totals,
    /// The workers of the chosen models, ordered by model, role, and then as chosen.
    pub(super) rows: Vec<Row<'s>>,
    /// The decisions, the newest first, with the clock of their router.
    pub(super) decisions: Vec<(u64, &'s Decision)>,
}

impl<'s> View<'s> {
    /// What the routers say, of the models that are chosen.
    pub(super) fn new(routers: &'s [Router], options: &Options) -> Self {
        let snapshots = || routers.iter().filter_map(|router| router.snapshot.as_ref());
        let mut names: Vec<&str> = Vec::new();
        let mut rows: Vec<Row<'s>> = Vec::new();
        let mut hits: BTreeMap<usize, (f64, u32)> = BTreeMap::new();
        let mut totals = Totals::default();
        let mut flow = None;
        for model in snapshots().flat_map(|snapshot| &snapshot.models) {
            if !names.contains(&&*model.name) {
                names.push(&model.name);
            }
            if !options.shows(&model.name) {
                continue;
            }
            flow = Some(&*model.flow);
            totals.add(model);
            for worker in &model.workers {
                let at = place(&mut rows, &model.name, worker);
                rows[at].add(worker);
                if let Some(ratio) = worker.hit_ratio {
                    let sum = hits.entry(at).or_default();
                    *sum = (sum.0 + ratio, sum.1 + 1);
                }
            }
        }
        for (at, (sum, count)) in hits {
            rows[at].hit_ratio = Some(sum / f64::from(count));
        }
        sort(&mut rows, options.sort);
        let decisions = snapshots().flat_map(|snapshot| {
            snapshot.decisions.iter().map(|decision| (snapshot.time_unix_ms, decision))
        });
        let mut decisions: Vec<_> =
            decisions.filter(|(_, decision)| options.shows(&decision.model)).collect();
        // By age on the clock of each router, whose clocks may differ.
        decisions.sort_by_key(|(now, decision)| now.saturating_sub(decision.decided_unix_ms));
        let is_one = names.iter().filter(|name| options.shows(name)).count() == 1;
        Self { routers, models: names, flow: flow.filter(|_| is_one), totals, rows, decisions }
    }
}

impl Totals {
    fn add(&mut self, model: &Model) {
        let sum = |total: &mut Option<f64>, figure: Option<f64>| {
            if let Some(figure) = figure {
                *total = Some(total.unwrap_or(0.0) + figure);
            }
        };
        let add = |total: &mut Sources, more: Sources| {
            sum(&mut total.cached, more.cached);
            sum(&mut total.transferred, more.transferred);
            sum(&mut total.computed, more.computed);
        };
        let worst = |total: &mut Option<Percentiles>, other: Option<Percentiles>| {
            if other.is_some_and(|other| total.is_none_or(|total| other.p99 > total.p99)) {
                *total = other;
            }
        };
        let in_flight = u64::try_from(model.requests_in_flight).unwrap_or_default();
        self.requests_in_flight = self.requests_in_flight.saturating_add(in_flight);
        let queued = model.queue_requests.unwrap_or_default();
        self.queue_requests = self.queue_requests.saturating_add(queued);
        sum(&mut self.requests_per_s, model.requests_per_s);
        self.add_results(model);
        sum(&mut self.generation_tokens_per_s, model.generation_tokens_per_s);
        add(&mut self.prefill, model.prompt_tokens_per_s.prefill);
        add(&mut self.decode, model.prompt_tokens_per_s.decode);
        worst(&mut self.ttft_ms, model.ttft_ms);
        worst(&mut self.inter_token_ms, model.inter_token_ms);
        let (known, other): (f64, f64) =
            (self.stages_ms.iter().map(|(_, ms)| ms).sum(), model.stages_ms.values().sum());
        if other > known {
            let mut stages: Vec<_> = model.stages_ms.clone().into_iter().collect();
            stages.sort_by(|(_, a), (_, b)| b.total_cmp(a));
            self.stages_ms = stages;
        }
    }
}

impl Totals {
    /// Only requests that failed or were shed are the fault of routers and engines.
    fn add_results(&mut self, model: &Model) {
        let Some(results) = &model.results_per_s else {
            self.failures_per_s += model.failures_per_s.values().sum::<f64>();
            return;
        };
        for (result, rate) in results {
            match result.as_str() {
                "ok" => {}
                "failed" | "shed" => self.failures_per_s += rate,
                _ => *self.others_per_s.entry(result.clone()).or_default() += rate,
            }
        }
    }
}

/// The place of a worker's row, which is added if it is new.
fn place<'s>(rows: &mut Vec<Row<'s>>, model: &'s str, worker: &'s Worker) -> usize {
    let found = rows.iter().position(|row| row.model == model && row.id == worker.id);
    found.unwrap_or_else(|| {
        let Worker { id, url, role, state, state_why, .. } = worker;
        rows.push(Row { model, id, url, role, state, state_why, ..Row::default() });
        rows.len() - 1
    })
}

/// Whether a worker in this state gets new work and is not slowed down.
pub(super) fn is_in_service(state: &str) -> bool {
    state == "serving"
}

impl<'s> Row<'s> {
    fn add(&mut self, worker: &'s Worker) {
        if worker.state != self.state {
            self.is_mixed = true;
            if is_in_service(self.state) {
                (self.state, self.state_why) = (&worker.state, &worker.state_why);
            }
        }
        let merge = |known: &mut Option<f64>, other: Option<f64>, pick: fn(f64, f64) -> f64| {
            *known = match (*known, other) {
                (Some(one), Some(other)) => Some(pick(one, other)),
                (one, other) => one.or(other),
            };
        };
        self.requests = self.requests.saturating_add(worker.requests);
        self.prefill_tokens = self.prefill_tokens.saturating_add(worker.prefill_tokens);
        // All routers ask the same engine, at different times.
        self.engine_running = self.engine_running.max(worker.engine_running);
        self.engine_waiting = self.engine_waiting.max(worker.engine_waiting);
        merge(&mut self.kv_used_ratio, worker.kv_used_ratio, f64::max);
        merge(&mut self.slowdown, worker.slowdown, f64::max);
        merge(&mut self.prefill_tokens_per_s, worker.prefill_tokens_per_s, f64::min);
        merge(&mut self.step_ms, worker.step_ms, f64::max);
        merge(&mut self.leg_ms, worker.leg_ms, f64::max);
        merge(&mut self.event_lag_ms, worker.event_lag_ms, f64::max);
        for issue in issues(worker) {
            if !self.issues.contains(&issue) {
                self.issues.push(issue);
            }
        }
    }
}

/// What is wrong with a worker besides its state.
fn issues(worker: &Worker) -> Vec<String> {
    let breakers = worker.breakers_open.iter().map(|leg| format!("breaker open: {leg}"));
    let overlap = worker.overlap_issues.iter().map(|issue| match &worker.parity_cause {
        Some(cause) if issue == "parity_mismatch" => format!("parity mismatch: {cause}"),
        _ => issue.replace('_', " "),
    });
    breakers.chain(overlap).collect()
}

fn sort(rows: &mut [Row<'_>], by: Sort) {
    rows.sort_by(|a, b| {
        let group = (a.model, role_place(a.role)).cmp(&(b.model, role_place(b.role)));
        let ratio =
            |a: Option<f64>, b: Option<f64>| b.unwrap_or(-1.0).total_cmp(&a.unwrap_or(-1.0));
        let chosen = match by {
            Sort::Name => std::cmp::Ordering::Equal,
            Sort::Requests => b.requests.cmp(&a.requests),
            Sort::PrefillTokens => b.prefill_tokens.cmp(&a.prefill_tokens),
            Sort::KvUsed => ratio(a.kv_used_ratio, b.kv_used_ratio),
            Sort::HitRatio => ratio(a.hit_ratio, b.hit_ratio),
        };
        group.then(chosen).then_with(|| compare(a.id, b.id))
    });
}
