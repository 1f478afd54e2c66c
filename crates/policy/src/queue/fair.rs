//! Fairness between tenants: start-time fair queueing.
//!
//! Each tenant has a virtual time, which each release advances by the release's prefill
//! divided by the tenant's weight. The queue's virtual time is that of the tenant which waits
//! and has got least. Who comes after a pause begins there: nothing is saved up.

use std::collections::HashMap;

/// Tenants that are remembered while they do not wait. Beyond it, who is least ahead is
/// forgotten, and forgiven.
const REMEMBERED_MAX: usize = 4096;

/// What tenants have got.
#[derive(Clone, Debug, Default)]
pub(super) struct Fair {
    tenants: HashMap<u64, Tenant>,
    virtual_ms: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tenant {
    virtual_ms: f64,
    waiting: usize,
}

impl Fair {
    /// One more request of a tenant waits.
    pub(super) fn joined(&mut self, tenant: u64) {
        self.advance();
        let begin = self.virtual_ms;
        let tenant = self.tenants.entry(tenant).or_default();
        tenant.virtual_ms = tenant.virtual_ms.max(begin);
        tenant.waiting += 1;
    }

    /// One request less waits; it has got nothing.
    pub(super) fn left(&mut self, tenant: u64) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.waiting = tenant.waiting.saturating_sub(1);
        }
        self.forget();
    }

    /// One request less waits; it has got so much.
    pub(super) fn served(&mut self, tenant: u64, prefill_ms: f64, weight: f64) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.virtual_ms += prefill_ms / weight.max(1e-6);
        }
        self.left(tenant);
    }

    /// By how much a tenant is ahead of the one that has got least.
    pub(super) fn ahead_ms(&self, tenant: u64) -> f64 {
        self.tenants.get(&tenant).map_or(0.0, |tenant| tenant.virtual_ms - self.virtual_ms)
    }

    fn advance(&mut self) {
        let waiting = self.tenants.values().filter(|tenant| tenant.waiting > 0);
        let least = waiting.map(|tenant| tenant.virtual_ms).fold(f64::INFINITY, f64::min);
        if least.is_finite() {
            self.virtual_ms = self.virtual_ms.max(least);
        }
    }

    /// Forgets who neither waits nor is ahead.
    fn forget(&mut self) {
        self.advance();
        let now = self.virtual_ms;
        self.tenants.retain(|_, tenant| tenant.waiting > 0 || tenant.virtual_ms > now);
        while self.tenants.len() > REMEMBERED_MAX {
            let gone = self.tenants.iter().filter(|(_, tenant)| tenant.waiting == 0);
            let least = gone.min_by(|a, b| a.1.virtual_ms.total_cmp(&b.1.virtual_ms));
            let Some(name) = least.map(|(name, _)| *name) else { break };
            self.tenants.remove(&name);
        }
    }
}
