//! Which legs may fetch, as far as the request says.

use crate::context::PromptContext;
use crate::prepare::Unit;
use splitrail_api::Endpoint;
use splitrail_api::request::Options;
use splitrail_config::model::PeerFetch;
use splitrail_fleet::ServedModel;
use splitrail_transfer::pinned::reports_ids;

/// Whether a part of a prompt can be fetched: the router knows all of its tokens, without asking an
/// engine for them, and the engine reads its cache for it.
pub(crate) fn is_fetchable(
    served: &ServedModel,
    endpoint: Endpoint,
    unit: &Unit,
    options: Options,
) -> bool {
    let has_ids = || {
        let prompt = unit.body.raw("prompt");
        endpoint == Endpoint::Generate || prompt.is_some_and(|raw| raw.starts_with('['))
    };
    unit.prompt_tokens.is_some()
        && !unit.hashes.is_empty()
        && options.bypasses_cache.is_none()
        && (served.prompt.is_some() || has_ids())
}

/// Whether the worker that computes this prompt may fetch a part of it.
pub(crate) fn may_fetch(prompt: PromptContext<'_>) -> bool {
    let PromptContext { context, unit, .. } = prompt;
    let (served, endpoint) = (&context.served, context.endpoint);
    served.pool.fetch_bounds().is_some() && is_fetchable(served, endpoint, unit, context.options)
}

/// Whether a prefill leg of a prompt may take a prefix itself, on a worker that can: the router knows
/// all tokens of the prompt, and the engine says in its reply which ones it has computed.
pub(crate) fn may_take_prefix(served: &ServedModel, endpoint: Endpoint, unit: &Unit) -> bool {
    served.config.peer_fetch == PeerFetch::OneShot
        && reports_ids(endpoint)
        && unit.unknown.is_none()
}
