//! The reply to a `decode_only` request if too little of its prompt is cached. The router makes the
//! reply that an engine with support for `cache_hit_threshold` would make.

use bytes::Bytes;
use serde_json::Value;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::threshold_reply::{ReplyEvent, ReplyForm, ThresholdReply};
use splitrail_engine::usage::EngineUsage;
use splitrail_kv::Overlap;

use crate::context::PromptContext;
use crate::run::generate::StartedReply;
use splitrail_api::error::Error;
use splitrail_api::text::random_id;
use splitrail_api::usage::usage_of_prompt;
use splitrail_api::{Endpoint, JsonObject};
use splitrail_ledger::leg::{Expectation, LegFacts, LegKind};
use splitrail_telemetry::clock::unix_ms;

/// Makes the reply, in which nothing was generated and every choice ends with
/// `cache_threshold`, and enters the prompt in the ledger. `usage` is the usage that the engine
/// reported, if it was asked.
///
/// # Errors
/// None: the reply is always a JSON object.
pub(crate) fn reply(
    prompt: PromptContext<'_>,
    usage: Option<EngineUsage>,
) -> Result<StartedReply, Error> {
    let context = prompt.context;
    let options = &context.options;
    let shows_usage = options.include_usage || !options.stream;
    let usage = settle(prompt, usage, shows_usage);
    let reply = ThresholdReply {
        form: form(context.endpoint),
        id: &random_id(),
        model: context.served.name(),
        created_s: unix_ms() / 1000,
        choices: options.n,
        usage: usage.as_ref(),
    };
    if options.stream {
        let events = reply.to_events(options.include_usage);
        return Ok(StartedReply::RouterEvents(events.iter().map(event_bytes).collect()));
    }
    JsonObject::parse(reply.to_json().to_string().into()).map(StartedReply::Whole)
}

fn form(endpoint: Endpoint) -> ReplyForm {
    match (endpoint.dialect(), endpoint) {
        (Dialect::Responses, _) => ReplyForm::Responses,
        (Dialect::Messages, _) => ReplyForm::Messages,
        (Dialect::Chunks, Endpoint::Chat) => ReplyForm::Chat,
        (Dialect::Chunks, Endpoint::Generate) => ReplyForm::Generate,
        (Dialect::Chunks, _) => ReplyForm::Completions,
    }
}

/// An event as reply streams carry it: only named events have field names.
fn event_bytes(ReplyEvent { name, data }: &ReplyEvent) -> Bytes {
    match name {
        Some(name) => format!("event: {name}\ndata: {data}").into(),
        None => data.to_string().into(),
    }
}

/// Enters in the ledger that no leg serves the prompt. Returns the usage object of the reply;
/// `None` if the length of the prompt is not known.
fn settle(
    prompt: PromptContext<'_>,
    usage: Option<EngineUsage>,
    shows_usage: bool,
) -> Option<Value> {
    let PromptContext { context, unit, decision, .. } = prompt;
    let blocks = decision.with(|decision| decision.overlap_blocks);
    let roster = context.served.pool.roster();
    let expected = Expectation {
        prompt_tokens: unit.prompt_tokens,
        overlap: Overlap { blocks, by_tier: [blocks, 0, 0, 0] },
        blocks_otherwise: blocks,
        overlap_is_upper_bound: roster.iter().any(|worker| worker.overlap_is_upper_bound()),
        block_size: context.served.pool.block_size(),
        bypasses_cache: context.options.bypasses_cache.is_some(),
        several_samples: context.options.samples > 1,
        ..Expectation::default()
    };
    let known = LegFacts {
        prompt_tokens: usage.map(|usage| usage.prompt_tokens),
        cached_tokens: usage.and_then(|usage| usage.cached_tokens),
        ..LegFacts::new(LegKind::Decode, "", expected)
    };
    let fallback = context.served.config.cached_tokens_fallback;
    let usage = decision.threshold_reply_made(known, fallback, shows_usage)?;
    let dialect = context.endpoint.dialect();
    Some(usage_of_prompt(dialect, usage.prompt_tokens, usage.cached_tokens))
}
