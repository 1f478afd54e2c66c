//! Holds requests that wait for a worker, and decides their order.
//!
//! A request in an engine's own queue has been placed: its position cannot be changed when a
//! shorter request comes, or when another worker is free sooner. Therefore requests are held here,
//! and each is bound to a worker only when that worker is about to run out of work (late binding).
//!
//! **Order.** Higher classes come first; then tenants that are not ahead of others, and of each
//! tenant the sessions that are not ahead of its others; then requests that would miss a deadline that can still be met; then the shortest predicted prefill. The gain:
//! at the load where a queue in order of arrival waits 3.6 s on average, this queue waits 2 s.
//!
//! **No starvation.** A share of the released work, a tenth by default, belongs to the request that
//! has waited longest, whatever its class, tenant and length: every other release earns credit, and
//! when the credit covers the prefill of the oldest request, that request is next. A request with
//! older work `A` before it is therefore released, at the latest, after `A / share` of other work.
//! Ageing by waiting time would achieve the same until the fleet is overloaded; then all requests
//! are old and the queue becomes one in order of arrival. A share keeps nine tenths of the fleet
//! for requests that can still be served in time.
//!
//! **Binding.** In that order, each request is placed on its best worker, counting the requests
//! placed before it, whether released or not. It is released if that worker has room and no earlier
//! request waits for it. Otherwise the request waits for that worker and does not take a worse one.
//! Because waiting requests count, a popular prefix does not hold up its requests while other
//! workers are idle.
//!
//! **No request waits for longer than it is worth.** A worker may be slower than predicted, or hang.
//! While another worker is idle, a request waits for a better one until the cost of its choice, with
//! the time that it has waited, is that of the idle worker; then it takes the idle one.

mod fair;
mod goal;
mod order;
mod plan;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::candidate::{Candidate, Query};
use crate::choose::Choice;
use crate::fetch::Source;
use crate::index::WorkerIndex;
use crate::load::load_seconds;
use fair::ReceivedWork;

pub use fair::Payer;
pub use goal::QueueRefusal;
pub(crate) use plan::FETCH_LEAD_NS;

/// The settings of the queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueConfig {
    /// The order among equal priority, fairness and deadline.
    pub order: Order,
    /// The maximum number of requests that may wait, at least 1; further requests are refused.
    pub max_waiting: usize,
    /// The maximum time in milliseconds for which a request may wait; then it is refused. The
    /// default is the time after which official clients give up.
    pub max_wait_ms: f64,
    /// A worker gets its next request when it is predicted to be free within this time in
    /// milliseconds, which should be enough for the request to reach the worker.
    pub lead_ms: f64,
    /// The share of the released work that goes to the request that has waited longest, from 0.01 to
    /// 1.
    pub oldest_share: f64,
    /// The number of milliseconds of prefill by which a client may be ahead of another client that
    /// waits. `limits.fair_by` tells clients apart; without it, all clients count as one.
    pub fairness_ms: f64,
    /// Requests whose first token is predicted later than this number of milliseconds are refused
    /// when they arrive, unless their prefill alone takes longer or they need not wait. Without it,
    /// no request is refused for this reason.
    pub ttft_goal_ms: Option<f64>,
    /// The highest `x-splitrail-priority`. Higher classes are served first, those below 0 after
    /// class 0.
    pub priority_max: i32,
    /// Requests that one scheduling round examines, the first ones in the order.
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

/// The order in which requests are served.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The shortest predicted prefill; `oldest_share` of the work goes to the oldest request.
    #[default]
    ShortestFirst,
    /// The request that arrived first.
    Arrival,
}

/// A waiting request.
#[derive(Clone, Debug)]
pub struct Item<T> {
    /// The caller's identification of the request.
    pub key: T,
    /// When the request arrived. A request that is put back after its worker failed keeps its time.
    pub arrival_ns: u64,
    /// The priority class; higher classes are served first. The caller decides who may use which
    /// class.
    pub class: i32,
    /// Whom the request counts for.
    pub payer: Payer,
    /// The time by which the first token should arrive.
    pub deadline_ns: Option<u64>,
    /// The query for the policy.
    pub query: Query,
}

/// Identifies a request in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// A request that is released to its worker.
#[derive(Clone, Debug)]
pub struct Release<T> {
    /// The ticket that the request had in the queue.
    pub ticket: Ticket,
    /// The request.
    pub item: Item<T>,
    /// The choice of the worker, which is the candidate `choice.index`.
    pub choice: Choice,
    /// The candidates of the choice, including what was released earlier in the same round.
    pub candidates: Vec<Candidate>,
}

impl<T> Release<T> {
    /// The worker that takes the request.
    pub fn worker(&self) -> WorkerIndex {
        self.candidates[self.choice.index].worker
    }
}

/// The result of a scheduling round.
#[derive(Clone, Debug)]
pub struct Round<T> {
    /// The released requests, in the order of their release.
    pub releases: Vec<Release<T>>,
    /// When the next worker is predicted to have room. A round is due at that time, and whenever a
    /// request arrives, a prefill ends or a worker comes back.
    pub due_ns: Option<u64>,
}

/// The data that the queue needs from its owner.
pub trait View<T> {
    /// Lists the workers that may serve a request, in their present state, including everything
    /// that was released to them in earlier rounds.
    fn candidates(&mut self, key: &T, out: &mut Vec<Candidate>);

    /// Lists the workers that a request could fetch a prefix from. Without any, each worker computes
    /// what it does not hold.
    fn sources(&mut self, key: &T, out: &mut Vec<Source>) {
        let _ = key;
        out.clear();
    }

    /// Leading blocks that two waiting requests have in common.
    fn shared_blocks(&self, one: &T, other: &T) -> u32;

    /// Whether the same workers may serve two waiting requests. Not if one of them has failed on a
    /// worker, say.
    fn same_workers(&self, one: &T, other: &T) -> bool {
        let _ = (one, other);
        true
    }
}

/// The requests that wait for the workers of one model; at most `max_waiting` of them.
#[derive(Debug)]
pub struct Queue<T> {
    config: QueueConfig,
    waiting: Vec<WaitingItem<T>>,
    next_number: u64,
    /// The credit of the oldest request, in milliseconds of prefill.
    credit_ms: f64,
    received: ReceivedWork,
    /// The position at which the next refresh of estimates continues.
    refreshed: usize,
}

#[derive(Debug)]
struct WaitingItem<T> {
    item: Item<T>,
    number: u64,
    /// The shortest predicted prefill on any worker, as of the last evaluation.
    prefill_ms: f64,
    /// Until when the request waits for a certain worker although another one is idle.
    waits_until_ns: Option<u64>,
}

impl<T> Queue<T> {
    /// An empty queue.
    pub fn new(config: QueueConfig) -> Self {
        Self {
            config,
            waiting: Vec::new(),
            next_number: 0,
            credit_ms: 0.0,
            received: ReceivedWork::default(),
            refreshed: 0,
        }
    }

    /// The settings of the queue.
    pub fn config(&self) -> QueueConfig {
        self.config
    }

    /// Changes the settings; waiting requests stay in the queue.
    pub fn configure(&mut self, config: QueueConfig) {
        self.config = config;
    }

    /// Adds a request, or refuses it. A round is due afterwards.
    ///
    /// # Errors
    /// The queue is full, or the request cannot meet its deadline. It is not in the queue then.
    pub fn push(
        &mut self,
        item: Item<T>,
        now_ns: u64,
        view: &mut impl View<T>,
    ) -> Result<Ticket, QueueRefusal> {
        if self.waiting.len() >= self.config.max_waiting {
            let retry_after_ms = self.backlog_ms(&item, view).unwrap_or(1e3);
            return Err(QueueRefusal::full(retry_after_ms));
        }
        let mut candidates = Vec::new();
        view.candidates(&item.key, &mut candidates);
        let prefill_ms = shortest_prefill_ms(&candidates, &item.query);
        let item = self.check_goal(item, prefill_ms, now_ns, &candidates)?;
        let number = self.next_number;
        self.next_number += 1;
        self.received.joined(item.payer);
        self.waiting.push(WaitingItem { item, number, prefill_ms, waits_until_ns: None });
        Ok(Ticket(number))
    }

    /// Removes a request whose client has gone; `None` if the request was already released.
    pub fn remove(&mut self, ticket: Ticket) -> Option<Item<T>> {
        let place = self.waiting.iter().position(|entry| entry.number == ticket.0)?;
        let entry = self.waiting.swap_remove(place);
        self.received.left(entry.item.payer);
        self.settle();
        Some(entry.item)
    }

    /// The number of waiting requests.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The waiting requests, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &Item<T>> {
        self.waiting.iter().map(|entry| &entry.item)
    }

    /// When no request waits, all credit and all debts are cleared.
    fn settle(&mut self) {
        if self.waiting.is_empty() {
            self.credit_ms = 0.0;
            self.received = ReceivedWork::default();
        }
    }
}

/// The shortest predicted prefill of a request, in milliseconds, on any worker that is up, with the
/// time to load blocks from slower tiers or to read them back. 0 without workers.
pub fn shortest_prefill_ms(candidates: &[Candidate], query: &Query) -> f64 {
    let any_up = candidates.iter().any(|candidate| candidate.up);
    let able = candidates.iter().filter(|candidate| candidate.up || !any_up);
    let prefill = |candidate: &Candidate| {
        let available_prefix = candidate.available_prefix(query, candidate.held_blocks());
        let cached = query.cached_tokens(available_prefix.blocks);
        let prefill = candidate.coefficients.prefill_seconds(query.prompt_tokens, cached);
        (load_seconds(candidate, query) + available_prefix.read_seconds + prefill) * 1e3
    };
    let shortest = able.map(prefill).fold(f64::INFINITY, f64::min);
    if shortest.is_finite() { shortest } else { 0.0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
