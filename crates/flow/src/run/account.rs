//! Accounts for one prompt's reply from the sending of its leg to its end: booking, usage, outcome.

use std::sync::Arc;
use std::time::Instant;

use splitrail_engine::dialect::Dialect;
use splitrail_engine::json::Fault;
use splitrail_engine::usage::{EngineUsage, UsageError};

use crate::context::PromptContext;
use crate::run::reply_leg::ReplyLeg;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::usage::{MessageStart, lacks_cached_tokens, rewrite};
use splitrail_fleet::ServedModel;
use splitrail_fleet::Worker;
use splitrail_fleet::reply_check::{check_events, check_reply};
use splitrail_ledger::decisions::{DecisionHandle, UsageReport};
use splitrail_ledger::leg::{LegFacts, LegKind};
use splitrail_ledger::timeline::LegSpan;
use splitrail_policy::{Distance, Leg};
use splitrail_telemetry::Metrics;
use splitrail_workload::Booking;
use splitrail_workload::costs::WholeReply;
use splitrail_workload::progress::Awaited;

/// Usage of which nothing can be read, for a client.
const NO_USAGE: &str = "null";

/// The data that one prompt's reply owns until it ends in any way: its booking, and its decision
/// record with the ledger's entry.
pub(crate) struct Account {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) served: Arc<ServedModel>,
    pub(crate) decision: DecisionHandle,
    pub(crate) booking: Booking,
    pub(crate) worker: Arc<Worker>,
    /// The dialect of the engine's reply.
    pub(crate) dialect: Dialect,
    /// Whether the reply is the text of a recording, of which engines report no cached tokens.
    transcribes: bool,
    /// When the leg was sent.
    sent: Instant,
    /// Whether the prompt was handed over, so that the worker does not compute it.
    handed_over: bool,
    /// How far the worker is from the one that has handed over.
    distance: Distance,
    /// The prompt's length by the router's tokenizer.
    pub(crate) prompt_tokens: Option<u32>,
    /// Whether the engine has reported its usage.
    pub(crate) settled: bool,
    /// The tokens of a message's prompt that its first event has.
    message_start: Option<MessageStart>,
    /// The leg in the trace of the request.
    pub(crate) leg: LegSpan,
}

impl Account {
    /// Makes the data that the reply owns until it ends, and enters its leg in the ledger.
    pub(crate) fn open(
        sending: &ReplyLeg<'_>,
        now: Instant,
        handed_over: bool,
        leg: LegSpan,
    ) -> Self {
        let ReplyLeg { prompt, placed, .. } = *sending;
        let PromptContext { context, unit, decision, .. } = prompt;
        let worker = &placed.worker;
        let booking = match handed_over {
            true => worker.book(placed.rank, 0, unit.weight_tokens),
            false => placed.book(context, unit, now, context.options.stream),
        };
        let facts = LegFacts::new(LegKind::Decode, worker.id(), placed.expectation(context, unit));
        decision.enter(|entry| entry.decode_sent(facts));
        Self {
            metrics: Arc::clone(&context.metrics),
            served: Arc::clone(&context.served),
            decision: decision.clone(),
            booking,
            worker: Arc::clone(worker),
            dialect: context.endpoint.dialect(),
            transcribes: context.endpoint.transcribes(),
            sent: now,
            handed_over,
            distance: placed.distance,
            prompt_tokens: unit.prompt_tokens,
            settled: false,
            message_start: None,
            leg,
        }
    }

    /// Records that the leg has been sent, and nothing else keeps its engine from answering.
    pub(crate) fn await_reply(&self, is_streamed: bool) {
        let awaited = if is_streamed { Awaited::FirstOutput } else { Awaited::WholeReply };
        self.booking.set_awaited(awaited);
    }

    /// Evaluates the engine's usage object and returns the one for the client, who gets it if
    /// `tells` is true. `whole` is the usage of the whole reply if the engine reported only that
    /// of its last part. If it cannot be evaluated, the client gets the counts that can be read, and
    /// never the engine's figure of cached tokens, which may be about transferred KV.
    pub(crate) fn settle(&mut self, raw: &str, whole: Option<&str>, tells: bool) -> String {
        let completed = self.message_start.and_then(|start| start.complete(raw));
        let raw = completed.as_deref().unwrap_or(raw);
        let told = self.evaluate(raw, whole, tells);
        let told = told.or_else(|| rewrite(self.dialect, whole.unwrap_or(raw), None));
        told.unwrap_or_else(|| NO_USAGE.to_owned())
    }

    fn evaluate(&mut self, raw: &str, whole: Option<&str>, tells: bool) -> Option<String> {
        let leg = self.read(raw)?;
        let (raw, usage) = match whole {
            Some(whole) => (whole, self.read(whole)?),
            None => (raw, leg),
        };
        self.compare(usage.prompt_tokens);
        self.settled = true;
        let fallback = self.served.config.cached_tokens_fallback;
        let report = UsageReport { leg, whole: usage, fallback, is_shown: tells };
        rewrite(self.dialect, raw, self.decision.usage_reported(report))
    }

    /// The usage for an event that precedes the final usage, which may leave its figures out. It has
    /// the cached tokens that are certain at that time. `None` if the engine's usage may stay as it
    /// is.
    pub(crate) fn foretold(&mut self, raw: &str) -> Option<String> {
        self.message_start = MessageStart::read(raw);
        self.decision.received(0, EngineUsage::parse(self.dialect, raw).ok());
        let told = self.decision.with(|decision| decision.told_cached_tokens);
        if told.is_none() && lacks_cached_tokens(raw) {
            return None;
        }
        Some(rewrite(self.dialect, raw, told).unwrap_or_else(|| NO_USAGE.to_owned()))
    }

    fn read(&self, raw: &str) -> Option<EngineUsage> {
        read_usage(&self.served, &self.worker, self.dialect, raw)
    }

    /// Compares the engine's count of the prompt's tokens with the count of the router's tokenizer.
    fn compare(&self, engine: u32) {
        let Some(router) = self.prompt_tokens.filter(|router| *router != engine) else { return };
        let model = self.served.name();
        self.metrics.prompt_length_mismatches.with_label_values(&[model]).inc();
        if self.served.mismatch.may_log() {
            let worker = self.worker.id();
            tracing::error!(
                model,
                worker,
                router,
                engine,
                "router and engine disagree on the prompt's token count: is the tokenizer the \
                 engine's, and was the engine started with flags that change prompts?"
            );
        }
    }

    /// Trains the cost model with a whole reply that began to arrive at `begun`, which is when the engine
    /// had generated it. Without usage, the number of its steps is not known.
    pub(crate) fn learn_whole(&mut self, begun: Instant, samples: u32, usage: EngineUsage) {
        let (load, tokens) = (&self.worker.load, u64::from(usage.prompt_tokens));
        let Some(generated) = usage.completion_tokens else { return };
        let of_sample = u64::from(generated.div_ceil(samples.max(1)));
        let reply = WholeReply {
            cached_tokens: usage.cached_tokens.map(u64::from),
            steps: of_sample.saturating_sub(1),
            requests: load.booked.requests().into(),
            context_tokens: load.booked.active_tokens(),
        };
        if self.handed_over {
            let took = begun.saturating_duration_since(self.sent);
            let scale = self.served.pool.link_scale(self.distance);
            load.costs.learn_handed_over(begun, tokens, took, scale, reply);
        } else {
            self.booking.whole_reply_done(begun, reply);
        }
    }

    /// Records that the reply is complete. Its figures are counted when the whole request ends.
    pub(crate) fn finish(&mut self) {
        // A message may end without usage. The number of its generated tokens is not known then.
        let has_usage = self.settled;
        if !has_usage && self.message_start.is_some() {
            self.settle("{}", None, false);
        }
        let now = Instant::now();
        self.booking.reply_done(now);
        self.leg.end(now, "ok");
        self.worker.record(Leg::Decode, None);
        if let Some(leg) = self.decision.reply_completed().filter(|_| !self.transcribes) {
            check_reply(&self.metrics, &self.served, &self.worker, &leg, has_usage);
            check_events(&self.served, &self.worker, &leg);
        }
    }

    /// Records that the engine rejected the leg because it holds too little of the prompt. The
    /// cached tokens that it reports are checked against the index like those of any other reply.
    pub(crate) fn end_below_threshold(&mut self, usage: Option<EngineUsage>) {
        let error = Error::new(ErrorKind::BelowThreshold, "");
        self.leg.end_with_stage(error.outcome());
        self.worker.record(Leg::Decode, Some(&error));
        let leg = self.decision.threshold_rejected(usage, error.outcome());
        if let (Some(leg), Some(_)) = (leg, usage) {
            check_reply(&self.metrics, &self.served, &self.worker, &leg, true);
        }
    }

    /// Records that the leg that generates the reply failed. Its prefill leg may serve another
    /// attempt.
    pub(crate) fn fail_leg(&mut self, error: &Error) {
        self.leg.end_with_stage(error.outcome());
        self.worker.record(Leg::Decode, Some(error));
        self.decision.decode_failed(error.outcome());
    }

    /// Records that the reply broke off.
    pub(crate) fn fail(&mut self, error: &Error) {
        self.leg.end_with_stage(error.outcome());
        self.worker.record(Leg::Decode, Some(error));
        self.decision.reply_lost(error.outcome());
    }

    /// Records that there is no reply, without a fault of the worker.
    pub(crate) fn give_up(&mut self, outcome: &'static str) {
        self.leg.end_with_stage(outcome);
        self.decision.given_up(outcome);
    }
}

/// Reads an engine's usage object; see [`EngineUsage::read`]. A fault of it is logged.
pub(crate) fn read_usage(
    served: &ServedModel,
    worker: &Worker,
    dialect: Dialect,
    raw: &str,
) -> Option<EngineUsage> {
    let (usage, fault) = EngineUsage::read(dialect, raw);
    if let Some(error) = fault.filter(|_| worker.kv.usage_log.may_log()) {
        let (model, worker) = (served.name(), worker.id());
        let what = match (&usage, &error) {
            (None, UsageError::Shape(error)) if error.fault == Fault::DuplicateKey => {
                "an engine's usage has a key twice and counts as not reported"
            }
            (None, _) => "an engine's usage counts as not reported",
            (_, UsageError::CachedExceedsPrompt { .. }) => {
                "an engine reports more cached tokens than the prompt has"
            }
            _ => "a part of an engine's usage counts as not reported",
        };
        tracing::warn!(model, worker, %error, "{what} (said at most twice a minute)");
    }
    usage
}
