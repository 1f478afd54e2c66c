//! What a tenant is told: that a limit is exceeded, and how much of each limit remains.

use super::kind::LimitKind;

/// Why a request is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitExceeded {
    /// The request needs more than the whole limit, so that a retry is of no use.
    #[error("the request needs more than the limit of {maximum} ({limit:?})")]
    TooLarge {
        /// The limit.
        limit: LimitKind,
        /// The value of the limit.
        maximum: u64,
    },
    /// The limit is used up for now.
    #[error("the limit is used up ({limit:?}); retry in {retry_after_ms} ms")]
    Used {
        /// The limit; of several limits, the one that takes the longest.
        limit: LimitKind,
        /// Milliseconds until the request would be admitted if no other request came. An estimate if
        /// replicas share the limit, and exact otherwise.
        retry_after_ms: u64,
    },
}

/// How much of a tenant's limits remains. `None` for a limit that does not apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Requests of the last minute.
    pub requests: Option<LimitStanding>,
    /// Tokens of the last minute.
    pub tokens_per_minute: Option<LimitStanding>,
    /// Tokens of the current day (UTC).
    pub tokens_per_day: Option<LimitStanding>,
}

/// How much of a limit remains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStanding {
    /// The limit; with a fixed share, this router's part of the limit.
    pub limit: u64,
    /// What remains. If replicas share the limit, what the other replicas last reported as used is
    /// subtracted.
    pub remaining: u64,
    /// Milliseconds until nothing counts as used by this router any more, if no further request
    /// comes.
    pub reset_ms: u64,
}
