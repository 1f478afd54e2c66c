//! Fairness between tenants: start-time fair queueing.
//!
//! Each tenant has a virtual time. Each release advances it by the prefill of the release divided
//! by the tenant's weight. The queue's virtual time is that of the waiting tenant that has received
//! least. A tenant that comes after a pause starts at this time: it cannot save up time.

use std::collections::HashMap;

/// Maximum number of tenants that are remembered although they have no waiting request. Beyond it,
/// the tenant that is least ahead is forgotten, and its lead with it.
const REMEMBERED_MAX: usize = 4096;

/// The amount of work that each tenant has received.
#[derive(Clone, Debug, Default)]
pub(super) struct TenantWork {
    tenants: HashMap<u64, Tenant>,
    virtual_ms: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tenant {
    virtual_ms: f64,
    waiting: usize,
}

impl TenantWork {
    /// Records that one more request of a tenant waits.
    pub(super) fn joined(&mut self, tenant: u64) {
        self.advance();
        let begin = self.virtual_ms;
        let tenant = self.tenants.entry(tenant).or_default();
        tenant.virtual_ms = tenant.virtual_ms.max(begin);
        tenant.waiting += 1;
    }

    /// Records that a request left the queue without being served.
    pub(super) fn left(&mut self, tenant: u64) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.waiting = tenant.waiting.saturating_sub(1);
        }
        self.forget();
    }

    /// Records that a request was released, with the predicted time of its prefill.
    pub(super) fn served(&mut self, tenant: u64, prefill_ms: f64, weight: f64) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.virtual_ms += prefill_ms / weight.max(1e-6);
        }
        self.left(tenant);
    }

    /// By how much a tenant is ahead of the waiting tenant that has received least.
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

    /// Forgets tenants that have no waiting request and are not ahead.
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
