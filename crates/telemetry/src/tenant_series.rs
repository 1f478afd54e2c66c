//! The metric series of one tenant that every request of the tenant updates, looked up only once:
//! looking up a series by its labels takes a lock that all requests share.

use prometheus::IntCounter;

use crate::metrics::Metrics;
use crate::series::Series;

/// Series of one tenant, by the labels that differ.
#[derive(Debug, Default)]
pub struct TenantSeries {
    requests: Series<IntCounter, 1>,
    refusals: Series<IntCounter, 1>,
    tokens: Series<IntCounter, 1>,
    reserved: Series<IntCounter, 0>,
    settled: Series<IntCounter, 0>,
}

impl TenantSeries {
    /// Counts a request with its outcome; `tenant` is the value of the label.
    pub fn ended(&self, all: &Metrics, tenant: &str, outcome: &'static str) {
        let find = || all.tenant_requests.with_label_values(&[tenant, outcome]);
        self.requests.with([outcome], find, IntCounter::inc);
    }

    /// Counts a request that was refused because of this limit.
    pub fn refused(&self, all: &Metrics, tenant: &str, limit: &'static str) {
        let find = || all.tenant_refusals.with_label_values(&[tenant, limit]);
        self.refusals.with([limit], find, IntCounter::inc);
    }

    /// Counts tokens of this kind; `tenant` is the value of the label.
    pub fn used(&self, all: &Metrics, tenant: &str, kind: &'static str, tokens: u64) {
        let find = || all.tenant_tokens.with_label_values(&[tenant, kind]);
        self.tokens.with([kind], find, |series| series.inc_by(tokens));
    }

    /// Counts tokens that a request has reserved.
    pub fn reserved(&self, all: &Metrics, tenant: &str, tokens: u64) {
        let find = || all.tenant_reserved_tokens.with_label_values(&[tenant]);
        self.reserved.with([], find, |series| series.inc_by(tokens));
    }

    /// Counts tokens that a request was charged.
    pub fn settled(&self, all: &Metrics, tenant: &str, tokens: u64) {
        let find = || all.tenant_settled_tokens.with_label_values(&[tenant]);
        self.settled.with([], find, |series| series.inc_by(tokens));
    }
}
