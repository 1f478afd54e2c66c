//! The budget of retries that all requests of a model share.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What one retry costs; a request brings in `budget_percent` of it.
const RETRY: u64 = 100;
/// Retries that are in reserve at the start, and at most.
const RESERVE: u64 = 100;

/// A purse that requests fill and retries empty: where every request fails, retries are a
/// small share of the load instead of a multiple.
#[derive(Debug)]
pub struct RetryBudget {
    per_request: u64,
    left: AtomicU64,
}

impl RetryBudget {
    /// A full purse.
    pub fn new(budget_percent: u32) -> Self {
        Self { per_request: budget_percent.into(), left: AtomicU64::new(RESERVE * RETRY) }
    }

    /// A request has come.
    pub fn deposit(&self) {
        let more = |left: u64| Some((left + self.per_request).min(RESERVE * RETRY));
        // The change always applies.
        let _before = self.left.fetch_update(Relaxed, Relaxed, more);
    }

    /// Pays for a retry; `false` if that cannot be afforded.
    pub fn withdraw(&self) -> bool {
        self.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(RETRY)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_a_share_of_the_requests_once_the_reserve_is_spent() {
        let budget = RetryBudget::new(20);
        let mut retries = 0;
        for _ in 0..1000 {
            budget.deposit();
            retries += u32::from(budget.withdraw()) + u32::from(budget.withdraw());
        }
        assert_eq!(retries, 100 + 1000 / 5 - 1, "the first deposit finds a full purse");
    }
}
