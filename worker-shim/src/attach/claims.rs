//! Which stream leads to which router: one router may be found under several addresses, and
//! takes one stream of a shim only.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// Routers by their identity, each with the address whose stream it took last.
#[derive(Debug, Default)]
pub(super) struct Claims {
    claimed: Mutex<BTreeMap<String, SocketAddr>>,
    released: Notify,
}

impl Claims {
    /// This address's stream was welcomed last, so that an older one has ended.
    pub(super) fn claim(self: &Arc<Self>, router_id: &str, address: SocketAddr) -> Claim {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        claimed.insert(router_id.to_owned(), address);
        Claim { claims: Arc::clone(self), router_id: router_id.to_owned(), address }
    }

    /// Waits while another address's stream leads to this router.
    pub(super) async fn until_free(&self, router_id: &str, address: SocketAddr) {
        loop {
            let mut released = std::pin::pin!(self.released.notified());
            released.as_mut().enable();
            if !self.is_other(router_id, address) {
                return;
            }
            released.await;
        }
    }

    /// Whether another address's stream leads to this router.
    pub(super) fn is_other(&self, router_id: &str, address: SocketAddr) -> bool {
        let claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        claimed.get(router_id).is_some_and(|other| *other != address)
    }
}

/// A stream's claim, for as long as it lives.
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
