//! One prompt's answer on its way to the client.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use splitrail_engine::usage::{EngineUsage, UsageError};

use super::sse::{Piece, Splitter};
use super::usage::{Source, UsageRule, rewrite};
use crate::api::JsonObject;
use crate::core::{Core, Served};
use crate::error::{Error, Kind};
use crate::fleet::{Booking, Worker};
use crate::flow::client::broken;
use crate::ledger::counts::Settled;
use crate::ledger::decisions::DecisionHandle;

/// Events from an engine.
pub struct EventReader {
    body: Incoming,
    splitter: Splitter,
    worker: Arc<Worker>,
    idle: Duration,
}

impl EventReader {
    /// Reads events of up to `max_bytes`, at most `idle` apart.
    pub fn new(body: Incoming, max_bytes: usize, worker: Arc<Worker>, idle: Duration) -> Self {
        Self { body, splitter: Splitter::new(max_bytes), worker, idle }
    }

    /// The same reader with another patience between pieces.
    pub fn with_idle(self, idle: Duration) -> Self {
        Self { idle, ..self }
    }

    /// The next event's data; `None` once the engine said that it is done. A
    /// stream that just ends has broken off.
    ///
    /// # Errors
    /// If the connection breaks, an event is too long, or nothing comes in time.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            match self.splitter.next_piece() {
                Ok(Some(Piece::Data(data))) => return Ok(Some(data)),
                Ok(Some(Piece::Done)) => return Ok(None),
                Ok(None) => {}
                Err(_) => {
                    let what = "sent an event over limits.engine_reply_max_bytes";
                    return Err(broken(&self.worker, what));
                }
            }
            match tokio::time::timeout(self.idle, self.body.frame()).await {
                Err(_) => {
                    let message = format!("worker {} fell silent in mid-stream", self.worker.id());
                    return Err(Error::new(Kind::EngineTimeout, message));
                }
                Ok(Some(Ok(frame))) => {
                    if let Some(data) = frame.data_ref() {
                        self.splitter.push(data);
                    }
                }
                Ok(Some(Err(_)) | None) => {
                    return Err(broken(&self.worker, "broke off in mid-stream"));
                }
            }
        }
    }
}

/// What one prompt's answer owns until it has ended, on whatever path: its load
/// booking, its record, and the rule by which its usage is told.
pub struct Account {
    pub(crate) core: Arc<Core>,
    pub(crate) served: Arc<Served>,
    pub(crate) decision: DecisionHandle,
    pub(crate) booking: Booking,
    pub(crate) worker: Arc<Worker>,
    pub(crate) rule: UsageRule,
    pub(crate) decode_overlap_blocks: u32,
    /// The prompt's length by the router's tokenizer.
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) settled: Option<Settled>,
}

impl Account {
    /// Takes an engine's usage object; gives the client's.
    pub fn settle(&mut self, raw: &str) -> Option<String> {
        let usage = self.read(raw)?;
        let tokens_known = self.prompt_tokens.is_some();
        let settled = Settled::new(&self.rule, usage, self.decode_overlap_blocks, tokens_known);
        let told = self.rule.told(settled.cached);
        self.settled = Some(settled);
        self.decision.update(|decision| {
            decision.cached_tokens = Some(settled.cached.tokens);
            decision.cached_source = Some(settled.cached.source.name());
            decision.told_cached_tokens = told;
            decision.transferred_tokens =
                settled.prefill.map(|_| settled.decode.external_kv_transfer);
        });
        rewrite(raw, told)
    }

    fn read(&self, raw: &str) -> Option<EngineUsage> {
        let worker = self.worker.id();
        match EngineUsage::parse(serde_json::from_str(raw).ok()?) {
            Ok(usage) => Some(usage),
            Err(UsageError::CachedExceedsPrompt { prompt_tokens, .. }) => {
                tracing::warn!(worker, "an engine reports more cached tokens than the prompt has");
                let completion = JsonObject::parse_str(raw).ok()?;
                let completion_tokens = completion.get("completion_tokens", "a count").ok()?;
                let completion_tokens = completion_tokens.unwrap_or(0);
                Some(EngineUsage { prompt_tokens, completion_tokens, cached_tokens: None })
            }
            Err(error) => {
                tracing::warn!(worker, %error, "an engine's usage is passed on as it is");
                None
            }
        }
    }

    /// Records the cached tokens that are certain before the answer: after a hand-off
    /// the prefill leg has said them. They go out with the headers of a stream.
    pub fn foretell(&self) {
        if self.rule.handed_over
            && let Some(tokens) = self.rule.prefill_cached_tokens
        {
            self.decision.update(|decision| {
                decision.cached_tokens = Some(tokens);
                decision.told_cached_tokens = Some(tokens);
                decision.cached_source = Some(Source::Engine.name());
            });
        }
    }

    /// The answer is complete.
    pub fn finish(&mut self) {
        if let Some(settled) = self.settled {
            let block_size = self.rule.block_size;
            settled.count(&self.core.metrics, self.served.name(), block_size);
        }
        self.end("ok");
    }

    /// The answer broke off.
    pub fn fail(&mut self, error: &Error) {
        self.end(error.outcome());
    }

    fn end(&mut self, outcome: &'static str) {
        self.decision.update(|decision| decision.outcome = Some(outcome));
    }
}

/// A whole answer: the engine's reply with the client's usage.
///
/// # Errors
/// If the reply is no JSON object.
pub fn whole(account: &mut Account, reply: Bytes) -> Result<JsonObject, Error> {
    let nonsense = |_| broken(&account.worker, "sent a reply that is not JSON");
    let mut reply = JsonObject::parse(reply).map_err(nonsense)?;
    if let Some(raw) = reply.raw("usage").filter(|raw| *raw != "null").map(str::to_owned)
        && let Some(told) = account.settle(&raw)
    {
        reply.set("usage", told);
    }
    hide_hand_off(&mut reply);
    account.finish();
    Ok(reply)
}

/// Where KV lies is the router's business, not a client's.
fn hide_hand_off(reply: &mut JsonObject) {
    if !matches!(reply.raw("kv_transfer_params"), None | Some("null")) {
        reply.set("kv_transfer_params", "null");
    }
}

/// A streamed answer, event by event.
pub struct UnitStream {
    pub(crate) account: Account,
    pub(crate) reader: EventReader,
    /// The event that proved the attempt good.
    pub(crate) first: Option<Bytes>,
    /// Whether the client asked for usage.
    pub(crate) tells_usage: bool,
    /// The label of this answer's flow.
    pub(crate) flow: &'static str,
    pub(crate) last_event: Instant,
}

impl UnitStream {
    /// The next event for the client; `None` at the proper end.
    pub async fn next(&mut self) -> Option<Result<Bytes, Error>> {
        loop {
            let data = match self.first.take() {
                Some(first) => first,
                None => match self.reader.next().await {
                    Ok(Some(data)) => {
                        self.observe_gap();
                        data
                    }
                    Ok(None) => {
                        self.account.finish();
                        return None;
                    }
                    Err(error) => return Some(Err(self.lost(&error))),
                },
            };
            self.account.booking.prefill_done();
            let nonsense = match &data {
                data if !is_object(data) => Some("sent an event that is no chunk"),
                data if is_error(data) => Some("reported an error in mid-stream"),
                _ => None,
            };
            if let Some(what) = nonsense {
                let error = broken(&self.account.worker, what);
                return Some(Err(self.lost(&error)));
            }
            if let Some(data) = self.with_usage(data) {
                return Some(Ok(data));
            }
        }
    }

    fn observe_gap(&mut self) {
        let now = Instant::now();
        let gap = now.duration_since(std::mem::replace(&mut self.last_event, now)).as_secs_f64();
        let labels = [self.account.served.name(), self.flow];
        self.account.core.metrics.inter_token.with_label_values(&labels).observe(gap);
    }

    /// An error after the first event: said in full, never papered over.
    fn lost(&mut self, error: &Error) -> Error {
        let message = format!("the answer broke off: {}", error.message());
        let lost = Error::new(Kind::DecodeLost, message);
        self.account.fail(&lost);
        lost
    }

    /// Rewrites usage where an event carries it; `None` hides the event.
    fn with_usage(&mut self, data: Bytes) -> Option<Bytes> {
        const KEY: &[u8] = b"\"usage\"";
        // An escaped quote cannot precede the key's own: inside a string it would
        // read `\"usage\"`, whose last quote is not preceded by `usage` alone.
        let Some(_) = data.windows(KEY.len()).rposition(|window| window == KEY) else {
            return Some(data);
        };
        let Ok(mut event) = JsonObject::parse(data.clone()) else {
            return Some(data);
        };
        let Some(raw) = event.raw("usage").filter(|raw| *raw != "null").map(str::to_owned) else {
            return Some(data);
        };
        let is_final = event.raw("choices").is_none_or(|raw| raw.trim() == "[]");
        if !is_final {
            // Running totals have no details on engines of today; only the final
            // chunk has figures to rely on.
            return Some(data);
        }
        let told = self.account.settle(&raw);
        if !self.tells_usage {
            return None;
        }
        if let Some(told) = told {
            event.set("usage", told);
        }
        Some(event.to_bytes())
    }
}

/// Whether an event is an engine's error instead of a chunk, however it is spelt.
pub(crate) fn is_error(data: &[u8]) -> bool {
    const KEY: &[u8] = b"\"error\"";
    data.windows(KEY.len()).any(|window| window == KEY)
        && JsonObject::parse(Bytes::copy_from_slice(data))
            .is_ok_and(|event| !matches!(event.raw("error"), None | Some("null")))
}

/// Whether an event can be a chunk: an object from its first byte to its last.
pub(crate) fn is_object(data: &[u8]) -> bool {
    let data = data.trim_ascii();
    data.starts_with(b"{") && data.ends_with(b"}")
}
