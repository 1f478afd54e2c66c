//! Which address is used for which router. A router can be reachable under several addresses,
//! but accepts only one stream from each shim.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// Router ids, each with the address whose stream the router accepted last.
#[derive(Debug, Default)]
pub(super) struct Claims {
    claimed: Mutex<BTreeMap<String, SocketAddr>>,
    released: Notify,
}

impl Claims {
    /// Records that the router has accepted the stream to this address, which ends an older one.
    pub(super) fn claim(self: &Arc<Self>, router_id: &str, address: SocketAddr) -> Claim {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        claimed.insert(router_id.to_owned(), address);
        Claim { claims: Arc::clone(self), router_id: router_id.to_owned(), address }
    }

    /// Waits while a stream to another address of this router is open.
    pub(super) async fn wait_until_free(&self, router_id: &str, address: SocketAddr) {
        loop {
            let mut released = std::pin::pin!(self.released.notified());
            released.as_mut().enable();
            if !self.is_claimed_by_other(router_id, address) {
                return;
            }
            released.await;
        }
    }

    /// Whether a stream to another address of this router is open.
    pub(super) fn is_claimed_by_other(&self, router_id: &str, address: SocketAddr) -> bool {
        let claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        claimed.get(router_id).is_some_and(|other| *other != address)
    }
}

/// The claim of one open stream. Dropping it releases the router.
#[derive(Debug)]
pub(super) struct Claim {
    claims: Arc<Claims>,
    router_id: String,
    address: SocketAddr,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = self.claims.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        if claimed.get(&self.router_id) == Some(&self.address) {
            claimed.remove(&self.router_id);
        }
        drop(claimed);
        self.claims.released.notify_waiters();
    }
}
