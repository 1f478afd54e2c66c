//! Pairs of legs of engines that push KV (`connector: nixl_push`).
//!
//! A decode engine registers its blocks with the prefill engine that its leg names, and then waits for
//! their KV, without an end: it reports no error, and it keeps the blocks even if its leg is cancelled.
//! Only a prefill leg with the same id and prompt frees them, on the engine with which it has
//! registered (vLLM 0.32). `repair` makes such a leg finish if the pair is given up.

mod identity;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use splitrail_engine::connectors::nixl::PREFILL_PARAMS_JSON;
use splitrail_engine::connectors::nixl_push::{PushEngine, PushReply};

use crate::params::Matched;
use identity::{UnknownIdentity, engine, pinned_rank};
use splitrail_api::error::Error;
use splitrail_api::text::random_id;
use splitrail_api::{Endpoint, JsonObject};
use splitrail_engine_client::LegHeaders;
use splitrail_fleet::{ServedModel, Worker};

use super::{PairFailure, Target};

/// Maximum time in which a decode engine must say who it is: as long as a busy one may need for a few
/// tokens.
const DECODE_PATIENCE: Duration = Duration::from_secs(10);

/// Maximum time in which a failed pair waits to learn whether its prefill engine has restarted.
const RELEARN_PATIENCE: Duration = Duration::from_secs(2);

/// The data of one pair: with which engine decode registers, and under which id.
pub struct PushPair {
    engine: Arc<PushEngine>,
    /// The rank to which the prefill leg is pinned.
    rank: Option<u32>,
    decode_params: String,
    /// The value of `request_id` in both bodies, as JSON, if the endpoint has such a member.
    request_id: Option<String>,
}

impl PushPair {
    /// Makes the data of a pair. The engines match its legs by the id in `leg_headers`, which is the
    /// router's, new for each attempt, and cannot be guessed.
    pub(super) async fn make(
        served: &ServedModel,
        endpoint: Endpoint,
        prefill: Target<'_>,
        leg_headers: &LegHeaders,
    ) -> Result<Self, Error> {
        let Target { worker, rank } = prefill;
        let rank = pinned_rank(worker, rank)?;
        let engine = engine(served, worker, rank, served.config.timeouts.prefill).await?;
        let id = leg_headers.request_id.to_str().unwrap_or_default();
        let decode_params = engine.decode_params_json(id);
        Ok(Self { engine, rank, decode_params, request_id: own_member(endpoint) })
    }

    /// Checks that a decode worker's engine takes KV that is pushed. One that pulls would be ended by the
    /// decode leg of a push.
    ///
    /// # Errors
    /// The engine does not take pushed KV, or its reply does not say so.
    pub(super) async fn check_decode(
        served: &ServedModel,
        decode: Target<'_>,
    ) -> Result<(), Error> {
        let rank = decode.rank.map(u32::from);
        let patience = served.config.timeouts.prefill.min(DECODE_PATIENCE);
        engine(served, decode.worker, rank, patience).await?;
        Ok(())
    }

    /// The engine with which decode registers.
    pub(super) fn engine(&self) -> Arc<PushEngine> {
        Arc::clone(&self.engine)
    }

    /// The rank to which the prefill leg is pinned.
    pub(super) fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// What the body of the prefill leg says.
    pub(super) fn prefill_params(&self) -> Matched<'_> {
        Matched { params: PREFILL_PARAMS_JSON, request_id: self.request_id.as_deref() }
    }

    /// What the body of the decode leg says.
    pub(super) fn decode_params(&self) -> Matched<'_> {
        Matched { params: &self.decode_params, request_id: self.request_id.as_deref() }
    }

    /// Learns from the reply of the prefill leg which engine has replied. Returns the cached tokens
    /// that the engine reports.
    ///
    /// # Errors
    /// The reply has no hand-off, its engine is at a host that is not allowed, or it is another engine
    /// than the one with which decode registers.
    pub(super) fn read_prefill_reply(
        &self,
        served: &ServedModel,
        worker: &Worker,
        reply: &JsonObject,
        peer: Option<IpAddr>,
    ) -> Result<Option<u32>, PairFailure> {
        let reply = PushReply::parse(reply.raw("kv_transfer_params").unwrap_or("null"));
        let reply = reply.map_err(|error| {
            let what = format!("gave no hand-off: {error}");
            PairFailure::Prefill(Error::engine(worker.id(), &what))
        })?;
        let admitted = served.admit_host(worker, reply.engine.host(), peer);
        admitted.map_err(PairFailure::Prefill)?;
        worker.transfer.push.learn(self.rank, reply.engine.clone());
        if reply.engine != *self.engine {
            let what = "is another engine than the one with which decode has registered";
            return Err(PairFailure::EngineReplaced(Error::engine(worker.id(), what)));
        }
        Ok(reply.cached_tokens)
    }

    /// Forgets the engine with which a pair failed.
    pub(super) fn forget(&self, worker: &Worker) {
        worker.transfer.push.forget(&self.engine);
    }

    /// Asks a prefill worker again who its engine is, after decode has failed. Returns whether that
    /// is another one by now than the one of this pair, which was the cause then. A worker that is too
    /// busy to say so in time counts as the same engine.
    ///
    /// # Errors
    /// The worker cannot be reached, or says something else, so it was the cause.
    pub(super) async fn is_of_another_engine(
        &self,
        served: &ServedModel,
        worker: &Worker,
    ) -> Result<bool, Error> {
        self.forget(worker);
        match engine(served, worker, self.rank, RELEARN_PATIENCE).await {
            Ok(now) => Ok(now != self.engine),
            Err(UnknownIdentity::Late(_)) => Ok(false),
            Err(UnknownIdentity::Failed(error)) => Err(error),
        }
    }
}

/// The member of a body by which an engine that ignores `X-Request-Id` on an endpoint names the
/// request: responses.
fn own_member(endpoint: Endpoint) -> Option<String> {
    (endpoint == Endpoint::Responses).then(|| format!("\"resp_{}\"", random_id()))
}
