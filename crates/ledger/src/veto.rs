//! The reasons for which workers were excluded from a choice.

use serde::Serialize;

use splitrail_api::error::ErrorKind;

/// Why a worker could not take a leg. `docs/http.md` explains each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VetoReason {
    /// Capability: its role does not include the leg.
    Role,
    /// Capability: its engine reported lately that it does not have the endpoint.
    LacksEndpoint,
    /// Capability: its engine does not list the adapter.
    LacksAdapter,
    /// Capability: its engine has loaded the adapter from another path than most, and KV moves between
    /// the model's workers.
    OtherAdapterLoad,
    /// Capability: its replies on this endpoint carry no hand-off, or decode workers have failed on its
    /// hand-offs.
    NoHandOff,
    /// Capability: it holds fewer leading blocks of the prompt than the threshold requires, and
    /// fewer than other workers.
    TooFewBlocks,
    /// Capability: its engine's context is too short for the prompt and the output that is asked for.
    ContextTooShort,
    /// Lease: because of its queue it would fetch a hand-off too late, or it did so in an earlier
    /// attempt.
    Lease,
    /// Capability: its engine stores KV in another data type, layout or block size than the engine of the other
    /// leg, or than all that could be.
    OtherKvFormat,
    /// Topology: it is of another transfer group than the worker of the other leg, or than all that
    /// could be.
    OtherTransferGroup,
    /// Topology: it computed the prompt, and an engine does not fetch from itself.
    SameWorker,
    /// Topology: it is the last worker that can decode, so it does not get the prefill leg.
    KeptForDecode,
    /// Topology: in an earlier attempt it handed over from a host outside the fleet and
    /// `hand_off_networks`.
    ForeignHandOff,
    /// Health: it failed an earlier attempt of this request.
    Failed,
    /// Health: too many failures in a row opened its circuit breaker for the leg.
    BreakerOpen,
    /// Health: it does not respond to probes or requests.
    Down,
    /// Health: an operator or its shim has asked for no new work on it.
    Draining,
    /// Health: its cache may hold KV of other tokens.
    Quarantined,
    /// Health: it fails or lags much more than the other workers of its role.
    Ejected,
    /// Health: it makes no progress with the legs that it was sent.
    Stuck,
    /// Health: its engine says that it does not serve: it sleeps, or refuses the router's key.
    Unready,
    /// Load: its engine has just said that it is full (429 or 503).
    Full,
    /// Health: it is no longer part of the fleet.
    Left,
    /// Load: it is saturated (see `saturation`), and other workers are not.
    Busy,
    /// Load: it is in its slow start, and this request is not in its share.
    SlowStart,
    /// Load: workers of a newer transfer group have joined, of which one has time, and it holds no more
    /// than half of the prompt.
    Outgoing,
    /// Load: the request has waited for it for as long as that was worth, and others are idle.
    Occupied,
}

impl VetoReason {
    /// The reason of a worker that failed an attempt, for the attempts that follow.
    pub fn of_failure(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::LeaseExpired => Self::Lease,
            ErrorKind::ForeignHandOff => Self::ForeignHandOff,
            _ => Self::Failed,
        }
    }
}
