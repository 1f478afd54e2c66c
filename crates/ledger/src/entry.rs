//! One prompt's entry in the ledger: the legs that served it, and the attempts that were discarded.

use splitrail_engine::usage::EngineUsage;

use super::leg::{Figures, LegFacts, Origin};

/// The number of cached prompt tokens on the leg that computed the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedTokens {
    /// The count; never more than the tokens of the prompt.
    pub tokens: u32,
    /// The source of the count.
    pub source: Origin,
}

/// The usage of a prompt that the client received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedUsage {
    /// `usage.prompt_tokens`.
    pub prompt_tokens: u32,
    /// `usage.completion_tokens`; `None` if the usage had no such key.
    pub completion_tokens: Option<u32>,
    /// `usage.prompt_tokens_details.cached_tokens`, if the usage had it.
    pub cached_tokens: Option<u32>,
}

/// A leg whose result did not reach the client.
#[derive(Clone, Debug)]
pub struct DiscardedLeg {
    /// The leg.
    pub leg: LegFacts,
    /// Its figures, if the leg is known to have computed the prompt.
    pub figures: Option<Figures>,
    /// The reason: the outcome of its attempt.
    pub reason: &'static str,
}

impl DiscardedLeg {
    /// Prompt tokens that were looked up or computed without use. In an attempt with a hand-off the
    /// prefill leg has them, so that they are counted once.
    pub fn wasted_prompt_tokens(&self) -> u32 {
        match self.figures {
            Some(figures) if !self.leg.receives => figures.prompt_tokens,
            _ => 0,
        }
    }
}

/// The reason of legs that were still open when another attempt replaced them.
const SUPERSEDED: &str = "superseded";

/// One prompt's entry: the legs of the present attempt, or of the attempt that has answered, and
/// the legs of discarded attempts. The number of attempts is limited by the model's retries.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    prefill: Option<LegFacts>,
    decode: Option<LegFacts>,
    /// Earlier legs of the reply whose workers were lost during the stream; the reply continued
    /// from the tokens that were delivered by then.
    earlier: Vec<LegFacts>,
    /// The facts of a prompt for which the client got the reply that too little is cached; no leg
    /// served it.
    below_threshold: Option<LegFacts>,
    discarded: Vec<DiscardedLeg>,
    completion_tokens: Option<u32>,
    client_usage: Option<ReportedUsage>,
    /// Whether the entry is for a further sample of a prompt that has an entry already. It has legs
    /// of its own, but its prompt is not counted again.
    further_sample: bool,
    /// Whether no count of cached tokens is reported for the prompt.
    without_cached_tokens: bool,
    /// Whether the request has ended; later events change nothing.
    closed: bool,
}

impl Entry {
    /// An entry for a further sample of a prompt, if samples are sent as separate requests. Its
    /// legs are counted like all others; its prompt is counted with the first sample.
    pub fn further_sample() -> Self {
        Self { further_sample: true, ..Self::default() }
    }

    /// An entry for a prompt without a count of cached tokens, such as that of an embedding.
    pub fn without_cached_tokens() -> Self {
        Self { without_cached_tokens: true, ..Self::default() }
    }

    /// Whether the prompt is counted with another entry.
    pub fn is_further_sample(&self) -> bool {
        self.further_sample
    }

    /// Records that a prefill leg is about to be sent, which begins a new attempt.
    pub(crate) fn prefill_sent(&mut self, leg: LegFacts) {
        self.discard(SUPERSEDED);
        if !self.closed {
            self.prefill = Some(leg);
        }
    }

    /// Records that the prefill engine has computed the prompt.
    pub(crate) fn prefill_worked(&mut self) {
        if let Some(leg) = self.prefill.as_mut().filter(|_| !self.closed) {
            leg.worked = true;
        }
    }

    /// Records the reply of the prefill engine; a figure that it did not report is `None`.
    pub(crate) fn prefill_reported(
        &mut self,
        prompt_tokens: Option<u32>,
        cached_tokens: Option<u32>,
    ) {
        if let Some(leg) = self.prefill.as_mut().filter(|_| !self.closed) {
            leg.worked = true;
            leg.prompt_tokens = prompt_tokens;
            leg.cached_tokens = cached_tokens;
        }
    }

    /// Records that the answering leg is about to be sent. It receives KV if there is a prefill
    /// leg.
    pub(crate) fn decode_sent(&mut self, leg: LegFacts) {
        match self.earlier.is_empty() {
            true => self.discard_decode(SUPERSEDED),
            false => self.discard(SUPERSEDED),
        }
        if !self.closed {
            self.decode = Some(LegFacts { receives: self.prefill.is_some(), ..leg });
        }
    }

    /// Records that the reply has begun, so the prompt is computed.
    pub(crate) fn decode_worked(&mut self) {
        if let Some(leg) = self.decode.as_mut().filter(|_| !self.closed) {
            leg.worked = true;
        }
    }

    /// Records the usage that the answering engine reported.
    pub(crate) fn decode_reported(&mut self, usage: EngineUsage) {
        if self.closed {
            return;
        }
        if let Some(leg) = &mut self.decode {
            leg.worked = true;
            leg.prompt_tokens = Some(usage.prompt_tokens);
            leg.cached_tokens = usage.cached_tokens;
        }
        // Embeddings have none.
        let none = self.without_cached_tokens.then_some(0);
        self.completion_tokens = usage.completion_tokens.or(none);
    }

    /// Records that the worker was lost during the stream and that this leg is about to be sent to
    /// continue the reply. Its prompt includes the tokens delivered so far.
    pub(crate) fn decode_resumed(&mut self, leg: LegFacts) {
        if !self.closed {
            self.earlier.extend(self.decode.take());
            self.decode = Some(leg);
        }
    }

    /// Records the usage of the whole reply if the usage of its last leg covers only a part.
    pub(crate) fn whole_reply(&mut self, usage: EngineUsage) {
        if let Some(first) = self.earlier.first_mut().filter(|_| !self.closed) {
            first.prompt_tokens = Some(usage.prompt_tokens);
            self.completion_tokens = usage.completion_tokens;
        }
    }

    /// Records that the engine rejected the answering leg because too little of its prompt is
    /// cached. Returns the leg with the figures that the engine reported.
    pub(crate) fn end_decode_below_threshold(
        &mut self,
        usage: Option<EngineUsage>,
    ) -> Option<LegFacts> {
        let leg = self.decode.as_mut()?;
        // Other samples of the request may have run.
        leg.worked =
            usage.and_then(|usage| usage.completion_tokens).is_some_and(|tokens| tokens > 0);
        leg.prompt_tokens = usage.map(|usage| usage.prompt_tokens);
        leg.cached_tokens = usage.and_then(|usage| usage.cached_tokens);
        Some(leg.clone())
    }

    /// Records that the client gets only the reply that too little of its prompt is cached.
    pub(crate) fn answer_below_threshold(&mut self, known: LegFacts) {
        self.discard(SUPERSEDED);
        self.below_threshold = Some(known);
        self.completion_tokens = Some(0);
    }

    /// Records the usage that the client gets.
    pub(crate) fn record_client_usage(&mut self, told: ReportedUsage) {
        self.client_usage = Some(told);
    }

    /// Discards the answering leg. Its prefill leg, or legs whose output was delivered before it,
    /// may serve another attempt.
    pub(crate) fn discard_decode(&mut self, reason: &'static str) {
        if self.closed {
            return;
        }
        let elsewhere = self.elsewhere();
        let elsewhere = elsewhere.filter(|_| self.earlier.is_empty());
        let leg = self.decode.take();
        self.put_aside(leg, elsewhere, reason);
        self.completion_tokens = None;
    }

    /// Discards all legs of the present attempt.
    pub(crate) fn discard(&mut self, reason: &'static str) {
        if self.closed {
            return;
        }
        let mut elsewhere = self.elsewhere();
        let prefill = self.prefill.take();
        self.put_aside(prefill, elsewhere, reason);
        let answering = std::mem::take(&mut self.earlier);
        for leg in answering.into_iter().chain(self.decode.take()) {
            // A leg that continues a reply has a longer prompt, so the other leg's count does not
            // apply.
            self.put_aside(Some(leg), elsewhere.take(), reason);
        }
        self.below_threshold = None;
        self.completion_tokens = None;
    }

    /// Closes the entry with the outcome of its request. Unless the outcome is `ok`, all legs are
    /// discarded.
    pub(crate) fn close(&mut self, outcome: &'static str) {
        if outcome != "ok" {
            self.discard(outcome);
        }
        self.closed = true;
    }

    fn put_aside(
        &mut self,
        leg: Option<LegFacts>,
        elsewhere: Option<(u32, Origin)>,
        reason: &'static str,
    ) {
        let Some(leg) = leg else { return };
        let figures = if leg.worked { leg.figures(elsewhere) } else { None };
        self.discarded.push(DiscardedLeg { leg, figures, reason });
    }

    /// The prefill leg of the present attempt or of the reply.
    pub fn prefill(&self) -> Option<&LegFacts> {
        self.prefill.as_ref()
    }

    /// The answering leg of the present attempt or of the reply.
    pub fn decode(&self) -> Option<&LegFacts> {
        self.decode.as_ref()
    }

    /// Tokens that the answering worker received by a hand-off; `None` if there was no hand-off.
    pub fn transferred_tokens(&self) -> Option<u32> {
        let leg = self.first_answering().filter(|leg| leg.receives)?;
        leg.figures(self.elsewhere()).map(|figures| figures.tokens.external_kv_transfer)
    }

    /// The legs of the reply, with their figures if they are known.
    pub fn legs(&self) -> impl Iterator<Item = (&LegFacts, Option<Figures>)> {
        let elsewhere = self.elsewhere();
        let answering = self.earlier.iter().chain(&self.decode).enumerate();
        // A leg that continues a reply has a longer prompt, so the other leg's count applies only
        // to the first leg.
        let answering = answering.map(move |(i, leg)| (leg, elsewhere.filter(|_| i == 0)));
        let legs = self.prefill.iter().map(move |leg| (leg, elsewhere)).chain(answering);
        legs.map(|(leg, elsewhere)| (leg, leg.figures(elsewhere)))
    }

    /// Discarded legs, oldest first.
    pub fn discarded(&self) -> &[DiscardedLeg] {
        &self.discarded
    }

    /// The length of the prompt: the count of the answering engine, which clients see, or else that
    /// of the prefill engine, or else that of the router.
    pub fn prompt_tokens(&self) -> Option<u32> {
        let last =
            self.first_answering().or(self.prefill.as_ref()).or(self.below_threshold.as_ref())?;
        last.prompt_length(self.elsewhere()).map(|(tokens, _)| tokens)
    }

    /// The number of tokens that were cached on the worker that computed the prompt: the prefill
    /// worker if there was one. Tokens that its leg has read from another worker are included, as in the
    /// engine's own figure: they were not computed. Tokens of a hand-off are never included, nor
    /// tokens that the source of a peer fetch has computed for the request.
    pub fn cached(&self) -> Option<CachedTokens> {
        if self.without_cached_tokens {
            return None;
        }
        let work =
            self.prefill.as_ref().or(self.first_answering()).or(self.below_threshold.as_ref())?;
        let figures = work.figures(self.elsewhere())?;
        let prompt_tokens = self.prompt_tokens()?;
        let tokens = figures.tokens.cached();
        Some(CachedTokens { tokens: tokens.min(prompt_tokens), source: figures.source })
    }

    /// Generated tokens, if the engine reported them.
    pub fn completion_tokens(&self) -> Option<u32> {
        self.completion_tokens
    }

    /// Whether the client got only the reply that too little of the prompt is cached: nothing was
    /// computed for it.
    pub(crate) fn is_below_threshold(&self) -> bool {
        self.below_threshold.is_some()
    }

    /// The usage that the client received, if any.
    pub fn client_usage(&self) -> Option<ReportedUsage> {
        self.client_usage
    }

    /// The prompt's length according to either engine, for a leg whose own engine did not report
    /// it.
    fn elsewhere(&self) -> Option<(u32, Origin)> {
        let said = |leg: &LegFacts| leg.prompt_tokens.map(|tokens| (tokens, leg.kind.origin()));
        self.first_answering().and_then(said).or(self.prefill.as_ref().and_then(said))
    }

    /// The first leg of the reply, whose prompt is the client's prompt.
    fn first_answering(&self) -> Option<&LegFacts> {
        self.earlier.first().or(self.decode.as_ref())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use splitrail_kv::Overlap;

    use super::*;
    use crate::leg::{Expectation, LegKind};

    fn leg(kind: LegKind, prompt_tokens: Option<u32>, overlap_blocks: u32) -> LegFacts {
        let overlap = Overlap { blocks: overlap_blocks, by_tier: [overlap_blocks, 0, 0, 0] };
        let expected =
            Expectation { prompt_tokens, overlap, block_size: 16, ..Expectation::default() };
        LegFacts::new(kind, "w", expected)
    }

    fn usage(prompt_tokens: u32, cached_tokens: Option<u32>) -> EngineUsage {
        EngineUsage { prompt_tokens, completion_tokens: Some(4), cached_tokens }
    }

    #[test]
    fn the_leg_that_did_the_prompt_says_what_was_cached() {
        let mut entry = Entry::default();
        entry.prefill_sent(leg(LegKind::Prefill, Some(1142), 0));
        entry.prefill_reported(Some(1142), Some(64));
        entry.decode_sent(leg(LegKind::Decode, Some(1142), 10));
        // vLLM 0.22 reports the whole prompt as cached on the decode leg.
        entry.decode_reported(usage(1142, Some(1142)));
        let cached = entry.cached().unwrap();
        assert_eq!(cached, CachedTokens { tokens: 64, source: Origin::EnginePrefill });
        let legs: Vec<_> = entry.legs().map(|(_, figures)| figures.unwrap()).collect();
        assert_eq!((legs[0].tokens.hit(), legs[0].tokens.local_compute), (64, 1078));
        assert_eq!((legs[1].tokens.hit(), legs[1].tokens.external_kv_transfer), (160, 982));
    }

    #[test]
    fn a_silent_prefill_leaves_the_estimate_and_a_decode_first_hit_the_engines_figure() {
        let mut entry = Entry::default();
        entry.prefill_sent(leg(LegKind::Prefill, None, 4));
        entry.prefill_reported(None, None);
        entry.decode_sent(leg(LegKind::Decode, None, 0));
        assert_eq!(entry.cached(), None);
        entry.decode_reported(usage(100, Some(100)));
        assert_eq!(entry.cached().unwrap(), CachedTokens { tokens: 64, source: Origin::Estimate });
        let mut alone = Entry::default();
        alone.decode_sent(leg(LegKind::Decode, Some(100), 9));
        alone.decode_reported(usage(100, Some(0)));
        assert_eq!(
            alone.cached().unwrap(),
            CachedTokens { tokens: 0, source: Origin::EngineDecode }
        );
    }

    #[test]
    fn a_discarded_attempt_wastes_its_prompt_once() {
        let mut entry = Entry::default();
        entry.prefill_sent(leg(LegKind::Prefill, Some(100), 0));
        // It is not known whether the engine has done any work.
        entry.discard("engine_failed");
        entry.prefill_sent(leg(LegKind::Prefill, Some(100), 0));
        entry.prefill_reported(Some(100), Some(32));
        entry.decode_sent(leg(LegKind::Decode, Some(100), 0));
        entry.decode_worked();
        entry.discard("decode_lost");
        entry.decode_sent(leg(LegKind::Decode, Some(100), 0));
        entry.decode_worked();
        entry.discard("cancelled");
        // Later events do not change a closed entry.
        entry.discard("cancelled");
        let wasted: Vec<_> =
            entry.discarded().iter().map(DiscardedLeg::wasted_prompt_tokens).collect();
        assert_eq!(wasted, [0, 100, 0, 100]);
        assert_eq!(entry.legs().count(), 0);
        assert_eq!(entry.cached(), None);
    }

    #[test]
    fn a_prompt_that_is_turned_away_has_figures_and_no_legs() {
        let mut entry = Entry::default();
        entry.decode_sent(leg(LegKind::Decode, Some(100), 2));
        entry.decode_worked();
        let told = entry.end_decode_below_threshold(Some(EngineUsage {
            completion_tokens: Some(0),
            ..usage(100, Some(16))
        }));
        entry.discard("below_threshold");
        assert_eq!(entry.discarded()[0].wasted_prompt_tokens(), 0, "the engine has run nothing");
        entry.answer_below_threshold(told.unwrap());
        assert_eq!((entry.prompt_tokens(), entry.completion_tokens()), (Some(100), Some(0)));
        assert_eq!(
            entry.cached().unwrap(),
            CachedTokens { tokens: 16, source: Origin::EngineDecode }
        );
        assert_eq!(entry.legs().count(), 0);
    }

    #[test]
    fn a_prefill_that_serves_a_second_decode_leg_is_not_wasted_by_the_first() {
        let mut entry = Entry::default();
        entry.prefill_sent(leg(LegKind::Prefill, Some(100), 0));
        entry.prefill_reported(Some(100), Some(0));
        entry.decode_sent(leg(LegKind::Decode, Some(100), 0));
        entry.discard_decode("engine_unreachable");
        entry.decode_sent(leg(LegKind::Decode, Some(100), 0));
        entry.decode_reported(usage(100, None));
        assert_eq!(entry.legs().count(), 2);
        let [unsent] = entry.discarded() else { panic!("{entry:?}") };
        assert_eq!((unsent.reason, unsent.wasted_prompt_tokens()), ("engine_unreachable", 0));
    }

    #[test]
    fn an_answer_that_went_on_elsewhere_has_the_first_legs_prompt_and_both_legs_work() {
        let mut entry = Entry::default();
        entry.decode_sent(leg(LegKind::Decode, Some(100), 2));
        entry.decode_worked();
        entry.decode_resumed(leg(LegKind::Decode, Some(107), 1));
        entry.decode_reported(usage(107, Some(96)));
        entry.whole_reply(EngineUsage { completion_tokens: Some(11), ..usage(100, None) });
        assert_eq!((entry.prompt_tokens(), entry.completion_tokens()), (Some(100), Some(11)));
        // The first leg's cached tokens were not reported, and the second leg's hits do not count
        // for them.
        assert_eq!(entry.cached().unwrap(), CachedTokens { tokens: 32, source: Origin::Estimate });
        let legs: Vec<_> = entry.legs().map(|(_, figures)| figures.unwrap()).collect();
        assert_eq!((legs[0].prompt_tokens, legs[0].tokens.local_compute), (100, 68));
        assert_eq!((legs[1].prompt_tokens, legs[1].tokens.local_compute), (107, 11));
        entry.discard("decode_lost");
        let wasted: Vec<_> =
            entry.discarded().iter().map(DiscardedLeg::wasted_prompt_tokens).collect();
        assert_eq!(wasted, [100, 107]);
    }

    #[test]
    fn a_reply_of_the_prefill_leg_has_the_figures_of_that_leg() {
        let mut entry = Entry::default();
        entry.prefill_sent(leg(LegKind::Prefill, Some(100), 0));
        entry.prefill_reported(Some(100), Some(32));
        assert_eq!(entry.prompt_tokens(), Some(100));
        assert_eq!(
            entry.cached().unwrap(),
            CachedTokens { tokens: 32, source: Origin::EnginePrefill }
        );
    }

    #[derive(Clone, Copy, Debug)]
    enum LedgerStep {
        PrefillSent,
        PrefillWorked,
        PrefillReported(Option<u32>, Option<u32>),
        DecodeSent,
        DecodeWorked,
        Resumed,
        DecodeReported(u32, Option<u32>),
        DiscardDecode,
        Discard,
    }

    fn step() -> impl Strategy<Value = LedgerStep> {
        let count = || proptest::option::of(0u32..500);
        prop_oneof![
            Just(LedgerStep::PrefillSent),
            Just(LedgerStep::PrefillWorked),
            (count(), count())
                .prop_map(|(prompt, cached)| LedgerStep::PrefillReported(prompt, cached)),
            Just(LedgerStep::DecodeSent),
            Just(LedgerStep::DecodeWorked),
            Just(LedgerStep::Resumed),
            (0u32..500, count())
                .prop_map(|(prompt, cached)| LedgerStep::DecodeReported(prompt, cached)),
            Just(LedgerStep::DiscardDecode),
            Just(LedgerStep::Discard),
        ]
    }

    fn take(entry: &mut Entry, step: LedgerStep, known: Option<u32>) -> usize {
        match step {
            LedgerStep::PrefillSent => entry.prefill_sent(leg(LegKind::Prefill, known, 3)),
            LedgerStep::PrefillWorked => entry.prefill_worked(),
            LedgerStep::PrefillReported(prompt, cached) => entry.prefill_reported(prompt, cached),
            LedgerStep::DecodeSent => entry.decode_sent(leg(LegKind::Decode, known, 2)),
            LedgerStep::DecodeWorked => entry.decode_worked(),
            LedgerStep::Resumed => entry.decode_resumed(leg(LegKind::Decode, known, 1)),
            LedgerStep::DecodeReported(prompt, cached) => {
                entry.decode_reported(usage(prompt, cached))
            }
            LedgerStep::DiscardDecode => entry.discard_decode("x"),
            LedgerStep::Discard => entry.discard("x"),
        }
        usize::from(matches!(
            step,
            LedgerStep::PrefillSent | LedgerStep::DecodeSent | LedgerStep::Resumed
        ))
    }

    proptest! {
        #[test]
        fn after_any_events_each_leg_is_counted_once_as_used_or_wasted(
            steps in proptest::collection::vec(step(), 0..24),
            known in proptest::option::of(0u32..500),
            ok: bool,
        ) {
            let mut entry = Entry::default();
            let sent: usize = steps.iter().map(|step| take(&mut entry, *step, known)).sum();
            entry.close(if ok { "ok" } else { "cancelled" });
            for late in [LedgerStep::PrefillSent, LedgerStep::DecodeReported(7, Some(7)), LedgerStep::Discard] {
                take(&mut entry, late, known);
            }
            prop_assert_eq!(entry.legs().count() + entry.discarded().len(), sent);
            prop_assert!(ok || entry.legs().count() == 0);
            for (leg, figures) in entry.legs() {
                let Some(figures) = figures else { continue };
                prop_assert_eq!(figures.tokens.total(), figures.prompt_tokens);
                prop_assert!(leg.receives || figures.tokens.external_kv_transfer == 0);
            }
            for discarded in entry.discarded() {
                let wasted = discarded.wasted_prompt_tokens();
                prop_assert!(wasted == 0 || (discarded.leg.worked && !discarded.leg.receives));
            }
            if let Some(cached) = entry.cached() {
                prop_assert!(cached.tokens <= entry.prompt_tokens().unwrap());
            }
        }
    }
}
