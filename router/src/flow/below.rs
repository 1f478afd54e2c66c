//! What a client of `decode_only` is told where too little of its prompt is cached: the
//! answer of an engine that honours the threshold, made by the router.

mod named;

use bytes::Bytes;
use serde_json::{Value, json};
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::EngineUsage;
use splitrail_kv::Overlap;

use super::answer::Begun;
use super::context::Context;
use crate::api::{Endpoint, JsonObject};
use crate::core::{random_id, unix_ms};
use crate::error::Error;
use crate::ledger::decisions::DecisionHandle;
use crate::ledger::entry::Told as ToldUsage;
use crate::ledger::leg::{Expected, LegFacts, LegKind};
use crate::prepare::Unit;
use crate::reply::choices::CACHE_THRESHOLD;
use crate::reply::usage::told;

/// The reply: every choice ends with `cache_threshold`, and nothing was generated. `usage`
/// is what the engine said, if it was asked.
///
/// # Errors
/// None: what is made here is an object.
pub(super) fn tell(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    usage: Option<EngineUsage>,
) -> Result<Begun, Error> {
    let usage_told = context.options.include_usage || !context.options.stream;
    let told_usage = settle(context, unit, decision, usage, usage_told);
    let (id, created_s) = (random_id(), unix_ms() / 1000);
    if let Some(named) = named::Told::new(context, &id, created_s, told_usage.as_ref()) {
        if context.options.stream {
            return Ok(Begun::Made(named.events()));
        }
        return JsonObject::parse(named.reply()).map(Begun::Whole);
    }
    let told = Told { context, id, created_s };
    if context.options.stream {
        return Ok(Begun::Made(told.events(told_usage.as_ref())));
    }
    JsonObject::parse(told.reply(told_usage.as_ref())).map(Begun::Whole)
}

/// Enters in the ledger that no leg serves the prompt. Gives the usage to be told; `None` if
/// nobody knows how long the prompt is.
fn settle(
    context: &Context,
    unit: &Unit,
    decision: &DecisionHandle,
    usage: Option<EngineUsage>,
    tells: bool,
) -> Option<Value> {
    let blocks = decision.with(|decision| decision.overlap_blocks);
    let expected = Expected {
        prompt_tokens: unit.prompt_tokens,
        overlap: Overlap { blocks, by_tier: [blocks, 0, 0, 0] },
        block_size: context.served.pool.block_size(),
        bypasses_cache: context.options.bypasses_cache.is_some(),
        comparable: false,
        epoch: 0,
    };
    let known = LegFacts {
        prompt_tokens: usage.map(|usage| usage.prompt_tokens),
        cached_tokens: usage.and_then(|usage| usage.cached_tokens),
        ..LegFacts::new(LegKind::Decode, "", expected)
    };
    let fallback = context.served.config.cached_tokens_fallback;
    let mut told_usage = None;
    decision.update(|decision| {
        decision.outcome = Some("ok");
        decision.ledger.turned_away(known);
        let known = decision.ledger.prompt_tokens().zip(decision.ledger.cached());
        let Some((prompt_tokens, cached)) = known else { return };
        let cached_tokens = told(cached, fallback);
        decision.cached_tokens = Some(cached.tokens);
        decision.told_cached_tokens = cached_tokens;
        decision.cached_source = Some(cached.source.kind());
        if tells {
            decision.ledger.tell(ToldUsage { prompt_tokens, completion_tokens: 0, cached_tokens });
        }
        told_usage = Some(usage_in(context.endpoint.dialect(), prompt_tokens, cached_tokens));
    });
    told_usage
}

/// The usage of a prompt for which nothing was generated.
fn usage_in(dialect: Dialect, prompt_tokens: u32, cached_tokens: Option<u32>) -> Value {
    let details = cached_tokens.map(|tokens| json!({"cached_tokens": tokens}));
    let (mut usage, key, details) = match dialect {
        Dialect::Chunks => (
            json!({
                "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens,
                "completion_tokens": 0,
            }),
            "prompt_tokens_details",
            details,
        ),
        Dialect::Responses => (
            json!({
                "input_tokens": prompt_tokens, "total_tokens": prompt_tokens, "output_tokens": 0,
            }),
            "input_tokens_details",
            details,
        ),
        Dialect::Messages => {
            let rest = prompt_tokens.saturating_sub(cached_tokens.unwrap_or(0));
            let usage = json!({"input_tokens": rest, "output_tokens": 0});
            (usage, "cache_read_input_tokens", cached_tokens.map(Value::from))
        }
    };
    if let Some(details) = details {
        usage[key] = details;
    }
    usage
}

struct Told<'a> {
    context: &'a Context,
    id: String,
    created_s: u64,
}

impl Told<'_> {
    fn reply(&self, usage: Option<&Value>) -> Bytes {
        let choices = (0..self.context.options.n).map(|index| self.choice(index, "message"));
        let object = match self.context.endpoint {
            Endpoint::Chat => "chat.completion",
            _ => "text_completion",
        };
        let mut reply = self.envelope(object, choices.collect());
        if let Some(usage) = usage {
            reply["usage"] = usage.clone();
        }
        reply.to_string().into()
    }

    fn events(&self, usage: Option<&Value>) -> Vec<Bytes> {
        let object = match self.context.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            _ => "text_completion",
        };
        let chunks = (0..self.context.options.n).map(|index| {
            self.envelope(object, vec![self.choice(index, "delta")]).to_string().into()
        });
        let mut events: Vec<Bytes> = chunks.collect();
        if let Some(usage) = usage.filter(|_| self.context.options.include_usage) {
            let mut last = self.envelope(object, Vec::new());
            last["usage"] = usage.clone();
            events.push(last.to_string().into());
        }
        events
    }

    /// A choice without output; of a chat, `says` is the member that would hold it.
    fn choice(&self, index: u32, says: &str) -> Value {
        let mut choice = json!({"index": index});
        match self.context.endpoint {
            Endpoint::Chat => choice[says] = json!({"role": "assistant", "content": ""}),
            Endpoint::Generate => choice["token_ids"] = json!([]),
            _ => choice["text"] = json!(""),
        }
        choice["logprobs"] = Value::Null;
        choice["finish_reason"] = json!(CACHE_THRESHOLD);
        choice
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        let prefix = match self.context.endpoint {
            Endpoint::Chat => "chatcmpl",
            Endpoint::Generate => {
                return json!({
                    "request_id": format!("generate-tokens-{}", self.id),
                    "model": self.context.served.name(),
                    "created": self.created_s,
                    "usage": null,
                    "output_mode": "tokens",
                    "choices": choices,
                });
            }
            _ => "cmpl",
        };
        json!({
            "id": format!("{prefix}-{}", self.id),
            "object": object,
            "created": self.created_s,
            "model": self.context.served.name(),
            "choices": choices,
        })
    }
}
