//! Why a canary gave no clear result.

/// Why it is not known whether a worker agrees with the router, although it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnclearReason {
    /// The engine could not be reached, or replied with an error.
    NoReply,
    /// The engine did not reply within `canary.timeout`.
    NoReplyInTime,
    /// The engine rejected the prompt, as a chat and as plain text.
    Refused,
    /// The worker's KV events do not arrive.
    EventsCutOff,
    /// The index got only the first blocks of the prompt within `canary.timeout`.
    Evicted,
    /// The index has no room for the worker's blocks.
    OverLimit,
    /// The engine's context has no room for a block beside the template and the reply.
    ContextTooShort,
    /// The engine never answers one leg of a pair alone, and does not tell its tokens either.
    NotServedAlone,
    /// The router cannot compute the engine's tokens exactly.
    TokenizerNotExact,
    /// The router's tokenizer failed.
    TokenizerFailed,
}

impl UnclearReason {
    /// All reasons.
    pub const ALL: [Self; 10] = [
        Self::NoReply,
        Self::NoReplyInTime,
        Self::Refused,
        Self::EventsCutOff,
        Self::Evicted,
        Self::OverLimit,
        Self::ContextTooShort,
        Self::NotServedAlone,
        Self::TokenizerNotExact,
        Self::TokenizerFailed,
    ];

    /// The label in metrics, logs and `/admin/workers`.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoReply => "no_reply",
            Self::NoReplyInTime => "no_reply_in_time",
            Self::Refused => "refused",
            Self::EventsCutOff => "events_cut_off",
            Self::Evicted => "evicted",
            Self::OverLimit => "over_limit",
            Self::ContextTooShort => "context_too_short",
            Self::NotServedAlone => "not_served_alone",
            Self::TokenizerNotExact => "tokenizer_not_exact",
            Self::TokenizerFailed => "tokenizer_failed",
        }
    }

    /// What an operator can do about it, as shown in the log.
    pub fn advice(self) -> &'static str {
        match self {
            Self::NoReply => {
                "send /tokenize and a short prompt with this model's name to the engine, and read its \
                 log: it could not be reached, or replied with an error"
            }
            Self::NoReplyInTime => "raise canary.timeout, or find out why the engine is slow",
            Self::Refused => {
                "send the engine a short prompt with this model's name and cache_salt: its reply \
                 says why it is refused"
            }
            Self::EventsCutOff => "the router must reach the worker's kv_events, or its shim must",
            Self::Evicted => {
                "the engine's KV cache is probably full: it needs more blocks or less load; or its \
                 events come later than canary.timeout"
            }
            Self::OverLimit => "raise limits.index_blocks_per_worker_max",
            Self::ContextTooShort => {
                "the engine's context is too short for one KV block: a longer context, smaller \
                 blocks, or canary.enabled: false"
            }
            Self::NotServedAlone => {
                "the engine needs /tokenize or render to be tested; without them, set \
                 canary.enabled: false"
            }
            Self::TokenizerNotExact => {
                "the model's tokenizer has parts that the router does not compute: \
                 tokenizer.kind: engine asks the engines instead (not with SGLang)"
            }
            Self::TokenizerFailed => "the router's log names the error of its tokenizer",
        }
    }
}
