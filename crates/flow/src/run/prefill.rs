//! Runs the prefill leg, on one worker after another until one succeeds.

use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use splitrail_engine::connectors::nixl::{HandOff, HandOffError};
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::EngineUsage;

use crate::context::{Context, PromptContext};
use crate::decide::adapter_holders::{is_about_adapters, reconsider};
use crate::decide::attempts::{AttemptFailures, allow_retry, record_retry};
use crate::decide::context_length::{PREFILL_OUTPUT_TOKENS, fits_elsewhere, not_longer, too_short};
use crate::decide::place::{
    LegRules, PlacedLeg, place_in_turn, record_computed_prompt, record_sent_prompt,
};
use crate::decide::plan::LocalReason;
use crate::decide::threshold::carried_threshold;
use crate::decide::weigh::prefill_rules;
use crate::prepare::Unit;
use crate::run::account::read_usage;
use crate::run::beginning::SentLeg;
use crate::run::kv_read::{KvRead, record_leg};
use crate::run::leg_headers::{begin_attempt, traced_headers};
use crate::run::local_prefill::record_local_prefill;
use crate::run::peer_fetch::fetch_planned;
use crate::run::recent_prefixes::remember_prefix;
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_api::{Endpoint, JsonObject, Parts};
use splitrail_config::model::{KvPath, OnNoPrefill};
use splitrail_engine_client::{LegHeaders, RevocableBody, Shape, refusal_event};
use splitrail_fleet::reply_check::{check_events, check_reply};
use splitrail_fleet::{Exclusion, LegLimit, LegReply, LegRequest, LegWait, Pool, Worker};
use splitrail_ledger::decisions::DecisionHandle;
use splitrail_ledger::leg::LegKind;
use splitrail_ledger::timeline::Stage;
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;
use splitrail_reply::choices::Failure;
use splitrail_reply::dialect;
use splitrail_transfer::bodies;
use splitrail_transfer::lease::Lease;
use splitrail_transfer::params::PrefillParams;
use splitrail_transfer::participants::{excluded_from_prefill, without_hand_offs};
use splitrail_transfer::repair::Repair;
use splitrail_transfer::staged::{
    HandOffOrigin, PrefillResult, ReleaseRequest, Staged, count_abandoned_hand_off,
};
use splitrail_workload::progress::Awaited;

/// The attempts of one prompt's prefill leg.
pub(crate) struct PrefillAttempts {
    excluded: Vec<Exclusion>,
    /// Workers that return no hand-offs for this endpoint.
    missing: Vec<Exclusion>,
    left: u32,
    failures: AttemptFailures,
    /// What the next attempt may fetch and read. After a failed fetch, none fetches, and after a
    /// failed read, none reads.
    rules: LegRules<'static>,
}

impl PrefillAttempts {
    /// As many attempts as the model's configuration allows. `rules` says what the first one may fetch
    /// and read.
    pub(crate) fn new(
        prompt: PromptContext<'_>,
        failed_decode: &[Exclusion],
        rules: LegRules<'static>,
    ) -> Self {
        let PromptContext { context, unit, .. } = prompt;
        let failures = AttemptFailures::new(prompt);
        let left = failures.bound(context.served.config.retries.prefill);
        let mut excluded = excluded_from_prefill(&context.served, failed_decode);
        excluded.extend(too_short(&context.served, Leg::Prefill, unit, PREFILL_OUTPUT_TOKENS));
        let mut missing = without_hand_offs(&context.served, context.endpoint, Instant::now());
        let lacks = |one: &&Exclusion| one.reason == VetoReason::LacksEndpoint;
        missing.extend(failed_decode.iter().filter(lacks));
        let failed_hand_off = |one: &&Exclusion| one.reason == VetoReason::NoHandOff;
        excluded.extend(failed_decode.iter().filter(failed_hand_off));
        excluded.extend(failed_decode.iter().filter(|one| is_about_adapters(one)));
        Self { excluded, missing, left, failures, rules }
    }

    /// Chooses the next worker.
    ///
    /// # Errors
    /// If no prefill worker is up, or the queue refuses the request.
    pub(crate) async fn place(&self, prompt: PromptContext<'_>) -> Result<PlacedLeg, Error> {
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

    /// Notes that a worker has failed, not by the client's fault, or that the prompt is too long for it,
    /// and allows a further attempt.
    ///
    /// # Errors
    /// The worker's error, if another worker would not do better, no other worker is up, or the
    /// attempts or the retry budget are used up.
    pub(crate) fn retry_elsewhere(
        &mut self,
        context: &Context,
        worker: &Worker,
        error: Error,
    ) -> Result<(), Error> {
        self.failures.judge(&context.served, Leg::Prefill, worker, &error);
        reconsider(&mut self.excluded, &error);
        let fits_elsewhere = fits_elsewhere(&context.served, worker, &error);
        match fits_elsewhere {
            true => self.excluded.extend(not_longer(&context.served, worker, &self.excluded)),
            false => {
                let reason = VetoReason::of_failure(error.kind());
                self.excluded.push(Exclusion::new(worker.index, reason));
            }
        }
        let others = context.served.pool.any_up(Leg::Prefill, &self.excluded);
        let same = error.is_of_the_connection();
        if same {
            self.excluded.pop();
        }
        let worth = error.worth_another_worker() || fits_elsewhere;
        let may = self.left > 0 && (others || same) && worth;
        if !may || !allow_retry(context, "prefill", worker, &error) {
            return Err(error);
        }
        self.left -= 1;
        Ok(())
    }
}

/// The error for a prefill leg that no worker can take.
pub(crate) fn no_prefill_worker(context: &Context) -> Error {
    let lacks = match context.served.pool.any_up(Leg::Prefill, &[]) {
        true => "can be used for this request",
        false => "is up",
    };
    let message = format!("model {} has no prefill worker that {lacks}", context.served.name());
    Error::new(ErrorKind::NoWorker, message)
}

/// Runs the prefill leg. `None` if the decode worker is to compute the prompt: no prefill leg
/// succeeded and the model's configuration allows this, or there is no hand-off.
pub(crate) async fn prefill_or_local(
    prompt: PromptContext<'_>,
    failed_decode: &[Exclusion],
) -> Result<Option<Box<PrefillResult>>, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let Context { served, endpoint, options, .. } = context.as_ref();
    let rules = prefill_rules(served, *endpoint, unit, *options);
    let mut tries = PrefillAttempts::new(prompt, failed_decode, rules);
    let last = loop {
        let mut placed = match tries.place(prompt).await {
            Ok(placed) => placed,
            // If the queue refused the prefill, do not fall back to a costlier local prefill.
            Err(error) if error.is_busy() => return Err(error),
            Err(_) if tries.only_missing(&context.served.pool) => {
                record_local_prefill(prompt, LocalReason::NoHandOff);
                return Ok(None);
            }
            Err(error) => break error,
        };
        let one_shot = fetch_planned(prompt, &mut placed, &mut tries.rules.may_fetch).await;
        record_sent_prompt(context, unit, &placed);
        let leg_headers = begin_attempt(context, decision);
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
            placed.worker.health.outcomes.began(started.elapsed());
        }
        let error = match prefilled {
            Ok(PrefillOutcome::HandedOver(prefilled)) => {
                record_computed_prompt(context, unit, &placed);
                remember_prefix(prompt);
                return Ok(Some(prefilled));
            }
            Ok(PrefillOutcome::NothingHandedOver(reason)) => {
                record_local_prefill(prompt, reason);
                decision.enter(|entry| entry.discard(reason.name()));
                return Ok(None);
            }
            Err(error) => error,
        };
        decision.enter(|entry| entry.discard(error.outcome()));
        if reads {
            tries.rules.readable_blocks = 0;
        }
        if failed_to_read {
            // The fault may be the other worker's, or that of what was read: the same again without.
            // The retry budget is not asked, because the router chose to read.
            record_retry(context, "prefill", &placed.worker, &error);
            continue;
        }
        if error.fault() == Fault::Client && !fits_elsewhere(served, &placed.worker, &error) {
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
pub(crate) fn without_prefill(prompt: PromptContext<'_>, last: &Error) -> Result<(), Error> {
    let context = prompt.context;
    if context.served.config.on_no_prefill == OnNoPrefill::Fail {
        if last.fault() == Fault::Client {
            return Err(last.clone());
        }
        let message = format!("every prefill worker failed; the last error: {}", last.message());
        return Err(Error::new(ErrorKind::NoWorker, message));
    }
    if context.served.no_prefill.may_log() {
        tracing::warn!(
            model = context.served.name(),
            error = %last,
            "every prefill worker failed: decode workers compute prompts \
             (logged at most twice a minute; local_prefills_total counts)"
        );
    }
    record_local_prefill(prompt, LocalReason::NoPrefill);
    Ok(())
}

/// The reply of a prefill engine.
pub(crate) struct PrefillReply {
    reply: JsonObject,
    dialect: Dialect,
    /// The address that the reply came from.
    pub(crate) peer: Option<IpAddr>,
    /// When the reply began: the engine had staged the blocks by then.
    begun: tokio::time::Instant,
    usage: Option<EngineUsage>,
}

impl PrefillReply {
    /// Whether the reply ended with its first token by itself. An engine returns a hand-off only
    /// for a reply that was cut off by its length limit.
    pub(crate) fn ended(&self) -> bool {
        dialect::ended(self.dialect, &self.reply)
    }

    /// The reply itself.
    pub(crate) fn reply(&self) -> &JsonObject {
        &self.reply
    }

    /// The number of prompt tokens that the engine did not compute, if it says so: in its usage, or else
    /// in its hand-off.
    pub(crate) fn cached_tokens(&self) -> Option<u32> {
        let carried = || {
            let said = HandOff::from_reply(self.reply.raw("kv_transfer_params")?);
            said.ok()?.remote_prefill_cached_tokens()
        };
        self.usage.and_then(|usage| usage.cached_tokens).or_else(carried)
    }

    /// The hand-off in the reply, or the reason why the reply has none.
    fn hand_off(&self, worker: &Worker) -> Result<RepliedHandOff, Error> {
        let params = self.reply.raw("kv_transfer_params");
        match HandOff::from_reply(params.unwrap_or("null")) {
            Ok(hand_off) => Ok(RepliedHandOff::Present(hand_off)),
            Err(HandOffError::Absent) if self.ended() => {
                Ok(RepliedHandOff::Absent(LocalReason::PrefillEnded))
            }
            // An engine that returns hand-offs for chats may not support the member on this
            // endpoint.
            Err(HandOffError::Absent) if params.is_none() && self.dialect.names_events() => {
                Ok(RepliedHandOff::Absent(LocalReason::NoHandOff))
            }
            Err(error) => Err(Error::engine(worker.id(), &format!("gave no hand-off: {error}"))),
        }
    }

    /// The lease of the blocks that the reply leaves to a decode engine that has its address.
    pub(crate) fn lease(&self, context: &Context) -> Lease {
        let lease = context.served.config.lease;
        Lease::new(self.begun, lease, None, tokio::time::Instant::now())
    }

    /// Enters the usage in the ledger. `carried` is the count of cached tokens in the hand-off, or of
    /// an engine that pushes, which is used if the usage has none.
    pub(crate) fn report(
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
            check_events(&context.served, worker, &leg);
        }
    }
}

/// Whether the reply of a prefill engine has a hand-off.
enum RepliedHandOff {
    Present(HandOff),
    Absent(LocalReason),
}

/// The result of a prefill leg that was answered.
enum PrefillOutcome {
    /// A decode leg can follow.
    HandedOver(Box<PrefillResult>),
    /// The worker that answers computes the prompt.
    NothingHandedOver(LocalReason),
}

/// The request that releases the hand-off of a prompt: the client's own prompt, for any decode worker.
fn release_request(context: &Context, unit: &Unit) -> ReleaseRequest {
    ReleaseRequest {
        endpoint: context.endpoint,
        body: unit.body.clone(),
        memory: Some(Arc::clone(&context.memory)),
        weight_tokens: unit.weight_tokens,
        by: None,
    }
}

/// Makes the body of a prefill leg.
pub(crate) fn body(
    context: &Context,
    unit: &Unit,
    worker: &Worker,
    params: PrefillParams<'_>,
) -> Result<Parts, Error> {
    let mut body = unit.body.clone();
    if let Some(threshold) = carried_threshold(context, worker, 0.0) {
        body.set("cache_hit_threshold", threshold.to_string());
    }
    bodies::prefill(&body, context.endpoint, params)
}

/// Sends a prefill leg and reads its reply. With `repair`, the leg may outlive the request.
pub(crate) async fn send(
    prompt: PromptContext<'_>,
    leg_headers: &LegHeaders,
    placed: &PlacedLeg,
    body: RevocableBody,
    repair: Option<&mut Repair>,
) -> Result<PrefillReply, Error> {
    let PromptContext { context, unit, .. } = prompt;
    let started = Instant::now();
    let worker = &placed.worker;
    let uncached = placed.uncached_tokens(context, unit);
    let mut limit = context.prefill_limit(placed.predicted_time(unit, uncached));
    worker.breaker(Leg::Prefill).begin(started);
    let mut booking = placed.book(context, unit, started, true);
    booking.set_awaited(Awaited::FirstOutput);
    let mut leg = prompt.leg(LegKind::Prefill, worker);
    let leg_headers = traced_headers(placed.pinned(leg_headers), &leg);
    let leg_headers = LegHeaders { prefill_tokens: Some(uncached), ..leg_headers };
    let call = post(prompt, worker, body, leg_headers.clone());
    if let Some(deadline) = placed.read_deadline {
        let duration = deadline.at.saturating_duration_since(started.into());
        if duration < limit.duration {
            limit = LegLimit { duration, key: deadline.key };
        }
    }
    let wait = LegWait { served: &context.served, worker, leg: Leg::Prefill, limit };
    let sent = SentLeg::new(prompt, placed, LegKind::Prefill);
    let replied = match repair {
        None => wait.until_output(pin!(call)).await,
        Some(repair) => wait.until_output(pin!(repair.run(leg_headers, call))).await,
    };
    sent.ended();
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
    worker.counts.series.leg_took("prefill", ended.duration_since(started).as_secs_f64());
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
    let read = body.clone();
    let parse = move || JsonObject::parse(read);
    let reply = context.preparer.cores.run_sized(bytes, parse).await?;
    let nonsense = |_| Error::engine(worker.id(), "sent a prefill reply that cannot be understood");
    let reply = reply.map_err(nonsense)?;
    match dialect::failure_of(context.endpoint.dialect(), &reply) {
        None => Ok((reply, begun, peer)),
        Some(Failure::Abort) => Err(Error::engine(worker.id(), "aborted the request")),
        Some(Failure::Error) => Err(refusal_event(worker, &body)),
    }
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
        decision.enter(|entry| entry.worked(LegKind::Prefill));
        leg.rest(response).await
    }
}

/// Runs the prefill leg of a connector whose decode leg follows it.
async fn prefill(
    prompt: PromptContext<'_>,
    leg_headers: LegHeaders,
    placed: &PlacedLeg,
    reading: Option<KvRead<'_>>,
) -> Result<PrefillOutcome, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let worker = &placed.worker;
    let params = match context.served.config.connector.kv_path() {
        KvPath::Stored => PrefillParams::Stored,
        KvPath::Pulled | KvPath::Pushed | KvPath::Matched | KvPath::None => PrefillParams::Pulled,
    };
    let is_stored = matches!(params, PrefillParams::Stored);
    worker.transfer.missing_hand_offs.begin(context.endpoint.dialect(), Instant::now());
    worker.transfer.failed_hand_offs.begin(Instant::now());
    let reply = match reading {
        Some(reading) => Box::pin(reading.send(prompt, &leg_headers, placed)).await?,
        None => {
            let body = body(context, unit, worker, params)?;
            send(prompt, &leg_headers, placed, body.into(), None).await?
        }
    };
    if worker.is_quarantined() {
        // The leg may have found KV of other tokens in the worker's cache. No worker may take them.
        if !is_stored && matches!(reply.hand_off(worker), Ok(RepliedHandOff::Present(_))) {
            count_abandoned_hand_off(&context.served, &context.metrics);
        }
        return Err(Error::engine(worker.id(), "may hold KV of other tokens in its cache"));
    }
    if is_stored {
        reply.report(context, decision, worker, None);
        let worker = Arc::clone(worker);
        let prefilled = PrefillResult { worker, staged: None, leg_headers };
        return Ok(PrefillOutcome::HandedOver(Box::new(prefilled)));
    }
    let replied = reply.hand_off(worker);
    record_missing_hand_off(worker, context.endpoint, &replied);
    let carried = match &replied {
        Ok(RepliedHandOff::Present(hand_off)) => hand_off.remote_prefill_cached_tokens(),
        _ => None,
    };
    reply.report(context, decision, worker, carried);
    let hand_off = match replied? {
        RepliedHandOff::Present(hand_off) => hand_off,
        RepliedHandOff::Absent(reason) => return Ok(PrefillOutcome::NothingHandedOver(reason)),
    };
    let admitted = context.served.admit_host(worker, hand_off.remote_host(), reply.peer);
    admitted.inspect_err(|_| count_abandoned_hand_off(&context.served, &context.metrics))?;
    let lease = Lease::of(context.served.config.lease, &hand_off, reply.begun);
    let origin = HandOffOrigin {
        served: &context.served,
        metrics: &context.metrics,
        worker: worker.index,
        leg_headers: &leg_headers,
    };
    let staged = Staged::new(origin, release_request(context, unit), hand_off, lease);
    let (worker, staged) = (Arc::clone(worker), Some(staged));
    Ok(PrefillOutcome::HandedOver(Box::new(PrefillResult { worker, staged, leg_headers })))
}

/// Remembers whether a worker returns hand-offs for an endpoint.
fn record_missing_hand_off(
    worker: &Worker,
    endpoint: Endpoint,
    replied: &Result<RepliedHandOff, Error>,
) {
    let (missing_hand_offs, dialect) = (&worker.transfer.missing_hand_offs, endpoint.dialect());
    let (model, id, endpoint) = (worker.model(), worker.id(), endpoint.path());
    match replied {
        Ok(RepliedHandOff::Present(_)) if missing_hand_offs.record_hand_off(dialect) => {
            tracing::info!(
                model,
                worker = id,
                endpoint,
                "replies on this path carry hand-offs again"
            );
        }
        Ok(RepliedHandOff::Absent(LocalReason::NoHandOff))
            if missing_hand_offs.record_missing(dialect, Instant::now()) =>
        {
            let what = "replies on this path carry no hand-off; no prefill is sent there, \
                        except for an occasional trial";
            tracing::warn!(model, worker = id, endpoint, "{what}");
        }
        _ => {}
    }
}
