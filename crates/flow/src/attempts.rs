//! Counts the attempts of one prompt's legs, and excludes workers on which a leg already failed.

use super::context::{Context, may_retry};
use splitrail_api::error::{Error, Kind};
use splitrail_fleet::{Exclusion, Worker};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;

/// The decode workers that failed one prompt, and its further attempts.
pub(super) struct Attempts {
    failed: Vec<Exclusion>,
    left: u32,
}

impl Attempts {
    /// As many as the model's configuration allows.
    pub(super) fn new(context: &Context) -> Self {
        Self { failed: Vec::new(), left: context.served.config.retries.decode }
    }

    /// Workers that are not asked again.
    pub(super) fn failed(&self) -> &[Exclusion] {
        &self.failed
    }

    /// Nor are these.
    pub(super) fn spare(&mut self, workers: Vec<Exclusion>) {
        self.failed.extend(workers);
    }

    /// A worker has failed a leg.
    ///
    /// # Errors
    /// Its error, where another worker would not do better, or there is none, or enough
    /// were tried.
    pub(super) fn again_elsewhere(
        &mut self,
        context: &Context,
        leg: Leg,
        worker: &Worker,
        error: Error,
    ) -> Result<(), Error> {
        let reason = VetoReason::of_failure(error.kind());
        self.failed.push(Exclusion::new(worker.index, reason));
        let others = context.served.pool.any_up(leg, &self.failed);
        let stale = error.kind() == Kind::StaleConnection;
        if stale || !others && (error.kind() == Kind::LeaseExpired || error.is_of_the_connection())
        {
            // It was too slow once; with a new prefill it may be in time. Or a connection to it
            // was lost, which says nothing of the next.
            self.failed.pop();
        } else if !(others && error.worth_another_worker()) {
            return Err(error);
        }
        self.again(context, worker, error)
    }

    /// An attempt was in vain, through no fault of its worker's.
    ///
    /// # Errors
    /// Its error, if enough were made.
    pub(super) fn again(
        &mut self,
        context: &Context,
        worker: &Worker,
        error: Error,
    ) -> Result<(), Error> {
        match self.left.checked_sub(1) {
            Some(left) if may_retry(context, "decode", worker, &error) => {
                self.left = left;
                Ok(())
            }
            _ => Err(error),
        }
    }
}
