//! Closes a request: turns its entries into metrics and a line of the ledger file, from the same
//! record, so that both always agree.

use splitrail_kv::Tier;

use super::decisions::DecisionHandle;
use super::entry::{CachedTokens, Entry};
use super::leg::{Figures, LegKind};
use super::lines::Lines;
use super::record::{LabelledTenant, RequestFacts, RequestRecord};
use splitrail_telemetry::{LabelledSeries, Metrics, ModelSeries};

/// Closes the entries of a request. Legs count as served if the request ended with `ok`, or if its
/// client left, the router stopped, or the reply was cut off after engines had begun them. Otherwise
/// they count as wasted, because their results reached no client. Returns the tokens of the request.
pub fn close(
    metrics: &Metrics,
    series: &ModelSeries,
    ledger: &Lines,
    ended: &RequestFacts<'_>,
    decisions: &[DecisionHandle],
) -> UsedTokens {
    let labelled = LabelledSeries { model: ended.model, series };
    // A record is made only if there is a ledger file. The metric is computed from the same entries
    // by the same function.
    let recorded = ledger.is_open();
    let mut entries: Vec<Entry> = Vec::new();
    let mut used = UsedTokens::of(ended.outcome);
    // The reply to one prompt was cut off, and the others with it.
    if decisions.iter().any(|decision| decision.with(|decision| decision.ledger.is_cut)) {
        decisions.iter().for_each(|decision| decision.enter(|entry| entry.is_cut = true));
    }
    for decision in decisions {
        decision.enter(|entry| {
            entry.close(ended.outcome);
            let of_prompt = entry.cached();
            count_prompt(metrics, labelled, entry, of_prompt);
            if entry.counts(ended.outcome) {
                used.add(entry, of_prompt.map(|cached| cached.tokens));
            }
            if recorded {
                entries.push(entry.clone());
            }
        });
    }
    let cached = used.cached();
    if let Some(cached) = cached {
        let result = if cached > 0 { "hit" } else { "miss" };
        series.hit_or_miss(metrics, ended.model, result);
    }
    // Requests that generate nothing have no tokens of a reply, and that of a client that left has
    // no length.
    if used.has_ended_ok && used.completion_tokens > 0 {
        let (prompt, output) = (used.prompt_tokens, used.completion_tokens);
        series.request_tokens(metrics, ended.model, prompt, output, cached);
    }
    if let Some(tenant) = ended.tenant {
        count_tenant(metrics, tenant, ended.outcome, used);
    }
    if recorded {
        ledger.write(&RequestRecord::new(ended, &entries));
    }
    used
}

/// The tokens of a finished request, as the ledger file has them. If the client left, the router
/// stopped, or the reply was cut off, they are those of the prompts that engines had begun. Requests
/// that ended with another error have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsedTokens {
    /// Prompt tokens, with each prompt counted once.
    pub prompt_tokens: u64,
    /// Prompt tokens that were cached on the workers that computed the prompts.
    pub cached_tokens: u64,
    /// Generated tokens of all prompts.
    pub completion_tokens: u64,
    has_ended_ok: bool,
    /// Whether any prompt counts.
    has_prompts: bool,
    is_known: KnownParts,
}

/// Which of the figures are known of every prompt that counts. Otherwise the sums are those of the
/// others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KnownParts {
    prompt: bool,
    cached: bool,
    completion: bool,
}

impl UsedTokens {
    fn of(outcome: &str) -> Self {
        let is_known = KnownParts { prompt: true, completion: true, cached: true };
        Self { has_ended_ok: outcome == "ok", is_known, ..Self::default() }
    }

    /// The tokens of all prompts; `None` if they are not known of every prompt.
    pub fn prompt(&self) -> Option<u64> {
        (self.has_prompts && self.is_known.prompt).then_some(self.prompt_tokens)
    }

    /// The cached tokens; `None` if they are not known of every prompt.
    pub fn cached(&self) -> Option<u64> {
        (self.has_prompts && self.is_known.cached).then_some(self.cached_tokens)
    }

    /// The generated tokens; `None` if they are not known of every prompt and sample.
    pub fn completion(&self) -> Option<u64> {
        (self.has_prompts && self.is_known.completion).then_some(self.completion_tokens)
    }

    /// Whether the request has ended with `ok` and not all of its tokens are known.
    pub fn is_partial(&self) -> bool {
        self.has_ended_ok && (self.prompt().is_none() || self.completion().is_none())
    }

    /// Whether the client left and the length of a prompt that an engine had begun is not known.
    pub fn lacks_begun_prompt(&self) -> bool {
        !self.has_ended_ok && self.has_prompts && !self.is_known.prompt
    }

    fn add(&mut self, entry: &Entry, cached_tokens: Option<u32>) {
        self.has_prompts = true;
        let completion_tokens = entry.completion_tokens;
        self.is_known.completion &= completion_tokens.is_some();
        self.completion_tokens += u64::from(completion_tokens.unwrap_or(0));
        if !entry.further_sample {
            let prompt_tokens = entry.prompt_tokens();
            // What nothing was computed for costs nothing, if its length is not known.
            self.is_known.prompt &= prompt_tokens.is_some() || entry.is_below_threshold();
            self.is_known.cached &= cached_tokens.is_some();
            self.prompt_tokens += u64::from(prompt_tokens.unwrap_or(0));
            self.cached_tokens += u64::from(cached_tokens.unwrap_or(0));
        }
    }
}

fn count_tenant(
    metrics: &Metrics,
    tenant: LabelledTenant<'_>,
    outcome: &'static str,
    used: UsedTokens,
) {
    let LabelledTenant { label, series, .. } = tenant;
    series.ended(metrics, label, outcome);
    let tokens = [
        ("prompt", used.prompt_tokens),
        ("cached", used.cached_tokens),
        ("completion", used.completion_tokens),
    ];
    for (kind, tokens) in tokens {
        series.used(metrics, label, kind, tokens);
    }
}

fn count_prompt(
    metrics: &Metrics,
    labelled: LabelledSeries<'_>,
    entry: &Entry,
    cached: Option<CachedTokens>,
) {
    let LabelledSeries { model, series } = labelled;
    for (leg, figures) in entry.legs() {
        if let Some(figures) = figures {
            count_leg(metrics, labelled, leg.kind, &figures);
        }
    }
    for discarded in &entry.discarded {
        let wasted = u64::from(discarded.wasted_prompt_tokens());
        if wasted > 0 {
            let labels = [model, discarded.reason];
            metrics.wasted_prompt_tokens.with_label_values(&labels).inc_by(wasted);
        }
    }
    series.generated(metrics, model, entry.completion_tokens.unwrap_or(0).into());
    if entry.further_sample {
        return;
    }
    series.prompted(metrics, model, entry.prompt_tokens().unwrap_or(0).into());
    if let Some(cached) = cached {
        series.cached(metrics, model, cached.source.kind(), cached.tokens.into());
    }
}

fn count_leg(metrics: &Metrics, labelled: LabelledSeries<'_>, leg: LegKind, figures: &Figures) {
    let LabelledSeries { model, series } = labelled;
    let count = |source: &'static str, tier: &'static str, tokens: u32| {
        let labels = [leg.name(), source, tier];
        let find = || metrics.prompt_tokens.with_label_values(&[model, leg.name(), source, tier]);
        series.prompt_tokens.with(labels, find, |series| series.inc_by(tokens.into()));
    };
    let tokens = &figures.tokens;
    for tier in Tier::ALL {
        let hit = tokens.local_cache_hit[tier as usize];
        // Series of other tiers are created with their first hit.
        if tier == Tier::Device || hit > 0 {
            count("local_cache_hit", tier.name(), hit);
        }
    }
    if tokens.peer_fetched > 0 {
        let fetched = metrics.peer_fetched_tokens.with_label_values(&[model]);
        fetched.inc_by(tokens.peer_fetched.into());
    }
    // Only prefill legs read from other workers; elsewhere there are no such series.
    if leg == LegKind::Prefill {
        count("read_back", "none", tokens.read_back);
        count("fetched", "none", tokens.fetched);
    }
    count("external_kv_transfer", "none", tokens.external_kv_transfer);
    count("local_compute", "none", tokens.local_compute);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_config::Rotation;
    use splitrail_engine::usage::EngineUsage;
    use splitrail_kv::Overlap;

    use super::*;
    use crate::leg::{Expectation, LegFacts};

    /// A prompt of 100 tokens whose leg has begun and has generated `tokens`.
    fn streaming(tokens: u32) -> DecisionHandle {
        let decision = DecisionHandle::default();
        let expected = Expectation { prompt_tokens: Some(100), ..Expectation::default() };
        decision.enter(|entry| entry.decode_sent(LegFacts::new(LegKind::Decode, "w", expected)));
        decision.enter(|entry| entry.worked(LegKind::Decode));
        decision.received(tokens, None);
        decision
    }

    fn no_file(metrics: &Metrics) -> Lines {
        let (records, writable) = (metrics.ledger_records.clone(), &metrics.output_file_writable);
        Lines::open("ledger", None, Rotation::default(), records, writable).unwrap()
    }

    #[test]
    fn a_client_that_leaves_is_charged_alike_everywhere() {
        let queued = DecisionHandle::default();
        queued.enter(|entry| {
            entry.decode_sent(LegFacts::new(LegKind::Decode, "w", Expectation::default()))
        });
        let decisions = [streaming(7), streaming(0), queued];
        for (outcome, expected) in [("cancelled", [200, 7]), ("decode_lost", [0, 0])] {
            let (metrics, series) = (Metrics::new().unwrap(), ModelSeries::default());
            let tenant_series = splitrail_telemetry::TenantSeries::default();
            let tenant = LabelledTenant { name: "t", label: "t", series: &tenant_series };
            let ended = RequestFacts {
                request_id: "r",
                tenant: Some(tenant),
                session: None,
                model: "m",
                endpoint: "completions",
                flow: "aggregated",
                outcome,
                arrived_unix_ms: 1,
                ended_unix_ms: 2,
            };
            let decisions = match outcome {
                "cancelled" => decisions.to_vec(),
                _ => vec![streaming(7)],
            };
            let used = close(&metrics, &series, &no_file(&metrics), &ended, &decisions);
            assert_eq!([used.prompt_tokens, used.completion_tokens], expected, "{outcome}");
            assert_eq!(used.completion(), (outcome == "cancelled").then_some(7));
            let of_tenant = ["prompt", "completion"]
                .map(|kind| metrics.tenant_tokens.with_label_values(&["t", kind]).get());
            assert_eq!(of_tenant, expected, "{outcome}");
            let of_model = [&metrics.usage_prompt_tokens, &metrics.generation_tokens]
                .map(|counter| counter.with_label_values(&["m"]).get());
            assert_eq!(of_model, expected, "{outcome}");
            let wasted = metrics.wasted_prompt_tokens.with_label_values(&["m", outcome]).get();
            assert_eq!(wasted, if outcome == "cancelled" { 0 } else { 100 }, "never both");
            let entries = decisions.iter().map(|one| one.with(|record| record.ledger.clone()));
            let line = RequestRecord::new(&ended, &entries.collect::<Vec<_>>());
            let written = [line.prompt_tokens, line.completion_tokens];
            assert_eq!(written.map(Option::unwrap_or_default), expected, "{outcome}");
            let source = line.prompts[0].completion_source;
            assert_eq!(source.is_some(), outcome == "cancelled", "the router has counted");
        }
    }

    #[test]
    fn hits_are_counted_by_tier() {
        let metrics = Metrics::new().unwrap();
        let expected = Expectation {
            overlap: Overlap { blocks: 5, by_tier: [2, 3, 0, 0] },
            block_size: 16,
            ..Expectation::default()
        };
        let mut entry = Entry::default();
        entry.decode_sent(LegFacts::new(LegKind::Decode, "w", expected));
        let (prompt_tokens, cached_tokens) = (100, Some(80));
        entry.decode_reported(EngineUsage {
            prompt_tokens,
            completion_tokens: Some(1),
            cached_tokens,
        });
        let labelled = LabelledSeries { model: "m", series: &ModelSeries::default() };
        count_prompt(&metrics, labelled, &entry, entry.cached());
        let count = |source, tier| {
            metrics.prompt_tokens.with_label_values(&["m", "decode", source, tier]).get()
        };
        assert_eq!(count("local_cache_hit", "device"), 32);
        assert_eq!(count("local_cache_hit", "host"), 48);
        assert_eq!(count("local_compute", "none"), 20);
        assert!(!metrics.encode().contains("tier=\"disk\""));
    }
}
