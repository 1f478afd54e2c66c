//! Sends the leg that answers the client, and waits until its answer begins.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::EngineUsage;

use super::context::{PromptContext, book, expected, uncached_tokens, within};
use super::first::{First, first_events};
use super::hand_off::Carried;
use super::lease::Lease;
use super::legs;
use super::migrate::{Migration, is_exact};
use super::place::Placed;
use super::prefill::Prefilled;
use super::staged::{Staged, UnderWay};
use crate::boxed::pinned;
use crate::reply::alike::Alike;
use crate::reply::choices::turned_away;
use crate::reply::relay::{Account, Pace, UnitStream, whole};
use splitrail_api::error::{Error, Kind};
use splitrail_api::{JsonObject, Parts};
use splitrail_engine_client::{Envelope, Parcel, Shape};
use splitrail_fleet::Served;
use splitrail_fleet::Worker;
use splitrail_fleet::costs::RankScope;
use splitrail_ledger::leg::{LegFacts, LegKind};
use splitrail_policy::Leg;

/// An answer that has begun. Nothing of it has reached the client yet.
pub enum Begun {
    /// A whole reply.
    Whole(JsonObject),
    /// A whole reply, unchanged from the engine.
    Verbatim(Bytes),
    /// A stream whose first events have arrived.
    Stream(Box<UnitStream>),
    /// Events that the router itself made.
    Made(Vec<Bytes>),
}

/// The result of the leg that answers.
pub(super) enum Answer {
    /// The answer has begun.
    Begun(Begun),
    /// The engine holds less of the prompt than its threshold requires and has run nothing. With
    /// the usage that the engine reported, if any.
    Below(Option<EngineUsage>),
}

/// A leg that answers the client, with everything needed to send it.
#[derive(Clone, Copy)]
pub(super) struct Sending<'a> {
    pub(super) prompt: PromptContext<'a>,
    pub(super) envelope: &'a Envelope,
    pub(super) placed: &'a Placed,
    /// The value of `cache_hit_threshold` in the body.
    pub(super) threshold: Option<f64>,
}

impl Sending<'_> {
    /// Whether the worker may reject the leg. If so, events are held back until they show output.
    pub(super) fn is_gated(&self) -> bool {
        self.envelope.gate.is_some() || self.threshold.is_some_and(|threshold| threshold > 0.0)
    }

    /// Whether a leg of its own fetches the hand-off first. One hand-off cannot serve several
    /// samples; after the fetch, the samples find the prompt in the worker's own cache.
    pub(super) fn fetches_first(&self) -> bool {
        self.prompt.context.options.samples > 1
    }

    /// The body of the leg that answers.
    pub(super) fn body(&self, carried: Carried<'_>) -> Result<Parts, Error> {
        let context = self.prompt.context;
        let body = self.gated_body(self.threshold);
        legs::answer(body, context.endpoint, context.options, carried)
    }

    /// The body of the leg that fetches a hand-off first.
    pub(super) fn fetching_body(&self, carried: Carried<'_>) -> Result<Parts, Error> {
        let body = self.gated_body(self.threshold.map(|_| 0.0));
        legs::fetch(&body, self.prompt.context.endpoint, carried)
    }

    fn gated_body(&self, threshold: Option<f64>) -> JsonObject {
        let mut body = self.prompt.unit.body.clone();
        if let Some(threshold) = threshold {
            body.set("cache_hit_threshold", threshold.to_string());
        }
        if is_exact(self.prompt.context, &self.prompt.unit.body) {
            body.set("return_token_ids", "true");
        }
        body
    }

    /// Sends the leg that answers.
    pub(super) async fn ask(
        &self,
        account: &Account,
        body: Parcel,
        lease: Option<Lease>,
    ) -> Result<First, Error> {
        below_if_412(if self.prompt.context.options.stream {
            let events = Box::pin(first_events(self, self.prompt.context.endpoint, body));
            in_lease(lease, &self.placed.worker, events).await
        } else {
            whole_reply(self, account, body, lease).await
        })
    }

    /// Sends the leg that fetches a hand-off.
    pub(super) async fn fetch(&self, body: Parcel, lease: Option<Lease>) -> Result<(), Error> {
        let Sending { prompt, envelope, placed, .. } = *self;
        let context = prompt.context;
        let (worker, envelope) = (&placed.worker, &placed.pinned(envelope));
        let Served { config, client, .. } = context.served.as_ref();
        let call = pin!(async {
            let shape = Shape::whole(context.endpoint);
            let response = client.post(worker, shape, body, envelope).await?;
            client.whole(worker, response).await.map(drop)
        });
        let limit = config.timeouts.first_token;
        let call = pin!(within(client, limit, worker, "timeouts.first_token", call));
        in_lease(lease, worker, call).await
    }
}

/// Sends the leg that answers the client, and waits until its answer begins. The hand-off is taken
/// out of `staged`, and is put back if no byte of it was sent.
///
/// # Errors
/// The reason why the answer did not begin; nothing has reached the client then.
pub(super) async fn generate(
    sending: &Sending<'_>,
    staged: &mut Option<Prefilled>,
) -> Result<Answer, Error> {
    let Sending { prompt, placed, .. } = *sending;
    let PromptContext { context, decision, .. } = prompt;
    let started = Instant::now();
    let ahead = placed.worker.waiting(started);
    let mut prefilled = staged.take();
    let lease = prefilled.as_ref().and_then(Prefilled::lease);
    placed.worker.breaker(Leg::Decode).begin(started);
    let handed_over = prefilled.is_some();
    let to_compute = to_compute(sending, handed_over);
    let envelope = &Envelope { prefill_tokens: Some(to_compute), ..sending.envelope.clone() };
    let sending = &Sending { envelope, ..*sending };
    let account = account(sending, started, handed_over);
    let staged_now = prefilled.as_mut().and_then(|prefilled| prefilled.staged.as_mut());
    let hand_off = staged_now.and_then(Staged::spend);
    let carried = hand_off.as_deref().map_or(Carried::Nothing, Carried::Params);
    let fetches = hand_off.is_some() && sending.fetches_first();
    let body = if fetches { sending.fetching_body(carried)? } else { sending.body(carried)? };
    let (body, receipt) = Parcel::new(body);
    let body = if hand_off.is_some() { body.once() } else { body };
    let mut under_way = UnderWay::new(prefilled, hand_off, receipt);
    let (body, lease) = if fetches {
        match pinned(|| sending.fetch(body, lease)).await {
            Ok(()) => (Ok(sending.body(Carried::Nothing)?.into()), None),
            Err(error) => (Err(error), None),
        }
    } else {
        (Ok(body), lease)
    };
    let begun = match body {
        Ok(body) => sending.ask(&account, body, lease).await,
        Err(error) => Err(error),
    };
    context.mark("first_token", started);
    if matches!(begun, Ok(First::Events(..))) {
        placed.worker.pace.observe(started.elapsed(), ahead);
        placed.worker.outcomes.began(started.elapsed());
        if handed_over && ahead == 0 {
            learn_hand_off(sending, started.elapsed());
        }
    }
    let error = match conclude(sending, account, begun) {
        Ok(answer) => return Ok(answer),
        Err(error) => error,
    };
    let now = tokio::time::Instant::now();
    let good = |prefilled: &Prefilled| prefilled.lease().is_none_or(|l| !l.left(now).is_zero());
    *staged = under_way.take_back().filter(good);
    if staged.is_none() {
        // The prefill leg cannot serve another attempt either, so it is discarded as well.
        decision.attempt_discarded(error.outcome());
    }
    Err(error)
}

/// Trains the cost model with a hand-off. Without requests ahead of it in the queue, the first
/// event of a leg comes after the transfer of its KV and one decode step.
fn learn_hand_off(sending: &Sending<'_>, took: Duration) {
    let Sending { prompt, placed, .. } = *sending;
    let PromptContext { context, unit, .. } = prompt;
    let (worker, costs) = (&placed.worker, &placed.worker.costs);
    let (requests, context_tokens) = (worker.booked.requests(), worker.booked.active_tokens());
    let step = costs.seen(Instant::now(), RankScope::Rank(None), 0).coefficients;
    let step_seconds = step.step_seconds(u64::from(requests), context_tokens);
    let held = u64::from(placed.believed_blocks) * u64::from(context.served.pool.block_size());
    let took_seconds = took.as_secs_f64();
    // If the step's duration is not learned yet, its prediction may exceed the measured time; at
    // least a tenth of the measured time is then taken for the hand-off.
    let seconds = (took_seconds - step_seconds).max(took_seconds / 10.0);
    costs.handed_over(unit.weight_tokens.saturating_sub(held), seconds);
}

/// Evaluates how the leg that answers has begun. After an error, its prefill leg is not discarded
/// here, since the hand-off may serve another attempt.
pub(super) fn conclude(
    sending: &Sending<'_>,
    mut account: Account,
    begun: Result<First, Error>,
) -> Result<Answer, Error> {
    let Sending { prompt, placed, .. } = *sending;
    let PromptContext { context, decision, .. } = prompt;
    let error = match begun {
        Ok(First::Whole(reply)) => match whole(&mut account, reply) {
            Ok(reply) => return Ok(Answer::Begun(Begun::Whole(reply))),
            Err(error) => error,
        },
        Ok(First::Events(reader, held)) => {
            account.began();
            if placed.worker.breaker(Leg::Decode).answers() {
                tracing::info!(worker = placed.worker.id(), leg = "decode", "breaker closed");
            }
            decision.cached_tokens_foretold();
            return Ok(Answer::Begun(Begun::Stream(Box::new(UnitStream {
                account,
                reader: *reader,
                held,
                migration: Migration::new(prompt),
                tells_usage: context.options.include_usage,
                gaps: context.inter_token(decision),
                pace: Pace::begin(Instant::now()),
                alike: Alike::default(),
            }))));
        }
        Ok(First::Below(usage)) => {
            account.turned_away(usage);
            return Ok(Answer::Below(usage));
        }
        Err(error) => error,
    };
    account.fail_leg(&error);
    Err(error)
}

/// Some engines reject a request below its threshold with status 412.
fn below_if_412(begun: Result<First, Error>) -> Result<First, Error> {
    begun.or_else(|error| match error.kind() {
        Kind::EngineRejected(412) => Ok(First::Below(None)),
        _ => Err(error),
    })
}

/// The number of prompt tokens that the worker has to compute before it answers.
fn to_compute(sending: &Sending<'_>, handed_over: bool) -> u64 {
    match handed_over {
        true => 0,
        false => {
            let PromptContext { context, unit, .. } = sending.prompt;
            uncached_tokens(context, unit, sending.placed.assumed_blocks)
        }
    }
}

/// Makes the data that the answer owns until it ends, and enters its leg in the ledger.
pub(super) fn account(sending: &Sending<'_>, now: Instant, handed_over: bool) -> Account {
    let Sending { prompt, placed, .. } = *sending;
    let PromptContext { context, unit, decision } = prompt;
    let worker = &placed.worker;
    let booking = match handed_over {
        true => worker.book(placed.rank, 0, unit.weight_tokens),
        false => book(context, unit, placed, now, context.options.stream),
    };
    let leg = LegFacts::new(LegKind::Decode, worker.id(), expected(context, unit, placed));
    decision.decode_sent(leg);
    Account {
        metrics: Arc::clone(&context.metrics),
        served: Arc::clone(&context.served),
        decision: decision.clone(),
        booking,
        worker: Arc::clone(worker),
        dialect: context.endpoint.dialect(),
        prompt_tokens: unit.prompt_tokens,
        settled: false,
    }
}

/// Limits a call by the lease of its hand-off. An engine that has not begun to answer by the end of
/// the lease may have fetched the blocks too late, and would not report this.
async fn in_lease<T>(
    lease: Option<Lease>,
    worker: &Worker,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let Some(lease) = lease else { return call.await };
    let in_time = tokio::time::timeout_at(lease.ends(), call).await;
    in_time.unwrap_or_else(|_| Err(lease_expired(worker)))
}

fn lease_expired(worker: &Worker) -> Error {
    let message = format!("worker {} has not taken a hand-off within its lease", worker.id());
    Error::new(Kind::LeaseExpired, message)
}

/// Sends a leg that is not streamed, and reads its reply.
async fn whole_reply(
    sending: &Sending<'_>,
    account: &Account,
    body: Parcel,
    lease: Option<Lease>,
) -> Result<First, Error> {
    let Sending { prompt, envelope, placed, .. } = *sending;
    let context = prompt.context;
    let (worker, envelope) = (&placed.worker, &placed.pinned(envelope));
    let Served { config, client, .. } = context.served.as_ref();
    let sent = lease.map(|_| Instant::now());
    let call = pin!(async {
        let shape = Shape::whole(context.endpoint);
        let response = client.post(worker, shape, body, envelope).await?;
        // Engines send the status of a whole reply when the answer is complete. If the leg may be
        // rejected, only the body shows whether it is an answer.
        if !sending.is_gated() {
            account.began();
        }
        client.whole_answer(worker, response, &context.unread).await
    });
    // The reply comes only after all tokens are generated, so its time says nothing about the
    // lease. Only the worker's load reports show whether the request left the queue in time.
    let queued = async {
        match lease {
            Some(lease) => tokio::time::sleep_until(lease.ends()).await,
            None => std::future::pending().await,
        }
        if sent.is_none_or(|sent| !worker.has_queued_since(sent)) {
            std::future::pending::<()>().await;
        }
    };
    let call = within(client, config.timeouts.reply, worker, "timeouts.reply", call);
    let reply = tokio::select! {
        reply = call => reply?,
        () = queued => return Err(lease_expired(worker)),
    };
    let dialect = context.endpoint.dialect();
    if turned_away(dialect, &reply) {
        return Ok(First::Below(usage_of(dialect, &reply)));
    }
    Ok(First::Whole(reply))
}

/// The usage in a reply or an event, if it is valid.
pub(super) fn usage_of(dialect: Dialect, reply: &Bytes) -> Option<EngineUsage> {
    let reply = JsonObject::parse(reply.clone()).ok()?;
    EngineUsage::parse_in(dialect, serde_json::from_str(reply.raw("usage")?).ok()?).ok()
}
