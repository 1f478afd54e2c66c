//! Counters of requests by outcome, and of connections on which the engine misbehaves.

use prometheus::IntCounter;

use crate::telemetry::Registrar;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestOutcome {
    /// The engine replied.
    Forwarded,
    /// The engine replied to a request whose required blocks it holds.
    GateHit,
    /// The shim answered because the engine does not hold the required blocks.
    GateMiss,
    /// The gate header, or the body of a miss, is malformed.
    GateMalformed,
    /// The path is not forwarded.
    RefusedPath,
    /// Too many requests are in flight.
    Busy,
    /// The engine cannot be reached.
    EngineUnreachable,
    /// The engine closed the connection before it replied.
    EngineFailed,
    /// The client disconnected before the reply began.
    ClientGone,
    /// Answered by the shim's own endpoints.
    Local,
    /// The client sent the body too slowly.
    SlowBody,
}

impl RequestOutcome {
    const ALL: [(Self, &'static str); 11] = [
        (Self::Forwarded, "forwarded"),
        (Self::GateHit, "gate_hit"),
        (Self::GateMiss, "gate_miss"),
        (Self::GateMalformed, "gate_malformed"),
        (Self::RefusedPath, "refused_path"),
        (Self::Busy, "busy"),
        (Self::EngineUnreachable, "engine_unreachable"),
        (Self::EngineFailed, "engine_failed"),
        (Self::ClientGone, "client_gone"),
        (Self::Local, "local"),
        (Self::SlowBody, "slow_body"),
    ];
}

/// Registers the counter of connections on which the engine sent bytes that answer no request.
///
/// # Errors
/// If the registry already has a metric of this name.
pub(super) fn unsolicited_data_connections(new: &Registrar<'_>) -> prometheus::Result<IntCounter> {
    new.counter(
        "unsolicited_data_connections_total",
        "Kept connections on which the engine, or a proxy before it, sent bytes that answer no \
         request.",
    )
}

/// Registers the counter of connections that were refused because their address holds its share.
///
/// # Errors
/// If the registry already has a metric of this name.
pub(super) fn refused_connections(new: &Registrar<'_>) -> prometheus::Result<IntCounter> {
    new.counter(
        "refused_connections_total",
        "Connections that were refused because their address holds its share of all connections.",
    )
}

/// One counter per outcome.
#[derive(Debug)]
pub(super) struct OutcomeCounters([IntCounter; RequestOutcome::ALL.len()]);

impl OutcomeCounters {
    /// Creates the counters and registers them.
    ///
    /// # Errors
    /// If the registry already has a metric of this name.
    pub(super) fn new(new: &Registrar<'_>) -> prometheus::Result<Self> {
        let family = new.counters(
            "requests_total",
            "Requests by outcome, each counted once when its reply begins.",
            &["outcome"],
        )?;
        Ok(Self(RequestOutcome::ALL.map(|(_, label)| family.with_label_values(&[label]))))
    }

    /// Starts to count a request.
    pub(super) fn start_request(&self) -> OutcomeRecorder<'_> {
        OutcomeRecorder { outcomes: self, outcome: RequestOutcome::ClientGone }
    }
}

/// Counts one request when it is dropped.
#[derive(Debug)]
pub(super) struct OutcomeRecorder<'a> {
    outcomes: &'a OutcomeCounters,
    /// The outcome so far. [`RequestOutcome::ClientGone`] until another one is set.
    pub(super) outcome: RequestOutcome,
}

impl Drop for OutcomeRecorder<'_> {
    fn drop(&mut self) {
        // `ALL` is in the order of the variants, which a test checks.
        self.outcomes.0[self.outcome as usize].inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_has_its_own_counter() {
        for (index, (outcome, _)) in RequestOutcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, index);
        }
    }
}
