//! Compares the cached tokens of a reply with the estimate of the index, and reacts to lasting
//! drift.

use std::time::Instant;

use crate::ServedModel;
use crate::Worker;
use crate::drift::{Direction, DriftReaction, Measurements};
use crate::resync::ResyncRequest;
use crate::shim_report::EventOrigin;
use crate::usage_stats::ReportingCounts;
use splitrail_ledger::leg::LegFacts;
use splitrail_telemetry::Metrics;

/// The reason of resyncs because of drift in `splitrail_index_resyncs_total`.
const RESYNC_REASON: &str = "drift";

/// Counts which figures a worker reported at the end of a leg, compares them with the index, and
/// names the worker in the log, once, if it never reports a figure. `has_usage` tells whether the
/// reply had a usage object; `leg` contains its figures.
pub fn check_reply(
    metrics: &Metrics,
    served: &ServedModel,
    worker: &Worker,
    leg: &LegFacts,
    has_usage: bool,
) {
    // The metrics of a worker that has left were removed.
    if worker.gone.is_cancelled() {
        return;
    }
    check_usage(served, worker, has_usage);
    let audit = &worker.kv.usage_stats;
    // A leg that receives KV may count transferred tokens as cached.
    if leg.receives {
        return;
    }
    let has_cached = leg.cached_tokens.is_some();
    count(served, worker, &audit.cached_tokens, "cached_tokens", has_cached);
    let Some((engine, prompt_tokens)) = leg.cached_tokens.zip(leg.prompt_tokens) else { return };
    let expected = &leg.expected;
    let estimate = expected.cached_tokens(prompt_tokens);
    audit.count_hits(prompt_tokens, leg.credible_cached_tokens(prompt_tokens).unwrap_or(estimate));
    if !expected.comparable || expected.block_size == 0 {
        return;
    }
    let compared = EstimateBasis { epoch: expected.epoch, block_size: expected.block_size };
    compare(metrics, served, worker, compared, [estimate, engine]);
    let otherwise = expected.cached_tokens_otherwise(prompt_tokens);
    learn_last_block(served, worker, expected.epoch, [estimate, otherwise, engine]);
}

/// Follows the events of a worker on a new connection if they have stopped, as the end of a leg shows that
/// computed its prompt: the index may then have anything that the engine has evicted. The canary tells
/// whether they come again.
pub fn check_events(served: &ServedModel, worker: &Worker, leg: &LegFacts) {
    let expected = &leg.expected;
    let Some((engine, prompt_tokens)) = leg.cached_tokens.zip(leg.prompt_tokens) else { return };
    let is_counted = expected.comparable
        && !leg.receives
        && expected.block_size > 0
        && expected.epoch == worker.kv.usage_stats.epoch()
        && worker.events_are_current()
        && worker.event_origin() == Some(EventOrigin::Engine);
    let cached = expected.cached_tokens(prompt_tokens).max(engine);
    if !is_counted || prompt_tokens.saturating_sub(cached) < 2 * expected.block_size {
        return;
    }
    if worker.kv.event_stats.record_reply(expected.events, Instant::now()) {
        tracing::warn!(
            model = served.name(),
            worker = worker.id(),
            "the engine computes new blocks, but its KV events have stopped: they are read on a new \
             connection"
        );
        worker.kv.parity.forget();
        worker.kv.resync.request(ResyncRequest { reason: "silent", is_last_resort: true });
    }
}

/// Learns what the worker's engine does with the last block of a hit, from
/// `[promised, otherwise, found]` tokens (see [`LastBlock::compare`](super::last_block::LastBlock)).
fn learn_last_block(served: &ServedModel, worker: &Worker, epoch: u64, figures: [u32; 3]) {
    let last_block = &worker.kv.last_block;
    if epoch != worker.kv.usage_stats.epoch() || !last_block.compare(figures) {
        return;
    }
    worker.index_begins_anew();
    let rule = if last_block.is_dropped() { "drops" } else { "keeps" };
    tracing::info!(
        model = served.name(),
        worker = worker.id(),
        "the engine {rule} the last block of each hit, by its cached_tokens: overlaps are counted so \
         from now on (engines with EAGLE or MTP drop it)"
    );
}

/// Counts whether a reply had a usage object, and names the worker in the log, once, if it never has
/// one. Of replies without a prefix cache, such as embeddings, this is all that is expected.
pub fn check_usage(served: &ServedModel, worker: &Worker, has_usage: bool) {
    if !worker.gone.is_cancelled() {
        count(served, worker, &worker.kv.usage_stats.usage, "usage", has_usage);
    }
}

/// Compares the tokens that the source of a peer fetch had cached with the blocks that the index promised
/// in this epoch: `[blocks, tokens]`.
pub fn check_source(
    metrics: &Metrics,
    served: &ServedModel,
    worker: &Worker,
    epoch: u64,
    [blocks, found]: [u32; 2],
) {
    let block_size = served.pool.block_size();
    if !worker.gone.is_cancelled() && block_size > 0 {
        let [promised, otherwise] = worker.kv.last_block.tokens_of(blocks, block_size);
        compare(metrics, served, worker, EstimateBasis { epoch, block_size }, [promised, found]);
        learn_last_block(served, worker, epoch, [promised, otherwise, found]);
    }
}

/// What an estimate was made from.
#[derive(Clone, Copy)]
struct EstimateBasis {
    epoch: u64,
    block_size: u32,
}

fn compare(
    metrics: &Metrics,
    served: &ServedModel,
    worker: &Worker,
    EstimateBasis { epoch, block_size }: EstimateBasis,
    [estimate, engine]: [u32; 2],
) {
    let blocks = f64::from(estimate.abs_diff(engine)) / f64::from(block_size);
    let direction = if estimate > engine { "over" } else { "under" };
    served.series.cached_tokens_compared(metrics, served.name(), direction, blocks);
    if worker.kv.usage_stats.compare(epoch, block_size, estimate, engine) {
        act_on_drift(served, worker);
    }
}

fn count(
    served: &ServedModel,
    worker: &Worker,
    reporting: &ReportingCounts,
    figure: &'static str,
    reported: bool,
) {
    worker.counts.series.reported(figure, reported);
    if reporting.count(reported) {
        tracing::warn!(
            model = served.name(),
            worker = worker.id(),
            figure,
            "the engine has never reported this figure: what clients are told follows \
             cached_tokens_fallback. vLLM wants --enable-prompt-tokens-details, SGLang \
             --enable-cache-report (said once per worker)"
        );
    }
}

/// Reacts to the drift of a worker after a comparison.
fn act_on_drift(served: &ServedModel, worker: &Worker) {
    let config = &served.config.drift;
    if !config.enabled || worker.kv.drift.has_given_up() {
        return;
    }
    let measured = worker.kv.usage_stats.measured();
    let decision = worker.kv.drift.decide(config, &measured, Instant::now());
    let Measurements { samples, over_blocks, under_blocks, .. } = measured;
    let (model, id) = (served.name(), worker.id());
    match decision.reaction {
        DriftReaction::NoDrift | DriftReaction::Wait | DriftReaction::Tolerate => {}
        DriftReaction::Resync(direction) => {
            tracing::warn!(
                model,
                worker = id,
                direction = direction.name(),
                samples,
                over_blocks,
                under_blocks,
                overlap_discount = decision.discount,
                likely_cause = likely_cause(worker),
                "the worker's cached_tokens are not what the index promises: its KV events are \
                 read again"
            );
            let past = worker.kv.drift.view();
            // The next step would be to give the worker up. An index of the batches that the engine
            // still has is better than that.
            let is_last_resort =
                direction == Direction::Over && past.over_resyncs >= config.resyncs_max;
            worker.kv.resync.request(ResyncRequest { reason: RESYNC_REASON, is_last_resort });
        }
        DriftReaction::Exclude => tracing::error!(
            model,
            worker = id,
            samples,
            over_blocks,
            likely_cause = likely_cause(worker),
            "the worker still finds less than the index promises, after drift.resyncs_max \
             readings: no KV routing to it until it comes back"
        ),
    }
}

/// Why an engine most probably uses something else than its KV events say.
fn likely_cause(worker: &Worker) -> &'static str {
    let stats = &worker.kv.event_stats;
    if !stats.unfollowed_groups().is_empty() {
        "the model is hybrid, and some of its cache groups are not followed"
    } else if !stats.followed_groups().is_empty() {
        "the model is hybrid, and an option of the engine that no event names shortens its hits, such as \
         speculative decoding (docs/parity.md)"
    } else {
        "the engine does not announce all that it evicts"
    }
}
