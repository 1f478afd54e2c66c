//! Faults that can be switched on while the engine runs.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;

/// A fault and the number of times that it occurs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// What goes wrong.
    #[serde(flatten)]
    pub kind: FaultKind,
    /// Number of requests, batches or pulls that are affected; `None` for all until cleared.
    #[serde(default)]
    pub times: Option<u32>,
}

/// The kinds of faults. At most one fault of each kind is active; a later one replaces it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FaultKind {
    /// Inference requests get this HTTP status and an error in OpenAI's format.
    Status {
        /// For example 500, 503 or 429.
        status: u16,
    },
    /// The connection is reset in the middle of the reply's head.
    Reset,
    /// The request is never answered.
    Hang,
    /// The engine was put to sleep: its metrics say so, and requests wait.
    Asleep,
    /// The engine's core is dead: `/health` answers 503, and requests are never answered.
    DeadCore,
    /// There is no `/metrics`.
    NoMetrics,
    /// Inference requests get 503 and `retry-after`.
    Full {
        /// The seconds in `retry-after`.
        retry_after_s: u32,
    },
    /// Inference requests whose body contains this text get 500.
    Poison {
        /// The text.
        text: String,
    },
    /// The connection is cut after this many stream chunks, without `[DONE]`. A reply that is not
    /// streamed is cut in its middle.
    DieMidStream {
        /// Number of chunks before the cut.
        after_chunks: usize,
    },
    /// The engine aborts the reply after this many tokens, as a paused engine does: the finish reason
    /// is `abort`, and there is no hand-off.
    Abort {
        /// Number of tokens before the end.
        after_tokens: usize,
    },
    /// A stream of chunks ends without `[DONE]`, as HTTP ends a body.
    NoDone,
    /// Half of the JSON body, with a matching content length.
    TruncatedBody,
    /// The reply is delayed.
    SlowFirstByte {
        /// Delay in milliseconds.
        delay_ms: u64,
    },
    /// A prefill reply lacks its `kv_transfer_params`; its blocks stay pinned.
    NoHandOff,
    /// A prefill reply's hand-off lacks the last block and a token; the blocks stay pinned.
    ShortHandOff,
    /// A prefill reply's hand-off names a host that belongs to nobody; the blocks stay pinned.
    ForeignHandOff,
    /// The whole reply of a prefill leg reports other token ids of its prompt than it has computed.
    OtherPromptIds,
    /// A request whose KV has been pulled loses it before its first output. If it has a
    /// `cache_hit_threshold` above 0, it is then refused.
    Preempt,
    /// Pulls by decode engines are refused with `hand_off_refused`.
    RefusePulls,
    /// Event batches take a sequence number but are not published (they can be replayed).
    DropEventBatches,
    /// Event batches are published as random bytes (replay has the true ones).
    GarbageEvents,
    /// Events do not report removed blocks, so that announced blocks may be missing. Replays
    /// contain the true events, unless `in_replay`.
    HideRemovals {
        /// Replays hide the removals as well.
        in_replay: bool,
    },
    /// Events do not contain cache salts.
    DropSalts,
    /// Events do not contain adapters.
    DropAdapters,
    /// Events name a parent for a prompt's first block that was never announced.
    StrangeParents,
    /// Events name another data-parallel rank.
    OtherRank,
    /// Each batch of events has one more event, which says nothing of the blocks of prefixes.
    OddEvents {
        /// The event.
        event: OddEvent,
    },
}

/// An event that says nothing of the blocks of prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OddEvent {
    /// Names offloaded blocks without their tokens, as vLLM does with CPU offloading.
    Placeholder,
    /// Has a type of which nothing is known.
    Unknown,
    /// Stores a block of a sliding window.
    SlidingWindow,
}

impl FaultKind {
    /// The tag of its JSON.
    fn name(&self) -> String {
        json!(self)["kind"].as_str().unwrap_or_default().to_owned()
    }
}

/// The faults of one inference request.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestFaults {
    pub(crate) status: Option<u16>,
    pub(crate) reset: bool,
    pub(crate) hang: bool,
    /// The value of `retry-after` of a full engine.
    pub(crate) full: Option<u32>,
    pub(crate) die_after_chunks: Option<usize>,
    pub(crate) abort_after_tokens: Option<usize>,
    pub(crate) no_done: bool,
    pub(crate) truncate: bool,
    pub(crate) delay: Option<Duration>,
    pub(crate) no_hand_off: bool,
    pub(crate) short_hand_off: bool,
    pub(crate) foreign_hand_off: bool,
    pub(crate) other_prompt_ids: bool,
    pub(crate) preempt: bool,
}

/// The active faults.
#[derive(Debug, Default)]
pub(crate) struct FaultBoard {
    active: Mutex<BTreeMap<String, Fault>>,
}

impl FaultBoard {
    pub(crate) fn set(&self, fault: Fault) {
        let name = fault.kind.name();
        if fault.times == Some(0) {
            self.lock().remove(&name);
        } else {
            self.lock().insert(name, fault);
        }
    }

    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    pub(crate) fn list(&self) -> Vec<Fault> {
        self.lock().values().cloned().collect()
    }

    /// Whether the fault occurs now; counts it if so.
    pub(crate) fn occurs_now(&self, name: &str) -> bool {
        self.take(name).is_some()
    }

    /// The faults of one inference request, which may stage or pull a hand-off.
    pub(crate) fn of_request(&self, prefill: bool, pull: bool) -> RequestFaults {
        let mut faults = RequestFaults::default();
        if let Some(FaultKind::SlowFirstByte { delay_ms }) = self.take("slow_first_byte") {
            faults.delay = Some(Duration::from_millis(delay_ms));
        }
        if let Some(FaultKind::Abort { after_tokens }) = self.take("abort") {
            faults.abort_after_tokens = Some(after_tokens);
        }
        faults.no_done = self.occurs_now("no_done");
        if self.occurs_now("reset") {
            faults.reset = true;
        } else if ["hang", "asleep", "dead_core"].iter().any(|name| self.occurs_now(name)) {
            faults.hang = true;
        } else if let Some(FaultKind::Full { retry_after_s }) = self.take("full") {
            faults.full = Some(retry_after_s);
        } else if let Some(FaultKind::Status { status }) = self.take("status") {
            faults.status = Some(status);
        } else if let Some(FaultKind::DieMidStream { after_chunks }) = self.take("die_mid_stream") {
            faults.die_after_chunks = Some(after_chunks);
        } else if self.occurs_now("truncated_body") {
            faults.truncate = true;
        }
        faults.foreign_hand_off = prefill && self.occurs_now("foreign_hand_off");
        faults.short_hand_off = prefill && self.occurs_now("short_hand_off");
        faults.no_hand_off = prefill && self.occurs_now("no_hand_off");
        faults.other_prompt_ids = prefill && self.occurs_now("other_prompt_ids");
        faults.preempt = pull && self.occurs_now("preempt");
        faults
    }

    /// Whether the fault is active, without counting it.
    pub(crate) fn is_active(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Whether a request with this body is poisoned.
    pub(crate) fn poisons(&self, body: &[u8]) -> bool {
        let active = self.lock().get("poison").map(|fault| fault.kind.clone());
        let Some(FaultKind::Poison { text }) = active else { return false };
        body.windows(text.len()).any(|part| part == text.as_bytes())
    }

    pub(crate) fn take(&self, name: &str) -> Option<FaultKind> {
        let mut active = self.lock();
        let fault = active.get_mut(name)?;
        let kind = fault.kind.clone();
        if let Some(times) = &mut fault.times {
            *times -= 1;
            if *times == 0 {
                active.remove(name);
            }
        }
        Some(kind)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Fault>> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
