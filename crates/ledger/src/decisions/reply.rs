//! The events of a prompt's reply: its usage and its end.

use splitrail_engine::usage::EngineUsage;

use super::handle::DecisionHandle;
use super::record::Decision;
use crate::entry::CachedTokens;
use crate::leg::{LegFacts, Origin};
use crate::record::client_cached_tokens;
use crate::timeline::RequestTimes;
use splitrail_config::model::CachedTokensFallback;

/// The usage of a reply, as its engine reports it.
#[derive(Clone, Copy, Debug)]
pub struct UsageReport {
    /// The usage of the last leg.
    pub leg: EngineUsage,
    /// The usage of the whole reply; differs from `leg` after a migration.
    pub whole: EngineUsage,
    /// What clients get if the engine reports no cached tokens.
    pub fallback: CachedTokensFallback,
    /// Whether the client sees the usage.
    pub is_shown: bool,
}

impl DecisionHandle {
    /// The engine has rejected the answering leg, because too little of the prompt is cached.
    /// `usage` is the usage that it reported with the rejection. Returns the leg with these
    /// figures.
    pub fn threshold_rejected(
        &self,
        usage: Option<EngineUsage>,
        outcome: &'static str,
    ) -> Option<LegFacts> {
        let mut decision = self.lock();
        decision.outcome = Some(outcome);
        let leg = decision.ledger.end_decode_below_threshold(usage);
        decision.ledger.discard(outcome);
        leg
    }

    /// The client gets the reply that too little of the prompt is cached. `known` has the facts
    /// about the prompt. Returns the usage for the client, who sees it if `is_shown`; `None` if the
    /// prompt's length is not known.
    pub fn threshold_reply_made(
        &self,
        known: LegFacts,
        fallback: CachedTokensFallback,
        is_shown: bool,
    ) -> Option<EngineUsage> {
        let mut decision = self.lock();
        decision.outcome = Some("ok");
        decision.ledger.answer_below_threshold(known);
        let prompt_tokens = decision.ledger.prompt_tokens()?;
        let cached = decision.ledger.cached()?;
        let cached_tokens = client_cached_tokens(cached, fallback);
        decision.set_cached(cached, cached_tokens);
        let usage = EngineUsage { prompt_tokens, completion_tokens: Some(0), cached_tokens };
        if is_shown {
            decision.ledger.client_usage = Some(usage);
        }
        Some(usage)
    }

    /// The reply begins. The cached tokens that the prefill leg has reported are certain before
    /// the reply's own usage: they go out with the headers of a stream.
    pub fn announce_cached_tokens(&self) {
        let mut decision = self.lock();
        let reported = decision.ledger.prefill.as_ref().and_then(LegFacts::reported_cached_tokens);
        if let Some(tokens) = reported {
            let tokens = tokens.min(decision.prompt_tokens.unwrap_or(u32::MAX));
            decision
                .set_cached(CachedTokens { tokens, source: Origin::EnginePrefill }, Some(tokens));
        }
    }

    /// So many further tokens of the reply have arrived, with the usage of the reply so far if the
    /// engine has reported it. They count if the client leaves before the final usage.
    pub fn received(&self, tokens: u32, so_far: Option<EngineUsage>) {
        if tokens > 0 || so_far.is_some() {
            self.lock().ledger.received(tokens, so_far);
        }
    }

    /// The answering engine has reported its usage. Returns the cached tokens for the client's
    /// usage; `None` if the usage gets none.
    pub fn usage_reported(&self, report: UsageReport) -> Option<u32> {
        let mut decision = self.lock();
        decision.ledger.decode_reported(report.leg);
        decision.ledger.whole_reply(report.whole);
        let cached = decision.ledger.cached()?;
        let cached_tokens = client_cached_tokens(cached, report.fallback);
        if report.is_shown {
            decision.ledger.client_usage = Some(EngineUsage { cached_tokens, ..report.whole });
        }
        decision.transferred_tokens = decision.ledger.transferred_tokens();
        decision.set_cached(cached, cached_tokens);
        cached_tokens
    }

    /// The reply is complete. Returns the leg that gave it.
    pub fn reply_completed(&self) -> Option<LegFacts> {
        let mut decision = self.lock();
        decision.outcome = Some("ok");
        decision.ledger.decode.clone()
    }

    /// The reply of an auxiliary endpoint has arrived, with the usage that the engine reports for
    /// all prompts together. It has no cached tokens.
    pub fn auxiliary_answered(&self, usage: Option<EngineUsage>) {
        let mut decision = self.lock();
        decision.outcome = Some("ok");
        if let Some(usage) = usage {
            decision.ledger.decode_reported(usage);
            decision.ledger.client_usage = Some(EngineUsage { cached_tokens: None, ..usage });
        }
    }

    /// The reply broke off: the answering leg and its prefill leg are discarded.
    pub fn reply_lost(&self, outcome: &'static str) {
        let mut decision = self.lock();
        decision.outcome = Some(outcome);
        decision.ledger.discard_decode(outcome);
        decision.ledger.discard(outcome);
    }

    /// The reply is given up, and the answering worker is not at fault.
    pub fn given_up(&self, outcome: &'static str) {
        let mut decision = self.lock();
        decision.outcome = Some(outcome);
        decision.ledger.discard(outcome);
    }

    /// The reply was cut off although its engine went on: what has arrived counts.
    pub fn reply_cut(&self, outcome: &'static str) {
        let mut decision = self.lock();
        decision.outcome = Some(outcome);
        decision.ledger.is_cut = true;
    }

    /// The request has ended. If the prompt has an outcome already, the outcome stays.
    pub fn request_ended(&self, outcome: &'static str) {
        self.lock().outcome.get_or_insert(outcome);
    }

    /// The request has ended after these times, which are those of all its prompts together.
    pub fn request_took(&self, times: RequestTimes) {
        self.lock().times = Some(times);
    }
}

impl Decision {
    fn set_cached(&mut self, cached: CachedTokens, told_tokens: Option<u32>) {
        self.cached_tokens = Some(cached.tokens);
        self.told_cached_tokens = told_tokens;
        self.cached_source = Some(cached.source.kind());
    }
}
