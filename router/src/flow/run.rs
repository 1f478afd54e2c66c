//! One prompt's way through its legs: placed, sent, retried, until an answer has
//! begun or an error is final.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::HeaderValue;
use serde_json::value::RawValue;
use splitrail_engine::nixl::HandOff;
use splitrail_engine::usage::EngineUsage;

use super::client::{Envelope, broken};
use super::legs;
use super::plan::{Facts, LocalReason, Plan, plan};
use crate::api::{Endpoint, JsonObject};
use crate::config::model::OnNoPrefill;
use crate::core::{Core, Served, random_id};
use crate::error::{Error, Fault, Kind};
use crate::fleet::{Booking, Worker};
use crate::ledger::decisions::{CandidateRecord, DecisionHandle};
use crate::pick::{Leg, Query, pick};
use crate::prepare::Unit;
use crate::reply::relay::{Account, EventReader, UnitStream, is_error, whole};
use crate::reply::usage::UsageRule;
use crate::stages::Stages;

/// What the prompts of one request share.
pub struct Context {
    /// The router.
    pub core: Arc<Core>,
    /// The model.
    pub served: Arc<Served>,
    /// Where the request came in.
    pub endpoint: Endpoint,
    /// Whether the client wants a stream.
    pub stream: bool,
    /// Whether the client wants a final usage chunk in its stream.
    pub include_usage: bool,
    /// Samples per prompt.
    pub samples: u32,
    /// Whether the engine computes the whole prompt, whatever it has cached.
    pub bypasses_cache: bool,
    /// W3C trace context.
    pub traceparent: Option<HeaderValue>,
    /// Times per stage.
    pub stages: Stages,
}

/// An answer that has begun: nothing of it has reached the client yet.
pub enum Begun {
    /// A whole reply.
    Whole(JsonObject),
    /// A stream whose first event is there.
    Stream(Box<UnitStream>),
}

/// A chosen worker with what was known of it.
struct Placed {
    worker: Arc<Worker>,
    overlap_blocks: u32,
}

/// What the prefill leg left for the decode leg.
struct Prefilled {
    hand_off: HandOff,
    cached_tokens: Option<u32>,
    prompt_tokens: u32,
    overlap_blocks: u32,
}

/// Runs a prompt until its answer begins.
///
/// # Errors
/// The last attempt's, once no further one is allowed or makes sense.
pub async fn begin(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
) -> Result<Begun, Error> {
    let model = &context.served.config;
    let facts = Facts {
        prompt_tokens: unit.prompt_tokens,
        samples: context.samples,
        bypasses_cache: context.bypasses_cache,
    };
    let plan = plan(model, facts);
    if let Plan::Aggregated(Some(reason)) = plan {
        count_local(context, decision, reason);
    }
    let mut excluded = Vec::new();
    loop {
        decision.update(|decision| decision.attempts += 1);
        let envelope = envelope(context);
        let prefilled = match plan {
            Plan::Aggregated(_) => None,
            Plan::PrefillFirst => prefill_or_local(context, unit, decision, &envelope).await?,
        };
        let spent_tokens = prefilled
            .as_ref()
            .map_or(0, |prefilled| prefilled.prompt_tokens);
        let leg = if prefilled.is_some() {
            Leg::Decode
        } else {
            Leg::Aggregated
        };
        let placed = place(context, unit, decision, leg, &excluded)?;
        let error = match generate(context, unit, decision, &envelope, &placed, prefilled).await {
            Ok(begun) => return Ok(begun),
            Err(error) => error,
        };
        // The hand-off may have been received: whatever comes next needs a new one.
        let metrics = &context.core.metrics;
        let labels = [context.served.name(), error.outcome()];
        metrics
            .wasted_prompt_tokens
            .with_label_values(&labels)
            .inc_by(spent_tokens.into());
        excluded.push(placed.worker.index);
        let others = context
            .served
            .pool
            .workers
            .iter()
            .any(|worker| worker.serves(leg) && !excluded.contains(&worker.index));
        if !error.worth_another_worker()
            || !others
            || excluded.len() > model.retries.decode as usize
        {
            return Err(error);
        }
        count_retry(context, "decode", &placed.worker, &error);
    }
}

/// The prefill leg; `None` if it could not be had and the model's configuration
/// has the decode worker compute the prompt.
async fn prefill_or_local(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    envelope: &Envelope,
) -> Result<Option<Prefilled>, Error> {
    let model = &context.served.config;
    let mut excluded = Vec::new();
    let last = loop {
        let placed = match place(context, unit, decision, Leg::Prefill, &excluded) {
            Ok(placed) => placed,
            Err(error) => break error,
        };
        let error = match prefill(context, unit, envelope, &placed).await {
            Ok(prefilled) => return Ok(Some(prefilled)),
            Err(error) => error,
        };
        if error.fault() == Fault::Client {
            return Err(error);
        }
        excluded.push(placed.worker.index);
        let others = (context.served.pool.workers.iter())
            .any(|worker| worker.serves(Leg::Prefill) && !excluded.contains(&worker.index));
        if !error.worth_another_worker()
            || !others
            || excluded.len() > model.retries.prefill as usize
        {
            break error;
        }
        count_retry(context, "prefill", &placed.worker, &error);
    };
    if model.on_no_prefill == OnNoPrefill::Fail {
        let message = format!(
            "no prefill worker did its part; the last error: {}",
            last.message()
        );
        return Err(Error::new(Kind::NoWorker, message));
    }
    tracing::warn!(
        model = context.served.name(),
        error = %last,
        "no prefill worker did its part: the decode worker computes the prompt"
    );
    count_local(context, decision, LocalReason::NoPrefill);
    decision.update(|decision| decision.prefill_worker = None);
    Ok(None)
}

async fn prefill(
    context: &Context,
    unit: &Unit,
    envelope: &Envelope,
    placed: &Placed,
) -> Result<Prefilled, Error> {
    let started = Instant::now();
    let Served { config, client, .. } = context.served.as_ref();
    let worker = &placed.worker;
    let uncached = uncached_tokens(context, unit, placed.overlap_blocks);
    let _booking = Booking::new(&worker.booked, uncached, unit.weight_tokens);
    let body = legs::prefill(&unit.body, context.endpoint);
    let call = async {
        let response = client
            .post(worker, context.endpoint.path(), body, envelope)
            .await?;
        client.whole(worker, response.into_body()).await
    };
    let reply = within(config.timeouts.prefill, worker, "timeouts.prefill", call).await?;
    let nonsense = |_| broken(worker, "sent a prefill reply that cannot be understood");
    let reply = JsonObject::parse(reply).map_err(nonsense)?;
    // Usage that makes no sense is usage that was not reported.
    let usage = reply
        .raw("usage")
        .and_then(|raw| serde_json::from_str(raw).ok());
    let usage: Option<EngineUsage> = usage.and_then(|raw| EngineUsage::parse(raw).ok());
    let raw = reply.raw("kv_transfer_params").unwrap_or("null");
    let raw: &RawValue = serde_json::from_str(raw).map_err(|_| broken(worker, "sent nonsense"))?;
    let hand_off = HandOff::from_reply(raw)
        .map_err(|error| broken(worker, &format!("gave no hand-off: {error}")))?;
    let told = usage.as_ref().and_then(|usage| usage.cached_tokens);
    context.stages.mark(context, "prefill", started);
    Ok(Prefilled {
        cached_tokens: told.or(hand_off.remote_prefill_cached_tokens()),
        prompt_tokens: usage.map_or(unit.prompt_tokens.unwrap_or(0), |usage| usage.prompt_tokens),
        overlap_blocks: placed.overlap_blocks,
        hand_off,
    })
}

/// The leg that answers the client.
async fn generate(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    envelope: &Envelope,
    placed: &Placed,
    prefilled: Option<Prefilled>,
) -> Result<Begun, Error> {
    let started = Instant::now();
    let Served {
        config,
        client,
        pool,
        ..
    } = context.served.as_ref();
    let worker = &placed.worker;
    let handed_over = prefilled.is_some();
    let rule = UsageRule {
        prefill_cached_tokens: prefilled
            .as_ref()
            .and_then(|prefilled| prefilled.cached_tokens),
        handed_over,
        overlap_blocks: prefilled
            .as_ref()
            .map_or(placed.overlap_blocks, |p| p.overlap_blocks),
        block_size: pool.block_size,
        bypasses_cache: context.bypasses_cache,
        fallback: config.cached_tokens_fallback,
    };
    let to_compute = if handed_over {
        0
    } else {
        uncached_tokens(context, unit, placed.overlap_blocks)
    };
    let mut account = Account {
        core: Arc::clone(&context.core),
        served: Arc::clone(&context.served),
        decision: decision.clone(),
        booking: Booking::new(&worker.booked, to_compute, unit.weight_tokens),
        worker: Arc::clone(worker),
        rule,
        decode_overlap_blocks: placed.overlap_blocks,
        tokens_known: unit.unknown.is_none(),
        settled: None,
        ended: false,
    };
    let body = match prefilled {
        Some(Prefilled { hand_off, .. }) => legs::decode(&unit.body, context.stream, hand_off)?,
        None => legs::aggregated(&unit.body, context.stream)?,
    };
    let path = context.endpoint.path();
    let begun = if context.stream {
        let call = first_event(context, worker, path, body, envelope);
        let call = within(
            config.timeouts.first_token,
            worker,
            "timeouts.first_token",
            call,
        )
        .await;
        call.map(|(reader, first)| (Some(reader), first))
    } else {
        let call = async {
            let response = client.post(worker, path, body, envelope).await?;
            client.whole(worker, response.into_body()).await
        };
        let reply = within(config.timeouts.answer, worker, "timeouts.answer", call).await;
        reply.map(|reply| (None, reply))
    };
    context.stages.mark(context, "first_token", started);
    match begun {
        Ok((None, reply)) => whole(&mut account, reply).map(Begun::Whole),
        Ok((Some(reader), first)) => Ok(Begun::Stream(Box::new(UnitStream {
            account,
            reader,
            first: Some(first),
            tells_usage: context.include_usage,
            flow: flow_name(context),
            last_event: Instant::now(),
        }))),
        Err(error) => {
            account.fail(&error);
            Err(error)
        }
    }
}

/// Sends a streamed leg and waits for its first event, which proves it good.
async fn first_event(
    context: &Context,
    worker: &Arc<Worker>,
    path: &'static str,
    body: Bytes,
    envelope: &Envelope,
) -> Result<(EventReader, Bytes), Error> {
    let Served { config, client, .. } = context.served.as_ref();
    let response = client.post(worker, path, body, envelope).await?;
    let idle = config.timeouts.stream_idle;
    let max_bytes = client.reply_max_bytes();
    // Until the first event, the leg's own time-out counts.
    let patience = config.timeouts.first_token.max(idle);
    let body = response.into_body();
    let mut reader = EventReader::new(body, max_bytes, Arc::clone(worker), patience);
    match reader.next().await? {
        Some(first) if is_error(&first) => Err(broken(worker, "answered with an error event")),
        Some(first) => Ok((reader.with_idle(idle), first)),
        None => Err(broken(worker, "answered with an empty stream")),
    }
}

/// Picks a worker for a leg and writes down why.
fn place(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    leg: Leg,
    excluded: &[usize],
) -> Result<Placed, Error> {
    let Served { config, pool, .. } = context.served.as_ref();
    let started = Instant::now();
    let candidates = pool.candidates(leg, &unit.hashes, excluded, started);
    context.stages.mark(context, "match", started);
    let started = Instant::now();
    let query = Query {
        leg,
        prompt_blocks: unit.hashes.len() as u32,
        block_size: pool.block_size,
        turn: pool.next_turn(leg),
        draw: rand::random(),
    };
    let Some(choice) = pick(&config.policy, &candidates, query) else {
        let message = format!(
            "model {} has no worker left for {}",
            config.name,
            leg.name()
        );
        return Err(Error::new(Kind::NoWorker, message));
    };
    let chosen = candidates[choice.index];
    let worker = Arc::clone(&pool.workers[chosen.worker]);
    let records = candidates
        .iter()
        .zip(&choice.costs)
        .enumerate()
        .map(|(i, (seen, cost))| {
            let name = pool.workers[seen.worker].id();
            CandidateRecord::new(leg.name(), name, seen, *cost, i == choice.index)
        });
    decision.update(|decision| {
        decision
            .candidates
            .retain(|earlier| earlier.leg != leg.name());
        decision.candidates.extend(records);
        let name = Some(worker.id().to_owned());
        match leg {
            Leg::Prefill => decision.prefill_worker = name,
            Leg::Decode | Leg::Aggregated => decision.decode_worker = name,
        }
        if leg == Leg::Decode {
            decision.decode_overlap_blocks = chosen.overlap_blocks;
        } else {
            decision.overlap_blocks = chosen.overlap_blocks;
            decision.estimated_cached_tokens = unit.prompt_tokens.map(|prompt_tokens| {
                if context.bypasses_cache {
                    return 0;
                }
                let overlap = chosen.overlap_blocks;
                splitrail_kv::estimate_cached_tokens(overlap, prompt_tokens, pool.block_size)
            });
        }
    });
    let metrics = &context.core.metrics;
    if unit.unknown.is_none() {
        let labels = [context.served.name(), leg.name()];
        metrics
            .overlap_blocks
            .with_label_values(&labels)
            .observe(chosen.overlap_blocks.into());
        let lost = choice.best_overlap_blocks - chosen.overlap_blocks;
        metrics
            .overlap_blocks_lost
            .with_label_values(&labels[..1])
            .inc_by(lost.into());
    }
    context.stages.mark(context, "pick", started);
    Ok(Placed {
        worker,
        overlap_blocks: chosen.overlap_blocks,
    })
}

/// Tokens that a worker is expected to compute of a prompt.
fn uncached_tokens(context: &Context, unit: &Unit, overlap_blocks: u32) -> u64 {
    let cached = u64::from(overlap_blocks) * u64::from(context.served.pool.block_size);
    unit.weight_tokens.saturating_sub(cached)
}

async fn within<T>(
    limit: Duration,
    worker: &Worker,
    key: &str,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
        let message = format!("worker {} took longer than {key} ({limit:?})", worker.id());
        Err(Error::new(Kind::EngineTimeout, message))
    })
}

/// A new id for each attempt: an engine's request ids must be unique, and a
/// client's would let it reach for another's.
fn envelope(context: &Context) -> Envelope {
    let request_id = HeaderValue::from_str(&random_id());
    Envelope {
        // Hexadecimal digits are always a header value.
        request_id: request_id.unwrap_or_else(|_| HeaderValue::from_static("splitrail")),
        traceparent: context.traceparent.clone(),
    }
}

/// The flow's label in metrics and records.
pub fn flow_name(context: &Context) -> &'static str {
    match context.served.config.flow {
        crate::config::model::Flow::Aggregated => "aggregated",
        crate::config::model::Flow::PrefillFirst => "prefill_first",
    }
}

fn count_local(context: &Context, decision: &DecisionHandle, reason: LocalReason) {
    let labels = [context.served.name(), reason.name()];
    context
        .core
        .metrics
        .local_prefills
        .with_label_values(&labels)
        .inc();
    decision.update(|decision| decision.local_reason = Some(reason.name()));
}

fn count_retry(context: &Context, leg: &'static str, worker: &Worker, error: &Error) {
    let labels = [context.served.name(), leg, error.outcome()];
    context
        .core
        .metrics
        .retries
        .with_label_values(&labels)
        .inc();
    tracing::warn!(model = labels[0], leg, worker = worker.id(), %error, "trying another worker");
}
