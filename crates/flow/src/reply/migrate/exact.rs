//! Decides which replies can be resumed exactly on another worker.

use super::chat;
use crate::context::Context;
use splitrail_api::{Endpoint, JsonObject};
use splitrail_config::model::Model;

/// Members whose effect on a token depends only on the tokens before it. A request with any other
/// member is not migrated.
const EXACT: [&str; 20] = [
    "model",
    "max_tokens",
    "min_tokens",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "allowed_token_ids",
    "ignore_eos",
    "stop_token_ids",
    "n",
    "user",
    "cache_salt",
    "priority",
    "add_special_tokens",
    "skip_special_tokens",
    "return_token_ids",
];

/// Further members that a completion may have.
const OF_COMPLETIONS: [&str; 2] = ["prompt", "best_of"];

/// The number of tokens that a completion generates without `max_tokens`.
const COMPLETION_TOKENS: u32 = 16;

/// Whether a request can be migrated exactly.
pub(crate) fn is_exact(context: &Context, body: &JsonObject) -> bool {
    let Model { migrate, connector, .. } = &context.served.config;
    let own: &[&str] = match context.endpoint {
        Endpoint::Completions => &OF_COMPLETIONS,
        Endpoint::Chat => &chat::MEMBERS,
        _ => return false,
    };
    if !*migrate || !connector.serves_alone() {
        return false;
    }
    let options = context.options;
    let totals = body.raw("stream_options").is_some_and(|raw| raw.contains("continuous_usage"));
    // With greedy sampling nothing is drawn at random, so a seed has no effect.
    let greedy = body.raw("temperature").and_then(|raw| raw.parse::<f64>().ok()) == Some(0.0);
    let exact = |(key, raw): (&str, &str)| {
        EXACT.contains(&key) || own.contains(&key) || raw == "null" || (key == "seed" && greedy)
    };
    options.stream
        && options.samples == 1
        && !totals
        && limit(context.endpoint, body).is_some()
        && body.members().all(exact)
}

/// The maximum number of tokens that a request asks for; `None` if only its engine knows.
pub(crate) fn limit(endpoint: Endpoint, body: &JsonObject) -> Option<u32> {
    let count = |key| body.get::<u32>(key, "an integer").ok().flatten();
    match endpoint {
        Endpoint::Chat => count("max_completion_tokens").or_else(|| count("max_tokens")),
        _ => Some(count("max_tokens").unwrap_or(COMPLETION_TOKENS)),
    }
}
