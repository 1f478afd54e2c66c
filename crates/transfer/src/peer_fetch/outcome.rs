//! How a peer fetch ends.

/// How a peer fetch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerFetchOutcome {
    /// The worker holds the prefix.
    Fetched,
    /// The engine of a leg that could take the prefix held it or computed it.
    Declined,
    /// The worker holds the prefix, because another request fetched it at the same time.
    Shared,
    /// The worker holds the prefix, but its source computed this number of tokens at its end: it had
    /// lost them, or its engine drops the last block of each hit.
    Recomputed(u32),
    /// The source had lost a part of the prefix and refused the request.
    Lost,
    /// The events of the source said so before it was asked.
    Gone,
    /// Other fetches took the last place of one of the workers.
    Full,
    /// The source gave no usable hand-off, or the prompt's token ids cannot be computed again.
    Unusable,
    /// The hand-off names a host from which none may come.
    ForeignHandOff,
    /// The engine of a leg that took the prefix computed another prompt than the router knows.
    Mismatch,
    /// A worker failed, or refused its request.
    Failed,
    /// The fetch took longer than it may, or than the lease of its hand-off.
    TimedOut,
    /// The request ended before the fetch.
    Cancelled,
}

impl PeerFetchOutcome {
    /// The outcome in metrics and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fetched => "fetched",
            Self::Declined => "declined",
            Self::Shared => "shared",
            Self::Recomputed(_) => "recomputed",
            Self::Lost => "lost",
            Self::Gone => "gone",
            Self::Full => "full",
            Self::Unusable => "unusable",
            Self::ForeignHandOff => "foreign_hand_off",
            Self::Mismatch => "mismatch",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
        }
    }

    /// The number of tokens that the source has computed for the request.
    pub fn recomputed_tokens(self) -> u32 {
        match self {
            Self::Recomputed(tokens) => tokens,
            _ => 0,
        }
    }

    /// Whether the worker holds the prefix now.
    pub fn has_blocks(self) -> bool {
        matches!(self, Self::Fetched | Self::Shared | Self::Recomputed(_))
    }
}
