//! Bounds the calls that stay open without requests: health watches and reflection.

use std::net::IpAddr;
use std::sync::Arc;

use tonic::Status;

use crate::core::Core;
use splitrail_settings::address_shares::{AddressPlace, AddressShares};

/// The open calls by client address.
pub(super) struct CallPlaces {
    core: Arc<Core>,
    open: Arc<AddressShares>,
}

impl CallPlaces {
    /// Places by the value of `limits.grpc_watches_max` at the time of each call.
    pub(super) fn new(core: Arc<Core>) -> Arc<Self> {
        Arc::new(Self { core, open: Arc::default() })
    }

    /// A place for a call from this address.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` if no place is free for it.
    pub(super) fn take(&self, address: IpAddr) -> Result<AddressPlace, Status> {
        let max = self.core.serving().limits.grpc_watches_max;
        if let Some(place) = self.open.take(address, max, usize::MAX) {
            return Ok(place);
        }
        self.core.metrics.shed.with_label_values(&["none", "grpc_watches"]).inc();
        let message = format!(
            "too many health watches and reflection calls are open, or too many of this address \
             (limits.grpc_watches_max: {max})"
        );
        Err(Status::resource_exhausted(message))
    }
}
