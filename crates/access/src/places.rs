//! The requests of a tenant that are in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use splitrail_api::error::{Error, ErrorKind, LimitReached};

use crate::tenant::Tenant;

/// The number of a tenant's requests in flight. It outlives a reload of the configuration.
#[derive(Debug, Default)]
pub(crate) struct InFlight(AtomicUsize);

impl InFlight {
    /// The number of requests.
    pub(crate) fn count(&self) -> usize {
        self.0.load(Relaxed)
    }
}

/// Places of a request among those of its tenant. Dropping this value returns them.
#[derive(Debug)]
pub struct TenantPlaces {
    in_flight: Arc<InFlight>,
    places: usize,
}

impl TenantPlaces {
    /// Takes places for a request of a tenant, one for each of its prompts. The request needs
    /// `whole` places altogether, some of which it may have taken before.
    ///
    /// # Errors
    /// A 429: the tenant would have more requests in flight than `limits.requests_in_flight`.
    pub fn take(tenant: &Tenant, places: usize, whole: usize) -> Result<Self, Error> {
        let in_flight = &tenant.in_flight;
        let max = tenant.limits.requests_in_flight.unwrap_or(usize::MAX);
        let take = |held: usize| held.checked_add(places).filter(|held| *held <= max);
        if in_flight.0.fetch_update(Relaxed, Relaxed, take).is_ok() {
            return Ok(Self { in_flight: Arc::clone(in_flight), places });
        }
        // A batch that is larger than the limit can never be admitted.
        let retry_after_ms = (whole <= max).then_some(1000);
        let (limit, unit) = ("requests_in_flight", "requests");
        let kind = ErrorKind::LimitReached(LimitReached { limit, unit, retry_after_ms });
        let message = format!(
            "the tenant may have {max} requests in flight, and each prompt counts \
             (limits.requests_in_flight)"
        );
        Err(Error::new(kind, message))
    }
}

impl Drop for TenantPlaces {
    fn drop(&mut self) {
        self.in_flight.0.fetch_sub(self.places, Relaxed);
    }
}
