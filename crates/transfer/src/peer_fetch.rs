//! The two requests of a peer fetch: the source hands a prefix over as after a prefill leg, and the
//! worker that lacks it takes it as with a decode leg.

mod outcome;

use std::sync::Arc;
use std::time::Instant;

use splitrail_engine::connectors::nixl::HandOff;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::EngineUsage;
use tokio::time::{Instant as TokioInstant, timeout_at};

use crate::bodies;
use crate::lease::Lease;
use crate::params::{DecodeParams, PrefillParams};
use crate::pinned::release_pinned_of;
use crate::staged::{
    HandOffOrigin, HandOffSend, PrefillResult, ReleaseRequest, Staged, count_abandoned_hand_off,
};
pub use outcome::PeerFetchOutcome;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::Charge;
use splitrail_api::{Endpoint, JsonObject, Parts};
use splitrail_engine_client::{LegHeaders, RevocableBody, Shape};
use splitrail_fleet::reply_check::check_source;
use splitrail_fleet::{LegReply, LegRequest, ServedModel, Worker};
use splitrail_reply::choices::is_below_threshold;
use splitrail_telemetry::Metrics;
use splitrail_workload::Booking;
use splitrail_workload::fetches::{FetchBooking, Prefix};

/// The endpoint of both requests: the only one that takes token ids and a cache salt on every engine.
const ENDPOINT: Endpoint = Endpoint::Completions;

/// The members of a client's request that both requests carry: what tells the prefix from the same
/// tokens of others, and how urgent it is.
const KEPT: [&str; 3] = ["model", "cache_salt", "priority"];

/// Both requests of a fetch.
pub struct Steps<'a> {
    asker: Asker<'a>,
    booking: &'a FetchBooking,
    workers: Workers<'a>,
    prefix: Prefix,
    /// The length of the prefix in tokens.
    prefix_tokens: u32,
    deadline: TokioInstant,
}

/// For what a prefix is fetched: a request of a client, or prewarming.
pub struct Asker<'a> {
    /// The model.
    pub served: &'a Arc<ServedModel>,
    /// The router's metrics.
    pub metrics: &'a Arc<Metrics>,
    /// A body whose namespace, and urgency, both requests of the fetch get.
    pub body: &'a JsonObject,
    /// The charge for the memory of the body, if a client's request has it.
    pub memory: Option<&'a Arc<Charge>>,
    /// The headers of both requests: like the legs of one attempt, they have the same id.
    pub leg_headers: LegHeaders,
}

/// The workers of a fetch.
#[derive(Clone, Copy)]
pub struct Workers<'a> {
    /// The worker that holds the prefix.
    pub source: &'a Arc<Worker>,
    /// The rank that holds it, if the source has several.
    pub source_rank: Option<u16>,
    /// The worker that takes it.
    pub fetcher: &'a Arc<Worker>,
}

/// What a source has given.
pub struct GivenPrefix {
    /// The hand-off of the prefix and one more token.
    pub hand_off: Staged,
    /// The number of tokens at the end of the prefix that the source has computed, because it had lost
    /// them, or because its engine drops the last block of each hit.
    pub recomputed_tokens: u32,
    /// Whether the source has computed no more than the last block, as engines with EAGLE always do.
    is_complete: bool,
    /// The body of both requests, without what each of them adds.
    body: JsonObject,
    /// The source is not free of work, and so not to be stopped, until its blocks were taken.
    _booking: Booking,
}

impl GivenPrefix {
    /// How a fetch ends whose worker has taken the prefix.
    pub fn taken(recomputed_tokens: u32) -> PeerFetchOutcome {
        match recomputed_tokens {
            0 => PeerFetchOutcome::Fetched,
            tokens => PeerFetchOutcome::Recomputed(tokens),
        }
    }
}

impl<'a> Steps<'a> {
    /// A fetch of `prefix` that must end by `deadline`.
    pub fn new(
        asker: Asker<'a>,
        booking: &'a FetchBooking,
        workers: Workers<'a>,
        prefix: Prefix,
        deadline: TokioInstant,
    ) -> Self {
        let prefix_tokens = prefix.blocks * asker.served.pool.block_size();
        Self { asker, booking, workers, prefix, prefix_tokens, deadline }
    }

    /// Sends one request after the other, for a prefix of these tokens and one more token, which are
    /// the first ones of `ids`.
    ///
    /// # Errors
    /// How the fetch ends, if the worker does not hold the prefix then.
    pub async fn run(&self, ids: &[u32]) -> Result<PeerFetchOutcome, PeerFetchOutcome> {
        let given = self.give(ids).await?;
        self.take(given).await
    }

    /// Has the source compute what it is to send, before the other requests.
    ///
    /// # Errors
    /// How the fetch ends if the source does not.
    pub async fn compute(&self, ids: &[u32]) -> Result<(), PeerFetchOutcome> {
        let mut asked = body(self.asker.body, ids).map_err(|_| PeerFetchOutcome::Unusable)?;
        for (key, value) in [("max_tokens", "1"), ("stream", "false")] {
            asked.set(key, value);
        }
        self.put_threshold(&mut asked, self.workers.source, 0.0);
        let rank = self.workers.source_rank.map(u32::from);
        let leg_headers = LegHeaders { rank, ..self.asker.leg_headers.clone() };
        let sent = self.send(self.workers.source, asked.to_parts().into(), &leg_headers);
        timeout_at(self.deadline, sent).await.map_err(|_| PeerFetchOutcome::TimedOut)??;
        Ok(())
    }

    /// Sends the first request: has the source hand the prefix over.
    ///
    /// # Errors
    /// How the fetch ends, if the worker does not hold the prefix then.
    pub async fn give(&self, ids: &[u32]) -> Result<GivenPrefix, PeerFetchOutcome> {
        let Workers { source, fetcher, .. } = &self.workers;
        let adapter = self.asker.served.adapter_of(self.asker.body.raw("model"));
        let lacks = |worker: &Worker| {
            adapter.as_deref().is_some_and(|name| worker.has_adapter(name) == Some(false))
        };
        if !source.stores_kv_as(fetcher)
            || !source.agrees_on(adapter.as_deref(), fetcher)
            || lacks(source)
            || lacks(fetcher)
        {
            return Err(PeerFetchOutcome::Unusable);
        }
        let ids = ids.get(..self.prefix_tokens as usize + 1).ok_or(PeerFetchOutcome::Unusable)?;
        let body = body(self.asker.body, ids).map_err(|_| PeerFetchOutcome::Unusable)?;
        let given = timeout_at(self.deadline, self.ask(body)).await;
        let given = given.unwrap_or(Err(PeerFetchOutcome::TimedOut));
        let did_well = given.as_ref().is_ok_and(|given| given.is_complete);
        self.booking.source_did(did_well, Instant::now());
        given
    }

    /// Sends the second request: has the worker take what the source has given.
    ///
    /// # Errors
    /// How the fetch ends, if the worker does not hold the prefix then.
    pub async fn take(&self, given: GivenPrefix) -> Result<PeerFetchOutcome, PeerFetchOutcome> {
        let recomputed_tokens = given.recomputed_tokens;
        // After its lease, the source may use the blocks for another prompt, and nobody would see it.
        let ends = self.deadline.min(given.hand_off.lease().ends());
        let taken = timeout_at(ends, self.send_hand_off(given)).await;
        let taken = taken.unwrap_or(Err(PeerFetchOutcome::TimedOut));
        self.booking.both_did(taken.is_ok(), Instant::now());
        taken.map(|()| GivenPrefix::taken(recomputed_tokens))
    }

    /// Asks the source for the prefix and one more token.
    async fn ask(&self, body: JsonObject) -> Result<GivenPrefix, PeerFetchOutcome> {
        let Asker { served, metrics, leg_headers, .. } = &self.asker;
        let source = self.workers.source;
        let tokens = self.prefix_tokens + 1;
        let block_size = served.pool.block_size();
        let mut asked = body.clone();
        // An engine that knows the threshold computes nothing if it has lost more than the last block.
        let least_tokens = self.prefix_tokens.saturating_sub(block_size);
        let least = (f64::from(least_tokens) - 0.5) / f64::from(tokens);
        self.put_threshold(&mut asked, source, least.max(0.0));
        let asked = bodies::prefill(&asked, ENDPOINT, PrefillParams::Pulled)
            .map_err(|_| PeerFetchOutcome::Failed)?;
        let epoch = source.kv.usage_stats.epoch();
        let _asked = source.book(self.workers.source_rank, 1, u64::from(tokens));
        let rank = self.workers.source_rank.map(u32::from);
        let pinned = LegHeaders { rank, prefill_tokens: Some(1), ..leg_headers.clone() };
        let LegReply { body: reply, begun, peer } =
            self.send(source, asked.into(), &pinned).await?;
        let reply = JsonObject::parse(reply).map_err(|_| PeerFetchOutcome::Failed)?;
        let usage = reply.raw("usage");
        let usage = usage.and_then(|raw| EngineUsage::parse(Dialect::Chunks, raw).ok());
        let hand_off = reply.raw("kv_transfer_params").unwrap_or("null");
        let hand_off = HandOff::from_reply(hand_off).map_err(|_| PeerFetchOutcome::Unusable)?;
        if served.admit_host(source, hand_off.remote_host(), peer).is_err() {
            count_abandoned_hand_off(served, metrics);
            return Err(PeerFetchOutcome::ForeignHandOff);
        }
        let cached = usage.and_then(|usage| usage.cached_tokens);
        let cached = cached.or(hand_off.remote_prefill_cached_tokens());
        if let Some(cached) = cached {
            check_source(metrics, served, source, epoch, [self.prefix.blocks, cached]);
        }
        // A hand-off of other tokens than these would be taken without an error.
        let fits = usage.is_none_or(|usage| usage.prompt_tokens == tokens)
            && hand_off.remote_num_tokens() == Some(tokens)
            && hand_off.block_count() == self.prefix.blocks as usize + 1;
        if !fits {
            // No worker may take it, not even to free its blocks: they stay staged until the lease
            // ends.
            count_abandoned_hand_off(served, metrics);
            return Err(PeerFetchOutcome::Unusable);
        }
        let lease = Lease::of(served.config.lease, &hand_off, begun);
        let release_request = ReleaseRequest {
            endpoint: ENDPOINT,
            body: body.clone(),
            weight_tokens: u64::from(tokens),
            by: Some(Arc::clone(self.workers.fetcher)),
            memory: self.asker.memory.cloned(),
        };
        let origin = HandOffOrigin { served, metrics, worker: source.index, leg_headers };
        let hand_off = Staged::new(origin, release_request, hand_off, lease);
        let recomputed_tokens =
            cached.map_or(0, |cached| self.prefix_tokens.saturating_sub(cached));
        let is_complete = cached.is_none_or(|cached| cached >= least_tokens);
        let _booking = source.book(self.workers.source_rank, 0, 0);
        Ok(GivenPrefix { hand_off, recomputed_tokens, is_complete, body, _booking })
    }

    /// Lets the worker take the hand-off.
    async fn send_hand_off(&self, given: GivenPrefix) -> Result<(), PeerFetchOutcome> {
        let Asker { served, metrics, leg_headers, .. } = &self.asker;
        let GivenPrefix { mut hand_off, body, .. } = given;
        let params = hand_off.spend().ok_or(PeerFetchOutcome::Failed)?;
        let mut asked = body;
        self.put_threshold(&mut asked, self.workers.fetcher, 0.0);
        let parts: Result<Parts, Error> =
            bodies::take_hand_off(&asked, ENDPOINT, DecodeParams::Params(&params));
        let (revocable, send_state) =
            RevocableBody::new(parts.map_err(|_| PeerFetchOutcome::Failed)?);
        let rank = self.prefix.rank.map(u32::from);
        let leg_headers = LegHeaders { rank, prefill_tokens: Some(0), ..leg_headers.clone() };
        let worker = Arc::clone(self.workers.source);
        let staged = Some(hand_off);
        let prefilled = PrefillResult { worker, leg_headers: leg_headers.clone(), staged };
        // Releases the hand-off if it is dropped before a byte of it was sent.
        let _under_way = HandOffSend::new(Some(prefilled), Some(params), send_state);
        let reply = self.send(self.workers.fetcher, revocable.once(), &leg_headers).await?;
        // An engine that keeps KV for read-back keeps that of this request as well.
        release_pinned_of(served, metrics, self.workers.fetcher, Dialect::Chunks, reply.body);
        Ok(())
    }

    /// Sends a request.
    async fn send(
        &self,
        worker: &Arc<Worker>,
        body: RevocableBody,
        leg_headers: &LegHeaders,
    ) -> Result<LegReply, PeerFetchOutcome> {
        let failed = |error: Error| match error.kind() {
            ErrorKind::EngineRejected(412) => PeerFetchOutcome::Lost,
            _ => {
                tracing::debug!(worker = worker.id(), %error, "a step of a peer fetch failed");
                PeerFetchOutcome::Failed
            }
        };
        let (client, shape) = (&self.asker.served.client, Shape::whole(ENDPOINT));
        let leg = LegRequest { client, worker, shape, headers: leg_headers };
        let reply = leg.whole(body).await.map_err(failed)?;
        match is_below_threshold(Dialect::Chunks, &reply.body) {
            true => Err(PeerFetchOutcome::Lost),
            false => Ok(reply),
        }
    }

    /// Adds `cache_hit_threshold` for an engine that knows it.
    fn put_threshold(&self, body: &mut JsonObject, worker: &Worker, threshold: f64) {
        if worker.takes_cache_hit_threshold(self.asker.served.config.gate.kind) {
            body.set("cache_hit_threshold", threshold.to_string());
        }
    }
}

/// The body of both requests, without what each of them adds.
fn body(request: &JsonObject, ids: &[u32]) -> Result<JsonObject, Error> {
    let mut body = JsonObject::parse_str("{}")?;
    for key in KEPT {
        if let Some(raw) = request.raw(key) {
            body.set(key, raw);
        }
    }
    let unwritable = |error: serde_json::Error| Error::new(ErrorKind::Internal, error.to_string());
    body.set("prompt", serde_json::to_string(ids).map_err(unwritable)?);
    body.set("temperature", "0");
    Ok(body)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_engine::connectors::nixl::PREFILL_PARAMS_JSON;

    use super::*;

    #[test]
    fn a_body_has_the_prefix_and_what_tells_it_from_others() {
        let request = r#"{"model":"a","messages":[{"role":"user","content":"x"}],"cache_salt":"s",
            "priority":-5,"max_tokens":50,"stream":true,"kv_transfer_params":{"a":1},"stop":["x"]}"#;
        let request = JsonObject::parse_str(request).unwrap();
        let sent =
            bodies::prefill(&body(&request, &[7, 8, 9]).unwrap(), ENDPOINT, PrefillParams::Pulled);
        let sent = String::from_utf8(sent.unwrap().into_bytes().to_vec()).unwrap();
        let expected = format!(
            r#"{{"model":"a","cache_salt":"s","priority":-5,"prompt":[7,8,9],"temperature":0,"stream":false,"max_tokens":1,"ignore_eos":true,"kv_transfer_params":{PREFILL_PARAMS_JSON}}}"#
        );
        assert_eq!(sent, expected);
    }
}
