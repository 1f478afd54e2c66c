//! Whether a worker agrees with the router on tokens and KV blocks.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use serde::Serialize;
use tokio::sync::watch;

/// What is known of a worker's agreement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parity {
    /// It was not asked yet since it joined or came back.
    Pending,
    /// It agrees.
    Ok,
    /// Nobody could tell, or nobody asks.
    Unknown,
    /// It does not.
    Mismatch(Cause),
}

/// Why a worker's blocks cannot be found by the router's hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Chats are written otherwise before they become tokens.
    Template,
    /// A special token at the prompt's start or end is there once too often, or missing.
    SpecialTokens,
    /// Plain text becomes other tokens.
    Vocabulary,
    /// Its KV blocks have another size.
    BlockSize,
    /// Its events or its cache do not tell salts apart.
    Salt,
    /// Its events name another adapter than was asked for, or none.
    Adapter,
    /// No KV events came.
    EventsAbsent,
    /// Its blocks come under a parent that was never announced.
    UnknownParent,
    /// Its events are of another data-parallel rank.
    Rank,
    /// Events came, but none of them was of the prompt's blocks.
    Unmatched,
}

impl Cause {
    /// Every cause.
    pub const ALL: [Self; 10] = [
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
        }
    }

    /// What an operator can do.
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
            Self::Unknown => "unknown",
            Self::Mismatch(_) => "mismatch",
        }
    }

    /// Why it does not agree.
    pub fn cause(self) -> Option<Cause> {
        match self {
            Self::Mismatch(cause) => Some(cause),
            _ => None,
        }
    }

    /// Whether its overlap may be believed.
    fn is_believed(self) -> bool {
        matches!(self, Self::Ok | Self::Unknown)
    }
}

/// Whether one worker agrees with the router, and whether a canary is due.
#[derive(Debug)]
pub struct ParityState {
    state: watch::Sender<State>,
    /// Whether `state` lets the worker's overlap be used; read at every request.
    believed: AtomicBool,
}

/// A worker's parity at one time.
#[derive(Clone, Copy, Debug)]
pub struct State {
    /// Grows each time that the worker may have become another one.
    pub round: u64,
    /// Whether it is asked.
    pub is_asked: bool,
    /// What came of it.
    pub parity: Parity,
}

impl Default for ParityState {
    fn default() -> Self {
        let state = State { round: 0, is_asked: false, parity: Parity::Unknown };
        Self { state: watch::Sender::new(state), believed: AtomicBool::new(true) }
    }
}

impl ParityState {
    /// What is known.
    pub fn parity(&self) -> Parity {
        self.state.borrow().parity
    }

    /// Whether its overlap may be believed.
    pub fn is_believed(&self) -> bool {
        self.believed.load(Relaxed)
    }

    /// From now on it is asked, or not.
    pub fn set_asked(&self, is_asked: bool) {
        self.change(|state| {
            if state.is_asked != is_asked {
                state.is_asked = is_asked;
                state.parity = if is_asked { Parity::Pending } else { Parity::Unknown };
            }
        });
    }

    /// It may have become another one: what was known is void.
    pub fn forget(&self) {
        self.change(|state| {
            state.round += 1;
            state.parity = if state.is_asked { Parity::Pending } else { Parity::Unknown };
        });
    }

    /// What came of asking it in a round; of no interest once that is over. That nobody can tell
    /// does not overrule what is known.
    pub fn judge(&self, round: u64, parity: Parity) {
        self.change(|state| {
            let tells = parity != Parity::Unknown || state.parity == Parity::Pending;
            if state.round == round && state.is_asked && tells {
                state.parity = parity;
            }
        });
    }

    /// Hears of every change.
    pub fn follow(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
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
    fn a_verdict_counts_for_its_round_only() {
        let standing = ParityState::default();
        assert!(standing.is_believed(), "nobody asks");
        standing.set_asked(true);
        assert!(!standing.is_believed(), "not yet asked");
        standing.judge(0, Parity::Ok);
        assert!(standing.is_believed());
        standing.forget();
        standing.judge(0, Parity::Ok);
        assert_eq!(standing.parity(), Parity::Pending);
        standing.judge(1, Parity::Mismatch(Cause::Salt));
        assert!(!standing.is_believed());
        standing.judge(1, Parity::Unknown);
        assert!(!standing.is_believed(), "once found, it stands");
        standing.forget();
        standing.judge(2, Parity::Unknown);
        assert!(standing.is_believed());
        standing.set_asked(false);
        standing.judge(2, Parity::Mismatch(Cause::Salt));
        assert_eq!(standing.parity(), Parity::Unknown);
    }
}
