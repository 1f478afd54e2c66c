//! One prompt's entry in the ledger: the legs that served it, and the attempts that were discarded.

use splitrail_engine::usage::EngineUsage;

use super::leg::{Figures, LegFacts, LegKind, Origin};

/// The number of cached prompt tokens on the leg that computed the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedTokens {
    /// The count; never more than the tokens of the prompt.
    pub tokens: u32,
    /// The source of the count.
    pub source: Origin,
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

/// The outcomes of requests that end before their replies do, and not by the fault of an engine: the
/// client left, or the router stops.
const LEFT: [&str; 2] = ["cancelled", "router_stopping"];

/// One prompt's entry: the legs of the present attempt, or of the attempt that has answered, and
/// the legs of discarded attempts. The number of attempts is limited by the model's retries.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// The prefill leg of the present attempt or of the reply.
    pub prefill: Option<LegFacts>,
    /// The answering leg of the present attempt or of the reply.
    pub decode: Option<LegFacts>,
    /// Earlier legs of the reply whose workers were lost during the stream; the reply continued
    /// from the tokens that were delivered by then.
    earlier: Vec<LegFacts>,
    /// The facts of a prompt for which the client got the reply that too little is cached; no leg
    /// served it.
    below_threshold: Option<LegFacts>,
    /// Discarded legs, oldest first.
    pub discarded: Vec<DiscardedLeg>,
    /// Generated tokens, if the engine reported them. If the reply ended before, those that had
    /// arrived.
    pub completion_tokens: Option<u32>,
    /// Generated tokens that have arrived so far.
    received_tokens: u32,
    /// Whether the router has counted `completion_tokens`, because the reply ended before the engine
    /// reported them.
    pub counted_by_router: bool,
    /// Whether the reply was cut off although its engine went on: what has arrived counts.
    pub is_cut: bool,
    /// The usage that the client received, if any.
    pub client_usage: Option<EngineUsage>,
    /// Whether the entry is for a further sample of a prompt that has an entry already. It has legs
    /// of its own, but its prompt is not counted again.
    pub further_sample: bool,
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

    /// Records that a prefill leg is about to be sent, which begins a new attempt.
    pub fn prefill_sent(&mut self, leg: LegFacts) {
        self.discard(SUPERSEDED);
        if !self.closed {
            self.prefill = Some(self.with_cache_before(leg));
        }
    }

    /// A leg with what was known of its worker's cache before earlier attempts ran there.
    fn with_cache_before(&self, leg: LegFacts) -> LegFacts {
        let mut earlier = self.discarded.iter().map(|discarded| &discarded.leg);
        let first = earlier.find(|earlier| earlier.worker == leg.worker);
        LegFacts { before: first.map(LegFacts::cache_before), ..leg }
    }

    /// Records that the engine of a leg has begun to compute the prompt: the head of its stream has
    /// arrived, or its events say so.
    pub fn begun(&mut self, kind: LegKind) {
        if let Some(leg) = self.open_leg(kind) {
            leg.begun = true;
        }
    }

    /// Records that the engine of a leg has computed the prompt. The reply of an answering leg has
    /// begun then.
    pub fn worked(&mut self, kind: LegKind) {
        if let Some(leg) = self.open_leg(kind) {
            leg.worked = true;
        }
    }

    /// A leg of the present attempt; `None` once the request has ended.
    fn open_leg(&mut self, kind: LegKind) -> Option<&mut LegFacts> {
        let leg = match kind {
            LegKind::Prefill => &mut self.prefill,
            LegKind::Decode => &mut self.decode,
        };
        leg.as_mut().filter(|_| !self.closed)
    }

    /// Records the reply of the prefill engine; a figure that it did not report is `None`.
    pub(crate) fn prefill_reported(
        &mut self,
        prompt_tokens: Option<u32>,
        cached_tokens: Option<u32>,
    ) {
        if let Some(leg) = self.open_leg(LegKind::Prefill) {
            leg.worked = true;
            leg.prompt_tokens = prompt_tokens;
            leg.cached_tokens = cached_tokens;
        }
    }

    /// Records that the answering leg is about to be sent. It receives KV if there is a prefill
    /// leg.
    pub fn decode_sent(&mut self, leg: LegFacts) {
        match self.earlier.is_empty() {
            true => self.discard_decode(SUPERSEDED),
            false => self.discard(SUPERSEDED),
        }
        if !self.closed {
            let leg = self.with_cache_before(leg);
            self.decode = Some(LegFacts { receives: self.prefill.is_some(), ..leg });
        }
    }

    /// Records further tokens of the reply, or the usage of the reply so far. A message begins with a
    /// usage of zeros if its engine does not know the figures yet.
    pub(crate) fn received(&mut self, tokens: u32, so_far: Option<EngineUsage>) {
        self.received_tokens = self.received_tokens.saturating_add(tokens);
        let Some(usage) = so_far.filter(|usage| usage.prompt_tokens > 0) else { return };
        self.received_tokens = usage.completion_tokens.unwrap_or(self.received_tokens);
        if let Some(leg) = self.open_leg(LegKind::Decode) {
            leg.prompt_tokens = Some(usage.prompt_tokens);
            leg.cached_tokens = usage.cached_tokens.or(leg.cached_tokens);
        }
    }

    /// Records how many of the tokens that have arrived are part of the reply, which another worker
    /// continues.
    pub fn tokens_kept(&mut self, tokens: u32) {
        self.received_tokens = tokens;
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
    pub fn decode_resumed(&mut self, leg: LegFacts) {
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

    /// Discards the answering leg. Its prefill leg, or legs whose output was delivered before it,
    /// may serve another attempt.
    pub fn discard_decode(&mut self, reason: &'static str) {
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
    pub fn discard(&mut self, reason: &'static str) {
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
        self.received_tokens = 0;
    }

    /// Closes the entry with the outcome of its request. If the client left after an engine had
    /// begun, or its reply was cut off, the legs that have begun count, with the tokens that have
    /// arrived. Of other requests that did not end with `ok`, all legs are discarded.
    pub(crate) fn close(&mut self, outcome: &'static str) {
        let has_left = self.has_left(outcome);
        let mut legs = self.prefill.iter().chain(self.first_answering());
        match outcome {
            "ok" => {}
            _ if has_left && legs.any(LegFacts::has_begun) => {
                if self.decode.as_ref().is_some_and(|leg| !leg.has_begun()) {
                    self.discard_decode(outcome);
                }
                self.counted_by_router = self.completion_tokens.is_none();
                self.completion_tokens.get_or_insert(self.received_tokens);
            }
            _ => self.discard(outcome),
        }
        self.closed = true;
    }

    /// Whether the request has ended before its reply, and not by the fault of an engine.
    fn has_left(&self, outcome: &str) -> bool {
        self.is_cut || LEFT.contains(&outcome)
    }

    /// Whether the tokens of the entry, which is closed, count in a request with this outcome.
    pub(crate) fn counts(&self, outcome: &str) -> bool {
        outcome == "ok" || (self.has_left(outcome) && self.legs().next().is_some())
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

    /// Whether the client got only the reply that too little of the prompt is cached: nothing was
    /// computed for it.
    pub(crate) fn is_below_threshold(&self) -> bool {
        self.below_threshold.is_some()
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
mod tests;
