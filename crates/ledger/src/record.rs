//! The written form of an entry, in the ledger file, in decision records and in `usage.splitrail`.
//! It contains counts and names only.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use splitrail_engine::usage::EngineUsage;
use splitrail_kv::Tier;

use super::entry::Entry;
use super::leg::{Figures, LegFacts, LegKind, Origin, ReadBackOffer};
use crate::entry::CachedTokens;
use splitrail_api::name::Name;
use splitrail_config::model::CachedTokensFallback;
use splitrail_telemetry::TenantSeries;

/// A request as one line of the ledger file.
#[derive(Clone, Debug, Serialize)]
pub struct RequestRecord {
    /// The version of the line format.
    pub version: u32,
    /// The request id that the client saw.
    pub request_id: String,
    /// The tenant of the request; `None` if the router has no tenants.
    pub tenant: Option<String>,
    /// The session that the client names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The model's configured name.
    pub model: String,
    /// `chat`, `completions` or `generate`.
    pub endpoint: &'static str,
    /// The flow of the first prompt that was executed.
    pub flow: &'static str,
    /// The outcome, as in `splitrail_requests_total`.
    pub outcome: &'static str,
    /// When the request arrived, in milliseconds since 1970.
    pub arrived_unix_ms: u64,
    /// When the request ended, in milliseconds since 1970.
    pub ended_unix_ms: u64,
    /// Prompt tokens, with each prompt counted once; `None` if one of them is not known. If the client
    /// left, those of the prompts that engines had begun.
    pub prompt_tokens: Option<u64>,
    /// The part of the prompt tokens that was cached on the workers that computed the prompts.
    pub cached_tokens: Option<u64>,
    /// Generated tokens of all prompts.
    pub completion_tokens: Option<u64>,
    /// Prompt tokens of discarded attempts. They are not part of the other figures.
    pub wasted_prompt_tokens: u64,
    /// The usage in the reply; `None` if there was none.
    #[serde(rename = "told")]
    pub client_usage: Option<ReplyUsage>,
    /// The prompts, in the order of the request.
    pub prompts: Vec<PromptRecord>,
}

/// The usage that a client received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ReplyUsage {
    /// `usage.prompt_tokens`.
    pub prompt_tokens: u64,
    /// `usage.completion_tokens`; `None` if the usage had no such key.
    pub completion_tokens: Option<u64>,
    /// `usage.prompt_tokens_details.cached_tokens`; `None` if the usage had no such key.
    pub cached_tokens: Option<u64>,
}

/// One prompt of a request.
#[derive(Clone, Debug, Serialize)]
pub struct PromptRecord {
    /// The length of the prompt in tokens, if it is known.
    pub prompt_tokens: Option<u32>,
    /// Tokens that were cached on the worker that computed the prompt.
    pub cached_tokens: Option<u32>,
    /// The source of `cached_tokens`.
    pub cached_source: Option<Origin>,
    /// Generated tokens, over all samples.
    pub completion_tokens: Option<u32>,
    /// The source of `completion_tokens` if the router has counted them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_source: Option<Origin>,
    /// Whether this is a further sample of the prompt before it. The request's figures count its
    /// prompt tokens only once.
    #[serde(skip_serializing_if = "is_false")]
    pub further_sample: bool,
    /// The legs of the reply.
    pub legs: Vec<LegRecord>,
    /// The discarded legs, whose results did not reach the client.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub discarded: Vec<DiscardedRecord>,
}

/// One leg. Its three parts add up to its prompt tokens.
#[derive(Clone, Debug, Serialize)]
pub struct LegRecord {
    /// The part of the request that the leg executed.
    pub leg: LegKind,
    /// The id of the worker; left out of replies to clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<Name>,
    /// The KV that the leg was to read back, if any; left out of replies to clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_back_offer: Option<ReadBackOffer>,
    /// The figures of the leg; absent if the length of the prompt is not known.
    #[serde(flatten)]
    pub figures: Option<FiguresRecord>,
}

/// The figures of a leg, each with its source.
#[derive(Clone, Debug, Serialize)]
pub struct FiguresRecord {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens found in the worker's own cache.
    pub local_cache_hit: u32,
    /// The same tokens by tier; tiers without tokens are left out.
    pub local_cache_hit_by_tier: BTreeMap<&'static str, u32>,
    /// The tokens that a peer fetch has brought for this leg: a part of `local_cache_hit`, or all of
    /// `fetched`; left out if there are none.
    #[serde(skip_serializing_if = "is_zero")]
    pub peer_fetched: u32,
    /// The part of `peer_fetched` that its source has computed for this request; left out if there is
    /// none.
    #[serde(skip_serializing_if = "is_zero")]
    pub recomputed: u32,
    /// Tokens whose KV the leg read back from a decode worker; left out if there are none.
    #[serde(skip_serializing_if = "is_zero")]
    pub read_back: u32,
    /// Tokens whose KV the leg itself took from a worker that held them; left out if there are none.
    #[serde(skip_serializing_if = "is_zero")]
    pub fetched: u32,
    /// Tokens whose KV another worker handed over.
    pub external_kv_transfer: u32,
    /// Tokens that the worker computed.
    pub local_compute: u32,
    /// The source of each figure.
    pub sources: Sources,
}

/// The sources of the figures of a leg.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sources {
    /// The source of the prompt's length.
    pub prompt_tokens: Origin,
    /// The source of the cache hits.
    pub local_cache_hit: Origin,
    /// The source of the transferred tokens, which follow from the prompt's length and the hits.
    pub external_kv_transfer: Origin,
    /// The source of the computed tokens, which follow from the prompt's length and the hits.
    pub local_compute: Origin,
}

/// A discarded leg, whose result did not reach the client.
#[derive(Clone, Debug, Serialize)]
pub struct DiscardedRecord {
    /// The leg; without figures if it is not known to have computed the prompt.
    #[serde(flatten)]
    pub leg: LegRecord,
    /// The reason for which the leg was discarded.
    pub reason: &'static str,
    /// The leg's share of the request's wasted prompt tokens.
    pub wasted_prompt_tokens: u32,
}

impl FiguresRecord {
    fn new(figures: &Figures) -> Self {
        let Figures { prompt_tokens, prompt_source, tokens, source } = *figures;
        let tiers =
            Tier::ALL.iter().map(|tier| (tier.name(), tokens.local_cache_hit[*tier as usize]));
        Self {
            prompt_tokens,
            local_cache_hit: tokens.hit(),
            local_cache_hit_by_tier: tiers.filter(|(_, tokens)| *tokens > 0).collect(),
            peer_fetched: tokens.peer_fetched,
            recomputed: tokens.recomputed,
            read_back: tokens.read_back,
            fetched: tokens.fetched,
            external_kv_transfer: tokens.external_kv_transfer,
            local_compute: tokens.local_compute,
            sources: Sources {
                prompt_tokens: prompt_source,
                local_cache_hit: source,
                external_kv_transfer: source,
                local_compute: source,
            },
        }
    }
}

impl PromptRecord {
    /// The written form of an entry as it is now, with or without the ids of workers.
    pub fn new(entry: &Entry, with_workers: bool) -> Self {
        let leg = |leg: &LegFacts, figures: Option<Figures>| LegRecord {
            leg: leg.kind,
            worker: with_workers.then(|| leg.worker.clone()),
            read_back_offer: leg.read_back.clone().filter(|_| with_workers),
            figures: figures.as_ref().map(FiguresRecord::new),
        };
        let cached = entry.cached();
        Self {
            prompt_tokens: entry.prompt_tokens(),
            cached_tokens: cached.map(|cached| cached.tokens),
            cached_source: cached.map(|cached| cached.source),
            completion_tokens: entry.completion_tokens,
            completion_source: entry.counted_by_router.then_some(Origin::Estimate),
            further_sample: entry.further_sample,
            legs: entry.legs().map(|(one, figures)| leg(one, figures)).collect(),
            discarded: entry
                .discarded
                .iter()
                .map(|discarded| DiscardedRecord {
                    leg: leg(&discarded.leg, discarded.figures),
                    reason: discarded.reason,
                    wasted_prompt_tokens: discarded.wasted_prompt_tokens(),
                })
                .collect(),
        }
    }
}

impl PromptRecord {
    /// The written form of an entry for clients: no worker, and no estimate if
    /// `cached_tokens_fallback` forbids estimates.
    pub fn for_client(entry: &Entry, fallback: CachedTokensFallback) -> Self {
        let mut record = Self::new(entry, false);
        if fallback == CachedTokensFallback::Estimate {
            return record;
        }
        if record.cached_source == Some(Origin::Estimate) {
            record.cached_source = None;
            record.cached_tokens =
                entry.cached().and_then(|cached| client_cached_tokens(cached, fallback));
        }
        let discarded = record.discarded.iter_mut().map(|discarded| &mut discarded.leg);
        for leg in record.legs.iter_mut().chain(discarded) {
            let estimated =
                |figures: &FiguresRecord| figures.sources.local_cache_hit == Origin::Estimate;
            if leg.figures.as_ref().is_some_and(estimated) {
                leg.figures = None;
            }
        }
        record
    }
}

/// Decision records show an entry in its written form.
impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        PromptRecord::new(self, true).serialize(serializer)
    }
}

/// A tenant, with what its records and metrics need.
#[derive(Clone, Copy, Debug)]
pub struct LabelledTenant<'a> {
    /// The configured name.
    pub name: &'a str,
    /// The value of the metrics' label `tenant`: the name, or `other` if there are too many tenants.
    pub label: &'a str,
    /// The tenant's series.
    pub series: &'a TenantSeries,
}

/// The facts about a finished request that do not belong to one of its prompts.
#[derive(Clone, Copy, Debug)]
pub struct RequestFacts<'a> {
    /// The request id that the client saw.
    pub request_id: &'a str,
    /// The tenant of the request; `None` if the router has no tenants.
    pub tenant: Option<LabelledTenant<'a>>,
    /// The session that the client names.
    pub session: Option<&'a str>,
    /// The model's configured name.
    pub model: &'a str,
    /// The value of the metrics' label `endpoint`.
    pub endpoint: &'static str,
    /// The flow that was executed.
    pub flow: &'static str,
    /// The outcome of the request.
    pub outcome: &'static str,
    /// When the request arrived, in milliseconds since 1970.
    pub arrived_unix_ms: u64,
    /// When the request ended, in milliseconds since 1970.
    pub ended_unix_ms: u64,
}

impl RequestRecord {
    /// The present version of the line format. It is raised by changes that readers would notice.
    pub const VERSION: u32 = 1;

    /// The record of a finished request. The figures of a batch are the sums over its prompts, and
    /// are left out if one prompt has no figure, so that a part is not taken for the whole.
    pub fn new(ended: &RequestFacts<'_>, entries: &[Entry]) -> Self {
        let prompts: Vec<_> = entries.iter().map(|entry| PromptRecord::new(entry, true)).collect();
        let ok = ended.outcome == "ok";
        let counted =
            || entries.iter().zip(&prompts).filter(|(entry, _)| entry.counts(ended.outcome));
        let each = || counted().map(|(_, prompt)| prompt);
        let once = || each().filter(|prompt| !prompt.further_sample);
        let wasted = prompts.iter().flat_map(|prompt| &prompt.discarded);
        Self {
            version: Self::VERSION,
            request_id: ended.request_id.to_owned(),
            tenant: ended.tenant.map(|tenant| tenant.name.to_owned()),
            session: ended.session.map(str::to_owned),
            model: ended.model.to_owned(),
            endpoint: ended.endpoint,
            flow: ended.flow,
            outcome: ended.outcome,
            arrived_unix_ms: ended.arrived_unix_ms,
            ended_unix_ms: ended.ended_unix_ms,
            prompt_tokens: total(once().map(|prompt| prompt.prompt_tokens)),
            cached_tokens: total(once().map(|prompt| prompt.cached_tokens)),
            completion_tokens: total(each().map(|prompt| prompt.completion_tokens)),
            wasted_prompt_tokens: wasted.map(|leg| u64::from(leg.wasted_prompt_tokens)).sum(),
            client_usage: client_usage_of(entries).filter(|_| ok || entries.len() == 1),
            prompts,
        }
    }
}

/// The usage that the reply to these prompts has, if all of them have some.
fn client_usage_of(entries: &[Entry]) -> Option<ReplyUsage> {
    let told: Vec<(&Entry, EngineUsage)> =
        entries.iter().map(|entry| Some((entry, entry.client_usage?))).collect::<Option<_>>()?;
    let once = || told.iter().filter(|(entry, _)| !entry.further_sample);
    Some(ReplyUsage {
        prompt_tokens: total(once().map(|(_, told)| Some(told.prompt_tokens)))?,
        completion_tokens: total(told.iter().map(|(_, told)| told.completion_tokens)),
        cached_tokens: total(once().map(|(_, told)| told.cached_tokens)),
    })
}

/// The sum, if every one is known and there is one at all.
fn total(counts: impl Iterator<Item = Option<u32>>) -> Option<u64> {
    let mut counts = counts.peekable();
    counts.peek()?;
    counts.map(|count| count.map(u64::from)).sum()
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_false(value: &bool) -> bool {
    !value
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// The count of cached tokens in the client's usage; `None` leaves the key out.
pub fn client_cached_tokens(cached: CachedTokens, fallback: CachedTokensFallback) -> Option<u32> {
    match (cached.source, fallback) {
        (Origin::Estimate, CachedTokensFallback::Zero) => Some(0),
        (Origin::Estimate, CachedTokensFallback::Omit) => None,
        _ => Some(cached.tokens),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::leg::Expectation;

    #[test]
    fn the_fallback_decides_only_where_the_engine_is_silent() {
        let estimate = CachedTokens { tokens: 256, source: Origin::Estimate };
        assert_eq!(client_cached_tokens(estimate, CachedTokensFallback::Estimate), Some(256));
        assert_eq!(client_cached_tokens(estimate, CachedTokensFallback::Zero), Some(0));
        assert_eq!(client_cached_tokens(estimate, CachedTokensFallback::Omit), None);
        for source in [Origin::EnginePrefill, Origin::EngineDecode] {
            for tokens in [0, 32] {
                let spoken = CachedTokens { tokens, source };
                assert_eq!(client_cached_tokens(spoken, CachedTokensFallback::Omit), Some(tokens));
                assert_eq!(client_cached_tokens(spoken, CachedTokensFallback::Zero), Some(tokens));
            }
        }
    }

    fn answered(mut entry: Entry, prompt_tokens: u32, cached_tokens: Option<u32>) -> Entry {
        entry.decode_sent(LegFacts::new(LegKind::Decode, "w", Expectation::default()));
        let usage = EngineUsage { prompt_tokens, completion_tokens: Some(4), cached_tokens };
        entry.decode_reported(usage);
        entry.client_usage = Some(usage);
        entry
    }

    fn record(entries: &[Entry], outcome: &'static str) -> RequestRecord {
        let ended = RequestFacts {
            request_id: "r",
            tenant: None,
            session: None,
            model: "m",
            endpoint: "completions",
            flow: "aggregated",
            outcome,
            arrived_unix_ms: 1,
            ended_unix_ms: 2,
        };
        RequestRecord::new(&ended, entries)
    }

    #[test]
    fn a_prompt_whose_samples_are_sent_apart_is_counted_once() {
        let first = answered(Entry::default(), 100, Some(0));
        let second = answered(Entry::further_sample(), 100, Some(96));
        let record = record(&[first, second], "ok");
        let figures = (record.prompt_tokens, record.cached_tokens, record.completion_tokens);
        assert_eq!(figures, (Some(100), Some(0), Some(8)));
        let told = record.client_usage.unwrap();
        assert_eq!((told.prompt_tokens, told.cached_tokens), (100, Some(0)));
        assert_eq!(told.completion_tokens, Some(8));
        assert_eq!(record.prompts[1].legs.len(), 1, "what its leg did is its own");
    }

    #[test]
    fn a_part_does_not_pass_for_the_whole() {
        let one = || answered(Entry::default(), 100, Some(16));
        let untold = || {
            let mut entry = Entry::default();
            entry.decode_sent(LegFacts::new(LegKind::Decode, "w", Expectation::default()));
            entry
        };
        let record_of = |entries: &[Entry]| record(entries, "ok");
        assert_eq!(record_of(&[one(), one()]).prompt_tokens, Some(200));
        let part = record_of(&[one(), untold()]);
        assert_eq!((part.prompt_tokens, part.cached_tokens, part.client_usage), (None, None, None));
        let failed = record(&[one(), one()], "decode_lost");
        assert_eq!((failed.prompt_tokens, failed.client_usage), (None, None));
    }
}
