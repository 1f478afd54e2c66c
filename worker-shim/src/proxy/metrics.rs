//! What became of requests, counted.

use prometheus::{IntCounter, IntCounterVec, Opts, Registry};

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The engine answered.
    Forwarded,
    /// So it did; the blocks that were asked for are there.
    GateHit,
    /// Turned away: they are not.
    GateMiss,
    /// The gate header, or the body of a miss, makes no sense.
    GateMalformed,
    /// The path is not forwarded.
    RefusedPath,
    /// Too many requests are under way.
    Busy,
    /// The engine cannot be reached.
    EngineUnreachable,
    /// The engine closed the connection before it answered.
    EngineFailed,
    /// The client left before the answer began.
    ClientGone,
    /// Answered by the shim for itself.
    Local,
}

impl Outcome {
    const ALL: [(Self, &'static str); 10] = [
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
    ];
}

/// Counters by outcome.
#[derive(Debug)]
pub(super) struct Outcomes([IntCounter; Outcome::ALL.len()]);

impl Outcomes {
    /// Counts from 0, shown in `registry`.
    ///
    /// # Errors
    /// If the registry has a metric of this name.
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let options = Opts::new(
            "splitrail_shim_requests_total",
            "Requests by what became of them; each once, when its answer begins.",
        );
        let family = IntCounterVec::new(options, &["outcome"])?;
        registry.register(Box::new(family.clone()))?;
        Ok(Self(Outcome::ALL.map(|(_, label)| family.with_label_values(&[label]))))
    }

    /// A request has come in.
    pub(super) fn begin(&self) -> Counting<'_> {
        Counting { outcomes: self, outcome: Outcome::ClientGone }
    }
}

/// Counts one request when it is dropped.
#[derive(Debug)]
pub(super) struct Counting<'a> {
    outcomes: &'a Outcomes,
    /// What has become of it; nobody waits for its answer until this is set.
    pub(super) outcome: Outcome,
}

impl Drop for Counting<'_> {
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
        for (index, (outcome, _)) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, index);
        }
    }
}
