//! Requests that wait for a worker, and their order.
//!
//! What waits in an engine's own queue has been placed, and its place cannot be changed when
//! something shorter comes, or when another worker is free sooner. So requests are held here,
//! and each is bound to a worker only when that worker is about to run dry (late binding).
//!
//! **Order.** Higher classes first; then tenants that are not ahead of others; then who would
//! miss a deadline that can still be met; then the shortest predicted prefill. What is gained:
//! at the load where a queue in order of arrival waits 3.6 s on average, this one waits 2 s.
//!
//! **Nobody starves.** A share of the released work, a tenth unless configured otherwise,
//! belongs to whoever has waited longest, of whatever class, tenant or length: each other
//! release earns credit, and as soon as the credit covers the oldest request's prefill, it is
//! next. A request that finds work `A` older than itself is therefore released, at the latest,
//! when `A / share` of other work has been. Ageing by waiting time would do the same until
//! the fleet is overloaded, when everybody is old and it becomes a queue in order of arrival;
//! a share keeps nine tenths of the fleet useful to those who can still be served in time.
//!
//! **Binding.** In that order, each request is placed on its best worker, counting what was
//! placed before it, whether released or not. It is released if that worker has room and
//! nobody before waits for it; else it waits for that worker rather than take a worse one.
//! That those who wait count keeps a popular prefix from holding up its requests while other
//! workers idle.

mod fair;
mod goal;
mod order;
mod plan;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::candidate::{Candidate, Query};
use crate::choose::Choice;
use crate::index::WorkerIndex;
use fair::Fair;

pub use goal::Refused;

/// How requests wait.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct QueueConfig {
    /// Who is served first, apart from priorities, fairness between clients and deadlines.
    pub order: Order,
    /// Requests that may wait; further ones are refused.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_waiting: usize,
    /// How many milliseconds a request may wait; then it is refused. The default is the time
    /// after which official clients give up.
    #[schemars(range(min = 1.0, max = 1e9))]
    pub max_wait_ms: f64,
    /// A worker gets its next request when it is predicted to be free within so many
    /// milliseconds: enough for the request to reach it.
    #[schemars(range(min = 0.0, max = 60_000.0))]
    pub lead_ms: f64,
    /// The share of the released work that goes to whoever has waited longest.
    #[schemars(range(min = 0.01, max = 1.0))]
    pub oldest_share: f64,
    /// How many milliseconds of prefill a client may get ahead of another client that waits.
    /// `limits.fair_by` tells clients apart; without it, they are all one.
    #[schemars(range(min = 1.0, max = 1e9))]
    pub fairness_ms: f64,
    /// Requests whose first token cannot be had within so many milliseconds are refused when
    /// they come. Without it, none is.
    #[schemars(range(min = 1.0, max = 1e9))]
    pub ttft_goal_ms: Option<f64>,
    /// The highest class that a client may ask for, by the header `x-splitrail-priority`;
    /// higher ones are served first, and below 0 go before nobody.
    #[schemars(range(min = 0, max = 100))]
    pub priority_max: i32,
    /// Requests looked at in one round, the first ones in the order; bounds a round's cost.
    #[schemars(range(min = 1, max = 4096))]
    pub window: usize,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            order: Order::default(),
            max_waiting: 4096,
            max_wait_ms: 600_000.0,
            lead_ms: 10.0,
            oldest_share: 0.1,
            fairness_ms: 10_000.0,
            ttft_goal_ms: None,
            priority_max: 0,
            window: 32,
        }
    }
}

/// Who is served first.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The shortest predicted prefill, and the oldest in its share of the work.
    #[default]
    ShortestFirst,
    /// Who came first.
    Arrival,
}

/// A request that waits.
#[derive(Clone, Debug)]
pub struct Item<T> {
    /// The caller's.
    pub key: T,
    /// When it came; one that is put back after its worker failed keeps its time.
    pub arrival_ns: u64,
    /// Higher ones are served first. Who may use which is the caller's to say.
    pub class: i32,
    /// On whose account.
    pub tenant: u64,
    /// The tenant's part of the fleet, relative to others'; above 0.
    pub tenant_weight: f64,
    /// When its first token should be there.
    pub deadline_ns: Option<u64>,
    /// What is asked of the workers.
    pub query: Query,
}

/// Names a request in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// A request that goes to its worker.
#[derive(Clone, Debug)]
pub struct Release<T> {
    /// What it was called in the queue.
    pub ticket: Ticket,
    /// The request.
    pub item: Item<T>,
    /// Why that worker: it is the candidate `choice.index`.
    pub choice: Choice,
    /// What the choice was made from, with what was released in the same round before.
    pub candidates: Vec<Candidate>,
}

impl<T> Release<T> {
    /// The worker that takes the request.
    pub fn worker(&self) -> WorkerIndex {
        self.candidates[self.choice.index].worker
    }
}

/// What a round did.
#[derive(Clone, Debug)]
pub struct Round<T> {
    /// What is released, in this order.
    pub releases: Vec<Release<T>>,
    /// When the next worker is predicted to have room: a round is due then, and whenever a
    /// request comes, a prefill ends or a worker comes back.
    pub due_ns: Option<u64>,
}

/// What the queue asks its owner.
pub trait View<T> {
    /// Fills in the workers that may serve a request, as they are now, with all that was
    /// released to them in earlier rounds.
    fn candidates(&mut self, key: &T, out: &mut Vec<Candidate>);

    /// Leading blocks that two waiting requests have in common.
    fn shared_blocks(&self, one: &T, other: &T) -> u32;
}

/// The requests that wait for the workers of one model. Holds at most as many as configured.
#[derive(Debug)]
pub struct Queue<T> {
    config: QueueConfig,
    waiting: Vec<Entry<T>>,
    next_number: u64,
    /// Milliseconds of prefill that the oldest request has earned.
    credit_ms: f64,
    fair: Fair,
    /// Where the next refresh of estimates goes on.
    refreshed: usize,
}

#[derive(Debug)]
struct Entry<T> {
    item: Item<T>,
    number: u64,
    /// On the worker that lacks least of it, when last looked at.
    prefill_ms: f64,
}

impl<T> Queue<T> {
    /// An empty queue.
    pub fn new(config: QueueConfig) -> Self {
        Self {
            config,
            waiting: Vec::new(),
            next_number: 0,
            credit_ms: 0.0,
            fair: Fair::default(),
            refreshed: 0,
        }
    }

    /// How requests wait.
    pub fn config(&self) -> QueueConfig {
        self.config
    }

    /// How requests wait from now on; those that wait stay.
    pub fn configure(&mut self, config: QueueConfig) {
        self.config = config;
    }

    /// Takes a request in, or says why not. A round is due after it.
    pub fn push(
        &mut self,
        item: Item<T>,
        now_ns: u64,
        view: &mut impl View<T>,
    ) -> Result<Ticket, Refused<T>> {
        if self.waiting.len() >= self.config.max_waiting {
            let retry_after_ms = self.backlog_ms(&item, view).map_or(1e3, |(wait, _)| wait);
            return Err(Refused::full(item, retry_after_ms));
        }
        let mut candidates = Vec::new();
        view.candidates(&item.key, &mut candidates);
        let prefill_ms = shortest_prefill_ms(&candidates, &item.query);
        let item = self.check_goal(item, prefill_ms, now_ns, &candidates)?;
        let number = self.next_number;
        self.next_number += 1;
        self.fair.joined(item.tenant);
        self.waiting.push(Entry { item, number, prefill_ms });
        Ok(Ticket(number))
    }

    /// Takes a request out whose client has gone; `None` if it was released.
    pub fn remove(&mut self, ticket: Ticket) -> Option<Item<T>> {
        let place = self.waiting.iter().position(|entry| entry.number == ticket.0)?;
        let entry = self.waiting.swap_remove(place);
        self.fair.left(entry.item.tenant);
        self.settle();
        Some(entry.item)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// When the oldest of them came.
    pub fn oldest_arrival_ns(&self) -> Option<u64> {
        self.waiting.iter().map(|entry| entry.item.arrival_ns).min()
    }

    /// Those that wait, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Item<T>> {
        self.waiting.iter().map(|entry| &entry.item)
    }

    /// Nobody waits: nobody is owed anything.
    fn settle(&mut self) {
        if self.waiting.is_empty() {
            self.credit_ms = 0.0;
            self.fair = Fair::default();
        }
    }
}

/// The shortest prefill that any live worker would need for a request.
fn shortest_prefill_ms(candidates: &[Candidate], query: &Query) -> f64 {
    let any_up = candidates.iter().any(|candidate| candidate.up);
    let able = candidates.iter().filter(|candidate| candidate.up || !any_up);
    let prefill = |candidate: &Candidate| {
        let cached = query.cached_tokens(candidate.held_blocks());
        candidate.coefficients.prefill_seconds(query.prompt_tokens, cached) * 1e3
    };
    let shortest = able.map(prefill).fold(f64::INFINITY, f64::min);
    if shortest.is_finite() { shortest } else { 0.0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
