//! Requests that generate no text (embeddings, scores, token ids): one worker serves each in full, without a hand-off.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use splitrail_engine::usage::EngineUsage;

use super::attempts::Attempts;
use super::context::{Context, PromptContext, attempt, book, expected, traced, within};
use super::generate::Begun;
use super::place::{Placed, Wish, place, place_in_turn};
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, Kind};
use splitrail_config::model::RequestFlow;
use splitrail_engine_client::{Envelope, Shape};
use splitrail_fleet::Served;
use splitrail_fleet::endpoint_support::TOKENIZER;
use splitrail_fleet::{Exclusion, Pool, Worker, excluded};
use splitrail_ledger::leg::{LegFacts, LegKind};
use splitrail_ledger::timeline::Stage;
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;

/// Replies of at least this length are parsed off the reactor.
const LONG_BYTES: usize = 256 << 10;

/// Runs a request of an auxiliary endpoint until its reply has arrived.
///
/// # Errors
/// The error of the last attempt, if no further attempt is allowed or useful.
pub(super) async fn run(prompt: PromptContext<'_>) -> Result<Begun, Error> {
    let PromptContext { context, decision, .. } = prompt;
    let Served { pool, retry_budget, .. } = context.served.as_ref();
    retry_budget.deposit();
    let endpoint = context.endpoint;
    let mut attempts = Attempts::new(context);
    loop {
        let (leg, lacking) = able(&context.served, endpoint, attempts.failed(), Instant::now())?;
        attempts.spare(lacking);
        decision.flow_begun(RequestFlow::Aggregated.name());
        let wish = Wish::any(leg, attempts.failed());
        let placed = match endpoint.computes() {
            true => place_in_turn(prompt, wish, false).await?,
            false => place(prompt, wish)?,
        };
        let worker = &placed.worker;
        begin(worker, leg, endpoint);
        match ask(prompt, &placed).await {
            Ok((reply, usage)) => {
                end(worker, leg, endpoint, None);
                decision.auxiliary_answered(usage);
                return Ok(Begun::Verbatim(reply));
            }
            Err(error) => {
                decision.decode_failed(error.outcome());
                if error.kind() == Kind::NotOffered {
                    // A worker without this endpoint is asked only once in a while, so this retry
                    // needs no bound and no budget.
                    worker.endpoint_support.lacks(endpoint, Instant::now());
                    continue;
                }
                end(worker, leg, endpoint, Some(&error));
                let again = Exclusion::new(worker.index, VetoReason::Failed);
                let failed = [attempts.failed(), &[again]].concat();
                let leg = next_leg(pool, &failed);
                attempts.again_elsewhere(context, leg, worker, error)?;
            }
        }
    }
}

/// The leg for which a worker is chosen, and the workers to exclude besides those in `failed`:
/// workers that lack the endpoint, and workers whose circuit breaker for it is open.
///
/// # Errors
/// If all workers that are up lack the endpoint.
pub(super) fn able(
    served: &Served,
    endpoint: Endpoint,
    failed: &[Exclusion],
    now: Instant,
) -> Result<(Leg, Vec<Exclusion>), Error> {
    let roster = served.pool.roster();
    let lacks = |worker: &Worker| worker.endpoint_support.is_lacking(endpoint, now);
    let left = |worker: &&Arc<Worker>| excluded(failed, worker.index).is_none();
    let lacking = roster.iter().filter(left).filter(|worker| lacks(worker));
    let veto = |reason| move |worker: &Arc<Worker>| Exclusion::new(worker.index, reason);
    let mut lacking: Vec<Exclusion> = lacking.map(veto(VetoReason::LacksEndpoint)).collect();
    let may_have = |worker: &Arc<Worker>| worker.is_up() && !lacks(worker);
    if roster.iter().any(|worker| lacks(worker)) && !roster.iter().any(may_have) {
        let message = format!("no worker of model {} offers {}", served.name(), endpoint.path());
        return Err(Error::new(Kind::NotOffered, message));
    }
    // As with legs: if the breakers of all workers are open, all workers are tried nevertheless.
    let shut =
        |worker: &Worker| !endpoint.computes() && !worker.endpoint_support.breaker.allows(now);
    let open = |worker: &Arc<Worker>| may_have(worker) && left(&worker) && !shut(worker);
    if roster.iter().any(open) {
        let shut = roster.iter().filter(|worker| shut(worker));
        lacking.extend(shut.map(veto(VetoReason::BreakerOpen)));
    }
    Ok((next_leg(&served.pool, &[failed, &lacking].concat()), lacking))
}

/// The role of the workers that serve auxiliary endpoints: workers for both legs or for decode, or
/// prefill workers if no other worker is up.
fn next_leg(pool: &Pool, exclusions: &[Exclusion]) -> Leg {
    let can = |leg| {
        let roster = pool.roster();
        roster
            .iter()
            .any(|worker| worker.serves(leg) && excluded(exclusions, worker.index).is_none())
    };
    let others = pool.any_up(Leg::Aggregated, exclusions);
    if others || (can(Leg::Aggregated) && !pool.any_up(Leg::Prefill, exclusions)) {
        Leg::Aggregated
    } else {
        Leg::Prefill
    }
}

/// An endpoint that the model computes uses the circuit breaker of the leg. Other endpoints have a
/// breaker of their own, because their failures say nothing about the model.
fn begin(worker: &Worker, leg: Leg, endpoint: Endpoint) {
    match endpoint.computes() {
        true => worker.breaker(leg).begin(Instant::now()),
        false => worker.endpoint_support.breaker.begin(Instant::now()),
    }
}

fn end(worker: &Worker, leg: Leg, endpoint: Endpoint, failed: Option<&Error>) {
    if endpoint.computes() {
        worker.record(leg, failed);
        return;
    }
    let (breaker, id) = (&worker.endpoint_support.breaker, worker.id());
    let failed = failed.is_some_and(Error::speaks_against_its_worker);
    if failed && breaker.fail(Instant::now()) {
        tracing::warn!(worker = id, leg = TOKENIZER, "breaker opened: too many failures in a row");
    } else if !failed && breaker.succeed() {
        tracing::info!(worker = id, leg = TOKENIZER, "breaker closed");
    }
}

/// Sends the request to one worker. Returns the reply and the usage that the worker reported.
async fn ask(
    prompt: PromptContext<'_>,
    placed: &Placed,
) -> Result<(Bytes, Option<EngineUsage>), Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let Served { config, client, .. } = context.served.as_ref();
    let (worker, endpoint) = (&placed.worker, context.endpoint);
    let started = Instant::now();
    let mut leg = prompt.leg(LegKind::Decode, worker);
    let mut envelope = traced(attempt(context, decision), &leg);
    let mut _booking = None;
    if endpoint.computes() {
        let leg = LegFacts::new(LegKind::Decode, worker.id(), expected(context, unit, placed));
        decision.decode_sent(leg);
        _booking = Some(book(context, unit, placed, started, false));
        envelope = Envelope { prefill_tokens: Some(unit.weight_tokens), ..envelope };
    }
    let call = async {
        let body = unit.body.to_bytes();
        let response = client.post(worker, Shape::whole(endpoint), body, &envelope).await?;
        client.whole_answer(worker, response, &context.unread).await
    };
    let reply = within(client, config.timeouts.reply, worker, "timeouts.reply", call).await;
    let reply = reply.map_err(|error| offered(error, worker, endpoint));
    let (stage, outcome) = match &reply {
        Ok(_) => (Stage::FirstToken, "ok"),
        Err(error) => (Stage::Failed, error.outcome()),
    };
    leg.end(prompt.mark(stage), outcome);
    let reply = reply?;
    let read = read(context, reply).await;
    read.ok_or_else(|| Error::engine(worker.id(), "sent a reply that is not JSON"))
}

/// Changes the error of an engine that lacks the endpoint or does not implement it: the request
/// failed, but the worker is healthy. The error of an engine that does not know the model is kept.
fn offered(error: Error, worker: &Worker, endpoint: Endpoint) -> Error {
    match (error.kind(), error.param()) {
        (Kind::EngineRejected(404), Some("model")) => error,
        (Kind::EngineRejected(404 | 405 | 501), _) => {
            let message = format!("worker {} does not offer {}", worker.id(), endpoint.path());
            Error::new(Kind::NotOffered, message)
        }
        _ => error,
    }
}

/// The members of a reply that the router reads.
#[derive(Deserialize)]
struct Reply<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
}

/// The reply with its usage; `None` if the reply is no JSON object.
async fn read(context: &Context, reply: Bytes) -> Option<(Bytes, Option<EngineUsage>)> {
    let bytes = reply.len();
    if bytes < LONG_BYTES {
        return usage(&reply).map(|usage| (reply, usage));
    }
    let work = move || usage(&reply).map(|usage| (reply, usage));
    context.preparer.run_off_reactor(bytes, work).await.ok()?
}

fn usage(reply: &[u8]) -> Option<Option<EngineUsage>> {
    // Serde would also read this struct from a JSON array.
    if !reply.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    let reply: Reply<'_> = serde_json::from_slice(reply).ok()?;
    Some(reply.usage.and_then(|usage| EngineUsage::parse(usage).ok()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_found_wherever_it_stands_and_a_reply_is_an_object() {
        let reply =
            br#"{"data":[{"embedding":[0.5,1e-3]}],"usage":{"prompt_tokens":7,"total_tokens":7}}"#;
        assert_eq!(usage(reply).unwrap().unwrap().prompt_tokens, 7);
        assert_eq!(usage(br#" {"tokens":[1]}"#), Some(None));
        assert_eq!(usage(br#"{"usage":null}"#), Some(None));
        for nonsense in ["", "[]", "[{}]", "null", r#"{"usage":{"prompt_tokens":7}"#, "<html>"] {
            assert_eq!(usage(nonsense.as_bytes()), None, "{nonsense}");
        }
    }
}
