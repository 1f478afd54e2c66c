//! A hand-off whose blocks a prefill engine keeps for a decode worker.
//!
//! With vLLM's NIXL connector only a decode leg that takes the blocks, or the end of the lease,
//! frees them; a hand-off that is never used would hold them for half a minute. Therefore
//! a hand-off that is dropped unsent, because its client left or its request failed, is sent
//! to a decode worker with a request for a single token.

use std::sync::Arc;

use splitrail_engine::connectors::nixl::HandOff;
use tokio::time::Instant;

use crate::bodies;
use crate::lease::Lease;
use crate::params::DecodeParams;
use crate::pinned::release_pinned_of;
use splitrail_api::memory_budget::Charge;
use splitrail_api::{Endpoint, JsonObject};
use splitrail_engine_client::{LegHeaders, RevocableBody, SendState, Shape};
use splitrail_fleet::{LegRequest, ServedModel, Worker};
use splitrail_policy::{Leg, WorkerIndex};
use splitrail_telemetry::Metrics;

/// A hand-off with the data that is needed to release it.
pub struct Staged {
    hand_off: Option<HandOff>,
    lease: Lease,
    metrics: Arc<Metrics>,
    served: Arc<ServedModel>,
    release_request: ReleaseRequest,
    leg_headers: LegHeaders,
    /// The prefill worker, which cannot take its own hand-off.
    worker: WorkerIndex,
}

/// The request that releases an unused hand-off: a worker takes the hand-off with it.
pub struct ReleaseRequest {
    /// The endpoint of the prompt.
    pub endpoint: Endpoint,
    /// The body, without the fields that a leg adds.
    pub body: JsonObject,
    /// The charge for the memory of the body, if a client's request has it.
    pub memory: Option<Arc<Charge>>,
    /// The prompt's load in tokens.
    pub weight_tokens: u64,
    /// The worker that releases the hand-off if it is up; otherwise a decode worker does.
    pub by: Option<Arc<Worker>>,
}

/// The prefill leg that a hand-off comes from.
pub struct HandOffOrigin<'a> {
    /// The model.
    pub served: &'a Arc<ServedModel>,
    /// The router's metrics.
    pub metrics: &'a Arc<Metrics>,
    /// The prefill worker.
    pub worker: WorkerIndex,
    /// The headers of the leg; a leg that takes the hand-off has the same id.
    pub leg_headers: &'a LegHeaders,
}

impl Staged {
    /// The hand-off of a prefill leg that has succeeded.
    pub fn new(
        origin: HandOffOrigin<'_>,
        release_request: ReleaseRequest,
        hand_off: HandOff,
        lease: Lease,
    ) -> Self {
        let HandOffOrigin { served, metrics, worker, leg_headers } = origin;
        Self {
            hand_off: Some(hand_off),
            lease,
            metrics: Arc::clone(metrics),
            served: Arc::clone(served),
            release_request,
            leg_headers: leg_headers.clone(),
            worker,
        }
    }

    /// The lease of the hand-off.
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// The parameters of a prefill leg that takes the first `blocks` blocks of the hand-off; `None` if
    /// they cannot be taken exactly. Whoever sends them spends the hand-off.
    pub fn prefix_params(&self, blocks: u32, block_size: u32) -> Option<String> {
        self.hand_off.as_ref()?.prefix_params(blocks, block_size)
    }

    /// Takes the hand-off out as JSON, to be sent. From now on it may have been used.
    pub fn spend(&mut self) -> Option<Box<str>> {
        self.hand_off.take().map(HandOff::into_json)
    }

    /// Makes a decode worker take the hand-off, so that its blocks are freed. `false` if the
    /// hand-off is left to the end of its lease.
    fn release(&self, hand_off: HandOff) -> bool {
        let left = self.lease.left(Instant::now());
        let Some(worker) = self.releasing_worker().filter(|_| !left.is_zero()) else {
            return false;
        };
        let params = hand_off.into_json();
        let ReleaseRequest { endpoint, body, weight_tokens, .. } = &self.release_request;
        let body = bodies::take_hand_off(body, *endpoint, DecodeParams::Params(&params));
        let Ok(body) = body else { return false };
        let booking = worker.book(None, 0, *weight_tokens);
        let (metrics, served) = (Arc::clone(&self.metrics), Arc::clone(&self.served));
        let held = (booking, self.release_request.memory.clone());
        let endpoint = *endpoint;
        let (leg_headers, shape) = (self.leg_headers.clone(), Shape::whole(endpoint));
        let body = RevocableBody::new(body).0.once();
        let release = async move {
            let _held = held;
            let leg = LegRequest {
                client: &served.client,
                worker: &worker,
                shape,
                headers: &leg_headers,
            };
            let taken = tokio::time::timeout(left, leg.whole(body)).await;
            let outcome = if matches!(taken, Ok(Ok(_))) { "fetched" } else { "failed" };
            if let Ok(Ok(reply)) = taken {
                let dialect = endpoint.dialect();
                release_pinned_of(&served, &metrics, &worker, dialect, reply.body);
            }
            count(&metrics, &served, outcome);
        };
        self.served.releases.run(release)
    }

    /// The worker that takes the hand-off to release it: the one that is meant to, or the decode worker
    /// that is up and has the fewest booked tokens.
    fn releasing_worker(&self) -> Option<Arc<Worker>> {
        if let Some(worker) = self.release_request.by.as_ref().filter(|worker| worker.is_up()) {
            return Some(Arc::clone(worker));
        }
        let roster = self.served.pool.roster();
        let from = roster.get(self.worker);
        let able = roster.iter().filter(|worker| {
            let is_other = worker.index != self.worker;
            let connector = self.served.config.connector;
            let can_take = from.is_none_or(|from| worker.can_take_from(from, connector));
            worker.serves(Leg::Decode) && worker.is_up() && is_other && can_take
        });
        able.min_by_key(|worker| worker.load.booked.active_tokens()).cloned()
    }
}

/// The result of a prefill leg, for the decode leg.
pub struct PrefillResult {
    /// The prefill worker.
    pub worker: Arc<Worker>,
    /// The attempt's id, which the decode leg carries as well.
    pub leg_headers: LegHeaders,
    /// The hand-off for one decode leg; `None` if the connector uses shared storage.
    pub staged: Option<Staged>,
}

impl PrefillResult {
    /// The lease of the hand-off, if there is one.
    pub fn lease(&self) -> Option<Lease> {
        self.staged.as_ref().map(Staged::lease)
    }
}

/// A prefill whose hand-off is being sent. If it is dropped before that, the hand-off is released.
pub struct HandOffSend {
    prefilled: Option<PrefillResult>,
    json: Option<Box<str>>,
    send_state: SendState,
}

impl HandOffSend {
    /// The hand-off is in the body to which `send_state` belongs.
    pub fn new(
        prefilled: Option<PrefillResult>,
        json: Option<Box<str>>,
        send_state: SendState,
    ) -> Self {
        Self { prefilled, json, send_state }
    }

    /// The prefill with its unused hand-off, if no byte of the hand-off was sent.
    pub fn take_back(&mut self) -> Option<PrefillResult> {
        let json = self.json.take()?;
        let mut prefilled = self.prefilled.take().filter(|_| self.send_state.take_back())?;
        prefilled.staged.as_mut()?.hand_off = HandOff::from_reply(&json).ok();
        Some(prefilled)
    }
}

impl Drop for HandOffSend {
    fn drop(&mut self) {
        drop(self.take_back());
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(hand_off) = self.hand_off.take()
            && !self.release(hand_off)
        {
            count(&self.metrics, &self.served, "left");
        }
    }
}

/// Counts a hand-off that no worker may take: its blocks stay staged until the lease ends.
pub fn count_abandoned_hand_off(served: &ServedModel, metrics: &Metrics) {
    count(metrics, served, "left");
}

fn count(metrics: &Metrics, served: &ServedModel, outcome: &str) {
    metrics.unused_hand_offs.with_label_values(&[served.name(), outcome]).inc();
}
