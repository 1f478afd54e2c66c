//! The limits of a tenant: requests and tokens in a minute, and tokens in a day.
//!
//! A request **reserves** what it may cost before it starts, and **settles** what it did cost when it
//! ends. Over any 60 seconds, and on any day (UTC), the cost of the admitted requests is at most the
//! limit. Cost belongs to the time of the reservation. Replicas may share limits (`replicas`, with the
//! cargo feature `nats`; docs/quotas.md).
//!
//! Times are milliseconds since 1970, from one [`SteadyClock`] of the process.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use splitrail_config::TenantLimits;
use tokio::sync::Notify;

#[cfg_attr(not(any(test, feature = "nats")), allow(dead_code))]
mod account;
#[cfg(feature = "nats")]
mod broker;
mod clock;
mod exceeded;
#[cfg_attr(not(any(test, feature = "nats")), allow(dead_code))]
mod fair;
#[cfg_attr(not(any(test, feature = "nats")), allow(dead_code))]
mod holdings;
mod kind;
#[cfg_attr(not(any(test, feature = "nats")), allow(dead_code))]
mod plan;
#[cfg_attr(not(any(test, feature = "nats")), allow(dead_code))]
mod presence;
#[cfg_attr(not(any(test, feature = "nats")), allow(dead_code))]
mod record;
#[cfg(feature = "nats")]
pub mod replicas;
#[cfg(test)]
mod tests;
mod window;

pub use clock::SteadyClock;
pub use exceeded::{LimitExceeded, LimitStanding, Standing};
pub use kind::LimitKind;

use account::{Account, CountedRequest, MINUTE_MS};
use holdings::{Holdings, Terms};

/// Where the limits of tenants are counted.
#[derive(Clone, Debug)]
pub enum LimitCounting {
    /// By this router alone, which admits this share of every limit (above 0 up to 1).
    Local(f64),
    /// By this router and others, which share the limits over a broker.
    #[cfg(feature = "nats")]
    Shared(Arc<replicas::Replicas>),
}

impl LimitCounting {
    /// The limits of a tenant that has used nothing yet.
    #[cfg_attr(not(feature = "nats"), allow(unused_variables))]
    pub(crate) fn limits(&self, tenant: &str, limits: &TenantLimits) -> Arc<Limits> {
        match self {
            Self::Local(share) => Limits::local(limits, *share),
            #[cfg(feature = "nats")]
            Self::Shared(replicas) => replicas.limits(tenant, limits),
        }
    }

    /// Replaces the limits of a tenant. What was used stays used.
    #[cfg_attr(not(feature = "nats"), allow(unused_variables))]
    pub(crate) fn change(
        &self,
        tenant: &str,
        counted: &Limits,
        limits: &TenantLimits,
        now_ms: u64,
    ) {
        match self {
            Self::Local(share) => counted.change(limits, *share, now_ms),
            #[cfg(feature = "nats")]
            Self::Shared(replicas) => _ = replicas.limits(tenant, limits),
        }
    }
}

/// The limits of one tenant, and what the tenant has used.
#[derive(Debug)]
pub struct Limits {
    account: Mutex<Account>,
    /// Notified when this replica should get a larger share.
    wants_share: Option<Arc<Notify>>,
}

impl Limits {
    /// Limits of which this router admits a fixed share, above 0 up to 1 (`quotas.share`). The part of
    /// each limit is rounded down, but is at least 1.
    #[must_use]
    pub fn local(limits: &TenantLimits, share: f64) -> Arc<Self> {
        let account = Account::new(kind::shares(limits, share), MINUTE_MS, None);
        Arc::new(Self { account: Mutex::new(account), wants_share: None })
    }

    /// Limits that replicas share.
    #[cfg_attr(not(any(test, feature = "nats")), allow(dead_code))]
    pub(crate) fn shared(
        limits: &TenantLimits,
        terms: Terms,
        wants_share: Arc<Notify>,
        now_ms: u64,
    ) -> Arc<Self> {
        let holdings = Some(Holdings::new(terms, now_ms));
        let account = Account::new(kind::shares(limits, 1.0), terms.window_ms, holdings);
        let wants_share = Some(wants_share);
        Arc::new(Self { account: Mutex::new(account), wants_share })
    }

    /// Replaces the limits, and the share that this router admits. What was used stays used. Limits
    /// that replicas share are changed by `replicas`, with a share of 1.
    pub fn change(&self, limits: &TenantLimits, share: f64, now_ms: u64) {
        let limits = kind::shares(limits, share);
        let mut account = self.account();
        let now_ms = account.advance(now_ms);
        let before = std::mem::replace(&mut account.limits, limits.clone());
        if let Some(holdings) = &mut account.holdings {
            for (kind, limit) in limits.iter() {
                holdings.change(kind, before[kind], *limit, now_ms);
            }
        }
        drop(account);
        self.ask_for_share();
    }

    /// Counts one request with this number of tokens, which is the most that the request may cost, if
    /// all limits allow it.
    ///
    /// # Errors
    /// A limit is used up, or the request is larger than a limit. Nothing is counted.
    pub fn reserve(
        self: &Arc<Self>,
        now_ms: u64,
        tokens: u64,
    ) -> Result<Reservation, LimitExceeded> {
        let mut account = self.account();
        let reserved = account.reserve(now_ms, tokens);
        drop(account);
        match reserved {
            Ok(counted) => Ok(Reservation { limits: Arc::clone(self), counted }),
            Err(exceeded) => {
                self.ask_for_share();
                Err(exceeded)
            }
        }
    }

    /// Checks whether the limit of requests allows one more. Counts nothing.
    ///
    /// # Errors
    /// The limit is used up.
    pub fn check_requests(&self, now_ms: u64) -> Result<(), LimitExceeded> {
        let checked = self.account().check_requests(now_ms);
        if checked.is_err() {
            self.ask_for_share();
        }
        checked
    }

    /// How much of each limit remains.
    pub fn standing(&self, now_ms: u64) -> Standing {
        self.account().standing(now_ms)
    }

    pub(crate) fn account(&self) -> MutexGuard<'_, Account> {
        // Poisoning is ignored, because one panic must not refuse all requests of a tenant.
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask_for_share(&self) {
        if let Some(notify) = &self.wants_share {
            notify.notify_one();
        }
    }
}

/// What an admitted request has reserved. Dropping a reservation that was not settled refunds the
/// tokens; the request itself stays counted, because it was made.
#[derive(Debug)]
#[must_use = "dropping a reservation refunds its tokens"]
pub struct Reservation {
    limits: Arc<Limits>,
    counted: CountedRequest,
}

impl Reservation {
    /// The number of reserved tokens.
    pub fn tokens(&self) -> u64 {
        self.counted.tokens
    }

    /// Replaces the reserved tokens by the actual number. More than was reserved is counted as well,
    /// even beyond the limit, and delays later requests. The tokens are counted where they were
    /// reserved; a minute or a day that has passed since does not change the present one.
    pub fn settle(mut self, actual_tokens: u64) {
        self.correct(actual_tokens);
        // Nothing remains to be refunded.
        self.counted.is_settled = true;
    }

    fn correct(&mut self, tokens: u64) {
        let mut account = self.limits.account();
        account.correct(&mut self.counted, tokens);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.counted.is_settled {
            self.correct(0);
        }
    }
}
