//! The budget of retries that all requests of a model share.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The cost of one retry. Each request adds `budget_percent` to the budget.
const RETRY_COST: u64 = 100;
/// Number of retries in the budget at the start, which is also its maximum.
const RESERVE: u64 = 100;

/// A budget to which requests add and from which retries take: if every request fails, retries are
/// a small share of the load instead of a multiple.
#[derive(Debug)]
pub struct RetryBudget {
    per_request: u64,
    left: AtomicU64,
}

impl RetryBudget {
    /// A full budget.
    pub fn new(budget_percent: u32) -> Self {
        Self { per_request: budget_percent.into(), left: AtomicU64::new(RESERVE * RETRY_COST) }
    }

    /// Adds a request's share.
    pub fn deposit(&self) {
        let more = |left: u64| Some((left + self.per_request).min(RESERVE * RETRY_COST));
        // `more` never returns `None`.
        let _before = self.left.fetch_update(Relaxed, Relaxed, more);
    }

    /// Takes the cost of one retry; `false` if the budget is too small.
    pub fn withdraw(&self) -> bool {
        self.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(RETRY_COST)).is_ok()
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
