//! Runs the prefill leg, on one worker after another until one succeeds.

use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use splitrail_engine::dialect::Dialect;
use splitrail_engine::nixl::{HandOff, HandOffError};
use splitrail_engine::nixl_push::PushReply;
use splitrail_engine::usage::EngineUsage;

use super::account::read_usage;
use super::context::{
    Context, PromptContext, attempt, book, carried_threshold, may_retry, nothing_handed_over,
    prefill_made_local, retried, traced, uncached_tokens,
};
use super::hand_off::{PrefillParams, excluded_from_prefill, missing};
use super::kv_read::{KvRead, record_leg};
use super::lease::Lease;
use super::legs;
use super::peer_fetch::fetch_planned;
use super::place::{LegRules, PlacedLeg, computed, place_in_turn, sent};
use super::plan::LocalReason;
use super::prewarm::recent::remember;
use super::repair::Repair;
use super::staged::{HandOffOrigin, PrefillResult, ReleaseRequest, Staged, leave};
use super::weigh::prefill_rules;
use crate::prepare::Unit;
use crate::reply::dialect;
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_api::{Endpoint, JsonObject, Parts};
use splitrail_config::model::{KvPath, OnNoPrefill};
use splitrail_engine_client::{LegHeaders, RevocableBody, Shape};
use splitrail_fleet::reply_check::check_reply;
use splitrail_fleet::{Exclusion, LegLimit, LegReply, LegRequest, Pool, ServedModel, Worker};
use splitrail_ledger::decisions::DecisionHandle;
use splitrail_ledger::leg::LegKind;
use splitrail_ledger::timeline::Stage;
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;
use splitrail_workload::progress::Awaited;

/// The attempts of one prompt's prefill leg.
pub(super) struct PrefillAttempts {
    excluded: Vec<Exclusion>,
    /// Workers that return no hand-offs for this endpoint.
    missing: Vec<Exclusion>,
    left: u32,
    /// What the next attempt may fetch and read. After a failed fetch, none fetches, and after a
    /// failed read, none reads.
    rules: LegRules<'static>,
}

impl PrefillAttempts {
    /// As many attempts as the model's configuration allows. `rules` says what the first one may fetch
    /// and read.
    pub(super) fn new(
        context: &Context,
        failed_decode: &[Exclusion],
        rules: LegRules<'static>,
    ) -> Self {
        let config = &context.served.config;
        let excluded = excluded_from_prefill(&context.served, failed_decode);
        let missing = missing(&context.served, context.endpoint, Instant::now());
        Self { excluded, missing, left: config.retries.prefill, rules }
    }

    /// Chooses the next worker.
    ///
    /// # Errors
    /// If no prefill worker is up, or the queue refuses the request.
    pub(super) async fn place(&self, prompt: PromptContext<'_>) -> Result<PlacedLeg, Error> {
        let context = prompt.context;
        let excluded = self.left_out();
        if !context.served.pool.any_up(Leg::Prefill, &excluded) {
            return Err(no_prefill_worker(context));
        }
        place_in_turn(prompt, LegRules { excluded: &excluded, ..self.rules }, true).await
    }

    fn left_out(&self) -> Vec<Exclusion> {
        [&self.excluded[..], &self.missing].concat()
    }

    /// Whether all remaining workers are workers that return no hand-offs for this endpoint.
    fn only_missing(&self, pool: &Pool) -> bool {
        let any_up = |excluded: &[Exclusion]| pool.any_up(Leg::Prefill, excluded);
        !any_up(&self.left_out()) && any_up(&self.excluded)
    }

    /// Notes that a worker has failed, not by the client's fault, and allows a further attempt.
    ///
    /// # Errors
    /// The worker's error, if another worker would not do better, no other worker is up, or the
    /// attempts or the retry budget are used up.
    pub(super) fn retry_elsewhere(
        &mut self,
        context: &Context,
        worker: &Worker,
        error: Error,
    ) -> Result<(), Error> {
        let reason = VetoReason::of_failure(error.kind());
        self.excluded.push(Exclusion::new(worker.index, reason));
        let others = context.served.pool.any_up(Leg::Prefill, &self.excluded);
        let same = error.is_of_the_connection();
        if same {
            self.excluded.pop();
        }
        let worth = self.left > 0 && (others || same) && error.worth_another_worker();
        if !worth || !may_retry(context, "prefill", worker, &error) {
            return Err(error);
        }
        self.left -= 1;
        Ok(())
    }
}

/// The error for a prefill leg that no worker can take.
pub(super) fn no_prefill_worker(context: &Context) -> Error {
    let message = format!("model {} has no prefill worker that is up", context.served.name());
    Error::new(ErrorKind::NoWorker, message)
}

/// Runs the prefill leg. `None` if the decode worker is to compute the prompt: no prefill leg
/// succeeded and the model's configuration allows this, or there is no hand-off.
pub(super) async fn prefill_or_local(
    prompt: PromptContext<'_>,
    failed_decode: &[Exclusion],
) -> Result<Option<PrefillResult>, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let Context { served, endpoint, options, .. } = context.as_ref();
    let rules = prefill_rules(served, *endpoint, unit, *options);
    let mut tries = PrefillAttempts::new(context, failed_decode, rules);
    let last = loop {
        let mut placed = match tries.place(prompt).await {
            Ok(placed) => placed,
            // If the queue refused the prefill, do not fall back to a costlier local prefill.
            Err(error) if error.is_busy() => return Err(error),
            Err(_) if tries.only_missing(&context.served.pool) => {
                prefill_made_local(prompt, LocalReason::NoHandOff);
                return Ok(None);
            }
            Err(error) => break error,
        };
        let one_shot = fetch_planned(prompt, &mut placed, &mut tries.rules.may_fetch).await;
        sent(context, unit, &placed);
        let leg_headers = attempt(context, decision);
        let reading = KvRead::of(prompt, &placed, one_shot, tries.rules.readable_blocks);
        record_leg(prompt, &mut placed, reading.as_ref());
        let started = Instant::now();
        let reads = reading.is_some();
        let prefilled = prefill(prompt, leg_headers, &placed, reading).await;
        let distrusted = context.served.pool.read_back.is_distrusted();
        let failed = prefilled.as_ref().is_err_and(|error| error.fault() != Fault::Client);
        let failed_to_read = reads && failed && !distrusted;
        if !failed_to_read {
            placed.worker.record(Leg::Prefill, prefilled.as_ref().err());
        }
        if prefilled.is_ok() {
            placed.worker.outcomes.began(started.elapsed());
        }
        let error = match prefilled {
            Ok(Ok(prefilled)) => {
                computed(context, unit, &placed);
                remember(prompt);
                return Ok(Some(prefilled));
            }
            Ok(Err(reason)) => {
                nothing_handed_over(prompt, reason);
                return Ok(None);
            }
            Err(error) => error,
        };
        decision.attempt_discarded(error.outcome());
        if reads {
            tries.rules.readable_blocks = 0;
        }
        if failed_to_read {
            // The fault may be the other worker's, or that of what was read: the same again without.
            // The retry budget is not asked, because the router chose to read.
            retried(context, "prefill", &placed.worker, &error);
            continue;
        }
        if error.fault() == Fault::Client {
            return Err(error);
        }
        if let Err(error) = tries.retry_elsewhere(context, &placed.worker, error) {
            break error;
        }
    };
    without_prefill(prompt, &last)?;
    Ok(None)
}

/// Records that no prefill leg succeeded and that the decode worker is to compute the prompt.
///
/// # Errors
/// If the model's configuration says `on_no_prefill: fail`.
pub(super) fn without_prefill(prompt: PromptContext<'_>, last: &Error) -> Result<(), Error> {
    let context = prompt.context;
    if context.served.config.on_no_prefill == OnNoPrefill::Fail {
        let message = format!("no prefill worker did its part; the last error: {}", last.message());
        return Err(Error::new(ErrorKind::NoWorker, message));
    }
    if context.served.no_prefill.may_log() {
        tracing::warn!(
            model = context.served.name(),
            error = %last,
            "no prefill worker did its part: decode workers compute prompts \
             (said at most twice a minute; local_prefills_total counts)"
        );
    }
    prefill_made_local(prompt, LocalReason::NoPrefill);
    Ok(())
}

/// The reply of a prefill engine.
pub(super) struct PrefillReply {
    reply: JsonObject,
    dialect: Dialect,
    /// The address that the reply came from.
    pub(super) peer: Option<IpAddr>,
    /// When the reply began: the engine had staged the blocks by then.
    begun: tokio::time::Instant,
    usage: Option<EngineUsage>,
}

impl PrefillReply {
    /// Whether the reply ended with its first token by itself. An engine returns a hand-off only
    /// for a reply that was cut off by its length limit.
    pub(super) fn ended(&self) -> bool {
        dialect::ended(self.dialect, &self.reply)
    }

    /// The reply itself.
    pub(super) fn reply(&self) -> &JsonObject {
        &self.reply
    }

    /// The number of prompt tokens that the engine did not compute, if it says so: in its usage, or else
    /// in its hand-off.
    pub(super) fn cached_tokens(&self) -> Option<u32> {
        let carried = || {
            let said = HandOff::from_reply(self.reply.raw("kv_transfer_params")?);
            said.ok()?.remote_prefill_cached_tokens()
        };
        self.usage.and_then(|usage| usage.cached_tokens).or_else(carried)
    }

    /// What the reply says of an engine that pushes KV.
    pub(super) fn pushed(&self, worker: &Worker) -> Result<PushReply, Error> {
        let said = self.reply.raw("kv_transfer_params").unwrap_or("null");
        PushReply::parse(said)
            .map_err(|error| Error::engine(worker.id(), &format!("gave no hand-off: {error}")))
    }

    /// The hand-off in the reply, or the reason why the reply has none.
    fn hand_off(&self, worker: &Worker) -> Result<Result<HandOff, LocalReason>, Error> {
        let said = self.reply.raw("kv_transfer_params");
        match HandOff::from_reply(said.unwrap_or("null")) {
            Ok(hand_off) => Ok(Ok(hand_off)),
            Err(HandOffError::Absent) if self.ended() => Ok(Err(LocalReason::PrefillEnded)),
            // An engine that returns hand-offs for chats may not support the member on this
            // endpoint.
            Err(HandOffError::Absent) if said.is_none() && self.dialect.names_events() => {
                Ok(Err(LocalReason::NoHandOff))
            }
            Err(error) => Err(Error::engine(worker.id(), &format!("gave no hand-off: {error}"))),
        }
    }

    /// The lease of the blocks that the reply leaves to a decode engine that has its address.
    pub(super) fn lease(&self, context: &Context) -> Lease {
        let lease = context.served.config.lease;
        Lease::new(self.begun, lease, None, tokio::time::Instant::now())
    }

    /// Enters the usage in the ledger. `carried` is the count of cached tokens in the hand-off, or of
    /// an engine that pushes, which is used if the usage has none.
    pub(super) fn report(
        &self,
        context: &Context,
        decision: &DecisionHandle,
        worker: &Worker,
        carried: Option<u32>,
    ) {
        let prompt_tokens = self.usage.map(|usage| usage.prompt_tokens);
        let cached_tokens = self.usage.and_then(|usage| usage.cached_tokens).or(carried);
        if let Some(leg) = decision.prefill_reported(prompt_tokens, cached_tokens) {
            check_reply(&context.metrics, &context.served, worker, &leg, self.usage.is_some());
        }
    }
}

/// Makes the body of a prefill leg.
pub(super) fn body(
    context: &Context,
    unit: &Unit,
    worker: &Worker,
    params: PrefillParams<'_>,
) -> Result<Parts, Error> {
    let mut body = unit.body.clone();
    if let Some(threshold) = carried_threshold(context, worker, 0.0) {
        body.set("cache_hit_threshold", threshold.to_string());
    }
    legs::prefill(&body, context.endpoint, params)
}

/// Sends a prefill leg and reads its reply. With `repair`, the leg may outlive the request.
pub(super) async fn send(
    prompt: PromptContext<'_>,
    leg_headers: &LegHeaders,
    placed: &PlacedLeg,
    body: RevocableBody,
    repair: Option<&mut Repair>,
) -> Result<PrefillReply, Error> {
    let PromptContext { context, unit, .. } = prompt;
    let started = Instant::now();
    let ServedModel { config, client, .. } = context.served.as_ref();
    let worker = &placed.worker;
    let uncached = uncached_tokens(context, unit, placed.speculative_blocks);
    worker.breaker(Leg::Prefill).begin(started);
    let mut booking = book(context, unit, placed, started, true);
    booking.set_awaited(Awaited::FirstOutput);
    let mut leg = prompt.leg(LegKind::Prefill, worker);
    let leg_headers = traced(placed.pinned(leg_headers), &leg);
    let leg_headers = LegHeaders { prefill_tokens: Some(uncached), ..leg_headers };
    let call = post(prompt, worker, body, leg_headers.clone());
    let mut limit = LegLimit { duration: config.timeouts.prefill, key: "timeouts.prefill" };
    if let Some(deadline) = placed.read_deadline {
        let duration = deadline.at.saturating_duration_since(started.into());
        if duration < limit.duration {
            limit = LegLimit { duration, key: deadline.key };
        }
    }
    let replied = match repair {
        None => limit.bound(client, worker, pin!(call)).await,
        Some(repair) => limit.bound(client, worker, pin!(repair.run(leg_headers, call))).await,
    };
    let replied = match replied {
        Ok(replied) => parsed(context, worker, replied).await,
        Err(error) => Err(error),
    };
    let (stage, outcome) = match &replied {
        Ok(_) => (Stage::Prefill, "ok"),
        Err(error) => (Stage::Failed, error.outcome()),
    };
    let ended = prompt.mark(stage);
    leg.end(ended, outcome);
    let (reply, begun, peer) = replied?;
    let dialect = context.endpoint.dialect();
    let usage = reply.raw("usage").filter(|raw| *raw != "null");
    let usage = usage.and_then(|raw| read_usage(&context.served, worker, dialect, raw));
    booking.prefill_done(usage.and_then(|usage| usage.cached_tokens));
    worker.series.leg_took("prefill", ended.duration_since(started).as_secs_f64());
    Ok(PrefillReply { reply, dialect, peer, begun, usage })
}

/// A reply that was parsed, off the reactor if it is long.
async fn parsed(
    context: &Context,
    worker: &Worker,
    replied: LegReply,
) -> Result<(JsonObject, tokio::time::Instant, Option<IpAddr>), Error> {
    let LegReply { body, begun, peer } = replied;
    let bytes = body.len();
    let parse = move || JsonObject::parse(body);
    let reply = context.preparer.run_sized(bytes, parse).await?;
    let nonsense = |_| Error::engine(worker.id(), "sent a prefill reply that cannot be understood");
    Ok((reply.map_err(nonsense)?, begun, peer))
}

/// The call of a prefill leg, which owns all that it needs.
fn post(
    prompt: PromptContext<'_>,
    worker: &Arc<Worker>,
    body: RevocableBody,
    leg_headers: LegHeaders,
) -> impl Future<Output = Result<LegReply, Error>> + Send + use<> {
    let (served, worker) = (Arc::clone(&prompt.context.served), Arc::clone(worker));
    let (shape, decision) = (Shape::whole(prompt.context.endpoint), prompt.decision.clone());
    async move {
        let leg =
            LegRequest { client: &served.client, worker: &worker, shape, headers: &leg_headers };
        let response = leg.begin(body).await?;
        // The engine has computed the prompt and staged its blocks by now.
        decision.prefill_worked();
        leg.rest(response).await
    }
}

/// Runs the prefill leg of a connector whose decode leg follows it. Returns the reason if there is
/// no hand-off.
async fn prefill(
    prompt: PromptContext<'_>,
    leg_headers: LegHeaders,
    placed: &PlacedLeg,
    reading: Option<KvRead<'_>>,
) -> Result<Result<PrefillResult, LocalReason>, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let worker = &placed.worker;
    let stored = context.served.config.connector.kv_path() == KvPath::Stored;
    worker.missing_hand_offs.begin(context.endpoint.dialect(), Instant::now());
    let said = match reading {
        Some(reading) => Box::pin(reading.send(prompt, &leg_headers, placed)).await?,
        None => {
            let params = if stored { PrefillParams::Stored } else { PrefillParams::Pulled };
            let body = body(context, unit, worker, params)?;
            send(prompt, &leg_headers, placed, body.into(), None).await?
        }
    };
    if worker.is_quarantined() {
        // The leg may have found KV of other tokens in the worker's cache. No worker may take them.
        if !stored && matches!(said.hand_off(worker), Ok(Ok(_))) {
            leave(&context.served, &context.metrics);
        }
        return Err(Error::engine(worker.id(), "may hold KV of other tokens in its cache"));
    }
    let staged = if stored {
        said.report(context, decision, worker, None);
        None
    } else {
        let hand_off = said.hand_off(worker);
        note(worker, context.endpoint, &hand_off);
        let carried = match &hand_off {
            Ok(Ok(hand_off)) => hand_off.remote_prefill_cached_tokens(),
            _ => None,
        };
        said.report(context, decision, worker, carried);
        let hand_off = match hand_off? {
            Ok(hand_off) => hand_off,
            Err(reason) => return Ok(Err(reason)),
        };
        let admitted = context.served.admit_host(worker, hand_off.remote_host(), said.peer);
        admitted.inspect_err(|_| leave(&context.served, &context.metrics))?;
        let lease = Lease::of(context.served.config.lease, &hand_off, said.begun);
        let release_request = ReleaseRequest::of(context, unit);
        let origin = HandOffOrigin {
            served: &context.served,
            metrics: &context.metrics,
            worker: worker.index,
            leg_headers: &leg_headers,
        };
        Some(Staged::new(origin, release_request, hand_off, lease))
    };
    Ok(Ok(PrefillResult { worker: Arc::clone(worker), staged, leg_headers }))
}

/// Remembers whether a worker returns hand-offs for an endpoint.
fn note(worker: &Worker, endpoint: Endpoint, said: &Result<Result<HandOff, LocalReason>, Error>) {
    let (missing_hand_offs, dialect) = (&worker.missing_hand_offs, endpoint.dialect());
    let (model, id, endpoint) = (worker.model(), worker.id(), endpoint.path());
    match said {
        Ok(Ok(_)) if missing_hand_offs.record_hand_off(dialect) => {
            tracing::info!(
                model,
                worker = id,
                endpoint,
                "replies on this path carry hand-offs again"
            );
        }
        Ok(Err(LocalReason::NoHandOff))
            if missing_hand_offs.record_missing(dialect, Instant::now()) =>
        {
            let what = "replies on this path carry no hand-off; no prefill is sent there, \
                        except for an occasional trial";
            tracing::warn!(model, worker = id, endpoint, "{what}");
        }
        _ => {}
    }
}
