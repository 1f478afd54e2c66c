//! Bounds the calls that stay open without requests: health watches and reflection.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tonic::Status;

use crate::admission::{SHARE_OF_FREE, client_prefix};
use crate::core::Core;

/// The open calls by client address. They are rare, so a lock is sufficient.
pub(super) struct CallPlaces {
    core: Arc<Core>,
    open: Mutex<HashMap<IpAddr, usize>>,
}

impl CallPlaces {
    /// Places by the value of `limits.grpc_watches_max` at the time of each call.
    pub(super) fn new(core: Arc<Core>) -> Arc<Self> {
        Arc::new(Self { core, open: Mutex::default() })
    }

    /// A place for a call from this address.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` if no place is free for it.
    pub(super) fn take(self: &Arc<Self>, address: IpAddr) -> Result<CallPlace, Status> {
        let max = self.core.serving().limits.grpc_watches_max;
        let address = client_prefix(address);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if has_room(&open, address, max) {
            *open.entry(address).or_default() += 1;
            return Ok(CallPlace { places: Arc::clone(self), address });
        }
        self.core.metrics.shed.with_label_values(&["none", "grpc_watches"]).inc();
        let message = format!(
            "too many health watches and reflection calls are open, or too many of this address \
             (limits.grpc_watches_max: {max})"
        );
        Err(Status::resource_exhausted(message))
    }
}

/// Whether an address may take a place, given the total number and the open calls.
fn has_room(open: &HashMap<IpAddr, usize>, address: IpAddr, max: usize) -> bool {
    let free = max.saturating_sub(open.values().sum());
    let held = open.get(&address).copied().unwrap_or(0);
    held < free.saturating_mul(SHARE_OF_FREE)
}

/// A place. Dropping it returns it.
pub(super) struct CallPlace {
    places: Arc<CallPlaces>,
    address: IpAddr,
}

impl Drop for CallPlace {
    fn drop(&mut self) {
        let mut open = self.places.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = open.get_mut(&self.address) {
            *held -= 1;
            if *held == 0 {
                open.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_places_for_others() {
        let mut open = HashMap::new();
        let mut fill = |address: &str| {
            let address: IpAddr = address.parse().unwrap();
            while has_room(&open, address, 90) {
                *open.entry(address).or_default() += 1;
            }
            open[&address]
        };
        assert_eq!(fill("10.0.0.1"), 80);
        assert_eq!(fill("10.0.0.2"), 9);
        assert_eq!(fill("10.0.0.3"), 1);
        assert!(!has_room(&open, "10.0.0.4".parse().unwrap(), 88), "a lower bound came");
    }
}
