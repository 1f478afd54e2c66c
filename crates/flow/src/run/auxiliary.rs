//! Requests of auxiliary endpoints (embeddings, scores, token ids, token counts, recordings): one
//! worker serves each in full, without a hand-off.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::EngineUsage;

use crate::context::{Context, PromptContext};
use crate::decide::attempts::DecodeAttempts;
use crate::decide::place::{LegRules, PlacedLeg, place, place_in_turn};
use crate::decide::supporting_workers::{begin, end, leg_for_endpoint, next_leg};
use crate::run::account::read_usage;
use crate::run::boxed::boxed_future;
use crate::run::generate::{Generation, StartedReply, generate};
use crate::run::leg_headers::{begin_attempt, traced_headers};
use crate::run::reply_leg::ReplyLeg;
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::form::Recording;
use splitrail_config::model::RequestFlow;
use splitrail_engine_client::{LegHeaders, Shape, refusal_event};
use splitrail_fleet::reply_check::check_usage;
use splitrail_fleet::{Exclusion, LegRequest, LegWait, ServedModel, Worker};
use splitrail_ledger::leg::{LegFacts, LegKind};
use splitrail_ledger::timeline::Stage;
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;
use splitrail_workload::costs::WholeReply;
use splitrail_workload::progress::Awaited;

/// Runs a request of an auxiliary endpoint until its reply has arrived.
///
/// # Errors
/// The error of the last attempt, if no further attempt is allowed or useful.
pub(crate) async fn run(prompt: PromptContext<'_>) -> Result<StartedReply, Error> {
    let PromptContext { context, decision, .. } = prompt;
    let ServedModel { pool, retry_budget, .. } = context.served.as_ref();
    retry_budget.deposit();
    let endpoint = context.endpoint;
    let mut attempts = DecodeAttempts::new(prompt);
    loop {
        let (leg, lacking) =
            leg_for_endpoint(&context.served, endpoint, attempts.failed(), Instant::now())?;
        attempts.exclude(lacking);
        decision.flow_begun(RequestFlow::Aggregated.name());
        let rules = LegRules::any(leg, attempts.failed());
        let placed = match endpoint.computes() {
            true => place_in_turn(prompt, rules, context.options.stream).await?,
            false => place(prompt, rules)?,
        };
        let worker = &placed.worker;
        let begun = match context.options.stream {
            true => boxed_future(|| streamed(prompt, &placed)).await,
            false => whole(prompt, leg, &placed).await,
        };
        match begun {
            Ok(begun) => return Ok(begun),
            // A worker without this endpoint is asked only once in a while, so this retry needs no
            // bound and no budget.
            Err(error) if error.kind() == ErrorKind::EngineLacksPath => {}
            Err(error) => {
                let again = Exclusion::new(worker.index, VetoReason::Failed);
                let failed = [attempts.failed(), &[again]].concat();
                let leg = next_leg(pool, &failed);
                attempts.retry_elsewhere(context, leg, worker, error)?;
            }
        }
    }
}

/// Runs the request on one worker, whose reply is a stream with the text of a recording.
async fn streamed(prompt: PromptContext<'_>, placed: &PlacedLeg) -> Result<StartedReply, Error> {
    let leg_headers = &LegHeaders {
        content_type: prompt.unit.recording.as_ref().and_then(Recording::content_type),
        ..begin_attempt(prompt.context, prompt.decision)
    };
    let sending = ReplyLeg { prompt, leg_headers, placed, threshold: None };
    match generate(&sending, &mut None).await? {
        Generation::Started(begun) => Ok(begun),
        Generation::BelowThreshold(_) => {
            let what = "turned a recording away by a threshold";
            Err(Error::engine(placed.worker.id(), what))
        }
    }
}

/// Runs the request on one worker until its whole reply has arrived.
async fn whole(
    prompt: PromptContext<'_>,
    leg: Leg,
    placed: &PlacedLeg,
) -> Result<StartedReply, Error> {
    let (worker, endpoint) = (&placed.worker, prompt.context.endpoint);
    begin(worker, leg, endpoint);
    match ask(prompt, leg, placed).await {
        Ok((reply, usage)) => {
            end(worker, leg, endpoint, None);
            prompt.decision.auxiliary_answered(usage);
            Ok(reply)
        }
        Err(error) => {
            prompt.decision.decode_failed(error.outcome());
            if error.kind() != ErrorKind::EngineLacksPath {
                end(worker, leg, endpoint, Some(&error));
            }
            Err(error)
        }
    }
}

/// Sends the request to one worker. Returns the reply and the usage that the worker reported.
async fn ask(
    prompt: PromptContext<'_>,
    role: Leg,
    placed: &PlacedLeg,
) -> Result<(StartedReply, Option<EngineUsage>), Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let client = &context.served.client;
    let (worker, endpoint) = (&placed.worker, context.endpoint);
    let started = Instant::now();
    let mut leg = prompt.leg(LegKind::Decode, worker);
    let mut leg_headers = traced_headers(begin_attempt(context, decision), &leg);
    leg_headers.content_type = unit.recording.as_ref().and_then(Recording::content_type);
    let mut booked = None;
    if endpoint.computes() {
        let leg = LegFacts::new(LegKind::Decode, worker.id(), placed.expectation(context, unit));
        decision.enter(|entry| entry.decode_sent(leg));
        let booking = booked.insert(placed.book(context, unit, started, false));
        booking.set_awaited(Awaited::WholeReply);
        leg_headers = LegHeaders { prefill_tokens: Some(unit.weight_tokens), ..leg_headers };
    }
    let call = async {
        let body = unit.parts(&unit.body);
        let shape = Shape::whole(endpoint);
        let leg = LegRequest { client, worker, shape, headers: &leg_headers };
        client.whole(&**worker, leg.begin(body).await?, Some(&context.unread)).await
    };
    let limit = context.reply_limit();
    let wait = LegWait { served: &context.served, worker, leg: role, limit };
    let reply = wait.until_whole(&context.unread, call).await;
    let arrived = Instant::now();
    booked.iter().filter(|_| reply.is_ok()).for_each(|booking| booking.reply_done(arrived));
    let (stage, outcome) = match &reply {
        Ok(_) => (Stage::FirstToken, "ok"),
        Err(error) => (Stage::Failed, error.outcome()),
    };
    leg.end(prompt.mark(stage), outcome);
    let reply = reply?;
    let may_be_text = TEXTS.map(Some).contains(&unit.body.raw("response_format"));
    let (reply, usage) = read(context, worker, reply, may_be_text).await?;
    if let Some(mut booking) = booked {
        if !endpoint.transcribes() {
            check_usage(&context.served, worker, usage.is_some());
        }
        // An auxiliary request generates nothing.
        let (cached_tokens, context_tokens) = (Some(0), unit.weight_tokens);
        let reply = WholeReply { cached_tokens, steps: 0, requests: 1, context_tokens };
        booking.whole_reply_done(arrived, reply);
    }
    Ok((reply, usage))
}

/// The formats of a recording's text, as raw JSON, for which an engine may reply with a text.
const TEXTS: [&str; 3] = [r#""text""#, r#""srt""#, r#""vtt""#];

/// The members of a reply that the router reads.
#[derive(Default, Deserialize)]
struct Reply<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    error: Option<IgnoredAny>,
    #[serde(borrow)]
    object: Option<&'a RawValue>,
}

impl<'a> Reply<'a> {
    /// Reads a reply; `None` if it is no JSON object. SGLang's reply to `/v1/rerank` is a list of
    /// results without usage.
    fn read(reply: &'a [u8], endpoint: Endpoint) -> Option<Self> {
        // Serde would also read this struct from a JSON array.
        match reply.trim_ascii_start().first() {
            Some(b'{') => serde_json::from_slice(reply).ok(),
            Some(b'[') if endpoint == Endpoint::RerankV1 => {
                let list: Result<Vec<IgnoredAny>, _> = serde_json::from_slice(reply);
                list.ok().map(|_| Self::default())
            }
            _ => None,
        }
    }

    /// Whether the reply is an error, although its status is that of a good one.
    fn is_error(&self) -> bool {
        self.error.is_some() || self.object.is_some_and(|object| object.get() == "\"error\"")
    }
}

/// The reply with its usage. None of its tokens count as cached: whatever the engine says of them,
/// they were computed. The usage of a recording is its duration, and of no tokens.
///
/// # Errors
/// The reply cannot be read, or is an error in place of a good reply.
async fn read(
    context: &Context,
    worker: &Arc<Worker>,
    reply: Bytes,
    may_be_text: bool,
) -> Result<(StartedReply, Option<EngineUsage>), Error> {
    let (served, worker) = (Arc::clone(&context.served), Arc::clone(worker));
    let endpoint = context.endpoint;
    let work = move |bytes: Bytes| {
        let not_json = || Error::engine(worker.id(), "sent a reply that is not JSON");
        let reply = match Reply::read(&bytes, endpoint) {
            None if may_be_text && std::str::from_utf8(&bytes).is_ok() => {
                return Ok((StartedReply::Text(bytes), None));
            }
            read => read.ok_or_else(not_json)?,
        };
        if reply.is_error() {
            let error = refusal_event(&*worker, &bytes);
            worker.record_refusal(&error, Some(endpoint));
            return Err(error);
        }
        let raw = reply.usage.map(RawValue::get).filter(|_| !endpoint.transcribes());
        let usage = raw.and_then(|raw| read_usage(&served, &worker, Dialect::Chunks, raw));
        let usage = usage.map(|usage| EngineUsage { cached_tokens: Some(0), ..usage });
        Ok((StartedReply::Verbatim(bytes), usage))
    };
    context.preparer.cores.run_sized(reply.len(), move || work(reply)).await?
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_found_wherever_it_stands_and_a_reply_is_an_object() {
        let read = |reply, endpoint| Some(Reply::read(reply, endpoint)?.usage.map(RawValue::get));
        let usage = |reply: &'static [u8]| read(reply, Endpoint::Embeddings);
        let reply =
            br#"{"data":[{"embedding":[0.5,1e-3]}],"usage":{"prompt_tokens":7,"total_tokens":7}}"#;
        let raw = r#"{"prompt_tokens":7,"total_tokens":7}"#;
        assert_eq!(usage(reply), Some(Some(raw)));
        assert_eq!(usage(br#" {"tokens":[1]}"#), Some(None));
        assert_eq!(usage(br#"{"usage":null}"#), Some(None));
        for nonsense in ["", "[]", "[{}]", "null", r#"{"usage":{"prompt_tokens":7}"#, "<html>"] {
            assert_eq!(usage(nonsense.as_bytes()), None, "{nonsense}");
        }
        assert_eq!(read(br#"[{"score":0.5,"index":0}]"#, Endpoint::RerankV1), Some(None));
        assert_eq!(read(b"[{}", Endpoint::RerankV1), None);
    }

    #[test]
    fn an_error_is_recognised_where_a_good_reply_is_expected() {
        for (reply, is_error) in [
            (r#"{"error":{"message":"x"}}"#, true),
            (r#"{"object":"error","message":"x"}"#, true),
            (r#"{"object":"list","data":[],"error":null}"#, false),
            (r#"{"object":7,"tokens":[1]}"#, false),
        ] {
            assert_eq!(
                Reply::read(reply.as_bytes(), Endpoint::Score).unwrap().is_error(),
                is_error,
                "{reply}"
            );
        }
    }
}
