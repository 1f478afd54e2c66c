//! Resumes a streamed reply on another decode worker when its worker is lost, starting from the
//! tokens that were already delivered.
//!
//! A reply is resumed only if the result is exact: a single sample of a completion or a chat
//! whose sampling depends only on the tokens before it. Penalties count output separately from the
//! prompt, a stop text may span the interruption, and grammars and seeds have a state; such replies
//! are not resumed. The engine is asked for token ids (`return_token_ids`), so the new prompt is
//! exactly the sequence of tokens that the lost engine had. A chat is resumed as a completion of
//! these ids (`chat`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use splitrail_engine::usage::read_count;
use splitrail_kv::{BlockHash, hashes_after};

use crate::context::{Context, PromptContext};
use crate::decide::adapter_holders::lacking_adapter;
use crate::decide::attempts::allow_retry;
use crate::decide::place::{
    LegRules, PlacedLeg, place, record_computed_prompt, record_sent_prompt,
};
use crate::decide::threshold::carried_threshold;
use crate::prepare::Unit;
use crate::reply::event_reader::EventReader;
use crate::run::first::{First, first_events};
use crate::run::leg_headers::{begin_attempt, traced_headers};
use crate::run::reply_leg::ReplyLeg;
use splitrail_api::error::Error;
use splitrail_api::memory_budget::Charge;
use splitrail_api::{Endpoint, JsonObject};
use splitrail_engine_client::RevocableBody;
use splitrail_fleet::{Exclusion, Worker};
use splitrail_ledger::decisions::DecisionHandle;
use splitrail_ledger::leg::{LegFacts, LegKind};
use splitrail_ledger::timeline::{LegSpan, PromptClock};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;
use splitrail_transfer::bodies;
use splitrail_transfer::params::DecodeParams;
use splitrail_workload::Booking;
use splitrail_workload::progress::Awaited;

mod chat;
mod exact;

pub(crate) use exact::is_exact;
use exact::limit;

/// The state of a reply that is needed to resume it on another worker.
pub(crate) struct Migration {
    context: Arc<Context>,
    decision: DecisionHandle,
    clock: PromptClock,
    namespace: BlockHash,
    body: JsonObject,
    /// Whether the client itself asked for token ids.
    told_ids: bool,
    /// The token ids of the prompt as the engine reported them; `None` until its first event.
    prompt: Option<Vec<u32>>,
    /// Tokens whose text the client has received.
    delivered: Vec<u32>,
    /// Tokens whose text the engine has not sent yet.
    pending: Vec<u32>,
    /// Maximum number of tokens that the request asks for.
    tokens_max: u32,
    /// The charge for the memory of the token ids.
    charge: Charge,
    /// Whether the engine has reported a finish reason.
    finished: bool,
    /// Whether a parser (reasoning, tool calls) made a part of the reply, which no other engine
    /// could continue.
    parsed: bool,
    /// The first event; all later events carry its id and creation time.
    first: Option<JsonObject>,
    /// The charge for the memory of the first event.
    first_charge: Charge,
    lost: Vec<Exclusion>,
    left: u32,
    /// The number of tokens that were delivered when the reply moved last.
    resumed_tokens: u64,
    /// Whether tokens were delivered, after the reply moved, whose ids are not known: it cannot be
    /// resumed again.
    has_unknown_tokens: bool,
}

/// The worker on which a reply continues, with the first events that it has sent.
pub(crate) struct Successor {
    pub(crate) worker: Arc<Worker>,
    pub(crate) booking: Booking,
    pub(crate) leg: LegSpan,
    pub(crate) reader: EventReader,
    pub(crate) held: VecDeque<Bytes>,
}

#[derive(Deserialize)]
struct CompletionChoice {
    text: Option<String>,
    finish_reason: Option<String>,
    token_ids: Option<Vec<u32>>,
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct ChatChoice {
    finish_reason: Option<String>,
    token_ids: Option<Vec<u32>>,
}

impl Migration {
    /// The state for a reply that has begun; `None` if the reply could not be resumed exactly.
    pub(crate) fn new(prompt: PromptContext<'_>) -> Option<Self> {
        let PromptContext { context, unit, decision, .. } = prompt;
        let tokens_max =
            is_exact(context, &unit.body).then(|| limit(context.endpoint, &unit.body))??;
        Some(Self {
            context: Arc::clone(context),
            decision: decision.clone(),
            clock: prompt.clock.clone(),
            namespace: unit.namespace,
            body: unit.body.clone(),
            told_ids: unit.body.raw("return_token_ids") == Some("true"),
            prompt: None,
            delivered: Vec::new(),
            pending: Vec::new(),
            tokens_max,
            charge: context.unread.memory.charge(),
            finished: false,
            parsed: false,
            first: None,
            first_charge: context.unread.memory.charge(),
            lost: Vec::new(),
            left: context.served.config.retries.decode,
            resumed_tokens: 0,
            has_unknown_tokens: false,
        })
    }

    /// Whether the reply has moved to another worker.
    pub(crate) fn has_moved(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Whether the reply is a chat that continues as a completion, so that its events must be
    /// converted.
    pub(crate) fn is_converted(&self) -> bool {
        self.has_moved() && self.context.endpoint == Endpoint::Chat
    }

    /// Records that the reply cannot be resumed again. What has been delivered stays known, because
    /// the usage of a reply that has moved is made from it.
    pub(crate) fn give_up(&mut self) {
        self.has_unknown_tokens = true;
    }

    /// Evaluates an event and returns what the client gets of it. `None` if an engine that reports
    /// token ids would not send such an event, or its tokens find no room in the memory of requests;
    /// the reply cannot be resumed then. After a move, an event of a completion may lack the ids.
    pub(crate) fn note(&mut self, data: &Bytes) -> Option<Bytes> {
        let mut event = JsonObject::parse(data.clone()).ok()?;
        let choices: Vec<Box<RawValue>> = serde_json::from_str(event.raw("choices")?).ok()?;
        if let [choice] = &choices[..] {
            let told = match self.context.endpoint == Endpoint::Chat && !self.has_moved() {
                true => self.note_chat(&mut event, choice)?,
                false => self.note_choice(choice)?,
            };
            event.set("choices", format!("[{told}]"));
        }
        if self.first.is_none() {
            let (_, max_bytes) = self.context.preparer.memory();
            self.first_charge.grow(data.len(), max_bytes).then_some(())?;
            self.first = Some(event.clone());
        }
        self.unify(&mut event);
        Some(event.to_bytes())
    }

    /// Gives an event of a later worker the id and creation time of the reply.
    pub(crate) fn unify(&self, event: &mut JsonObject) {
        if let Some(first) = self.first.as_ref().filter(|_| self.has_moved()) {
            for key in ["id", "object", "created"] {
                first.raw(key).into_iter().for_each(|raw| event.set(key, raw));
            }
        }
    }

    /// Keeps token ids that the engine has reported, and those of the prompt the first time. `None`
    /// if the prompt is not known, if the engine has generated more tokens than the request asks
    /// for, or if the ids find no room in the memory of requests.
    fn keep(&mut self, generated: Vec<u32>, prompt: Option<Vec<u32>>) -> Option<()> {
        let prompt_tokens = self.prompt.as_ref().or(prompt.as_ref())?.len();
        let tokens = self.delivered.len() + self.pending.len() + generated.len();
        // Lists grow in such steps.
        let bytes = ((prompt_tokens + tokens) * size_of::<u32>()).next_power_of_two();
        let more_bytes = bytes.saturating_sub(self.charge.bytes());
        let (_, max_bytes) = self.context.preparer.memory();
        let has_room = more_bytes == 0 || self.charge.grow(more_bytes, max_bytes);
        if tokens > self.tokens_max as usize || !has_room {
            return None;
        }
        self.pending.extend(generated);
        self.prompt = self.prompt.take().or(prompt);
        Some(())
    }

    fn note_choice(&mut self, raw: &RawValue) -> Option<String> {
        let CompletionChoice { text, finish_reason, token_ids, prompt_token_ids } =
            serde_json::from_str(raw.get()).ok()?;
        self.finished |= finish_reason.is_some();
        if token_ids.and_then(|ids| self.keep(ids, prompt_token_ids)).is_none() {
            self.has_moved().then(|| self.give_up())?;
        }
        // Engines send only text that can no longer change.
        if text.is_some_and(|text| !text.is_empty()) {
            self.delivered.append(&mut self.pending);
        }
        let choice = JsonObject::parse_str(raw.get()).ok()?;
        let hidden: &[&str] = match (self.told_ids, self.has_moved()) {
            (false, _) => &["token_ids", "prompt_token_ids"],
            // The prompt of the second worker contains delivered tokens, so the client does not see
            // it.
            (true, true) => &["prompt_token_ids"],
            (true, false) => &[],
        };
        let choice = without(choice, hidden);
        match self.is_converted() {
            true => chat::from_completion(&choice),
            false => Some(choice.to_string()),
        }
    }

    /// The same for the choice of a chat event, whose engine reports the prompt in the first event.
    fn note_chat(&mut self, event: &mut JsonObject, raw: &RawValue) -> Option<String> {
        let ChatChoice { finish_reason, token_ids } = serde_json::from_str(raw.get()).ok()?;
        let choice = JsonObject::parse_str(raw.get()).ok()?;
        let added = chat::read_delta(&choice)?;
        let prompt = match self.prompt {
            Some(_) => None,
            None => Some(serde_json::from_str(event.raw("prompt_token_ids")?).ok()?),
        };
        if token_ids.is_none() && (added.has_text || finish_reason.is_some()) {
            return None;
        }
        self.finished |= finish_reason.is_some();
        self.parsed |= added.is_parsed;
        self.keep(token_ids.unwrap_or_default(), prompt)?;
        if added.has_text {
            self.delivered.append(&mut self.pending);
        }
        if self.told_ids {
            return Some(raw.get().to_owned());
        }
        *event = without(event.clone(), &["prompt_token_ids"]);
        Some(without(choice, &["token_ids"]).to_string())
    }

    /// Resumes the reply on another worker; `None` if this is not possible.
    pub(crate) async fn resume(&mut self, lost: &Error, worker: &Arc<Worker>) -> Option<Successor> {
        if self.parsed || self.has_unknown_tokens {
            return None;
        }
        let unit = self.unit()?;
        self.resumed_tokens = self.delivered.len() as u64;
        self.decision.enter(|entry| entry.tokens_kept(self.delivered.len() as u32));
        let resumed = self.resume_on_another(&unit, lost, worker).await;
        count(&self.context, if resumed.is_some() { "resumed" } else { "lost" });
        resumed
    }

    /// Asks other workers for the rest of the reply, until one continues it.
    async fn resume_on_another(
        &mut self,
        unit: &Unit,
        lost: &Error,
        worker: &Arc<Worker>,
    ) -> Option<Successor> {
        let context = Arc::clone(&self.context);
        let mut error = lost.clone();
        let mut failed = Arc::clone(worker);
        while let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            self.lost.push(Exclusion::new(failed.index, VetoReason::Failed));
            let pool = &context.served.pool;
            let excluded = [&self.lost[..], &lacking_adapter(&context.served, &unit.body)].concat();
            let others = pool.any_up(Leg::Decode, &excluded);
            if !others || !allow_retry(&context, "migrate", &failed, &error) {
                return None;
            }
            let rules = LegRules::any(Leg::Decode, &excluded);
            let decision = &self.decision;
            let clock = &self.clock;
            clock.restart(Instant::now());
            let prompt = PromptContext { context: &context, unit, decision, clock };
            let placed = place(prompt, rules).ok()?;
            record_sent_prompt(&context, unit, &placed);
            match ask(prompt, &placed).await {
                Ok(resumed) => {
                    record_computed_prompt(&context, unit, &placed);
                    return Some(resumed);
                }
                Err(again) => {
                    placed.worker.record(Leg::Decode, Some(&again));
                    self.decision.enter(|entry| entry.discard_decode(again.outcome()));
                    (error, failed) = (again, placed.worker);
                }
            }
        }
        None
    }

    /// The rest of the reply as a prompt of its own; `None` if nothing is left to generate or the
    /// tokens so far are not known.
    fn unit(&mut self) -> Option<Unit> {
        // Tokens whose text the client has not received are generated again.
        self.pending.clear();
        let mut tokens = self.prompt.clone()?;
        tokens.extend(&self.delivered);
        let done = self.delivered.len() as u32;
        let count = |key| self.body.get::<u32>(key, "an integer").ok().flatten();
        let endpoint = self.context.endpoint;
        let left = self.tokens_max.checked_sub(done)?;
        let mut body = self.body.clone();
        if endpoint == Endpoint::Chat {
            if !chat::are_text(body.raw("messages")?) {
                return None;
            }
            body.retain(|key| !chat::MEMBERS.contains(&key));
        }
        body.set("prompt", serde_json::to_string(&tokens).ok()?);
        body.set("max_tokens", left.to_string());
        if let Some(least) = count("min_tokens") {
            body.set("min_tokens", least.saturating_sub(done).to_string());
        }
        body.set("return_token_ids", "true");
        let block_size = self.context.served.pool.block_size();
        (left > 0 && block_size > 0 && !self.finished).then(|| Unit {
            prompt_index: 0,
            further_sample: false,
            body,
            recording: None,
            prompt_tokens: Some(tokens.len() as u32),
            unknown: None,
            namespace: self.namespace,
            hashes: hashes_after(self.namespace, self.context.hash_seed, block_size, &tokens)
                .into(),
            weight_tokens: tokens.len() as u64,
        })
    }

    /// The usage of a whole reply that has moved, computed from the usage of its last part: tokens
    /// that were delivered before are output and not prompt. The last worker's count of cached tokens
    /// is removed, because another worker computed the client's prompt. `None` if the output of the
    /// last part cannot be read.
    pub(crate) fn usage(&self, raw: &str) -> Option<String> {
        let mut usage = JsonObject::parse_str(raw).ok()?;
        let count = |key| usage.raw(key).and_then(read_count).map(u64::from);
        let prompt_tokens = self.prompt.as_ref()?.len() as u64;
        let sent_tokens = prompt_tokens + self.resumed_tokens;
        let of_last = count("completion_tokens");
        let of_last = of_last.or_else(|| count("total_tokens")?.checked_sub(sent_tokens))?;
        let completion_tokens = self.resumed_tokens + of_last;
        usage.set("prompt_tokens", prompt_tokens.to_string());
        usage.set("completion_tokens", completion_tokens.to_string());
        usage.set("total_tokens", (prompt_tokens + completion_tokens).to_string());
        let details = usage.raw("prompt_tokens_details").filter(|raw| *raw != "null");
        if let Some(details) = details.map(JsonObject::parse_str) {
            let without_cached = |details: JsonObject| without(details, &["cached_tokens"]);
            let details = details.map(without_cached).map(|details| details.to_string());
            usage.set("prompt_tokens_details", details.unwrap_or_else(|_| "null".to_owned()));
        }
        Some(usage.to_string())
    }
}

/// Sends the rest of a reply to a worker, and waits until its first events arrive.
async fn ask(prompt: PromptContext<'_>, placed: &PlacedLeg) -> Result<Successor, Error> {
    let PromptContext { context, unit, decision, .. } = prompt;
    placed.worker.breaker(Leg::Decode).begin(Instant::now());
    let mut leg = prompt.leg(LegKind::Decode, &placed.worker);
    let leg_headers = traced_headers(begin_attempt(context, decision), &leg);
    let threshold = carried_threshold(context, &placed.worker, 0.0);
    let mut body = unit.body.clone();
    if let Some(threshold) = threshold {
        body.set("cache_hit_threshold", threshold.to_string());
    }
    let booking = placed.book(context, unit, Instant::now(), true);
    booking.set_awaited(Awaited::FirstOutput);
    let body =
        bodies::generate(body, Endpoint::Completions, context.options, DecodeParams::Nothing)?;
    let body: RevocableBody = body.into();
    let sending = ReplyLeg { prompt, leg_headers: &leg_headers, placed, threshold };
    let expected = placed.expectation(context, unit);
    let facts = LegFacts::new(LegKind::Decode, placed.worker.id(), expected);
    decision.enter(|entry| entry.decode_resumed(facts));
    let error = match first_events(&sending, Endpoint::Completions, body).await {
        Ok(First::Events(reader, held)) => {
            decision.enter(|entry| entry.worked(LegKind::Decode));
            let worker = Arc::clone(&placed.worker);
            return Ok(Successor { worker, booking, leg, reader: *reader, held });
        }
        Ok(First::BelowThreshold(_) | First::Whole(..)) => {
            Error::engine(placed.worker.id(), "does not continue the reply")
        }
        Err(error) => error,
    };
    leg.end(Instant::now(), error.outcome());
    Err(error)
}

/// Sets the named members of an object to null, if they exist.
pub(crate) fn without(mut object: JsonObject, keys: &[&str]) -> JsonObject {
    for key in keys {
        if object.raw(key).is_some() {
            object.set(key, "null");
        }
    }
    object
}

fn count(context: &Context, outcome: &str) {
    let labels = [context.served.name(), outcome];
    context.metrics.migrations.with_label_values(&labels).inc();
}
