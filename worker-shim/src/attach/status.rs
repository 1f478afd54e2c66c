//! The state of the attachment to each router.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

/// A handle on the states of all attachments. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct RouterStatuses {
    routers: Arc<Mutex<BTreeMap<SocketAddr, RouterStatus>>>,
}

/// The state of the attachment to one router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RouterStatus {
    /// The configured address that was resolved to `address`.
    pub name: String,
    /// The router's address.
    pub address: SocketAddr,
    /// The stage of the attachment.
    pub stage: Stage,
    /// The router's id; empty before its first welcome.
    pub router_id: String,
    /// The number of the last change that was sent.
    pub sent_sequence: u64,
    /// The number of the last change that the router has acknowledged.
    pub acked_sequence: u64,
    /// Snapshots that were sent.
    pub snapshots: u64,
    /// Streams that the router has accepted.
    pub attached: u64,
    /// Why the last stream ended, or could not be opened.
    pub last_error: Option<String>,
}

/// The stage of an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// The router cannot be reached, or no attempt has been made yet.
    Connecting,
    /// The router has refused the shim, or is incompatible. The next attempt is made after
    /// [`Timing::refused_retry`](super::Timing::refused_retry).
    Refused,
    /// The shim is attached to the same router under another address.
    Duplicate,
    /// The router is receiving a snapshot.
    Snapshot,
    /// The router receives changes as they occur.
    Live,
}

impl RouterStatus {
    /// Changes that were sent and not yet acknowledged.
    pub fn lag(&self) -> u64 {
        self.sent_sequence.saturating_sub(self.acked_sequence)
    }
}

impl RouterStatuses {
    /// The states of all attachments, sorted by address.
    pub fn routers(&self) -> Vec<RouterStatus> {
        let routers = self.routers.lock().unwrap_or_else(PoisonError::into_inner);
        routers.values().cloned().collect()
    }

    /// Whether there are routers, all of them refuse the shim, and none has ever accepted it.
    pub fn all_refuse(&self) -> bool {
        let routers = self.routers.lock().unwrap_or_else(PoisonError::into_inner);
        let refuses =
            |router: &RouterStatus| router.stage == Stage::Refused && router.attached == 0;
        !routers.is_empty() && routers.values().all(refuses)
    }

    /// Adds an entry for a router. Dropping the returned value removes the entry.
    pub(super) fn entry(&self, name: String, address: SocketAddr) -> StatusEntry {
        let new = RouterStatus {
            name,
            address,
            stage: Stage::Connecting,
            router_id: String::new(),
            sent_sequence: 0,
            acked_sequence: 0,
            snapshots: 0,
            attached: 0,
            last_error: None,
        };
        self.routers.lock().unwrap_or_else(PoisonError::into_inner).insert(address, new);
        StatusEntry { status: self.clone(), address }
    }
}

/// The entry of one router. Dropping it removes the entry.
#[derive(Debug)]
pub(super) struct StatusEntry {
    status: RouterStatuses,
    address: SocketAddr,
}

impl StatusEntry {
    pub(super) fn update(&self, change: impl FnOnce(&mut RouterStatus)) {
        let mut routers = self.status.routers.lock().unwrap_or_else(PoisonError::into_inner);
        routers.get_mut(&self.address).map(change);
    }
}

impl Drop for StatusEntry {
    fn drop(&mut self) {
        let mut routers = self.status.routers.lock().unwrap_or_else(PoisonError::into_inner);
        routers.remove(&self.address);
    }
}
