//! Whether a worker agrees with the router on tokens and KV blocks.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use serde::Serialize;
use tokio::sync::watch;

mod unclear_reason;

pub use unclear_reason::UnclearReason;

/// The result of the parity canary for one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parity {
    /// No canary has ended since the worker joined or came back.
    Pending,
    /// The worker agrees with the router.
    Ok,
    /// The canary gave no clear result, for this reason; `None` if no canaries are sent.
    Unknown(Option<UnclearReason>),
    /// The worker does not agree with the router.
    Mismatch(Cause),
}

/// Why a worker's blocks cannot be found by the router's hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The chat template produces another text.
    Template,
    /// One or two special tokens at the prompt's start or end are added or missing.
    SpecialTokens,
    /// Plain text is tokenised differently.
    Vocabulary,
    /// The engine's block size differs from the router's.
    BlockSize,
    /// The engine's events or its cache ignore `cache_salt`.
    Salt,
    /// The engine's events name another adapter than was requested, or none.
    Adapter,
    /// No KV events were received.
    EventsAbsent,
    /// The engine's blocks have a parent that was never announced.
    UnknownParent,
    /// The engine's events are those of another data-parallel rank.
    Rank,
    /// Events were received, but none was about the prompt's blocks.
    Unmatched,
    /// The model has no full attention, so its events do not say where in a prompt a block is.
    NoFullAttention,
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 11] = [
        Self::Template,
        Self::SpecialTokens,
        Self::Vocabulary,
        Self::BlockSize,
        Self::Salt,
        Self::Adapter,
        Self::EventsAbsent,
        Self::UnknownParent,
        Self::Rank,
        Self::Unmatched,
        Self::NoFullAttention,
    ];

    /// The label in metrics, logs and `/admin/workers`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Template => "template",
            Self::SpecialTokens => "special_tokens",
            Self::Vocabulary => "vocabulary",
            Self::BlockSize => "block_size",
            Self::Salt => "salt",
            Self::Adapter => "adapter",
            Self::EventsAbsent => "events_absent",
            Self::UnknownParent => "unknown_parent",
            Self::Rank => "rank",
            Self::Unmatched => "unmatched",
            Self::NoFullAttention => "no_full_attention",
        }
    }

    /// What an operator can do about it, as shown in the log.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Template => {
                "give the router the engine's chat template: the same model folder, and \
                 the engine's template options under tokenizer; if it writes the date, the same \
                 clock and time zone"
            }
            Self::SpecialTokens => {
                "the engine adds or leaves out a special token (BOS, EOS): the same \
                 tokenizer_config.json on both sides, and a template that does not write BOS twice"
            }
            Self::Vocabulary => {
                "tokenizer.path must be the engine's model (--tokenizer), of the same revision"
            }
            Self::BlockSize => "set block_size to the engine's, or to auto",
            Self::Salt => {
                "the engine's cache or its KV events leave out cache_salt: an engine version that \
                 has both is needed"
            }
            Self::Adapter => {
                "its KV events must name the adapter (lora_name): check adapters and the engine's \
                 version"
            }
            Self::EventsAbsent => {
                "the request ran and no KV event came: --kv-events-config with \
                 enable_kv_cache_events, --enable-prefix-caching, and kv_events the publisher's \
                 own address"
            }
            Self::UnknownParent => "give it kv_replay, so that earlier events can be read",
            Self::Rank => {
                "kv_events must be the first data-parallel rank's: rank r publishes r ports further"
            }
            Self::Unmatched => {
                "its events are not of its requests: kv_events and url must be the same engine's, \
                 with the same model"
            }
            Self::NoFullAttention => {
                "the model has no full attention, so its prompts are placed by load; kv_events: none \
                 says so without a mismatch"
            }
        }
    }
}

impl Parity {
    /// The values of the label `result`.
    pub const RESULTS: [&str; 4] = ["pending", "ok", "unknown", "mismatch"];

    /// The label in metrics, logs and `/admin/workers`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Ok => "ok",
            Self::Unknown(_) => "unknown",
            Self::Mismatch(_) => "mismatch",
        }
    }

    /// The cause of a mismatch.
    pub fn cause(self) -> Option<Cause> {
        match self {
            Self::Mismatch(cause) => Some(cause),
            _ => None,
        }
    }

    /// The cause of a mismatch, or why the canary gave no clear result: the label in metrics, logs and
    /// `/admin/workers`.
    pub fn cause_name(self) -> Option<&'static str> {
        match self {
            Self::Mismatch(cause) => Some(cause.name()),
            Self::Unknown(reason) => reason.map(UnclearReason::name),
            Self::Pending | Self::Ok => None,
        }
    }

    /// What an operator can do about the cause.
    pub fn advice(self) -> Option<&'static str> {
        match self {
            Self::Mismatch(cause) => Some(cause.advice()),
            Self::Unknown(reason) => reason.map(UnclearReason::advice),
            Self::Pending | Self::Ok => None,
        }
    }

    /// Whether the worker's overlap may be used.
    fn is_believed(self) -> bool {
        matches!(self, Self::Ok | Self::Unknown(_))
    }
}

/// Whether one worker agrees with the router, and whether a canary is due.
#[derive(Debug)]
pub struct ParityMonitor {
    state: watch::Sender<ParityState>,
    /// Whether `state` lets the worker's overlap be used; read at every request.
    believed: AtomicBool,
}

/// A worker's parity at one time.
#[derive(Clone, Copy, Debug)]
pub struct ParityState {
    /// Incremented each time that the worker may have been restarted.
    pub round: u64,
    /// Whether canaries are sent to the worker.
    pub is_asked: bool,
    /// The result so far.
    pub parity: Parity,
}

impl Default for ParityMonitor {
    fn default() -> Self {
        let state = ParityState { round: 0, is_asked: false, parity: Parity::Unknown(None) };
        Self { state: watch::Sender::new(state), believed: AtomicBool::new(true) }
    }
}

impl ParityMonitor {
    /// The result so far.
    pub fn parity(&self) -> Parity {
        self.state.borrow().parity
    }

    /// Whether the worker's overlap may be used.
    pub fn is_believed(&self) -> bool {
        self.believed.load(Relaxed)
    }

    /// Sets whether canaries are sent to the worker. A change resets the result.
    pub fn set_asked(&self, is_asked: bool) {
        self.change(|state| {
            if state.is_asked != is_asked {
                state.is_asked = is_asked;
                state.parity = if is_asked { Parity::Pending } else { Parity::Unknown(None) };
            }
        });
    }

    /// Resets the result, because the worker may have been restarted.
    pub fn forget(&self) {
        self.change(|state| {
            state.round += 1;
            state.parity = if state.is_asked { Parity::Pending } else { Parity::Unknown(None) };
        });
    }

    /// Records the result of a canary, unless the round in which it was sent is over. An unclear
    /// result does not replace an earlier clear one.
    pub fn record(&self, round: u64, parity: Parity) {
        self.change(|state| {
            let is_clear = !matches!(parity, Parity::Unknown(_));
            let was_clear = matches!(state.parity, Parity::Ok | Parity::Mismatch(_));
            if state.round == round && state.is_asked && (is_clear || !was_clear) {
                state.parity = parity;
            }
        });
    }

    /// A receiver for all changes.
    pub fn follow(&self) -> watch::Receiver<ParityState> {
        self.state.subscribe()
    }

    fn change(&self, change: impl FnOnce(&mut ParityState)) {
        self.state.send_modify(|state| {
            change(state);
            self.believed.store(state.parity.is_believed(), Relaxed);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_counts_for_its_round_only() {
        let standing = ParityMonitor::default();
        assert!(standing.is_believed(), "nobody asks");
        standing.set_asked(true);
        assert!(!standing.is_believed(), "not yet asked");
        standing.record(0, Parity::Ok);
        assert!(standing.is_believed());
        standing.forget();
        standing.record(0, Parity::Ok);
        assert_eq!(standing.parity(), Parity::Pending);
        standing.record(1, Parity::Mismatch(Cause::Salt));
        assert!(!standing.is_believed());
        standing.record(1, Parity::Unknown(Some(UnclearReason::NoReply)));
        assert!(!standing.is_believed(), "once found, it stands");
        standing.forget();
        for reason in [UnclearReason::NoReply, UnclearReason::Refused] {
            standing.record(2, Parity::Unknown(Some(reason)));
            assert!(standing.is_believed());
            assert_eq!(standing.parity(), Parity::Unknown(Some(reason)));
        }
        standing.set_asked(false);
        standing.record(2, Parity::Mismatch(Cause::Salt));
        assert_eq!(standing.parity(), Parity::Unknown(None));
    }
}
