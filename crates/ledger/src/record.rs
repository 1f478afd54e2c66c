//! The written form of an entry: in the ledger file, in decisions and in
//! `usage.splitrail`. Counts and names only.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use splitrail_kv::Tier;

use super::entry::{Entry, ReportedUsage};
use super::leg::{Figures, LegFacts, LegKind, Origin};
use crate::entry::Cached;
use splitrail_api::name::Name;
use splitrail_config::model::CachedTokensFallback;

/// A request, as one line of the ledger file.
#[derive(Clone, Debug, Serialize)]
pub struct RequestRecord {
    /// Of this form.
    pub version: u32,
    /// The id that the client saw.
    pub request_id: String,
    /// Whose request it was; `None` where tenants are not told apart.
    pub tenant: Option<String>,
    /// The model's configured name.
    pub model: String,
    /// `chat`, `completions` or `generate`.
    pub endpoint: &'static str,
    /// The flow that was executed, of the first prompt.
    pub flow: &'static str,
    /// As in `splitrail_requests_total`.
    pub outcome: &'static str,
    /// When it arrived, in milliseconds since 1970.
    pub arrived_unix_ms: u64,
    /// When it ended.
    pub ended_unix_ms: u64,
    /// Prompt tokens, each prompt once; `None` if one of them is not known.
    pub prompt_tokens: Option<u64>,
    /// Of these: cached where the prompts' work was done.
    pub cached_tokens: Option<u64>,
    /// Generated tokens.
    pub completion_tokens: Option<u64>,
    /// Prompt tokens of discarded attempts. Never part of the others.
    pub wasted_prompt_tokens: u64,
    /// The usage in the reply; `None` if there was none.
    pub told: Option<ToldRecord>,
    /// Each prompt, in the request's order.
    pub prompts: Vec<PromptRecord>,
}

/// What a client was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ToldRecord {
    /// `usage.prompt_tokens`.
    pub prompt_tokens: u64,
    /// `usage.completion_tokens`.
    pub completion_tokens: u64,
    /// `usage.prompt_tokens_details.cached_tokens`; `None` if the key was not there.
    pub cached_tokens: Option<u64>,
}

/// One prompt.
#[derive(Clone, Debug, Serialize)]
pub struct PromptRecord {
    /// Its length, if anybody knows it.
    pub prompt_tokens: Option<u32>,
    /// How much of it was cached where its work was done.
    pub cached_tokens: Option<u32>,
    /// Who said so.
    pub cached_source: Option<Origin>,
    /// Generated tokens, over all samples.
    pub completion_tokens: Option<u32>,
    /// Whether it is a further sample of the prompt before it, whose prompt tokens the
    /// request's figures count once.
    #[serde(skip_serializing_if = "is_false")]
    pub further_sample: bool,
    /// The legs of the answer.
    pub legs: Vec<LegRecord>,
    /// The legs of which no answer came.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub discarded: Vec<DiscardedRecord>,
}

/// One leg. The three parts sum to its prompt tokens.
#[derive(Clone, Debug, Serialize)]
pub struct LegRecord {
    /// Which part of the request.
    pub leg: LegKind,
    /// Who did it; not told to clients here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<Name>,
    /// Its figures; absent if nobody knows the prompt's length.
    #[serde(flatten)]
    pub figures: Option<FiguresRecord>,
}

/// The figures of a leg, each with its source.
#[derive(Clone, Debug, Serialize)]
pub struct FiguresRecord {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Found in the worker's own cache.
    pub local_cache_hit: u32,
    /// The same by tier; tiers without any are left out.
    pub local_cache_hit_by_tier: BTreeMap<&'static str, u32>,
    /// Handed over by another worker.
    pub external_kv_transfer: u32,
    /// Computed.
    pub local_compute: u32,
    /// Who gave each figure.
    pub sources: Sources,
}

/// Who gave each figure of a leg.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sources {
    /// Of the prompt's length.
    pub prompt_tokens: Origin,
    /// Of the hits.
    pub local_cache_hit: Origin,
    /// Of the transfer: what is left of the prompt.
    pub external_kv_transfer: Origin,
    /// Of the rest.
    pub local_compute: Origin,
}

/// A leg of which no answer came.
#[derive(Clone, Debug, Serialize)]
pub struct DiscardedRecord {
    /// The leg; without figures if it is not known to have worked.
    #[serde(flatten)]
    pub leg: LegRecord,
    /// Why.
    pub reason: &'static str,
    /// Its share of the request's wasted prompt tokens.
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
    /// An entry as it is now; with or without the workers' names.
    pub fn new(entry: &Entry, with_workers: bool) -> Self {
        let leg = |leg: &LegFacts, figures: Option<Figures>| LegRecord {
            leg: leg.kind,
            worker: with_workers.then(|| leg.worker.clone()),
            figures: figures.as_ref().map(FiguresRecord::new),
        };
        let cached = entry.cached();
        Self {
            prompt_tokens: entry.prompt_tokens(),
            cached_tokens: cached.map(|cached| cached.tokens),
            cached_source: cached.map(|cached| cached.source),
            completion_tokens: entry.completion_tokens(),
            further_sample: entry.is_further_sample(),
            legs: entry.legs().map(|(one, figures)| leg(one, figures)).collect(),
            discarded: entry
                .discarded()
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
    /// An entry as a client may see it: no worker, and no estimate that
    /// `cached_tokens_fallback` keeps from clients.
    pub fn for_client(entry: &Entry, fallback: CachedTokensFallback) -> Self {
        let mut record = Self::new(entry, false);
        if fallback == CachedTokensFallback::Estimate {
            return record;
        }
        if record.cached_source == Some(Origin::Estimate) {
            record.cached_source = None;
            record.cached_tokens = entry.cached().and_then(|cached| told(cached, fallback));
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

/// In decisions, an entry is shown as it is written down.
impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        PromptRecord::new(self, true).serialize(serializer)
    }
}

/// What is known of a request beside its prompts, when it has ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended<'a> {
    /// The id that the client saw.
    pub request_id: &'a str,
    /// The model's configured name.
    pub model: &'a str,
    /// The metrics' `endpoint` label.
    pub endpoint: &'static str,
    /// The flow that was executed.
    pub flow: &'static str,
    /// How it ended.
    pub outcome: &'static str,
    /// When it arrived, in milliseconds since 1970.
    pub arrived_unix_ms: u64,
    /// When it ended.
    pub ended_unix_ms: u64,
}

impl RequestRecord {
    /// The form of today's lines; a change that readers would notice raises it.
    pub const VERSION: u32 = 1;

    /// The cached tokens of a request that ended so, from those of its prompts, each with
    /// whether it is a further sample of the one before it.
    pub fn cached_tokens(
        outcome: &str,
        prompts: impl Iterator<Item = (bool, Option<u32>)>,
    ) -> Option<u64> {
        let counts = prompts.filter(|(further, _)| outcome == "ok" && !further);
        total(counts.map(|(_, tokens)| tokens))
    }

    /// A request that has ended. The figures of a batch are the sums of its prompts',
    /// where all of them have one: a part must not pass for the whole.
    pub fn new(ended: &Ended<'_>, entries: &[Entry]) -> Self {
        let prompts: Vec<_> = entries.iter().map(|entry| PromptRecord::new(entry, true)).collect();
        let ok = ended.outcome == "ok";
        let once = || prompts.iter().filter(|prompt| ok && !prompt.further_sample);
        let each = || prompts.iter().filter(|_| ok);
        let wasted = prompts.iter().flat_map(|prompt| &prompt.discarded);
        Self {
            version: Self::VERSION,
            request_id: ended.request_id.to_owned(),
            tenant: None,
            model: ended.model.to_owned(),
            endpoint: ended.endpoint,
            flow: ended.flow,
            outcome: ended.outcome,
            arrived_unix_ms: ended.arrived_unix_ms,
            ended_unix_ms: ended.ended_unix_ms,
            prompt_tokens: total(once().map(|prompt| prompt.prompt_tokens)),
            cached_tokens: Self::cached_tokens(
                ended.outcome,
                prompts.iter().map(|prompt| (prompt.further_sample, prompt.cached_tokens)),
            ),
            completion_tokens: total(each().map(|prompt| prompt.completion_tokens)),
            wasted_prompt_tokens: wasted.map(|leg| u64::from(leg.wasted_prompt_tokens)).sum(),
            told: told_of(entries).filter(|_| ok || entries.len() == 1),
            prompts,
        }
    }
}

/// The usage that the reply to these prompts has, if all of them have some.
fn told_of(entries: &[Entry]) -> Option<ToldRecord> {
    let told: Vec<(&Entry, ReportedUsage)> =
        entries.iter().map(|entry| Some((entry, entry.told()?))).collect::<Option<_>>()?;
    let once = || told.iter().filter(|(entry, _)| !entry.is_further_sample());
    Some(ToldRecord {
        prompt_tokens: total(once().map(|(_, told)| Some(told.prompt_tokens)))?,
        completion_tokens: total(told.iter().map(|(_, told)| Some(told.completion_tokens)))?,
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

/// The figure that the client is told; `None` leaves the key out.
pub fn told(cached: Cached, fallback: CachedTokensFallback) -> Option<u32> {
    match (cached.source, fallback) {
        (Origin::Estimate, CachedTokensFallback::Zero) => Some(0),
        (Origin::Estimate, CachedTokensFallback::Omit) => None,
        _ => Some(cached.tokens),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_engine::usage::EngineUsage;

    use super::*;
    use crate::leg::Expected;

    #[test]
    fn the_fallback_decides_only_where_the_engine_is_silent() {
        let estimate = Cached { tokens: 256, source: Origin::Estimate };
        assert_eq!(told(estimate, CachedTokensFallback::Estimate), Some(256));
        assert_eq!(told(estimate, CachedTokensFallback::Zero), Some(0));
        assert_eq!(told(estimate, CachedTokensFallback::Omit), None);
        for source in [Origin::EnginePrefill, Origin::EngineDecode] {
            for tokens in [0, 32] {
                let spoken = Cached { tokens, source };
                assert_eq!(told(spoken, CachedTokensFallback::Omit), Some(tokens));
                assert_eq!(told(spoken, CachedTokensFallback::Zero), Some(tokens));
            }
        }
    }

    fn answered(mut entry: Entry, prompt_tokens: u32, cached_tokens: Option<u32>) -> Entry {
        entry.decode_sent(LegFacts::new(LegKind::Decode, "w", Expected::default()));
        entry.decode_reported(EngineUsage { prompt_tokens, completion_tokens: 4, cached_tokens });
        entry.tell(ReportedUsage { prompt_tokens, completion_tokens: 4, cached_tokens });
        entry
    }

    fn record(entries: &[Entry], outcome: &'static str) -> RequestRecord {
        let ended = Ended {
            request_id: "r",
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
        let told = record.told.unwrap();
        assert_eq!((told.prompt_tokens, told.cached_tokens), (100, Some(0)));
        assert_eq!(told.completion_tokens, 8);
        assert_eq!(record.prompts[1].legs.len(), 1, "what its leg did is its own");
    }

    #[test]
    fn a_part_does_not_pass_for_the_whole() {
        let one = || answered(Entry::default(), 100, Some(16));
        let untold = || {
            let mut entry = Entry::default();
            entry.decode_sent(LegFacts::new(LegKind::Decode, "w", Expected::default()));
            entry
        };
        let record_of = |entries: &[Entry]| record(entries, "ok");
        assert_eq!(record_of(&[one(), one()]).prompt_tokens, Some(200));
        let part = record_of(&[one(), untold()]);
        assert_eq!((part.prompt_tokens, part.cached_tokens, part.told), (None, None, None));
        let failed = record(&[one(), one()], "decode_lost");
        assert_eq!((failed.prompt_tokens, failed.told), (None, None));
    }
}
